import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_shape():
    """A policy small enough that its distribution over whole sequences can be written down."""
    from asyncspec.models.policy import PolicyShape

    return PolicyShape(vocab_size=6, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48,
                       max_positions=64, rope_theta=1e4, norm_eps=1e-6, tied=False, eos_token_id=1, pad_token_id=0)


@pytest.fixture(scope="session")
def small_policy(small_shape):
    from asyncspec.models import policy

    torch.manual_seed(3)
    model = policy.build(small_shape)
    model.init_states()
    return model.requires_grad_(False)


@pytest.fixture
def contrary_draft(small_shape):
    """A draft that disagrees strongly with the policy: random weights, sharp logits."""
    from asyncspec.models.eagle3 import DraftShape, Eagle3

    torch.manual_seed(4)
    draft = Eagle3(DraftShape.for_policy(small_shape))
    with torch.no_grad():
        draft.lm_head.weight.mul_(4)
    return draft


@pytest.fixture
def contrary_mtp(small_shape, small_policy):
    """A multi-token-prediction module that disagrees with its policy: random weights."""
    from asyncspec.models.mtp import MTP

    torch.manual_seed(5)
    module = MTP(small_shape, small_policy.lm_head.weight)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    return module.requires_grad_(False)
