"""Drafting as one function compiled by numba: same proposals as passes launched one by one, and numba's cache."""

import importlib.util

import numpy as np
import pytest
import torch
from engines import engine_of, run

from asyncspec.drafters import numba_draft
from asyncspec.drafters.features import FeatureDrafter
from asyncspec.drafters.make import drafter_for
from asyncspec.drafts import draft as drafts
from asyncspec.speculation.verify import Sampling


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("method", ["eagle3", "eagle3 of few tokens", "mtp"])
def test_numba_proposes_the_same_as_passes_launched_one_by_one(small_shape, small_policy, maker, method, temperature):
    check_numba(engine_of(small_shape, small_policy, maker[method], 12, "random", Sampling(temperature)))


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_numba_drafts_for_other_families(other, method):
    torch.manual_seed(6)
    engine = engine_of(*other, drafter_for(drafts.new(method, *other)), 12, "random")
    if other[0].experts is not None and method == "mtp":
        assert type(engine.drafter) is FeatureDrafter
    else:
        check_numba(engine)


def check_numba(engine):
    """Check numba's proposals while sequences enter and leave, all at once and a few at a time.

    Some prompts have only one token.
    """
    drafter, of = engine.drafter, []
    by_numba = drafter._draft

    def both(B, K, uniform_BK):
        cached_S = drafter.cached_S.copy()
        expected_BK, expected_BKV = FeatureDrafter._draft(drafter, B, K, uniform_BK)
        drafter.cached_S[:] = cached_S
        token_BK, q_BKV = by_numba(B, K, uniform_BK)
        assert torch.equal(token_BK, expected_BK)
        assert torch.allclose(q_BKV, expected_BKV, rtol=1e-4, atol=1e-6)
        of.append((B, K))
        return token_BK, q_BKV

    drafter._draft = both
    run(engine, [[2 + i % 4] * (1 + i % 8) for i in range(24)], samples=3)
    rows = {B for B, _ in of}
    assert min(rows) < 6 and max(rows) == 12 and {K for _, K in of} == {1, 2, 3, 4}, of
    assert len(numba_draft.propose.signatures) == 1, "compiled for more than one set of argument types"


def test_numba_returns_the_distribution_that_it_draws_from():
    """For any logits and uniform number, the drawn token is where the cumulative sum passes that number, and never a
    token of probability zero.
    """
    rng = np.random.default_rng(0)
    for scale in (0.0, 1.0, 30.0, 1e4):
        logits_U = (scale * rng.standard_normal(50)).astype(np.float32)
        expected_V = torch.from_numpy(logits_U / np.float32(0.8)).softmax(-1).double()
        for uniform in (0.0, 1 - 2**-23, *(rng.integers(0, 2**23, 40) / 2**23)):
            q_V = np.zeros(50, np.float32)
            token = numba_draft._draw(
                logits_U.copy(),
                np.float32(0.8),
                np.float32(uniform),
                np.arange(50),
                q_V,
                np.empty(50, np.int32),
            )
            assert np.allclose(q_V, expected_V, rtol=1e-4, atol=1e-30) and q_V[token] > 0
            assert (
                q_V[:token].sum(dtype=np.float64)
                <= uniform * q_V.sum(dtype=np.float64) + 1e-12
                < q_V[: token + 1].sum(dtype=np.float64) + 2e-12
            )


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])  # numba's index of a function, and the compiled code it lists
def test_a_function_is_compiled_again_if_its_cache_is_damaged(tmp_path, monkeypatch, suffix):
    file = tmp_path / "kept.py"
    file.write_text(
        "from asyncspec.drafters.numba_draft import _numba\n\n\n@_numba()\ndef double(x):\n    return 2 * x\n"
    )
    monkeypatch.setattr(numba_draft, "_FUNCTIONS", [])

    def loaded():
        spec = importlib.util.spec_from_file_location("kept", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double

    assert loaded()(2) == 4
    kept = list(tmp_path.rglob(f"*.{suffix}"))
    assert kept
    for one in kept:
        one.write_bytes(one.read_bytes()[:50])
    numba_draft._FUNCTIONS.clear()
    again, results = loaded(), []
    with pytest.raises(Exception, match="pickle|EOF|truncated"):
        again(2)
    monkeypatch.setattr(numba_draft, "_rehearse", lambda: results.append(again(3)))
    numba_draft.prepare.__wrapped__()
    assert results == [6]
    assert loaded()(4) == 8
