"""One RoPE table serves all layers of a policy, as long as a run's sequences."""

from dataclasses import replace

import pytest
import torch
from directories import SIZES

from asyncspec.config import Config
from asyncspec.files import write_json
from asyncspec.launch import estimate
from asyncspec.models import eagle3, policy, rope
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.shape import Experts, PolicyShape
from asyncspec.rl.learner import Learner


# Memory that grows with a field.
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral", "qwen3_moe"])
def test_a_policy_has_one_rope_table_as_long_as_its_sequences(tmp_path, small_shape, kind):
    experts = Experts(2, 1, 8, True) if kind == "qwen3_moe" else None
    shape = replace(small_shape, model_type=kind, experts=experts, max_positions=262_144)
    model = policy.build(shape, 100)
    model.init_states()
    policy.save(model, shape, tmp_path)
    loaded, _ = policy.load(tmp_path, positions=100)
    for each in (loaded, policy.lengthened(loaded, shape, 100)):
        tables = {layer.attention.rope.cache.data_ptr() for layer in each.layers.values()}
        assert len(tables) == 1 and len(next(iter(each.layers.values())).attention.rope.cache) == 100
    whole = policy.build(shape)
    whole.load_state_dict(loaded.state_dict())
    tokens = torch.randint(0, shape.vocab_size, (2, 100))
    with torch.no_grad():
        assert torch.equal(whole(tokens), loaded(tokens))


def test_a_learner_makes_the_table_that_doctor_counts(tmp_path):
    config = Config()
    learner = Learner(config, tmp_path, "cpu")
    learner.load()
    table, fields = policy.first_rope(learner.model).cache, learner.shape.to_hf()
    assert table.numel() * 4 == estimate.rope_table(config, fields)
    assert len(table) == config.positions < learner.shape.max_positions


def test_an_eagle3_draft_has_no_table(small_shape):
    draft = eagle3.Eagle3(DraftShape.for_policy(replace(small_shape, max_positions=262_144)))
    assert sum(buffer.numel() for buffer in draft.buffers()) == small_shape.head_dim
    positions = torch.tensor([[0, 1, 5000, 262_143]])
    cos, sin = draft.rope(positions)
    table = rope.rotations(small_shape.head_dim, 262_144, small_shape.rope_theta, None)
    turns = table[positions].repeat(1, 1, 2).unsqueeze(2)
    torch.testing.assert_close(cos, turns.real, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, turns.imag, atol=1e-5, rtol=0)


# Stretched RoPE.
STRETCHED = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn as Qwen2.5 writes it": {"type": "yarn", "factor": 4.0},
    "yarn with fractions of dimensions": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn with other bounds": {"rope_type": "yarn", "factor": 40, "beta_fast": 16, "beta_slow": 2.5},
    "yarn of a given magnitude": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "yarn as DeepSeek scales it": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn with one of two scales": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707},
    "yarn that stretches nothing": {"rope_type": "yarn", "factor": 1.0},
    "yarn with zeros": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0, "beta_slow": None, "mscale": 0.0},
}


@pytest.mark.parametrize("original", [64, 4096, None])
@pytest.mark.parametrize("which", STRETCHED)
def test_stretched_tables_are_those_of_transformers(tmp_path, which, original):
    """In each form, for wide and narrow heads. A draft has the policy's, after its own config.json too."""
    from transformers import LlamaConfig, Qwen2Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    positions = torch.tensor([[0, 1, 63, 5000]])
    for kind, config, module, size, theta in (
        ("llama", LlamaConfig, LlamaRotaryEmbedding, 128, 5e5),
        ("qwen2", Qwen2Config, Qwen2RotaryEmbedding, 64, 1e6),
        ("qwen2", Qwen2Config, Qwen2RotaryEmbedding, 8, 1e4),
    ):
        given = STRETCHED[which] | ({} if original is None else {"original_max_position_embeddings": original})
        sizes = {**SIZES, "max_position_embeddings": 16384, "hidden_size": 4 * size}
        write_json(tmp_path / "config.json", {"model_type": kind, **sizes, "rope_theta": theta, "rope_scaling": given})
        cos, sin = module(config.from_pretrained(tmp_path))(torch.zeros(1), positions)
        shape = PolicyShape.from_hf(tmp_path)
        ours = policy.first_rope(policy.build(replace(shape, hidden_dim=8), 5001)).cache[positions]
        if kind == "llama":
            ours = torch.cat([ours.real, ours.real, ours.imag, ours.imag], -1)
        torch.testing.assert_close(ours, torch.cat([cos, sin], -1), atol=2e-3, rtol=0)  # float32 angles up to 5000
        torch.testing.assert_close(ours[:, :3], torch.cat([cos, sin], -1)[:, :3], atol=2e-5, rtol=0)
        write_json(tmp_path / "config.json", shape.to_hf())
        assert PolicyShape.from_hf(tmp_path) == shape
        draft = DraftShape.for_policy(shape)
        write_json(tmp_path / "config.json", draft.to_hf())
        assert DraftShape.from_hf(tmp_path, shape) == draft
        found = torch.cat(eagle3.Eagle3(draft).rope(positions), -1)[:, :, 0]
        torch.testing.assert_close(found, ours, atol=2e-3, rtol=0)


def test_an_original_length_beside_the_rope_counts_as_in_transformers(tmp_path):
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    fields = {"model_type": "qwen2", **SIZES, "rope_theta": 1e4, "rope_scaling": rope}
    write_json(tmp_path / "config.json", {**fields, "original_max_position_embeddings": 64})
    theirs, shape = Qwen2Config.from_pretrained(tmp_path), PolicyShape.from_hf(tmp_path)
    Qwen2RotaryEmbedding(theirs)  # completes the fields
    expected = theirs.rope_parameters["original_max_position_embeddings"]
    assert shape.rope_scaling.original_max_positions == expected == 64
    assert shape.longest == 256
