"""What a run does with its data before the first step, and what a generator passes to the reward."""

import json
import threading
from dataclasses import replace

import msgspec
import pytest
import torch
from groups import ticket_of
from safetensors.torch import load_file, save_file
from test_tokenizer import BEGIN, END, LETTERS, letters

from asyncspec.actors.base import ActorSpec
from asyncspec.actors.controller import Controller
from asyncspec.actors.generator import Generator, _OpenGroup
from asyncspec.actors.tickets import TicketMaker
from asyncspec.cli import main
from asyncspec.commands import draft_data, this_host
from asyncspec.commands.draft_settings import Training
from asyncspec.config import ConfigError, load, resolve_path, to_yaml
from asyncspec.console import terminal
from asyncspec.engine.protocol import Completion
from asyncspec.launch.preflight import check_inputs
from asyncspec.models.tokenizer import encode_prompts
from asyncspec.tasks.data import load_problems
from asyncspec.wire import waiting
from asyncspec.wire.control import ControlClient
from asyncspec.wire.messages import Beat, Interrupt

TINY = resolve_path("asset:tiny/policy")


def jsonl(path, *prompts):
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "answer": str(i)}) + "\n" for i, prompt in enumerate(prompts))
    )
    return path


@pytest.fixture
def model(tmp_path):
    """Callable(tokenizer, changes of config.json) -> the shipped policy's directory with that tokenizer."""

    def make(tokenizer, **config):
        folder = tmp_path / "model"
        folder.mkdir()
        fields = json.loads((TINY / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(fields))
        tensors = load_file(TINY / "model.safetensors")
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][: fields["vocab_size"]].clone()
        save_file(tensors, folder / "model.safetensors")
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return make


def test_a_longer_run_begins_like_a_shorter_one_and_uses_each_prompt_equally_often(tmp_path):
    path = jsonl(tmp_path / "train.jsonl", *map(str, range(10)))
    overrides = [f"data.train_file={path}", "rl.groups_per_step=4", "seed=3"]
    short, *_ = load_problems(load("tiny", [*overrides, "steps=4"]))
    long, held_out, _ = load_problems(load("tiny", [*overrides, "steps=10"]))
    assert len(short) == 16 and long[:16] == short and held_out == []
    assert sorted(p.prompt for p in long) == sorted(4 * [str(i) for i in range(10)])
    assert load_problems(load("tiny", [*overrides, "seed=4", "steps=4"]))[0] != short


def test_only_prompts_that_the_run_uses_are_encoded_before_it_starts(tmp_path, monkeypatch, capsys):
    path = jsonl(tmp_path / "train.jsonl", *(f"{i}+{i}=" for i in range(5000)))
    config = load("tiny", [f"data.train_file={path}", "steps=3", "rl.groups_per_step=4"])
    seen = []

    def encode(tokenizer, texts):
        seen.extend(texts)
        return encode_prompts(tokenizer, texts)

    monkeypatch.setattr("asyncspec.tasks.prompts.encode_prompts", encode)
    check_inputs(config)
    assert sorted(seen) == sorted(p.prompt for p in load_problems(config)[0]) and len(seen) == 12
    assert capsys.readouterr().out == ""


def test_a_ticket_gets_its_tokens_when_it_is_sent(tmp_path):
    path = jsonl(tmp_path / "train.jsonl", f"{BEGIN}abc", "abc")
    config = load("tiny", [f"data.train_file={path}", "steps=1", "rl.groups_per_step=2"])
    maker = TicketMaker(config, letters("<s> $A"), *load_problems(config)[:2])
    tickets = maker.of_step(0, 0)
    assert all(ticket.prompt_tokens == [] for ticket in tickets)
    tokens = [LETTERS[token] for token in (BEGIN, *"abc")]
    assert [maker.encoded(ticket) for ticket in tickets] == [
        msgspec.structs.replace(ticket, prompt_tokens=tokens) for ticket in tickets
    ]


