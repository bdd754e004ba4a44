"""What is trained is what was sampled, token by token, however a conversation goes."""

import json

import numpy as np
import pytest
import torch
from groups import group_of, ticket_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from toolbox import CHATML, COUNTING, FORGETFUL

from asyncspec.actors.episodes import Episodes
from asyncspec.clock import now
from asyncspec.config import load
from asyncspec.environments.conversation import NO_VERSION, Conversation, Turn, common
from asyncspec.environments.pool import Answer
from asyncspec.environments.rendering import Renderer
from asyncspec.models.chat import ChatTemplate
from asyncspec.timing.spans import Recorder
from asyncspec.wire.facts import GroupRecord, checksum, sampled, sampled_lengths

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789<>/_ \n?.:{}[]\",'+=#;"
END, OTHER_END = "<|im_end|>", "<|endoftext|>"


def tokenizer_of():
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    specials = (END, OTHER_END, "<|im_start|>")
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in specials])
    return tokenizer


def renderer_of(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(tokenizer_of(), ChatTemplate(folder))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return renderer_of(tmp_path_factory.mktemp("chatml"), CHATML)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    return renderer_of(tmp_path_factory.mktemp("forgetful"), FORGETFUL)


def test_a_template_that_only_appends_has_no_faults(chatml):
    assert chatml.faults() == []


def test_templates_that_rewrite_earlier_turns_are_named(tmp_path, forgetful):
    assert forgetful.faults() == ["reasoning before a message of the role user, after one turn"]
    found = renderer_of(tmp_path, COUNTING).faults()
    assert len(found) == 4 and all("after one turn" in fault for fault in found)


def test_tools_go_to_the_template_or_into_the_system_turn(chatml, forgetful):
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = [{"role": "user", "content": "what?"}]
    plain, known = (r.tokenizer.decode(r.begin(asked, tools), skip_special_tokens=False) for r in (chatml, forgetful))
    assert "<|im_start|>system\nou may call these tools" not in known and '"name": "add"' in known
    assert plain.startswith("<|im_start|>system\n") and '{"name": "add"}' in plain and "<tool_call>" in plain


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text("abc 12", max_size=6)}),
    min_size=1,
    max_size=2,
)


turns_of_both = st.lists(  # what the policy says, what ends it, and what the environment answers
    st.tuples(st.text("abcxyz 0", min_size=1, max_size=8), st.sampled_from([END, OTHER_END, ""]), messages),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=turns_of_both,
    thinks=st.booleans(),
)
@pytest.mark.parametrize("which", ["chatml", "forgetful"])
def test_a_conversation_reads_as_its_template_writes_it_and_keeps_what_was_sampled(request, which, turns, thinks):
    """With a template that only appends the text is the template's, but for a turn that something else ended: then what
    was sampled stands there, and the template's end of a turn behind it.
    """
    renderer = request.getfixturevalue(which)
    tokenizer = renderer.tokenizer
    beginning = [{"role": "user", "content": "go"}]
    conversation = Conversation(beginning, renderer.begin(beginning))
    expected = tokenizer.decode(conversation.prompt, skip_special_tokens=False)
    own = []
    for text, end, said in turns:
        text = f"<think>\nhm\n</think>\n{text}" if thinks else text
        tokens = np.array(tokenizer.encode(text + end, add_special_tokens=False).ids, np.int32)
        own.append(tokens)
        conversation.sampled(
            Turn(tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), 3, np.int32), not end)
        )
        added = renderer.follow(conversation, said)
        conversation.answered(added, text, said)
        expected += text + (end if end != END else "") + END + "\n"
        for message in said:
            if message["role"] == "tool" and which == "forgetful":
                expected += f"<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response>{END}\n"
            else:
                expected += f"<|im_start|>{message['role']}\n{message['content']}{END}\n"
        expected += "<|im_start|>assistant\n"
    assert tokenizer.decode(conversation.tokens, skip_special_tokens=False) == expected
    last = np.array([1], np.int32)
    conversation.sampled(Turn(last, np.zeros(1, np.float32), last, False))
    for shared in (len(conversation.prompt), 2):
        arrays = conversation.arrays(shared)
        mask = arrays["loss_mask"].astype(bool)
        assert arrays["tokens"].tolist() == conversation.tokens[shared:]
        assert arrays["tokens"][mask].tolist() == [*np.concatenate(own).tolist(), 1]
        assert (arrays["versions"][mask] >= 0).all() and (arrays["versions"][~mask] == NO_VERSION).all()
    if which == "chatml" and all(end == END for _, end, _ in turns):
        whole = renderer.template.render(conversation.beginning, {})
        assert tokenizer.encode(whole, add_special_tokens=False).ids == conversation.tokens[:-1]


