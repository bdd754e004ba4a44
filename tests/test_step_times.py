"""Step times: the calibration, and how comparisons of steps correct it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.speculation import step_times
from asyncspec.speculation.calibration import Calibration, calibration, plausible
from asyncspec.speculation.draft_length import LONGEST
from asyncspec.speculation.step_times import StepTimes


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.5))
def test_a_calibration_without_noise_is_used_as_measured(seed, bend):
    """Times may be linear in the draft length or not, and the machine's speed may differ from round to round."""
    lengths, rng = [0, 1, 2, 3, 5, LONGEST], np.random.default_rng(seed)
    seconds = np.array([1.0, *(2.0 + 0.3 * k + bend * max(0, k - 3) for k in lengths[1:]), 7.0])
    speeds = rng.uniform(0.5, 2.0, 7)
    result = calibration(lengths, speeds[:, None] * seconds) / np.median(speeds)
    assert np.allclose(result[[*lengths, -1]], seconds) and len(result) == LONGEST + 2


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 30.0]), min_size=6, max_size=6), min_size=2, max_size=6))
def test_a_disturbed_calibration_still_gives_positive_times(rounds):
    result = calibration([0, 1, 2, 3, 5, LONGEST], np.array(rounds))
    assert np.isfinite(result).all() and (result > 0).all()


@given(st.lists(st.floats(0.1, 10), min_size=LONGEST + 2, max_size=LONGEST + 2))
def test_calibrated_times_never_fall_with_the_draft_length(measured):
    found = plausible(np.array([measured]))[0]
    assert (np.diff(found[:-1]) >= 0).all() and found[-1] >= found[0]
    assert (found >= measured).all() and (np.isin(found, measured)).all()


def test_verification_costs_the_same_however_much_the_calibration_verified():
    """A step takes 1 s, plus 0.1 s for each proposal that is drafted, plus 0.2 s for each that is verified."""
    for usual in (1.0, 0.8):
        read_K = np.array([*(usual * k for k in range(LONGEST + 1)), LONGEST * usual / 2])
        seconds = 1 + 0.1 * np.array([*range(LONGEST + 1), LONGEST]) + 0.2 * read_K
        at = Calibration([1, 64], np.array([seconds] * 2), np.array([read_K] * 2)).at(8)
        k = np.arange(LONGEST + 1)
        for left in (1.0, 0.5):  # share of proposals that are verified
            assert at.seconds(k, left * k) == pytest.approx(1 + 0.1 * k + 0.2 * left * k)


def test_a_comparison_moves_the_less_certain_length_more():
    """The corrections follow Bayes' rule for normal, independent errors."""
    times = StepTimes()
    times.observe(6, 3, [1.0] * 8)
    times.observe(6, 5, [1.1] * 8)
    added = 2 * 8 * step_times.FORGETTING  # to each variance, before the comparison
    noise = 2 * step_times.BLOCK / 8
    share = (1 + added) / (2 * (1 + added) + noise)
    assert np.log(times.corrections(6)[[5, 3, 4]]) == pytest.approx(np.log(1.1) * share * np.array([1, -1, 0]))
    times.observe(6, 4, [1.1] * 8)  # the same time as 5, which has been compared before
    more = np.log(times.corrections(6))
    assert more[4] > abs(more[5] - np.log(1.1) * share) > 0


def test_a_slowdown_of_all_lengths_corrects_none():
    """A steady trend cancels: each block is compared with the block before it and the block after it."""
    times = StepTimes()
    for number in range(40):
        times.observe(6, (3, 5)[number % 2], [1.02**number] * 8)
    assert times.corrections(6)[5] / times.corrections(6)[3] == pytest.approx(1.0, abs=0.02)
    times.observe(8, 3, [9.0] * 8)  # other numbers of sequences are not compared
    assert times.corrections(8) == pytest.approx(1.0)
