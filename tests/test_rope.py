"""One RoPE table serves all layers of a policy, as long as a run's sequences."""

from dataclasses import replace

import pytest
import torch

from asyncspec.config import Config
from asyncspec.launch import estimate
from asyncspec.models import eagle3, policy
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.shape import Experts
from asyncspec.rl.learner import Learner


# Memory that grows with a field.
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
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
    rope = policy.first_rope(learner.model)
    fields = learner.shape.to_hf()
    assert rope.cache.numel() * 4 == estimate.rope_table(config, fields)
    assert len(rope.cache) == config.positions < learner.shape.max_positions


def test_an_eagle3_draft_has_no_table(small_shape):
    draft = eagle3.Eagle3(DraftShape.for_policy(replace(small_shape, max_positions=262_144)))
    assert sum(buffer.numel() for buffer in draft.buffers()) == small_shape.head_dim
    positions = torch.tensor([[0, 1, 5000, 262_143]])
    cos, sin = draft.rope(positions)
    table = eagle3.angles(draft.shape, 262_144)[positions].repeat(1, 1, 2).unsqueeze(2)
    torch.testing.assert_close(cos, table.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, table.sin(), atol=1e-5, rtol=0)