QWEN3 = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@settings(max_examples=60, deadline=None)
@given(
    turns=turns_of_both,
    thinks=st.booleans(),
)
def test_a_conversation_of_qwen3_goes_on_as_the_package_renderers_renders_it(turns, thinks):
    from asyncspec.environments.library import LibraryRenderer

    tokenizer = tokenizer_of()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in QWEN3])
    renderer = LibraryRenderer("qwen3", tokenizer, None, {}, keeps=True)
    beginning = [{"role": "user", "content": "go"}]
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    conversation = Conversation(beginning, renderer.begin(beginning, tools))
    expected = tokenizer.decode(conversation.prompt, skip_special_tokens=False)
    assert '"add"' in expected and expected.endswith("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    for text, end, said in turns:
        text = f"<think>\nhm\n</think>\n\n{text}" if thinks else text
        tokens = np.array(tokenizer.encode(text + end, add_special_tokens=False).ids, np.int32)
        conversation.sampled(Turn(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), not end))
        kept = conversation.tokens
        conversation.answered(renderer.follow(conversation, said, tools), text, said)
        assert conversation.tokens[: len(kept)] == kept
        expected += text + (end or END) + "\n"
        roles = [message["role"] for message in said]
        for number, message in enumerate(said):
            tool = message["role"] == "tool"
            if not tool or roles[number - 1 : number] != ["tool"]:
                expected += "<|im_start|>user"
            content = f"<tool_response>\n{message['content']}\n</tool_response>" if tool else message["content"]
            expected += f"\n{content}"
            if not tool or roles[number + 1 : number + 2] != ["tool"]:
                expected += f"{END}\n"
        expected += "<|im_start|>assistant\n"
    assert tokenizer.decode(conversation.tokens, skip_special_tokens=False) == expected


def test_the_package_renderers_says_what_qwen3_leaves_out():
    from asyncspec.environments.library import LibraryRenderer, name_of

    tokenizer = tokenizer_of()
    with pytest.raises(ValueError, match="environment.renderer='qwen3': Special token .* not found"):
        LibraryRenderer("qwen3", tokenizer, None, {}, keeps=False)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in QWEN3])
    assert LibraryRenderer("qwen3", tokenizer, None, {}, keeps=False).faults()
    assert not LibraryRenderer("qwen3", tokenizer, None, {}, keeps=True).faults()
    assert not LibraryRenderer("qwen3", tokenizer, None, {"enable_thinking": False}, keeps=False).faults()
    with pytest.raises(
        ValueError, match="environment.renderer='qwen9': .*nearest valid choice: environment.renderer=te"
    ):
        LibraryRenderer("qwen9", tokenizer, None, {}, keeps=False)
    assert name_of("Qwen/Qwen3-0.6B") == "qwen3" and name_of("nobody/nothing") is None


@pytest.mark.parametrize(
    "prompts, count", [([[1, 2, 3]], 3), ([[1, 2], [1, 2, 3]], 2), ([[1, 2], [3]], 0), ([[1, 2, 4], [1, 2, 3]], 2)]
)
def test_what_prompts_have_in_common(prompts, count):
    assert common(prompts) == count


class Answering:
    """Stands where environments do: answers at random after a while, as a seed says."""

    def __init__(self, rng, renderer):
        self.rng, self.renderer, self.due, self.failed, self.said = rng, renderer, [], 0, []

    def begin(self, key, row):
        self.row = row
        given = [{"role": "user", "content": "abcdef"[: 1 + int(self.rng.integers(5))]}]
        self._later(key, "reset", messages=given if self.rng.random() < 0.5 else None)

    def step(self, key, message):
        self.said.append((key, message["content"]))
        kind = self.rng.random()
        if kind < 0.05:
            self._later(key, "step", error="it raised")
        elif kind < 0.1:
            self._later(key, "step", again=True)
            self._later(key, "reset")
        else:
            long = "x" * int(self.rng.integers(12))
            self._later(key, "step", messages=[{"role": "tool", "content": long}], done=kind > 0.6, reward=0.5)

    def end(self, key):
        self.due = [(at, answer) for at, answer in self.due if answer.key != key]

    def refuse(self, key, why):
        self.end(key)

    def poll(self):
        ready = [answer for left, answer in self.due if left <= 0]
        self.due = [(left - 1, answer) for left, answer in self.due if left > 0]
        return ready

    def _later(self, key, what, **about):
        at = max((left for left, answer in self.due if answer.key == key), default=0) + int(self.rng.integers(4))
        self.due.append((at, Answer(key, now(), now(), what, **about)))


