"""Services play episodes over HTTP: what they are told is what is trained, in one conversation of tokens."""

import json
import os
import time
from contextlib import closing

import numpy as np
import openai
import pytest
from groups import ticket_of
from test_conversations import chat_policy, chatml, runs_of  # noqa: F401  fixtures

from asyncspec.actors.engine_holder import request_of
from asyncspec.actors.episodes import Episodes
from asyncspec.clock import now
from asyncspec.config import load
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.environments.pool import Environments
from asyncspec.serve.asks import Limits, Model
from asyncspec.serve.endpoint import ANY, Endpoint
from asyncspec.speculation.verify import AS_IS
from asyncspec.timing.spans import Recorder

SETTINGS = ["engine.max_prompt_tokens=40", "sampling.max_response_tokens=120", "environment.name=toolbox:Talker"]


@pytest.fixture
def play(chat_policy, chatml, monkeypatch):  # noqa: F811
    """Plays the episodes of one ticket; returns what they come to, and the completions of the engine."""
    import msgspec

    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    shape, model = chat_policy
    config = load("tiny", SETTINGS)
    engine = TorchEngine(shape, slots=4, max_prompt_tokens=40, max_response_tokens=120, draft_length=0, kept=4)
    engine.load_policy(dict(model.named_parameters()), 0)
    environments = Environments("toolbox:Talker", turn_s=5, episode_s=60, most_failures=1.0, start_s=30, workers=1)
    environments.load()
    limits = Limits(ANY, 120, 1, 16, 30.0, whole_tokens=160)
    tokenizer, size = chatml.tokenizer, shape.vocab_size
    known = Model("policy", tokenizer, chatml.template, {}, size, AS_IS, limits, tuple(shape.eos_token_ids))
    with closing(environments), closing(Endpoint(known, "127.0.0.1")) as endpoint:
        episodes = Episodes(
            config, chatml, environments, lambda turn: engine.submit(request_of(turn)), engine.forget, Recorder()
        )
        assert environments.driven
        episodes.endpoint, environments.endpoint = endpoint, endpoint.open
        endpoint.start()

        def played(samples=2, **row):
            prompt = chatml.begin([{"role": "user", "content": "go"}])
            ticket = ticket_of(0, prompt, seeds=range(samples))
            episodes.begin(msgspec.structs.replace(ticket, row=json.dumps(row)), now())
            made, deadline, swapped = [], time.monotonic() + 60, 0
            while True:
                assert time.monotonic() < deadline
                if engine.live or engine.waiting:
                    for completion in engine.poll():
                        made.append(completion)
                        episodes.sampled(completion)
                    if len(made) > swapped:
                        swapped = len(made)
                        engine.load_policy(dict(model.named_parameters()), engine.version + 1)
                else:
                    time.sleep(0.002)
                for ended in episodes.tend():
                    return ended, made

        played.endpoint, played.environments = endpoint, environments
        yield played


def stretches(completion):
    """Return the tokens, logprobs and versions of each stretch that is trained."""
    mask = completion.loss_mask.numpy().astype(bool)
    arrays = completion.tokens, completion.logprobs, completion.versions
    return [tuple(each[start:end].tolist() for each in arrays) for start, end in runs_of(mask)]


@pytest.mark.parametrize("how", ["chat", "text", "tokens", "again", "stream"])
def test_a_service_s_conversation_is_an_episode_of_what_was_sampled(play, how):
    turns = 1 if how == "stream" else 3
    ended, made = play(how=how, turns=turns, tokens=[5, 7, 11])
    assert ended.failed == [False, False] and not play.environments.first_failure
    engine_said = [(c.tokens.tolist(), c.logprobs.tolist(), c.versions.tolist()) for c in made]
    for completion in ended.completions:
        found = stretches(completion)
        assert len(found) == turns and all(each in engine_said for each in found)
    # the turn whose answer was lost was sampled again, and only then trained
    assert len(made) == 2 * turns + (2 if how == "again" else 0)
    assert ended.rewards == [turns / 10 if how in ("chat", "text", "stream") else 0.0] * 2
    assert ended.turns == 2 * turns and {phase.name for phase in ended.history} >= {"environment", "generate"}


