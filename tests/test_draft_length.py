"""The draft length chosen for each step: the best one is found at little cost."""

import numpy as np
import pytest
import torch
from draft_lengths import costs, emitted, kept, none, over_best, play, step

from asyncspec.speculation.draft_length import LONGEST, AutoLength
from asyncspec.speculation.drafter import Slots
from asyncspec.speculation.lookup_length import LookupLength


def auto(seconds):
    """Return an AutoLength that is calibrated with these times for any number of live sequences."""
    return AutoLength([1, 64], np.array([seconds] * 2))


@pytest.mark.parametrize("acceptance,best", [(0.0, 0), (0.95, LONGEST), (0.6, 3)])
def test_auto_learns_the_best_length(acceptance, best):
    seconds = costs(1.0, 1.3, 1.4) * 1e-3
    assert int((emitted(acceptance) / seconds[:-1]).argmax()) == best
    late = play(auto(seconds), seconds, acceptance)[2000:]
    assert over_best(late, seconds, acceptance) > 0.98  # including exploration
    assert (late != best).any()  # it keeps exploring


@pytest.mark.parametrize("scale", [1e-3, 2.0])  # seconds of a step without a draft
@pytest.mark.parametrize("first", [1.3, 1.8])  # relative time of a step with one proposal
def test_auto_notices_that_a_draft_has_improved(scale, first):
    seconds = costs(1.0, first, first + 0.1) * scale
    chosen = play(auto(seconds), seconds, lambda number: 0.0 if number < 3000 else 0.9, steps=16000, noise=0)
    assert np.mean(chosen[2000:3000] > 0) < 0.05
    assert np.mean(chosen[15000:] >= 3) > 0.9


def test_auto_notices_an_improved_draft_while_the_number_of_sequences_varies():
    seconds = costs(1.0, 1.3, 1.4) * 1e-3
    chooser, rng, chosen = auto(seconds), np.random.default_rng(0), []
    for number in range(8000):
        live = int(rng.integers(8, 17))
        chosen.append(k := chooser.choose(live))
        chooser.observe(step(k, seconds[k], kept(rng, live, k, 0.0 if number < 3000 else 0.9)))
    assert np.mean(np.array(chosen[2000:3000]) > 0) < 0.02
    assert np.mean(np.array(chosen[7000:]) >= 3) > 0.9


@pytest.mark.parametrize("left", [4, 12, 400])
def test_auto_counts_no_tokens_beyond_the_end_of_a_row(left):
    """Each row has up to `left` tokens left, evenly spread. Tokens of a longer draft beyond that end are not counted,
    and their verification costs nothing either.
    """
    first, drafted, each = 1.0, 0.05, 0.1  # ms of a verification, of each drafted and of each verified proposal
    seconds = [first + (drafted + each) * k for k in range(LONGEST + 1)] + [first + (drafted + each / 2) * LONGEST]
    chooser, rng = auto(np.array(seconds) * 1e-3), np.random.default_rng(0)
    for _ in range(4000):
        k = chooser.choose(8)
        found_B = np.minimum(k, rng.integers(1, left + 1, 8) - 1)
        took = (first + drafted * k + each * found_B.mean() if k else first) * 1e-3
        kept_B = np.minimum(kept(rng, 8, k, 0.97), found_B)
        chooser.observe(step(k, took, kept_B, found_B=found_B if k else None))
    spent = chooser._costs(8) / chooser._costs(8)[0]
    at_least = [max(0, 1 - j / left) for j in range(1, 4)]  # share of rows with at least j tokens before their last
    tokens = 1 + sum(0.97**j * share for j, share in enumerate(at_least, 1))
    assert chooser._tokens()[3] == pytest.approx(tokens, rel=0.05)
    assert spent[3] == pytest.approx(first + 3 * drafted + each * sum(at_least), rel=0.05)


def test_auto_copes_with_thousands_of_rows_and_no_accepted_proposal():
    chooser, rows = auto(np.full(LONGEST + 2, 1e-3)), none(5000)
    for _ in range(2000):
        chooser.choose(5000)
        chooser.observe(step(3, 1e-3, rows))
    assert chooser._tokens()[1] == pytest.approx(1.0, abs=1e-3)


def test_features_are_kept_only_for_trials_and_auto_still_notices_an_improvement():
    seconds = costs(1.0, 1.3, 1.4) * 1e-3
    chooser, rng, chosen, keeps = auto(seconds), np.random.default_rng(0), [], []
    missed_B = np.zeros(8, dtype=bool)
    for number in range(16000):
        chosen.append(k := chooser.choose(8, missed_B))
        keeps.append(k > 0 or chooser.keeps)
        missed_B |= not keeps[-1]
        if k and 2000 < number < 8000:
            assert missed_B.sum() <= 4
        kept_B = kept(rng, 8, k, 0.0 if number < 8000 else 0.9)
        chooser.observe(step(k, seconds[k], kept_B, missed_B=missed_B.copy()))
        missed_B &= rng.random(8) > 1 / 50  # a sequence ends, another takes its row
    assert 0.005 < np.mean(keeps[2000:8000]) < 0.4
    assert 0 < np.mean(np.array(chosen[2000:8000]) > 0) < 0.02
    assert np.mean(np.array(chosen[12000:]) >= 3) > 0.9


