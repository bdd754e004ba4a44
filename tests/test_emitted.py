"""Expected tokens for every draft length, learned from verifications with some lengths."""

import numpy as np
import pytest

from asyncspec.speculation.draft_length import LONGEST
from asyncspec.speculation.emitted import LENT_ROWS, Emitted, Survival


def test_an_untried_position_is_expected_to_behave_like_the_one_before_it():
    survival = Survival(4)
    survival.add(np.tile([0, 2, 2, 2], 512), 2)  # 3 in 4 rows pass the first position, and all of these the second
    assert survival.beyond() == pytest.approx([0.75, 0.75, 0.75, 0.75], rel=0.02)
    survival.add(np.tile([0, 1, 1, 1], 512), 2)  # then none pass the second, and half of the past is forgotten
    assert survival.beyond() == pytest.approx([0.75, 0.75 / 3, 0.75 / 9, 0.75 / 27], rel=0.05)


@pytest.mark.parametrize("held", [1, 3, 7, LONGEST])
def test_verifications_of_one_length_predict_all_lengths(held):
    rng, acceptance_J = np.random.default_rng(0), np.array([0.7 - 0.03 * j for j in range(LONGEST)])
    kept_R, result = (rng.random((40000, LONGEST)) < acceptance_J).cumprod(1)[:, :held].sum(1), Emitted()
    for kept_B in kept_R.reshape(-1, 100):
        result.add(kept_B, held)
    for k, tokens in enumerate(result.tokens()):
        true = 1 + acceptance_J[:k].cumprod().sum()
        assert tokens == pytest.approx(true, rel=0.05 if k <= held else 0.25), k


def test_a_lengths_own_verifications_count_beside_those_of_other_lengths():
    """Every third token is never proposed: k=2 always starts right before it and emits one token; k=1 emits 1.5."""
    result = Emitted()
    for _ in range(40):
        result.add(np.tile([1, 0], 50), 1)
    for _ in range(20):
        result.add(np.zeros(100, dtype=np.int64), 2)
    rows, by_position = result._rows_K[2], 1 + result._positions.beyond()[:2].sum()
    assert result.tokens()[2] == pytest.approx((by_position * LENT_ROWS + rows) / (LENT_ROWS + rows))
    assert result.tokens()[1] > 1.2 > result.tokens()[2]
