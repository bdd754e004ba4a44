"""Expected tokens for every draft length, from verifications of some."""

import numpy as np
import pytest
from draft_lengths import none

from asyncspec.speculation.draft_length import LONGEST
from asyncspec.speculation.emitted import Emitted, Survival


def test_a_position_not_tried_is_taken_for_like_those_before_it():
    survival = Survival(4, 0.3)
    # 3 in 4 go beyond the first, all of those further
    survival.add(none(1024), np.tile([1, 2, 2, 2], 256), np.tile([True, False, False, False], 256))
    # 1 in 7 ended of those before
    assert survival.beyond() == pytest.approx([0.75, 0.75, 0.75 * 6 / 7, 0.75 * 36 / 49], rel=0.02)
    survival.add(none(512), np.full(512, 3), np.tile([True, False], 256))  # of those behind the second half
    assert survival.beyond()[3] == pytest.approx(survival.beyond()[2] / 2, rel=0.02)


TEXT = 100000  # tokens


def simulated(keeps, k):
    """Verifications of k proposals each along a text: tokens of a streak before each, and proposals kept. keeps(at): of
    those at `at`.
    """
    streak_V, kept_V, streak, at = [], [], 0, 0
    while at < TEXT:
        kept = min(k, keeps(at))
        streak_V.append(streak)
        kept_V.append(kept)
        streak, at = streak + k + 1 if kept == k else 0, at + kept + 1
    return np.array(streak_V), np.array(kept_V)


def learned(keeps, k):
    """From one text, all of which is remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncspec.speculation.emitted.WINDOW", 10**9)
        result = Emitted()
        result.add(*simulated(keeps, k), k)
    return result


@pytest.mark.parametrize("held", [1, 3, 7, LONGEST])
def test_what_one_length_emits_tells_of_all_where_tokens_are_hard_wherever_a_draft_begins(held):
    """In easy stretches one token in fifty is hard, in others one in four."""
    rng = np.random.default_rng(0)
    hard_at = np.append(
        np.flatnonzero(rng.random(TEXT) < np.repeat(np.where(rng.random(TEXT // 40) < 0.5, 0.02, 0.25), 40)), TEXT
    )
    next_hard = hard_at[np.searchsorted(hard_at, np.arange(TEXT))]

    def keeps(at):
        return int(next_hard[at]) - at

    for k, tokens in enumerate(learned(keeps, held).tokens()):
        true = 1 + simulated(keeps, k)[1].mean()
        assert tokens == pytest.approx(true, rel=0.01 if k == held else 0.03 if k < held else 0.1), k


@pytest.mark.parametrize("held", [1, 3, 7, LONGEST])
def test_what_one_length_emits_tells_of_all_where_only_the_place_in_the_draft_counts(held):
    rng, acceptance_J = np.random.default_rng(0), np.array([0.7 - 0.03 * j for j in range(LONGEST)])

    def keeps(at):
        return int((rng.random(LONGEST) < acceptance_J).cumprod().sum())

    for k, tokens in enumerate(learned(keeps, held).tokens()):
        true = 1 + acceptance_J[:k].cumprod().sum()
        assert tokens == pytest.approx(true, rel=0.02 if k == held else 0.08 if k < held else 0.2), k
