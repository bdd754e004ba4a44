"""engine.kind=sglang with MockSglangServer, a test double. The answers of SGLang itself are not tested here."""

import os
import socket
import time

import pytest
import torch
from mock_sglang import POLICY, SGLANG, URL, MockSglangServer, one_line, reply
from runs import Running, rows
from vllm_checks import by_torchtitan, difference, ended, fill, moved, prompts, run

from asyncspec.actors.engines import make_engine
from asyncspec.config import load
from asyncspec.engine import sglang_engine
from asyncspec.engine.protocol import Request
from asyncspec.engine.sglang_server import ServerError
from asyncspec.launch.roles import specs
from asyncspec.ledger.audit import audit
from asyncspec.models import policy


@pytest.fixture
def settings(tmp_path):
    """callable(server, "field=value", ...) -> configuration."""
    return lambda server, *more: load(
        "tiny", [*SGLANG, f"engine.url={server.url}", f"engine.weights_dir={tmp_path / 'weights'}", *more]
    )


@pytest.mark.parametrize(
    "method,spec",
    [
        pytest.param("none", (), marks=pytest.mark.slow),
        ("ngram", ("speculation.method=ngram", "speculation.draft_length=1")),
    ],
)
def test_tokens_logprobs_and_versions_are_right_across_updates_in_flight(settings, tmp_path, method, spec):
    model, shape = policy.load(POLICY)
    models = [model, *(fill(policy.build(shape), moved(model, scale)) for scale in (0.05, 0.06))]
    some = prompts(8)
    with MockSglangServer(temperature=0.9, method=method, draft_length=1, slots=12) as server:
        engine = make_engine(settings(server, "engine.slots=16", "sampling.temperature=0.9", *spec), "cpu")
        for i, prompt in enumerate(some):
            engine.submit(Request(i, prompt, list(range(100 * i, 100 * i + 8)), 64))
        done = []
        for version, enough in ((1, 12), (2, 30)):
            while len(done) < enough:
                done += engine.poll()
            engine.load_policy(dict(models[version].named_parameters()), version)
            assert engine.version == version and engine.live and not list((tmp_path / "weights").rglob("*.safetensors"))
        done += ended(engine).values()
        assert server.swaps == 3 and server.weight_version == "2"
    assert len(done) == len({(c.request_id, c.sample) for c in done}) == 64
    worst, elsewhere, whole, across = 0.0, [], [0, 0, 0], 0
    for c in done:
        assert c.versions.tolist() == sorted(c.versions.tolist()) and len(c.versions) == len(c.tokens) == len(
            c.logprobs
        )
        assert c.truncated == (int(c.tokens[-1]) != shape.eos_token_id)
        first, last = int(c.versions[0]), int(c.versions[-1])
        whole[first] += first == last
        across += first != last
        for version in range(first, last + 1):
            if (of := c.versions == version).any():
                worst = max(worst, difference(by_torchtitan(models[version]), some[c.request_id], c, of, 0.9))
                elsewhere.append(difference(by_torchtitan(models[(version + 1) % 3]), some[c.request_id], c, of, 0.9))
        if method == "none":
            assert (c.verifications, c.proposed, c.accepted) == (len(c.tokens) - 1, 0, 0)
        else:
            assert sum(c.accepted_at) == c.accepted and (c.accepted == 0 or c.reached_at[0] == c.verifications)
            assert 0 <= c.accepted <= c.proposed <= c.verifications
            assert c.accepted + 1 + c.verifications >= len(c.tokens)
    elsewhere.sort()
    print(
        f"{method}: {whole} samples of one version, {across} of several; logprobs off by at most {worst:.1e}, under "
        f"another version by "
        f"{elsewhere[len(elsewhere) // 2]:.1e} (median); accepted {sum(c.accepted for c in done)} of "
        f"{sum(c.proposed for c in done)}"
    )
    assert min(whole) > 0 and across > 0 and worst < 1e-4
    assert elsewhere[len(elsewhere) // 10] > 1e-3  # so the comparison would detect a wrong version
    assert method == "none" or sum(c.accepted for c in done) > 0


def test_an_engine_takes_over_a_server_and_runs_more_samples_than_slots(settings):
    some = prompts(6)
    with MockSglangServer() as server:
        left = make_engine(settings(server), "cpu")
        left.submit(Request(0, some[0], list(range(40)), 64))
        left.poll()
        engine = make_engine(settings(server, "engine.slots=5"), "cpu")
        while server._open:  # wait until the aborted requests are answered
            time.sleep(0.01)
        server.most = 0
        got = run(engine, some, 4)
        assert server.most == 5 and engine.live == engine.waiting == 0
        with pytest.raises(ServerError) as error:
            ended(left)
        one_line(error, "request 0, sample ", "ended with abort: Aborted")
    own = run(make_engine(load("tiny", ["speculation.method=none", "sampling.max_response_tokens=64"]), "cpu"), some, 4)
    assert {key: c.tokens.tolist() for key, c in got.items()} == {key: c.tokens.tolist() for key, c in own.items()}


def test_a_stop_token_ends_a_sample_and_so_does_the_limit(settings):
    shape = policy.PolicyShape.from_hf(POLICY)
    with MockSglangServer() as server:
        engine = make_engine(settings(server), "cpu")
        whole = run(engine, prompts(4), 4)
        cut = run(engine, prompts(4), 4, length=6)
    stopped = [c for c in whole.values() if not c.truncated]
    assert stopped and all(int(c.tokens[-1]) == shape.eos_token_id for c in stopped)
    for key, c in cut.items():
        assert c.tokens.tolist() == whole[key].tokens[:6].tolist() and len(c.tokens) <= 6
        assert c.truncated == (int(c.tokens[-1]) != shape.eos_token_id)
    assert any(c.truncated for c in cut.values())


def fails(engine):
    with pytest.raises(ServerError) as error:
        run(engine, prompts(2), 2)
    return error


@pytest.mark.parametrize(
    "fault,expected",
    [
        (
            lambda handler: reply(handler, 500, b"Internal Server Error\nsecond line"),
            "/generate: HTTP 500: Internal Server Error second line",
        ),
        (lambda handler: reply(handler, 503, b'{"error": {"message": "no room"}}'), "/generate: HTTP 503: no room"),
        (
            lambda handler: reply(handler, 200, b'{"meta_info": '),
            "/generate: not an answer of SGLang 0.5.23: Input data was truncated",
        ),
        (lambda handler: reply(handler, 200, b"{}"), "missing required field `meta_info`"),
        (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), "/generate: RemoteDisconnected"),
        (lambda handler: time.sleep(2), "/generate: no answer within 0.5 s"),
    ],
)
def test_a_failing_server_gives_one_line(settings, monkeypatch, fault, expected):
    monkeypatch.setattr(sglang_engine, "SERVER_SAMPLE_S", 0.5)
    with MockSglangServer() as server:
        engine = make_engine(settings(server), "cpu")
        server.faults["/generate"] = fault
        one_line(fails(engine), server.url, expected)