def test_tokens_behind_a_stop_string_are_not_trained(play, chatml):  # noqa: F811
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789")
    ended, made = play(how="chat", turns=2, stop=letters[:8], samples=4)
    cut_short = 0
    for completion in ended.completions:
        for tokens, _, _ in stretches(completion):
            whole = next(c.tokens.tolist() for c in made if c.tokens.tolist()[: len(tokens)] == tokens)
            cut_short += len(whole) > len(tokens)
            text = chatml.tokenizer.decode(tokens)
            assert sum(text.count(letter) for letter in letters[:8]) <= 1
    assert cut_short


def test_a_service_that_rewrites_what_was_sampled_is_refused(play):
    ended, _ = play(how="rewrites", turns=1, tokens=[5, 7, 11])
    assert ended.failed == [True, True] and ended.rewards == [None, None]
    assert "differ at 3 from the conversation so far" in play.environments.first_failure


def test_a_service_that_asks_for_nothing_has_failed(play):
    ended, made = play(how="nothing")
    assert ended.failed == [True, True] and len(made) == 2
    assert all(len(completion.tokens) == 1 for completion in ended.completions)


def test_a_turn_that_is_given_up_in_flight_is_asked_for_again_behind_the_same_turns(play):
    ended, _ = play(how="dropped", turns=3, tokens=[5, 7, 11], samples=3)
    assert ended.failed == [False] * 3, play.environments.first_failure
    for completion in ended.completions:
        found = stretches(completion)
        assert len(found) == 3
        mask = completion.loss_mask.numpy()
        assert completion.tokens.numpy()[mask == 0].tolist() == [3, 1, 4] * 2  # what stood between the turns


def test_a_service_that_raises_while_its_request_waits_has_failed_and_nothing_hangs(play):
    ended, made = play(how="raises", tokens=[5, 7, 11], turns=1, samples=6)
    assert ended.failed == [True] * 6 and all(len(completion.tokens) == 1 for completion in ended.completions)


def test_a_service_that_reaches_the_most_turns_is_cut_off(play):
    ended, _ = play(how="tokens", turns=40, tokens=[5, 7, 11])
    assert ended.failed == [False, False] and all(completion.truncated for completion in ended.completions)
    assert play.environments.failed == 0


def test_a_first_prompt_that_is_too_long_is_that_episode_s_failure(play):
    ended, _ = play(how="tokens", turns=1, tokens=[5] * 60)
    assert ended.failed == [True, True] and "KeyError" in play.environments.first_failure


def test_only_the_key_of_an_open_episode_is_answered(play):
    endpoint = play.endpoint
    about = endpoint.open("episode")
    for key in ("none", ""):
        client = openai.OpenAI(base_url=about["base_url"], api_key=key or "x", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    client = openai.OpenAI(base_url=about["base_url"], api_key=about["api_key"], max_retries=0)
    assert client.models.list().data[0].model_dump()["max_model_len"] == 160
    endpoint.open("episode")  # which began again
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert endpoint.root.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "wrong, said",
    [({"temperature": 0.5}, "expected those of the run"), ({"n": 2}, "expected"), ({"top_p": 0.5}, "those of the run")],
)
def test_a_service_samples_as_the_run_does(play, wrong, said):
    about = play.endpoint.open("episode")
    client = openai.OpenAI(base_url=about["base_url"], api_key=about["api_key"], max_retries=0)
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go"}], **wrong)


def test_what_was_trained_has_the_versions_of_its_turns(play):
    ended, _ = play(how="tokens", turns=3, tokens=[5, 7, 11], samples=1)
    (completion,) = ended.completions
    versions = [set(versions) for _, _, versions in stretches(completion)]
    assert len(versions) == 3 and np.all(np.diff([min(each) for each in versions]) >= 0)
    assert max(versions[-1]) > min(versions[0])
