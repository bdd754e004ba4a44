"""The form that all benchmarks share: variants alternate, some may be measured alone, results can be thinned."""

import contextlib
import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncspec.bench import BENCHMARKS, Listed, end_to_end, harness, interpreters, learning, peers
from asyncspec.bench.speculation import FIXED, SpeculationBenchmark
from asyncspec.config import load
from asyncspec.errors import UserError

ROOT = Path(__file__).parents[1]


class Counting(harness.Benchmark):
    """Each measurement is the number of the call."""

    name, repeats, variants, columns = "counting", 2, ("job 1", "job 2", "64 mtp 1"), ("call",)

    def __init__(self):
        self.order = []

    def measure(self, variant, repetition):
        self.order.append(variant)
        return {"call": float(len(self.order))}

    def headline(self, samples):
        return {"calls": float(len(self.order))}

    def plot(self, axes, samples):
        axes.plot([0, 1])

    def close(self):
        self.closed = True


@pytest.fixture
def counting(monkeypatch):
    benchmark = Counting()
    monkeypatch.setitem(BENCHMARKS, "counting", Listed(__name__, "nothing", 1))
    monkeypatch.setattr(sys.modules[__name__], "make", lambda overrides, out: benchmark, raising=False)
    return benchmark


def test_variants_alternate_and_leave_a_result_and_a_plot(counting, tmp_path):
    assert harness.run("counting", str(tmp_path), None, []) == 0
    assert counting.order == [*Counting.variants, *reversed(Counting.variants)]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["samples"]["job 1"] == [{"call": 1.0}, {"call": 6.0}] and result["headline"] == {"calls": 6.0}
    assert (tmp_path / "plot.png").exists()


def test_some_variants_are_measured_alone(counting, tmp_path):
    assert harness.run("counting", str(tmp_path), 1, [], ["job 2", "64"]) == 0
    assert counting.order == ["job 2", "64 mtp 1"] and not (tmp_path / "plot.png").exists()
    assert "--only 'job 2' --only 64" in json.loads((tmp_path / "result.json").read_text())["command"]
    with pytest.raises(UserError, match="--only 'job 3': expected the beginning of a variant.*; nearest: job"):
        harness.run("counting", str(tmp_path), 1, [], ["job 3"])


@pytest.mark.parametrize(
    "measured, pairs",
    [
        (["job eagle3 auto", "job eagle3 none"], ["job eagle3 auto over none"]),
        (["job eagle3 3", "64 mtp auto"], []),
        ([f"64 mtp {k}" for k in (*FIXED, "auto", "none")], ["64 mtp auto over none"]),
    ],
)
def test_bench_speculation_pairs_only_what_it_has_measured(measured, pairs):
    benchmark = SpeculationBenchmark.__new__(SpeculationBenchmark)
    assert benchmark.again({variant: [{"tokens_per_s": 1.0}] for variant in measured})[1] == pairs


def test_a_thinned_result_holds_quartiles(counting, tmp_path, monkeypatch):
    harness.run("counting", str(tmp_path), 3, [])
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["thin_result.py", str(file)])
    runpy.run_path(str(ROOT / "scripts" / "thin_result.py"), run_name="__main__")
    thinned = json.loads(file.read_text())
    assert thinned["quartiles"]["job 1"] == {"call": [3.5, 6.0, 6.5, 3]} and "samples" not in thinned
    with pytest.raises(SystemExit):  # it has no samples any more
        runpy.run_path(str(ROOT / "scripts" / "thin_result.py"), run_name="__main__")


def test_a_full_benchmark_goes_on_after_its_whole_repetitions(counting, tmp_path, monkeypatch):
    monkeypatch.setattr(Counting, "full_repeats", 3)
    monkeypatch.setattr(Counting, "full_variants", ("extra", "other"), raising=False)

    def cut_short(variant, repetition):
        if len(counting.order) == 11:
            raise KeyboardInterrupt
        return Counting.measure(counting, variant, repetition)

    monkeypatch.setattr(counting, "measure", cut_short)
    with pytest.raises(KeyboardInterrupt):
        harness.run("counting", str(tmp_path), None, [], full=True)
    plain = ["job 1", "job 2", "64 mtp 1", "64 mtp 1", "job 2", "job 1", "job 1", "job 2", "64 mtp 1"]
    assert counting.order == [*plain, "extra", "other"]
    assert len(json.loads((tmp_path / "result.json").read_text())["samples"]) == 3  # written before the further ones
    monkeypatch.undo()
    again = Counting()
    again.full_repeats, again.full_variants = 3, ("extra", "other")
    monkeypatch.setitem(BENCHMARKS, "counting", Listed(__name__, "nothing", 1))
    monkeypatch.setattr(sys.modules[__name__], "make", lambda overrides, out: again, raising=False)
    with pytest.raises(UserError, match=r"measured with \[\] before; expected the same fields, or another --out"):
        harness.run("counting", str(tmp_path), None, ["steps=3"], full=True)
    assert harness.run("counting", str(tmp_path), None, [], full=True) == 0
    assert again.order == ["other", "extra", "extra", "other"]
    samples = json.loads((tmp_path / "result.json").read_text())["samples"]
    assert samples["job 1"] == [{"call": 1.0}, {"call": 6.0}, {"call": 7.0}] and len(samples["extra"]) == 3