@pytest.fixture(scope="module")
def chat_policy():
    """A small random policy over the test's letters."""
    from asyncspec.models import policy as policies
    from asyncspec.models.policy import PolicyShape

    tokenizer = tokenizer_of()
    size = tokenizer.get_vocab_size()
    shape = PolicyShape(
        vocab_size=size,
        dim=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        hidden_dim=48,
        max_positions=128,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=False,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = policies.build(shape)
    model.init_states()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
        model.lm_head.weight[shape.eos_token_id] += 0.15
    return shape, model.requires_grad_(False)


@pytest.mark.parametrize("method", [None, "ngram", "suffix"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_trained_is_what_the_engine_sampled(chat_policy, chatml, method, seed):
    """Random conversations with cut-offs, environments that fail and begin again, and new weights within turns."""
    from asyncspec.drafters.make import drafter_maker
    from asyncspec.engine.torch_engine import TorchEngine
    from asyncspec.models import policy as policies
    from asyncspec.speculation.draft_length import FixedLength

    shape, model = chat_policy
    rng = np.random.default_rng(seed)
    engine = TorchEngine(
        shape,
        drafter_maker(method, None, shape) if method else None,
        slots=3,
        max_prompt_tokens=40,
        max_response_tokens=60,
        draft_length=3,
        kept=int(rng.integers(0, 5)),
    )
    if method:
        engine.use(FixedLength(3))
    other = policies.build(shape)
    other.init_states()
    engine.load_policy(dict(model.named_parameters()), 0)
    config = load(
        "tiny",
        ["environment.name=toolbox:Scripted", "engine.max_prompt_tokens=40", "sampling.max_response_tokens=60"]
        + ["environment.max_turns=4"],
    )
    environments, seen, made = Answering(rng, chatml), {}, []
    holder = type("Holder", (), {"engine": engine, "submit_turn": _submit_turn})()
    episodes = Episodes(config, chatml, environments, holder.submit_turn, engine.forget, Recorder())
    row = json.dumps({"prompt": [{"role": "user", "content": "abcd"}], "answer": ""})
    prompt = chatml.begin([{"role": "user", "content": "abcd"}])
    for ticket_id in range(6):
        ticket = ticket_of(ticket_id, prompt, seeds=range(ticket_id * 10, ticket_id * 10 + 4))
        ticket = _with(ticket, prompt=chatml.tokenizer.decode(prompt, skip_special_tokens=False), row=row)
        episodes.begin(ticket, now())
    for round_ in range(4000):
        if engine.live or engine.waiting:
            for completion in engine.poll():
                seen[completion.request_id] = completion
                episodes.sampled(completion)
        made += episodes.tend()
        if round_ % 17 == 16:  # in the midst of turns
            engine.load_policy(dict((other if round_ % 2 else model).named_parameters()), engine.version + 1)
        if len(made) == 6:
            break
    assert len(made) == 6 and not episodes.open and not engine.kept._rows
    cut = failed = swapped = several = 0
    for ended in made:
        for sample, completion in enumerate(ended.completions):
            arrays = {
                "tokens": completion.tokens.numpy(),
                "versions": completion.versions.numpy(),
                "behavior": completion.logprobs.numpy(),
                "loss_mask": completion.loss_mask.numpy(),
                "lengths": np.array([len(completion.tokens)], np.int32),
            }
            mask = sampled(arrays)
            turns = runs_of(mask)
            several += len(turns) > 1
            # every stretch that is trained is one that the engine returned, with its logprobs and versions
            for start, end in turns:
                stretch = [arrays[name][start:end].tolist() for name in ("tokens", "behavior", "versions")]
                assert stretch in [[c.tokens.tolist(), c.logprobs.tolist(), c.versions.tolist()] for c in seen.values()]
                swapped += len(set(stretch[2])) > 1
            assert (arrays["versions"][~mask] == NO_VERSION).all() and (arrays["behavior"][~mask] == 0).all()
            # what the policy saw is the template's text of the messages, with what was sampled in it
            text = chatml.tokenizer.decode(
                [*ended.ticket.prompt_tokens, *completion.tokens.tolist()], skip_special_tokens=False
            )
            assert text.startswith("<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\n")
            assert len(ended.ticket.prompt_tokens) + len(completion.tokens) <= 100
            cut += completion.truncated
            failed += ended.failed[sample]
            assert (ended.rewards[sample] is None) == ended.failed[sample]
            assert (sampled_lengths(arrays) == [mask.sum()]).all()
            record = GroupRecord.of(group_of(ended.ticket, [0.0]), arrays)
            assert record.response_tokens == [mask.sum()] and record.version_min >= 0
            assert record.environment_tokens == (~mask).sum() and record.checksum == checksum(arrays)
            # a checksum notices any change
            for name in ("tokens", "versions", "loss_mask"):
                changed = {**arrays, name: arrays[name].copy()}
                changed[name][0] ^= 1
                assert checksum(changed) != checksum(arrays)
    assert several and swapped and cut


def _submit_turn(self, turn):
    from asyncspec.actors.engine_holder import EngineHolder

    EngineHolder.submit_turn(self, turn)


def _with(ticket, **changed):
    import msgspec

    return msgspec.structs.replace(ticket, **changed)


def runs_of(mask):
    """Return (start, end) of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))
