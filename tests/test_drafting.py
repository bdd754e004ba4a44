"""Drafting as one compiled function: the proposals of passes launched one by one, and what numba keeps of it."""

import importlib.util

import numpy as np
import pytest
import torch
from engines import engine_of, run

from asyncspec.drafters import numba_draft as drafting
from asyncspec.drafters.make import drafter_for
from asyncspec.drafts import draft as drafts


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("method", ["eagle3", "eagle3 of few tokens", "mtp"])
def test_a_compiled_proposal_is_that_of_passes_launched_one_by_one(
    small_shape, small_policy, maker, method, temperature
):
    check_compiled(engine_of(small_shape, small_policy, maker[method], 12, "random", temperature=temperature))


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_compiled_proposal_for_other_families(other, method):
    torch.manual_seed(6)
    engine = engine_of(*other, drafter_for(drafts.new(method, *other)), 12, "random")
    if other[0].experts is not None and method == "mtp":
        assert engine.drafter._compiled is None
    else:
        check_compiled(engine)


def check_compiled(engine):
    """While sequences come and go, at once and in parts, and prompts of one token among them."""
    compiled, launched, of = engine.drafter._compiled.propose, engine.drafter._launched, []

    def both(uniform_BK, temperature):
        (B, K), read = uniform_BK.shape, engine.drafter.read.copy()
        expected_BK, expected_BKV = launched(B, K, uniform_BK)
        engine.drafter.read[:] = read
        token_BK, q_BKV = compiled(uniform_BK, temperature)
        assert torch.equal(token_BK, expected_BK)
        assert torch.allclose(q_BKV, expected_BKV, rtol=1e-4, atol=1e-6)
        of.append((B, K))
        return token_BK, q_BKV

    engine.drafter._compiled.propose = both
    run(engine, [[2 + i % 4] * (1 + i % 8) for i in range(24)], samples=3)
    rows = {B for B, _ in of}
    assert min(rows) < 6 and max(rows) == 12 and {K for _, K in of} == {1, 2, 3, 4}, of
    assert len(drafting._draft.signatures) == 1, "compiled for arguments of several kinds"


def test_a_compiled_proposal_has_the_distributions_it_was_drawn_from():
    """Whatever logits and uniform numbers: what is drawn is where the cumulative sum passes, never a token of
    probability zero.
    """
    rng = np.random.default_rng(0)
    for scale in (0.0, 1.0, 30.0, 1e4):
        logits_U = (scale * rng.standard_normal(50)).astype(np.float32)
        expected_V = torch.from_numpy(logits_U / np.float32(0.8)).softmax(-1).double()
        for uniform in (0.0, 1 - 2**-23, *(rng.integers(0, 2**23, 40) / 2**23)):
            q_V = np.zeros(50, np.float32)
            token = drafting._draw(
                logits_U.copy(),
                np.float32(0.8),
                np.float32(uniform),
                np.empty(0, np.int64),
                q_V,
                np.empty(50, np.int32),
            )
            assert np.allclose(q_V, expected_V, rtol=1e-4, atol=1e-30) and q_V[token] > 0
            assert (
                q_V[:token].sum(dtype=np.float64)
                <= uniform * q_V.sum(dtype=np.float64) + 1e-12
                < q_V[: token + 1].sum(dtype=np.float64) + 2e-12
            )


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])  # numba's index of a function, and what it lists
def test_what_was_compiled_and_kept_damaged_is_compiled_again(tmp_path, monkeypatch, suffix):
    file = tmp_path / "kept.py"
    file.write_text(
        "from asyncspec.speculation.drafting import _compiled\n\n\n@_compiled()\ndef double(x):\n    return 2 * x\n"
    )
    monkeypatch.setattr(drafting, "_FUNCTIONS", [])

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
    drafting._FUNCTIONS.clear()
    again, results = loaded(), []
    with pytest.raises(Exception, match="pickle|EOF|truncated"):
        again(2)
    monkeypatch.setattr(drafting, "_rehearse", lambda: results.append(again(3)))
    drafting.prepare.__wrapped__()
    assert results == [6]
    assert loaded()(4) == 8
