"""What a client may ask for, and how a response's text comes in pieces."""

import pytest
import torch
from serving import NAME, configured, model_of, policy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncspec.engine.protocol import Partial
from asyncspec.models.tokenizer import encode_prompt
from asyncspec.serve.asks import Refused, understand
from asyncspec.serve.calls import Choice
from asyncspec.speculation.verify import GREEDY, Sampling

USER = [{"role": "user", "content": "1+2="}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of(configured(policy(tmp_path_factory.mktemp("policy"))), choices=8)


def chat(model, /, **body):
    return understand({"model": NAME, "messages": USER} | body, model, True)


def completion(model, /, **body):
    return understand({"model": NAME, "prompt": "1+2="} | body, model, False)


def test_defaults_are_the_servers(model):
    for ask in chat(model), completion(model):
        assert ask.prompts == [encode_prompt(model.tokenizer, "1+2=")] and ask.sampling == model.sampling
        assert (ask.most_tokens, ask.stops, ask.choices) == (model.limits.response_tokens, (), 1)
        assert not (ask.stream or ask.usage or ask.logprobs)
    assert completion(model).seeds != completion(model).seeds  # nobody asked for a seed


def test_fields_are_understood(model):
    ask = chat(
        model,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop="4",
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        frequency_penalty=0.0,
        tools=None,
        user="me",
    )
    assert (ask.most_tokens, ask.sampling, ask.seeds, ask.stops) == (7, Sampling(0.5, 0.9, 0), [[5, 6]], ("4",))
    assert ask.stream and ask.usage and ask.logprobs
    ask = completion(model, prompt=[[1, 2], [3]], n=3, seed=2**63 - 1, temperature=0, stop=["a", "b", "a"], logprobs=0)
    assert ask.prompts == [[1, 2], [3]] and ask.sampling == GREEDY and ask.stops == ("a", "b") and ask.logprobs
    assert ask.seeds == [[2**63 - 1, -(2**63), -(2**63) + 1], [-(2**63) + 2, -(2**63) + 3, -(2**63) + 4]]
    assert completion(model, prompt=["1", "22"]).prompts == [encode_prompt(model.tokenizer, t) for t in ("1", "22")]
    assert completion(model, prompt=[5, 6]).prompts == [[5, 6]]


def test_messages_are_rendered_with_the_template(model):
    parts = [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+2="}]}]
    assert chat(model, messages=parts).prompts == chat(model).prompts
    with_hint = chat(model, chat_template_kwargs={"hint": True})
    assert with_hint.prompts == [encode_prompt(model.tokenizer, "1+2=0")]


WRONG = {
    "temperature=3: expected a number from 0 to 2": {"temperature": 3},
    "temperature='hot': expected a number from 0 to 2": {"temperature": "hot"},
    "temperature=nan: expected a number from 0 to 2": {"temperature": float("nan")},
    "temperature=True: expected a number from 0 to 2": {"temperature": True},
    "top_p=0: expected a number above 0, up to 1": {"top_p": 0},
    "n=9: expected a whole number from 1 to 8": {"n": 9},
    "n=0.5: expected a whole number from 1 to 8": {"n": 0.5},
    "seed=9223372036854775808: expected a whole number from -9223372036854775808": {"seed": 2**63},
    "max_tokens=0: expected a whole number from 1 to ": {"max_tokens": 0},
    "stop='': expected a string, or at most 8 of them": {"stop": ""},
    "stop=[1]: expected a string, or at most 8 of them": {"stop": [1]},
    "stream=1: expected true or false": {"stream": 1},
    "stream_options={'x': 1}: expected an object with include_usage": {"stream_options": {"x": 1}},
    "presence_penalty=0.5: not supported; expected 0, or nothing": {"presence_penalty": 0.5},
    "logit_bias={'5': 1}: not supported; expected {}, or nothing": {"logit_bias": {"5": 1}},
    "echo=True: not supported; expected False, or nothing": {"echo": True},
    "temprature: no such field; nearest: temperature": {"temprature": 1},
    "model='other': expected 'sums'": {"model": "other"},
}


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("ask", [chat, completion])
def test_what_cannot_be_done_is_refused(model, ask, said):
    with pytest.raises(Refused) as caught:
        ask(model, **WRONG[said])
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    assert caught.value.param in WRONG[said] and caught.value.status == (404 if "other" in said else 400)


@pytest.mark.parametrize(
    "ask, body, said",
    [
        (completion, {"prompt": ""}, "prompt='': expected text that is not empty"),
        (completion, {"prompt": [1, -1]}, "prompt: expected tokens from 0 to 63"),
        (completion, {"prompt": [64]}, "prompt: expected tokens from 0 to 63"),
        (completion, {"prompt": ["a", 3]}, "prompt=['a', 3]: expected text that is not empty"),
        (completion, {"prompt": {"a": 1}}, "prompt={'a': 1}: expected text that is not empty"),
        (completion, {"prompt": ["1"] * 9}, "prompt: expected at most 8 prompts"),
        (completion, {"prompt": ["1"] * 4, "n": 3}, "prompt: 4 prompts with n=3; expected at most 8 choices"),
        (completion, {"prompt": "1" * 2000}, "prompt: 2000 tokens; expected at most "),
        (completion, {"prompt": "\ud800"}, "prompt: "),
        (completion, {"logprobs": 5}, "logprobs=5: expected 0, which gives the logprob of each sampled token"),
        (completion, {"messages": USER}, "messages: no such field"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens: expected either max_tokens or max_"),
        (chat, {"prompt": "1"}, "prompt: no such field"),
        (chat, {"messages": []}, "messages=[]: expected a list of objects with role and content"),
        (chat, {"messages": ["hello"]}, "messages: 'hello': expected an object with role and content"),
        (chat, {"messages": [{"role": "user", "content": 3}]}, "messages: content=3: expected text"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages: expected content as text, or as parts of type text",
        ),
        (chat, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs={'messages': 1}: expected an object"),
        (chat, {"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'}: not supported"),
        (chat, {"tools": [{"type": "function"}]}, "tools=[{'type': 'function'}]: not supported; expected []"),
        (chat, {"logprobs": 1}, "logprobs=1: expected true or false"),
    ],
)
def test_what_only_one_of_them_refuses(model, ask, body, said):
    with pytest.raises(Refused) as caught:
        ask(model, **body)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value) and str(caught.value).isascii()


def test_a_body_is_an_object(model):
    for body in [], "x", 3, None:
        with pytest.raises(Refused, match="the body: expected a JSON object"):
            understand(body, model, True)


@pytest.fixture(scope="module")
def bytewise():
    """A tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pieces(tokenizer, text, stops=(), step=1):
    """Return the pieces in which a text comes, and the choice."""
    tokens, choice, found = tokenizer.encode(text).ids, Choice(tokenizer, stops), []
    for count in range(step, len(tokens) + step, step):
        part = torch.tensor(tokens[:count])
        found.append(choice.grow(Partial(0, 0, part, torch.zeros(len(part)))))
        if choice.finish:
            break
    return found, choice


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_character_is_sent_whole(bytewise, step):
    found, _ = pieces(bytewise, "a€b😀c", step=step)
    assert "".join(found) == "a€b😀c" and not any("\ufffd" in piece for piece in found)
    assert step > 1 or found == ["a", "", "", "€", "b", "", "", "", "😀", "c"]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
def test_no_part_of_a_stop_string_is_sent(bytewise, step):
    found, choice = pieces(bytewise, "one STO two STOP three", ("STOP", "four"), step)
    assert "".join(found) == choice.text == "one STO two " and choice.finish == "stop"
    assert choice.used == len(choice.tokens) == len(choice.logprobs) == len("one STO two STOP")
    assert step > 1 or [piece for piece in found if piece][4:6] == ["STO ", "t"]


def test_the_first_of_several_stop_strings_ends_a_response(bytewise):
    for stops in ("bc", "abcd", "c"), ("c", "bc"):
        _, choice = pieces(bytewise, "xabcdx", stops, 6)
        assert choice.text == "xa" and choice.used == 4