@pytest.mark.parametrize(
    "meta,expected",
    [
        ({"weight_versions": None}, "Expected `array`, got `null` - at `$.meta_info.weight_versions`"),
        (
            {"weight_versions": [{"version": "default", "start": 0, "end": 6}]},
            "expected a whole number as the version of tokens from 0 on",
        ),
        ({"weight_versions": [{"version": "0", "start": 0, "end": 2}]}, "weight_versions cover 2 tokens; expected 6"),
        (
            {"weight_versions": [{"version": "7", "start": 0, "end": 6}]},
            "tokens of versions 7 to 7; expected 0 to 0: only this generator may change the server's weights",
        ),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "stopped at 'NaN happened'; expected tokens"),
        ({"output_token_logprobs": [[-1.0, 64, None]] * 6}, "expected tokens below the policy's 64"),
        ({"completion_tokens": 7}, "6 logprobs for 7 tokens; expected 1 to 64, equally many"),
        ({"output_token_logprobs": [[None, 3, None]] * 6}, "Expected `float`, got `null`"),
        (
            {"finish_reason": {"type": "length", "length": 6}},
            "cut off after 6 of 64 tokens; expected a server with room for prompt and response in its --context-length",
        ),
    ],
)
def test_an_answer_that_contradicts_itself_gives_one_line(settings, meta, expected):
    right = {
        "finish_reason": {"type": "stop", "matched": 1},
        "completion_tokens": 6,
        "output_token_logprobs": [[-1.0, 3, None]] * 6,
        "weight_versions": [{"version": "0", "start": 0, "end": 6}],
    }
    with MockSglangServer() as server:
        engine = make_engine(settings(server), "cpu")
        server.change = lambda path, content: {"meta_info": right} if path == "/generate" else content
        assert all(c.tokens.tolist() == [3] * 6 for c in run(engine, prompts(1)).values())
        server.change = lambda path, content: {"meta_info": right | meta} if path == "/generate" else content
        one_line(fails(engine), expected)