def test_prompts_that_a_generator_would_refuse_are_refused_before_it_starts(tmp_path, model):
    directory = model(letters("<s> $A"))
    for prompt, overrides, expected in (
        ("X", [], "prompt 'X': has no token that the policy knows"),
        (
            "abcdefgh",
            ["engine.max_prompt_tokens=8"],
            "'abcdefgh', has 9 tokens; nearest valid choice: engine.max_prompt",
        ),
    ):
        path = jsonl(tmp_path / "train.jsonl", prompt)
        config = load("tiny", [f"model.path={directory}", f"data.train_file={path}", *overrides])
        with pytest.raises(ConfigError) as caught:
            check_inputs(config)
        assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused_if_a_prompt_needs_it(tmp_path, model):
    directory = model(letters(), vocab_size=8)
    overrides = ["speculation.method=none", f"model.path={directory}", f"data.train_file={tmp_path}/train.jsonl"]
    jsonl(tmp_path / "train.jsonl", "abc")
    check_inputs(load("tiny", overrides))
    jsonl(tmp_path / "train.jsonl", "abc", "fg")
    with pytest.raises(
        ConfigError, match="^prompt 'fg': its token 'g' has the number 9; expected less than 8, the pol"
    ):
        check_inputs(load("tiny", overrides))


def test_a_damaged_tokenizer_ends_the_command_with_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["train", f"model.path={tmp_path}", f"run_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"asyncspec: {tmp_path}/tokenizer.json: ") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_interrupt_while_prompts_are_encoded_is_one_line(tmp_path, monkeypatch, capsys):
    def interrupted(tokenizer, texts):
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncspec.tasks.prompts.encode_prompts", interrupted)
    assert main(["train", f"run_dir={tmp_path}/run"]) == 130
    assert capsys.readouterr().err == "asyncspec train: interrupted\n"
    assert not (tmp_path / "run").exists()


@pytest.fixture
def controller(tmp_path, monkeypatch):
    """Callable(function that reads the data) -> (client of a launcher, function that ends with the exit code)."""

    def start(read):
        monkeypatch.setattr("asyncspec.actors.schedule.load_problems", read)
        config = load("tiny", [f"run_dir={tmp_path}", "deployment.encrypt=false"])
        config.deployment.host = "127.0.0.1"
        controller = Controller(ActorSpec("controller", "controller", str(tmp_path), to_yaml(config)))
        codes = []
        thread = threading.Thread(target=lambda: codes.append(controller.run()), daemon=True)
        thread.start()

        def end():
            thread.join(60)
            client.close(0)
            return codes[0]

        client = ControlClient(controller.address, "launcher")
        client.send(Beat("launcher"))
        return client, end

    return start


def until_beats(client, count):
    """Receive until the controller has sent so many heartbeats."""
    while count:
        waiting.wait([client], 60)
        message = client.receive()
        assert message is not None
        count -= isinstance(message, Beat) and message.name == "controller"


def test_the_controller_shows_signs_of_life_while_it_reads_the_data(controller, capsys):
    enough = threading.Event()

    def read(config):
        assert enough.wait(60)
        raise ValueError("data.train_file='train.jsonl': line 7: damaged")

    client, end = controller(read)
    until_beats(client, 3)
    enough.set()
    assert end() == 1
    assert "failed: data.train_file='train.jsonl': line 7: damaged\n" in capsys.readouterr().out


def test_an_interrupt_ends_a_run_that_still_reads_its_data(controller, capsys):
    reading = threading.Event()
    client, end = controller(lambda config: reading.wait(60))
    until_beats(client, 1)
    client.send(Interrupt("interrupted"))
    assert end() == 130 and not reading.is_set()
    reading.set()
    assert "stopped early: interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("keep, expected", [(False, ["a b", "a c"]), (True, ["a<s> b", "a<s> c"])])
@pytest.mark.parametrize("evaluation", [False, True])
def test_the_reward_gets_special_tokens_if_asked_but_never_the_one_that_ends(keep, expected, evaluation):
    config = load("tiny", [f"data.reward_special_tokens={keep}"])
    generator = Generator(ActorSpec("generator", "generator0", "", to_yaml(config)))
    generator.tokenizer = letters()

    def completion(text, *ends):
        tokens = [*letters().encode(text).ids, *ends]
        numbers = torch.tensor(tokens, dtype=torch.int32)
        return Completion(0, 0, numbers, numbers.float(), numbers, not ends, 1, 0, 0, 0.0)

    class Recorder:
        def submit(self, key, prompt, responses, answer, row):
            self.responses = responses

    generator.rewarder = Recorder()
    # "h" ends this response, as a token that is not special may; the other one was truncated.
    done = [completion("a<s> b", LETTERS["h"]), completion("a<s> c")]
    ticket = msgspec.structs.replace(ticket_of(), evaluation=evaluation)
    generator._reward(_OpenGroup(ticket, 0.0, 0.0, done))
    assert generator.rewarder.responses == expected


def test_doctor_reads_the_inputs_that_a_run_would_read(tmp_path, capsys):
    path = jsonl(tmp_path / "train.jsonl", "1+1=")
    main(["doctor", f"data.train_file={path}", "data.reward=exact", "deployment.device=cpu"])
    assert (
        "can read the models' files, the tokenizer and the data, and load the reward exact" in capsys.readouterr().out
    )
    path.write_text('{"prompt": "1+1="}\n')
    assert main(["doctor", f"data.train_file={path}", "deployment.device=cpu"]) == 1
    assert f"data.train_file='{path}': line 1: expected an answer in answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings, loads",
    [
        ([], "the reward asyncspec.tasks.sums:exact_match"),
        (["environment.name=worlds:Echo"], "the environment worlds:Echo"),
        (
            ["environment.name=python", "environment.reward_from=data.reward"],
            "the environment python and the reward asyncspec.tasks.sums:exact_match",
        ),
    ],
)
def test_doctor_names_what_scores_the_rollouts(monkeypatch, settings, loads):
    monkeypatch.setattr(this_host, "check_inputs", lambda config: None)
    assert this_host._inputs(load("tiny", settings)).endswith(f", and load {loads}")


