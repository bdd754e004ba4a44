"""The simulator's calibration: what is fitted to a run's spans, and what it refuses."""

import json

import numpy as np
import pytest

from asyncspec import config as configuration
from asyncspec.bench.jobs import run_job
from asyncspec.cli import main
from asyncspec.errors import UserError
from asyncspec.simulate import calibrate
from asyncspec.simulate.calibrate import Work, passes
from asyncspec.simulate.fitted_rounds import FittedRounds, fit_rounds
from asyncspec.simulate.machine import Measured
from asyncspec.wire.facts import ENTERING, GroupRecord, Rounds
from asyncspec.wire.messages import StepDone


def rounds_of(cost, cells, tokens=1.0, noise=0.0):
    rng = np.random.default_rng(0)
    found = []
    for live, k, positions in cells:
        seconds = float(cost(live, k, positions)) * (1 + noise * rng.standard_normal())
        found.append(Rounds(live, k, 10, 10 * seconds, 10 * live * tokens, 10 * positions))
    return found


CELLS = [(live, k, live * each) for live in (1, 3, 8, 20, 64) for k in (0, 1, 3, 7) for each in (20, 90)]


def test_a_straight_line_is_found_again():
    cost = FittedRounds(weights=[1e-3, 2e-5, 4e-5, 5e-5, 1e-3, 0.0, 2e-6])
    found, fit = fit_rounds(rounds_of(cost.seconds, CELLS))
    assert found.weights == pytest.approx(cost.weights, rel=1e-4, abs=1e-9)
    assert fit.middle == pytest.approx(1) and fit.pieces == len(CELLS)


def test_what_the_engine_timed_at_its_start_gives_the_form():
    """Rounds are 1.2 times as slow as that, and 0.3 ms more. Lengths and numbers in between are interpolated."""

    def timed(live, k, positions):
        return 1e-3 + 1e-4 * live * (k + 1) ** 0.8

    table = rounds_of(timed, [(live, k, 30 * live) for live in (1, 4, 16, 64) for k in (0, 1, 3, 7)], tokens=0.0)
    real = rounds_of(lambda *at: 1.2 * timed(*at) + 3e-4, [(live, k, 30 * live) for live in (4, 16) for k in (1, 3)])
    found, _ = fit_rounds([*table, *real, Rounds(1, ENTERING, 5, 9.0, 0.0, 0.0)])
    for live, k in ((1, 0), (64, 7), (16, 3)):
        assert found.seconds(live, k, 30 * live) == pytest.approx(1.2 * timed(live, k, 0) + 3e-4, rel=0.02)
    assert found.seconds(np.array([1, 64]), 7, np.array([30, 1920])).shape == (2,)


def record(place, tokens, differ=True):
    return GroupRecord(place, "generator0", 0.5, differ, tokens, 0, 0, 0, 1, 1, 1, 0, 0, [], prompt_tokens=5)


def test_passes_hold_all_tokens_with_a_signal():
    groups = [record(0, [300, 200]), record(1, [100, 100], differ=False), record(2, [400]), record(3, [50])]
    found = passes(StepDone(0, 0.0, 1.0, [], {}, {}, groups), 600)
    assert [(each.ticket, each.tokens) for each in found] == [(2, 600), (-1, 505 + 405 + 55 - 600)]
    assert sum(each.responses for each in found) == pytest.approx(4)


def test_acceptance_by_position_gives_tokens_and_what_lies_beyond_an_end():
    work = Work(FittedRounds(), retention=[0.8, 0.5, 0.5])
    assert [work.emitted(k) for k in (0, 1, 2)] == pytest.approx([1, 1.8, 2.2])
    assert work.beyond(0) == 0 and Work(FittedRounds(), retention=[1.0] * 5).beyond(5) == pytest.approx(2.5)


def test_what_was_written_is_read_again(tmp_path):
    work = Work(
        FittedRounds([1, 4], [0, 1], [[1e-3, 2e-3], [3e-3, 4e-3]], [30.0, 120.0], [1.0, 0, 0]),
        enter_s=0.5,
        retention=[0.5],
    )
    calibrate.save(work, tmp_path / "calibration.json")
    assert calibrate.read(tmp_path / "calibration.json") == work
    good = json.loads((tmp_path / "calibration.json").read_text())
    wrong = ({"sharing": 0}, {"enter_s": float("nan")}, {"pass_s": -1}, {"rounds": {}}, {"retention": []}, {"fits": 3})
    for change in wrong:
        (tmp_path / "calibration.json").write_text(json.dumps(good | change))
        with pytest.raises(UserError, match="damaged"):
            calibrate.read(tmp_path / "calibration.json")
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(UserError, match="damaged; try: asyncspec simulate calibrate"):
        calibrate.read(tmp_path / "calibration.json")


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected a run's directory, with config.yaml"):
        calibrate.calibrate(tmp_path)


@pytest.mark.slow
def test_a_run_is_calibrated_and_planned_with(tmp_path, capsys):
    """The calibrated run itself is predicted within a third: it is short, and other tests use the same cores."""
    run_dir = tmp_path / "run"
    rows = run_job(run_dir, "steps=12", "eval.every=0", "data.eval_prompts=8", "checkpoint.every=0")
    assert main(["simulate", "calibrate", str(run_dir)]) == 0
    assert "written:" in capsys.readouterr().out
    work = calibrate.read(run_dir / "calibration.json")
    assert all(0.7 < fit.middle < 1.4 for fit in work.fits.values())
    assert work.rounds.lives and 1 < work.emitted(7) <= 8 and work.logprob_token_s > 0 < work.token_s
    measured = Measured.read(run_dir, work)
    predicted = measured.predicted(measured.changed())
    assert predicted.step_s == pytest.approx(np.mean([row["time/step"] for row in rows[4:]]), rel=0.34)
    slower = measured.predicted(measured.changed(draft_length=0, slots=4))
    assert slower.step_s > predicted.step_s
    flags = ["plan", "--hardware", "this", "--run", str(run_dir)]
    assert main([*flags, "--out", str(tmp_path / "plan")]) == 0
    found = configuration.load(str(tmp_path / "plan" / "plan.yaml"), [])
    assert found.policy_lag == 1 and found.steps == 12