def test_weights_that_cannot_be_written_or_loaded_give_one_line(settings, tmp_path):
    with MockSglangServer() as server:
        engine = make_engine(settings(server), "cpu")
        tensors = {name: p.detach() for name, p in policy.load(POLICY)[0].named_parameters()}
        with pytest.raises(ServerError) as error:
            engine.load_policy({name: p * float("nan") for name, p in tensors.items()}, 1)
        one_line(error, "tensor ", "of version 1 holds values that are not finite")
        (tmp_path / "weights").write_text("a file")
        with pytest.raises(ServerError) as error:
            engine.load_policy(tensors, 1)
        one_line(
            error, "weights of version 1 could not be written to ", "expected an engine.weights_dir with room for them"
        )
    assert engine.version == 0


def test_a_server_that_cannot_load_a_version_has_ended_and_that_is_said(settings, monkeypatch):
    with MockSglangServer() as server:
        engine = make_engine(settings(server), "cpu")
        tensors = {name: p.detach() for name, p in policy.load(POLICY)[0].named_parameters()}

        def torn(folder, *args):
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(b"torn")

        monkeypatch.setattr(sglang_engine.hf_files, "write_checkpoint", torn)
        with pytest.raises(ServerError) as error:
            engine.load_policy(tensors, 1)
        one_line(error, "/update_weights_from_disk: RemoteDisconnected", "it ends if it cannot load a version")


def test_weights_are_written_to_shared_memory_by_default():
    def where(*more):
        config = load("tiny", [*SGLANG, f"engine.url={URL}", "run_dir=/data/runs/one", *more])
        return str(sglang_engine.weights_folder(config))

    assert (
        where() == f"/dev/shm/asyncspec-{os.getuid()}/data/runs/one"
        and where("engine.weights_dir=/shared/weights") == "/shared/weights"
    )


def test_a_generator_with_a_server_takes_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = load(
        "tiny", [*SGLANG, f"engine.url={URL},http://b:1", "deployment.generators=2", "deployment.device=cuda"]
    )
    assert {spec.name: spec.device for spec in specs(config)} == {
        "controller": "cpu",
        "trainer": "cuda:0",
        "logprob": "cuda:1",
        "generator0": "cpu",
        "generator1": "cpu",
    }


@pytest.mark.slow
def test_a_run_with_two_servers_finishes_with_a_clean_ledger(tmp_path):
    with MockSglangServer() as first, MockSglangServer() as second:
        run = Running.new(
            tmp_path / "run",
            "--steps",
            "5",
            *SGLANG,
            f"engine.url={first.url},{second.url}",
            "deployment.generators=2",
            f"engine.weights_dir={tmp_path / 'weights'}",
        )
        output = run.end()
        assert min(first.swaps, second.swaps) >= 4 and min(first.most, second.most) > 1, output
    metrics = rows(tmp_path / "run")
    assert len(metrics) == 5 and audit(str(tmp_path / "run")) == 0
    assert {row["lag/max"] for row in metrics} <= {0, 1} and metrics[-1]["eval/policy_version"] == 5
    assert not list((tmp_path / "weights").rglob("*.safetensors"))


@pytest.mark.slow
def test_a_server_that_fails_ends_the_run_with_one_line(tmp_path):
    with MockSglangServer() as server:
        run = Running.new(
            tmp_path / "run",
            "--steps",
            "50",
            *SGLANG,
            f"engine.url={server.url}",
            f"engine.weights_dir={tmp_path / 'weights'}",
        )
        run.wait_for_steps(1)
        server.faults["/generate"] = lambda handler: reply(handler, 500, b"out of memory")
        output = run.end(1)
    said = [line for line in output.splitlines() if "HTTP 500: out of memory" in line]
    print(*said, sep="\n")
    assert said and f"SGLang at {server.url}/generate" in said[0] and "Traceback" not in output