def test_a_plain_benchmark_says_its_result_once(counting, tmp_path, capsys):
    assert harness.run("counting", str(tmp_path), 1, []) == 0
    assert capsys.readouterr().out.count("written:") == 1


def test_samples_of_another_benchmark_are_named_as_such(counting, tmp_path, monkeypatch):
    monkeypatch.setattr(Counting, "full_repeats", 3)
    (tmp_path / "samples.json").write_text('{"overrides": [], "samples": {"lag 0": [{"call": 1.0}]}}')
    with pytest.raises(UserError, match="samples.json: of another benchmark or its other version; expected another"):
        harness.run("counting", str(tmp_path), None, [], full=True)


def test_a_result_is_json_for_every_reader():
    assert json.loads(
        harness.as_json({"low": float("nan"), "high": [float("inf"), 1.5]}), parse_constant=pytest.fail
    ) == {
        "low": None,
        "high": [None, 1.5],
    }


def test_an_environment_that_was_cut_short_is_made_again(tmp_path, monkeypatch):
    made = []

    def make(command):
        made.append(command[-1])
        (tmp_path / "trl" / "bin").mkdir(parents=True)
        (tmp_path / "trl" / "bin" / "python").touch()
        return SimpleNamespace(returncode=len(made) == 1)

    monkeypatch.delenv("ASYNCSPEC_TRL_PYTHON", raising=False)
    monkeypatch.setattr(interpreters.subprocess, "run", make)
    with pytest.raises(UserError, match="no environment with trl; set ASYNCSPEC_TRL_PYTHON to the interpreter of one"):
        interpreters.interpreter("trl", tmp_path)
    for _ in range(2):
        assert interpreters.interpreter("trl", tmp_path) == str(tmp_path / "trl" / "bin" / "python")
    assert made == ["trl", "trl"]
    monkeypatch.setenv("ASYNCSPEC_TRL_PYTHON", str(tmp_path))
    with pytest.raises(UserError, match="ASYNCSPEC_TRL_PYTHON=.*: expected the interpreter of an environment with trl"):
        interpreters.interpreter("trl", tmp_path)


