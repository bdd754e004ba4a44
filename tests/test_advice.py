"""What a report says should be changed."""

import pytest

from asyncspec.config import Config
from asyncspec.report.advice import advice, replayed
from asyncspec.report.run import Run
from asyncspec.timing.attribution import PARTS


def run_of(**metrics):
    """A run of ten equal steps with these seconds of parts, and these other metrics."""
    parts = {f"time/{part}": metrics.pop(part, 0.0) for part in PARTS}
    row = {**parts, "time/step": sum(parts.values()), **{name.replace("__", "/"): v for name, v in metrics.items()}}
    return Run("run", Config(), [row] * 10, [], [])


@pytest.mark.parametrize(
    "run, said",
    [
        (run_of(train=9.5, exposed_generation=0.5), "Training takes 95% of a step, so generation is hidden already."),
        (
            run_of(train=5.0, exposed_generation=5.0),
            "The largest part besides training is exposed generation: 5.00 s of a step of 10.0",
        ),
        (run_of(train=5.0, recovery=5.0), "Recovery takes 50% of a step"),
        (run_of(train=1.0, groups__without_signal=0.75), "75% of the groups have equal rewards"),
        (run_of(train=1.0, tokens__truncated=0.2), "20% of the responses are cut off"),
    ],
)
def test_advice_names_what_stands_out(run, said):
    assert any(line.startswith(said) for line in advice(run, replayed(run))), advice(run, replayed(run))


def test_advice_names_only_what_stands_out():
    run = run_of(train=1.0, groups__without_signal=0.1, tokens__truncated=0.01)
    assert len(advice(run, replayed(run))) == 1
