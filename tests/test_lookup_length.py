"""The draft length of lookups, which may find nothing: estimates from hindsight, corrected by what was kept."""

import numpy as np
import pytest
from draft_lengths import costs, none, step

from asyncspec.speculation.draft_length import LONGEST
from asyncspec.speculation.lookup_length import LookupLength


def test_lookups_are_used_only_while_they_save_time():
    seconds = np.array([[*costs(1.0, 1.3, 1.4)[:-1], 1.1]] * 2) * 1e-3
    chooser, rng, chosen = LookupLength([1, 64], seconds, False), np.random.default_rng(0), []
    for number in range(8000):
        # Lookups become good, then useless; at last hindsight claims that they are good again, but they are not.
        good, told = 2000 <= number < 4000, 2000 <= number < 4000 or number >= 6000
        if number % 10 == 0:  # finished rollouts report now and then, with or without lookups
            count_R = (rng.random(100) < 0.5) * 3
            chooser.learn(count_R, count_R * told)
        chosen.append(k := chooser.choose(4))
        found_B = np.minimum((rng.random(4) < 0.5) * 3, k)
        took = seconds[0, found_B.max() or -1] if k else seconds[0, 0]
        chooser.observe(step(k, took, found_B * good, found_B=found_B if k else None))
    looked = (np.array(chosen) > 0).reshape(-1, 1000).mean(1)
    assert looked[1] < 0.05 and looked[3] > 0.95 and looked[5] < 0.05 and looked[7] < 0.3, looked
    assert np.mean(np.array(chosen)[3000:4000] >= 3) > 0.9  # no more than three are ever found


def test_hindsight_counts_the_verifications_of_each_length():
    """Three proposals are always found. They are all right, except in every third response, where all are wrong: a step
    of k emits min(k, 3) + 1 tokens, or 1.
    """
    chooser = LookupLength([1], np.arange(1.0, LONGEST + 3)[None], False)
    for kept in (3, 3, 0) * 3:
        chooser.learn(np.full(12, 3), np.full(12, kept))
    tokens = [1, *(3 / (1 + 2 / (min(k, 3) + 1)) for k in range(1, LONGEST + 1))]
    assert chooser._tokens() == pytest.approx(tokens, rel=0.05)
    assert chooser._costs(1) == pytest.approx([1, 2, 3, *[4] * (LONGEST - 2)])  # never more than three to verify


def test_more_rows_make_it_likelier_that_one_finds_a_proposal():
    chooser = LookupLength([1, 4], np.tile([1.0, *[3.0] * LONGEST, 2.0], (2, 1)), False)
    chooser.learn(np.tile([0, 0, 0, 5], 64), none(256))  # one row in four finds proposals
    for live in (1, 4):
        assert chooser._costs(live)[1:] == pytest.approx([2 + (1 - 0.75**live)] * LONGEST)


def test_the_cost_of_packed_rows_depends_on_all_their_proposals_together():
    seconds = np.array([[1.0, *(2.0 + m for m in range(1, LONGEST + 1)), 2.0]] * 2)
    chooser, rng = LookupLength([1, 8], seconds, True), np.random.default_rng(0)
    chooser.learn(np.tile([0, 0, 0, 4], 64), none(256))  # one row in four finds proposals
    for live in (1, 8):
        assert chooser._costs(live)[1:] == pytest.approx([2 + min(k, 4) / 4 for k in range(1, LONGEST + 1)])
    # The mean number of proposals per row need not be whole.
    steps = []
    for _ in range(8):
        found_B = np.minimum(rng.integers(0, 2, 8) * 4, 3)
        steps.append(step(3, 2 + found_B.mean(), none(8), found_B=found_B))
    assert chooser._calibrated_seconds(steps) == pytest.approx([s.seconds for s in steps])


def test_all_rows_attend_as_widely_as_the_row_with_the_most_proposals():
    """A step takes 1 s, plus 0.1 s for each verified proposal per row on average, plus 0.001 s for each position and
    each column of the rectangle that holds all proposals.
    """

    def seconds(read, widest, span):
        return 1 + 0.1 * read + 0.001 * (widest + 1) * span

    calibrated = np.array([[*(seconds(k, k, 50) for k in range(LONGEST + 1)), seconds(0, 0, 50)]] * 2)
    chooser = LookupLength([1, 64], calibrated, True, np.array([[seconds(LONGEST, LONGEST, 150), 150, 50]] * 2))
    chooser.learn(np.tile([0, 0, 0, 4], 64), none(256))  # one row in four finds proposals
    chooser._span = 100
    for live in (1, 8):
        some = 1 - 0.75**live
        expected = [seconds(min(k, 4) / 4, some * min(k, 4), 100) for k in range(1, LONGEST + 1)]
        assert chooser._costs(live) == pytest.approx([seconds(0, 0, 100), *expected])
    # For a step that took the expected time, the calibration is right.
    took = step(7, seconds(7 / 8, 7, 100), none(8), found_B=np.array([7, *[0] * 7]), span=100)
    assert chooser._calibrated_seconds([took]) == pytest.approx([took.seconds])


def test_verifications_correct_hindsight_position_by_position():
    chooser = LookupLength([1], np.arange(1.0, LONGEST + 3)[None], False)
    chooser.learn(np.full(1200, 3), np.full(1200, 3))  # hindsight: three more are always right
    assert chooser._tokens()[1:4] == pytest.approx([2, 3, 4], rel=0.01)
    # In fact only the first one is right.
    chooser._learn_tokens([step(3, 1.0, np.ones(50, dtype=np.int64), found_B=np.full(50, 3))] * 100)
    assert chooser._tokens() == pytest.approx([1, *[2] * LONGEST], abs=0.1)


def test_verifications_of_one_length_do_not_mislead_the_estimate_of_another():
    """Every fourth token is never proposed. With k=2 every second verification starts right before that token, so its
    first proposal is wrong. With k=1 and k=3 this never happens.
    """
    chooser = LookupLength([1], np.arange(1.0, LONGEST + 3)[None], False)
    chooser.learn(np.full(1200, LONGEST), np.tile([3, 2, 1, 0], 300))
    chooser._learn_tokens([step(2, 1.0, np.array([2, 0]), found_B=np.full(2, 2))] * 500)
    assert chooser._tokens()[1:4] == pytest.approx([2, 2, 4], rel=0.05)