def processes_of(directory):
    """Return the process ids whose command names a directory."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory).encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_benchmark_leaves_no_run_behind(tmp_path, how):
    mocked = ("engine.kind=mock", "trainer.kind=mock")
    command = [sys.executable, "-m", "asyncspec.cli", "bench", "async", "--out", str(tmp_path), *mocked]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        wait_for(lambda: list(tmp_path.glob("*/metrics.jsonl")), 60)
        assert len(processes_of(tmp_path)) > 1
        bench.send_signal(how)
    wait_for(lambda: not processes_of(tmp_path), 30)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_benchmark_of_one_size_has_no_full_one(counting, tmp_path):
    with pytest.raises(UserError, match="bench counting --full: this benchmark has one size; expected no --full"):
        harness.run("counting", str(tmp_path), None, [], full=True)
    assert counting.closed  # what it started is stopped


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"overrides": [], "samples": {"job 1": [',
        "\0\0",
        '{"overrides": [], "samples": {"job 1": [{}]}}',
    ],
)
def test_a_damaged_file_of_earlier_sittings_is_one_line(counting, tmp_path, monkeypatch, content):
    monkeypatch.setattr(Counting, "full_repeats", 3)
    (tmp_path / "samples.json").write_text(content)
    with pytest.raises(UserError, match="samples.json: damaged; expected what --full has written"):
        harness.run("counting", str(tmp_path), None, [], full=True)


def test_the_difference_of_learning_is_covered_and_detected_as_often_as_stated():
    """The shares are of 4,000 draws: their standard error is at most 0.8 points, and four of them are allowed."""
    random, seeds, runs, truth = np.random.default_rng(0), 8, 4000, 0.02
    draws = random.normal(truth, 0.03, (runs, seeds))
    covered = np.mean([low < truth < high for low, high in (learning.interval(draw, 0.95) for draw in draws)])
    assert abs(covered - 0.95) < 0.014
    detectable = np.mean([learning.smallest_detectable(draw) for draw in draws])
    shifted = random.normal(detectable, 0.03, (runs, seeds))
    found = np.mean([learning.interval(draw, 0.95)[0] > 0 for draw in shifted])
    assert abs(found - 0.8) < 0.05  # the shortcut with two quantiles of t is itself a few points off


def test_learning_pools_the_lags_by_seed():
    def measured(ends):
        return [{"accuracy_end": end} for end in ends]

    samples = {
        "lag 0, without speculation": measured([0.5, 0.6]),
        "lag 0, with speculation": measured([0.6, 0.6]),
        "lag 1, without speculation": measured([0.5, 0.5]),
        "lag 1, with speculation": measured([0.5, 0.7]),
    }
    bench = learning.LearningBenchmark([], Path())
    assert bench.differences(samples) == pytest.approx([0.05, 0.1])
    headline = bench.headline(samples)
    assert headline["difference"] == pytest.approx(0.075) and headline["equivalent"] == 0 and headline["seeds"] == 2


@pytest.mark.parametrize(
    "differences, said",
    [
        ([0.01, -0.01, 0.0, 0.005], "Speculation on and off are equivalent within 0.05"),
        ([0.30, 0.31, 0.29, 0.30], "Speculation changes the accuracy by more than 0.05"),
        ([-0.30, -0.31], "Speculation changes the accuracy by more than 0.05"),
        ([0.2, -0.2, 0.0], "Equivalence within 0.05 is not shown: the test sees differences from 0.6"),
        ([0.2], "One seed shows no difference and no equivalence"),
    ],
)
def test_learning_claims_no_more_than_it_has_shown(differences, said):
    assert learning.verdict(differences).startswith(said)


def test_the_time_to_an_accuracy_is_between_two_means_of_two_evaluations():
    def row(version, evaluated, score):
        return {"policy_version": version, "time/step": 2.0, "eval/policy_version": evaluated, "eval/score": score}

    rows = [row(1, 0, 0.2), row(2, 0, 0.2), row(3, 2, 0.4), row(4, 2, 0.4), row(5, 4, 0.6), row(6, 4, 0.6)]
    # means: 0.3 with version 2, after 4 s, and 0.5 with version 4, after 8 s
    assert end_to_end.reached(rows, 0.4) == pytest.approx(6.0)
    assert end_to_end.reached(rows, 0.5) == pytest.approx(8.0) and end_to_end.reached(rows, 0.51) is None
    assert end_to_end.reached([{"policy_version": 1, "time/step": 2.0}], 0.4) is None


def test_the_bounds_are_those_of_amdahl():
    bounds = end_to_end.bounds(generation=2 / 3, logprob=0.1, train=0.2, acceptance=4.0)
    assert bounds["synchronous speculative"] == pytest.approx(2.0)
    assert bounds["asynchronous"] == pytest.approx(1.5) and bounds["asynchronous speculative"] == pytest.approx(5.0)


def test_an_evaluation_of_several_versions_counts_at_the_middle_of_them():
    def row(version, first, last, score):
        of = {"eval/policy_version": first, "eval/policy_version_max": last, "eval/score": score}
        return {"policy_version": version, "time/step": 2.0} | of

    rows = [row(1, 0, 0, 0.2), row(2, 0, 0, 0.2), row(3, 1, 3, 0.6)]
    assert end_to_end.curve(rows) == [(0.0, 0.2), (4.0, 0.4)]


def test_trl_is_asked_for_the_job_and_its_better_engine_is_compared(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "compare" / "trl_grpo.py"))
    job = script["Job"](**peers.job_of(load("tiny", ["rl.clip_high=0.3"]), "vllm", tmp_path))
    assert job.clip_high == 0.3 and job.groups_per_step * job.group_size % job.rows_per_pass == 0
    samples = {
        peers.OURS: [{"step_s": 1.0, "to_target_s": 10.0}],
        "TRL, transformers": [{"step_s": 5.0, "to_target_s": 60.0}],
        "TRL, vLLM": [{"step_s": 4.0, "to_target_s": 80.0}],
    }
    headline = peers.PeersBenchmark.headline(peers.PeersBenchmark.__new__(peers.PeersBenchmark), samples)
    assert headline == {"step_ratio_trl": 4.0, "accuracy_time_ratio_trl": 6.0}


def test_a_run_whose_first_evaluation_has_the_target_took_no_time():
    rows = [{"eval/policy_version": 0, "eval/score": 0.7}, {"policy_version": 1, "time/step": 2.0}]
    assert end_to_end.reached(rows, 0.6) is None  # one evaluation is not enough
    rows += [{"eval/policy_version": 1, "eval/score": 0.7}]
    assert end_to_end.reached(rows, 0.6) == 0.0
