"""The form that all benchmarks share: variants alternate, some may be measured alone, results can be thinned."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from asyncspec.bench import BENCHMARKS, Listed, harness
from asyncspec.bench.speculation import FIXED, SpeculationBenchmark
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