def test_a_draft_is_judged_only_by_rows_with_all_features():
    chooser = auto(costs(1.0, 1.01))
    missed_B, kept_B = np.array([True, False, False, False]), np.array([0, 3, 3, 3])
    for _ in range(200):
        chooser.choose(4)
        chooser.observe(step(3, 1.0, kept_B, missed_B=missed_B))
    assert chooser._tokens()[3] == pytest.approx(4.0, abs=0.1)


def test_a_length_with_an_expensive_trial_is_still_tried():
    seconds = costs(1.0, 2.3, 3.2, 3.4) * 0.06
    chosen = play(auto(seconds), seconds, lambda number: 0.0 if number < 10000 else 0.95, steps=40000, noise=0)
    assert np.mean(chosen[35000:] >= 5) > 0.9


# by draft length, the factor by which the calibration is wrong
@pytest.mark.parametrize(
    "wrong", [{2: 1.25}, {2: 1.15, 1: 0.95}, {2: 1.1, 1: 0.85}, {2: 1.15, 3: 0.9}, {3: 0.8}], ids=str
)
def test_a_wrong_calibration_is_corrected_within_seconds(wrong):
    seconds, late = costs(1.0, 1.4, 1.6) * 3e-3, []
    # k=2 is best: 8% faster than k=1, 4% faster than k=3
    acceptance = (0.66, 0.61, 0.42, *[0.4] * (LONGEST - 3))
    for seed in range(10):
        chooser = auto([s * wrong.get(k, 1.0) for k, s in enumerate(seconds)])
        chosen = play(chooser, seconds, acceptance, live=16, steps=2000, seed=seed)
        late.append(over_best(chosen[-500:], seconds, acceptance))  # including trials
    assert np.mean(late) > 0.955 and min(late) > 0.94, late


def test_a_calibration_that_overstates_k_0_does_not_keep_a_useless_draft():
    seconds = costs(1.0, 1.2, 1.3, 1.45) * 0.033
    wrong = np.array([1.37, 1.0, 1.0, 0.72, 0.86, *[1.0] * (LONGEST - 3)])  # as measured on a shared processor
    for seed in range(10):
        chosen = play(auto(seconds * wrong), seconds, 0.02, live=64, steps=1500, seed=seed)
        assert np.mean(seconds[chosen[500:]]) < 1.015 * seconds[0]


@pytest.mark.parametrize("wrong", [{1: 0.7, 2: 1.2, 3: 1.1, 4: 1.1, 5: 1.2}, {3: 0.75}], ids=str)
def test_a_length_that_was_calibrated_too_fast_does_not_remain_chosen(wrong):
    seconds, late = costs(1.0, 1.45, 1.7) * 6e-3, []
    for seed in range(15):
        chooser = auto([s * wrong.get(k, 1.0) for k, s in enumerate(seconds)])
        chosen = play(chooser, seconds, 0.93, live=1, steps=800, seed=seed)
        late.append(over_best(chosen[400:], seconds, 0.93))
    assert min(late) > 0.94, late


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
def test_auto_chooses_no_speculation_if_all_drafts_are_slower_than_calibrated(slower):
    """All lengths in use then seem equally slow, as if the whole machine had become slower."""
    calibrated = costs(1.0, 1.3, 1.4) * 6e-3
    seconds = np.where(np.arange(len(calibrated)) > 0, slower, 1.0) * calibrated
    for seed in range(2):
        chosen = play(auto(calibrated), seconds, 0.6, steps=6000, seed=seed)
        assert over_best(chosen[5000:], seconds, 0.6) > 0.97


def test_rows_attend_to_as_many_positions_as_the_longest_row_of_their_group():
    slots = Slots(6, 64, "cpu")
    slots.length_S[:5] = torch.tensor([10, 8, 3, 2, 40])
    assert slots.attended(4) == 10 and slots.attended(5) == 40
    slots.ends = [2]
    assert slots.attended(4) == (2 * 10 + 2 * 3) / 4 and slots.attended(2) == 10


@pytest.mark.parametrize("lookups", [False, True])
def test_a_step_costs_more_for_each_position_that_each_token_attends_to(lookups):
    """A step takes 1 s, plus 0.2 s for each proposal, plus 0.001 s for each token and each position it attends to. It
    is calibrated with 50 positions and with 150.
    """

    def seconds(k, span):
        return 1 + 0.2 * k + 0.001 * (k + 1) * span

    last = seconds(0, 50) if lookups else seconds(LONGEST, 50)
    calibrated = np.array([[*(seconds(k, 50) for k in range(LONGEST + 1)), last]] * 2)
    farther = np.array([[seconds(LONGEST, 150), 150, 50]] * 2)
    read = np.array([[*range(LONGEST + 1), LONGEST - 1.0]] * 2)
    chooser = (
        LookupLength([1, 64], calibrated, True, farther) if lookups else AutoLength([1, 64], calibrated, read, farther)
    )
    for span in (50, 100, 400):
        chooser._span = span
        assert chooser._costs(8) == pytest.approx([seconds(k, span) for k in range(LONGEST + 1)])
        # for a step that takes exactly this long, the calibration is right
        steps = [step(3, seconds(3, span), none(8), found_B=np.full(8, 3), span=span)]
        assert chooser._calibrated_seconds(steps) == pytest.approx([seconds(3, span)])