def test_a_draft_learns_on_the_tokens_that_a_run_would_have(tmp_path, small_shape, capsys):
    lines = [
        {"prompt": "<s>ab", "response": "cd"},
        {"prompt": "ab", "response": "cd</s>"},
        {"prompt": "a" * 50, "response": "c"},
        {"prompt": "b", "response": "c" * 60},
        {"prompt": "c", "response": "d"},
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape = replace(small_shape, vocab_size=64, eos_token_id=LETTERS[END])
    settings = Training(rollouts=f"{tmp_path}/rollouts.jsonl", max_prompt_tokens=10, max_response_tokens=20, seed=1)
    prompts, held_out, rollouts = draft_data.read(settings, letters("<s> $A </s>"), shape, terminal(width=200))

    def tokens(text):
        return tuple(LETTERS[token] for token in (BEGIN, *text, END))

    assert {*prompts, *held_out} == {tokens("ab"), tokens("b"), tokens("c")} and len(held_out) == 1
    learned = {
        prompt: {rollout.response for rollout in rollouts if rollout.prompt == prompt}
        for prompt in (*prompts, *held_out)
    }
    answers = {tokens("ab"): {tokens("cd")[1:]}, tokens("b"): set(), tokens("c"): {tokens("d")[1:]}}
    assert learned == {prompt: answers[prompt] if prompt in prompts else set() for prompt in answers}
    out = capsys.readouterr().out
    assert "1 of 4 prompts are left out: they have more than --max-prompt-tokens 10 tokens\n" in out
    assert ("1 of 3 rollouts are left out" in out or "1 of 2 rollouts are left out" in out) == (tokens("b") in prompts)


def test_held_out_prompts_that_are_trained_on_are_told(tmp_path, model, capsys):
    train, held_out = jsonl(tmp_path / "train.jsonl", "abc", "ab"), jsonl(tmp_path / "eval.jsonl", "ab", "bb")
    files = [f"data.train_file={train}", f"data.eval_file={held_out}", "steps=1"]
    check_inputs(load("tiny", [f"model.path={model(letters())}", *files]))
    assert "warning: 1 prompts of data.eval_file are also trained on" in capsys.readouterr().out
