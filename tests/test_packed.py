"""A packed pass gives the logprobs, the gradients and the supervision of plain padded passes."""

import numpy as np
import pytest
import torch
from groups import Largest, padded, plain_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.config import Config
from asyncspec.drafts.supervision import from_pass, supervise
from asyncspec.launch import estimate, pass_memory
from asyncspec.models import head, packed, sizes
from asyncspec.models.attention import Packing
from asyncspec.models.policy import build
from asyncspec.rl.batch import Part, pack

SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=4
)


def parts_of(sizes, seed, vocabulary=6):
    g = np.random.default_rng(seed)
    return [
        Part(
            g.integers(0, vocabulary, prompt).tolist(),
            {"tokens": g.integers(0, vocabulary, sum(n)).astype(np.int32), "lengths": np.array(n, np.int32)},
        )
        for prompt, n in sizes
    ]


def gradients(model, logprob_T, weight_T):
    model.zero_grad()
    (logprob_T * weight_T).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def copied(other):
    shape, model = other
    copy = build(shape)
    copy.load_state_dict(model.state_dict())
    return copy


def check(model, sizes, seed):
    """Tolerance: float32 sums in another order, 1e-5 of a logprob and 1e-4 of the largest gradient."""
    parts = parts_of(sizes, seed)
    plain_T = torch.cat([plain_logprobs(model, part.prompt, part.arrays, 0.8) for part in parts])
    weight_T = torch.randn(len(plain_T), generator=torch.Generator().manual_seed(seed))
    expected = gradients(model, plain_T, weight_T)
    found_T = packed.run(model, pack(parts), 0.8).chosen.logprob_T
    found = gradients(model, found_T, weight_T)
    torch.testing.assert_close(found_T, plain_T, atol=1e-5, rtol=1e-5)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-4 * largest, rtol=0)


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 99), st.integers(1, 12))
def test_a_packed_pass_has_the_logprobs_and_gradients_of_padded_ones(small_trained, sizes, seed, rows):
    head.ROWS, before = rows, head.ROWS
    try:
        check(small_trained, sizes, seed)
    finally:
        head.ROWS = before


def test_other_families_have_the_same_logprobs_and_gradients_packed(copied):
    check(copied, [(3, [4, 7, 1, 4]), (1, [6]), (5, [2, 2])], 1)


@pytest.fixture(scope="module")
def small_trained(small_shape, small_policy):
    copy = build(small_shape)
    copy.load_state_dict(small_policy.state_dict())
    return copy


def test_no_tensor_of_all_positions_and_the_vocabulary_is_made(small_trained):
    """The largest tensor of a pass forward and backward has as many elements as the logits of a chunk."""
    hidden_TD, weight_VD = torch.randn(1600, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Largest(1000) as largest:
        head.chosen(hidden_TD, weight_VD, torch.arange(1600) % 1000, 1.0).logprob_T.sum().backward()
    assert largest.numel == head.ROWS * 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_head_computes_in_float32(dtype):
    g = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(7, 16, generator=g).to(dtype).requires_grad_()
    weight_VD, token_T = torch.randn(40, 16, generator=g).to(dtype).requires_grad_(), torch.arange(7)
    found = head.chosen(hidden_TD, weight_VD, token_T, 0.7, keep=3)
    exact = (hidden_TD.detach().double() @ weight_VD.detach().double().T / 0.7).log_softmax(-1)
    assert found.logprob_T.dtype == torch.float32 and found.token_TM.shape == (7, 3)
    torch.testing.assert_close(found.logprob_T.double(), exact[torch.arange(7), token_T], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.kept_TM.double(), exact.topk(3).values, atol=1e-5, rtol=1e-5)
    found.logprob_T.sum().backward()
    assert hidden_TD.grad.dtype == weight_VD.grad.dtype == dtype


@pytest.mark.parametrize("keep", [0, 3])
def test_supervision_of_a_packed_pass_equals_that_of_a_padded_one(small_trained, keep):
    layers = (0, 1, len(small_trained.layers))
    parts = parts_of([(3, [4, 7, 1]), (2, [5, 2])], 3)
    scores = packed.run(small_trained, row := pack(parts), 0.8, keep, layers)
    for index, part in enumerate(parts):
        found = from_pass(row, scores, index)
        tokens_GL, mask_GL = padded(part.prompt, part.arrays)
        expected = supervise(small_trained, layers, tokens_GL, mask_GL, 0.8)
        real_GL = (
            torch.arange(tokens_GL.shape[1]) < len(part.prompt) + torch.from_numpy(part.arrays["lengths"])[:, None]
        )
        assert torch.equal(found.tokens_BL, tokens_GL) and torch.equal(found.mask_BL, mask_GL)
        # Nothing follows a response's last token, so a draft learns nothing at its position.
        inner_GL = real_GL & torch.nn.functional.pad(real_GL[:, 1:], (0, 1))
        torch.testing.assert_close(found.features_BLE[inner_GL], expected.features_BLE[inner_GL], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.embeds_BLD[inner_GL], expected.embeds_BLD[inner_GL])
        predicts_GL = torch.nn.functional.pad(mask_GL[:, 1:], (0, 1))
        wanted = expected.target.logprob_BLM[predicts_GL]
        wanted = wanted.topk(keep).values if keep else wanted
        torch.testing.assert_close(found.target.logprob_BLM[predicts_GL], wanted, atol=1e-5, rtol=1e-4)


@given(SHAPES)
def test_documents_of_a_packed_row_cover_each_query_once(sizes):
    packing = Packing.of(sizes)
    index, queries, keys, most_queries, most_keys = packing.documents()
    assert queries[-1] == packing.tokens and keys[-1] == len(index)
    positions = packing.positions()[0]
    for q0, q1, k0, k1 in zip(queries, queries[1:], keys, keys[1:]):
        # A query at position p sees the keys of positions 0 to p; the mask is aligned lower right.
        seen = index[k0:k1]
        assert positions[seen].tolist() == list(range(k1 - k0)) and seen[-(q1 - q0) :].tolist() == list(range(q0, q1))
        assert q1 - q0 <= most_queries and k1 - k0 <= most_keys


# Peak GiB on one H200, scripts/measure_trainer.py, benchmarks/gpu/h200.md: Qwen3-0.6B's sizes, computing in bfloat16.
@pytest.mark.parametrize(
    "tokens, recompute, measured", [(512 + 16 * 1023, False, 28.3), (512 + 4 * 4095, False, 27.6), (33278, True, 9.3)]
)
def test_the_estimate_of_a_pass_is_within_a_tenth_of_what_a_gpu_needed(tokens, recompute, measured):
    qwen3 = {
        "hidden_size": 1024,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "model_type": "qwen3",
    }
    gathered = 2 * 151936 * 1024  # the embedding in 16 bits, which FSDP gathers
    parts = (
        8 * sizes.parameters(qwen3),
        pass_memory.activations(qwen3, 2, tokens, recompute),
        pass_memory.head(qwen3, 2, 1),
    )
    assert (sum(parts) + gathered) / 2**30 == pytest.approx(measured, rel=0.1)


def test_a_sample_of_64k_tokens_fits_on_eight_gpus_of_80_gb():
    config = Config()
    config.model.dtype, config.sampling.max_response_tokens = "bfloat16", 65536
    config.trainer.ranks, config.trainer.recompute, config.trainer.tokens_per_pass = 8, True, 66000
    qwen3_8b = {
        "hidden_size": 4096,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "model_type": "qwen3",
    }
    assert sum(estimate.of_actor(config, qwen3_8b, "trainer").values()) < 80e9
