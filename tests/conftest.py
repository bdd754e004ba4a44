import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub, except its own

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
settings.register_profile("untimed", deadline=None)  # an example's duration depends on the machine
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def small_shape():
    """A policy small enough to compute its distribution over whole sequences exactly."""
    from asyncspec.models.policy import PolicyShape

    return PolicyShape(
        vocab_size=6,
        dim=32,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        hidden_dim=48,
        max_positions=64,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=False,
        eos_token_id=1,
        pad_token_id=0,
    )


@pytest.fixture(scope="session")
def small_policy(small_shape):
    from asyncspec.models import policy

    torch.manual_seed(3)
    model = policy.build(small_shape)
    model.init_states()
    return model.requires_grad_(False)


FAMILIES = [
    "llama",
    "llama, tied",
    "mistral, yarn",
    "qwen2, yarn",
    "qwen2, tied",
    "qwen3, yarn",
    "qwen3_moe",
    "qwen3_moe, unnormed",
]


@pytest.fixture(scope="session", params=FAMILIES)
def other(request, small_shape):
    """(shape, policy) of a model family other than dense Qwen3 with the default RoPE."""
    from dataclasses import replace

    from asyncspec.models import policy
    from asyncspec.models.rope_scaling import Llama3Scaling, YarnScaling
    from asyncspec.models.shape import Experts

    yarn = YarnScaling(4.0, 32, beta_fast=4.0, truncate=False)
    shape = {
        # Some RoPE wavelengths are kept, some scaled, some interpolated. Two tokens end a response.
        "llama": replace(
            small_shape,
            model_type="llama",
            norm_eps=1e-5,
            rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 64),
            other_eos_token_ids=(5,),
        ),
        "llama, tied": replace(small_shape, model_type="llama", tied=True, head_dim=16),
        "mistral, yarn": replace(small_shape, model_type="mistral", rope_scaling=replace(yarn, attention_factor=1.5)),
        "qwen2, yarn": replace(small_shape, model_type="qwen2", rope_scaling=yarn),
        "qwen2, tied": replace(small_shape, model_type="qwen2", tied=True, head_dim=16),
        "qwen3, yarn": replace(small_shape, rope_scaling=yarn),
        "qwen3_moe": replace(small_shape, model_type="qwen3_moe", experts=Experts(5, 2, 24, normed=True)),
        "qwen3_moe, unnormed": replace(small_shape, model_type="qwen3_moe", experts=Experts(4, 3, 16, normed=False)),
    }[request.param]
    torch.manual_seed(8)
    model = policy.build(shape)
    model.init_states()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # norm weights start as ones, biases as zeros
                parameter.add_(0.2 * torch.randn_like(parameter))
    return shape, model.requires_grad_(False)


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


@pytest.fixture
def maker(small_shape, small_policy, contrary_draft, contrary_mtp):
    """{method: make_drafter}, with drafts that disagree with the policy."""
    from asyncspec.drafters.draft_model import DraftModelDrafter
    from asyncspec.drafters.make import drafter_for, drafter_maker
    from asyncspec.drafts import draft as drafts
    from asyncspec.drafts.draft import Draft
    from asyncspec.models import policy as policies

    def other_policy(target):
        torch.manual_seed(6)
        other = policies.build(small_shape, target.slots.positions)
        other.init_states()
        model = policies.cast(other, target.backend.dtype).requires_grad_(False)
        return DraftModelDrafter(model, small_shape, target)

    torch.manual_seed(6)
    return {
        "eagle3": drafter_for(Draft("eagle3", contrary_draft, contrary_draft.shape)),
        "eagle3 of few tokens": drafter_for(drafts.new("eagle3", small_shape, small_policy, torch.tensor([1, 3, 4]))),
        "mtp": drafter_for(Draft("mtp", contrary_mtp, small_shape)),
        "draft_model": other_policy,
        **{method: drafter_maker(method, None, small_shape) for method in ("ngram", "suffix")},
    }


@pytest.fixture
def brought(tmp_path):
    """A copy of the shipped policy's directory."""
    from directories import TINY, copy

    return copy(TINY, tmp_path / "policy")


@pytest.fixture
def draft(tmp_path):
    """A copy of the shipped EAGLE-3 draft's directory."""
    from directories import TINY_DRAFT, copy

    return copy(TINY_DRAFT, tmp_path / "eagle3")


@pytest.fixture
def hub():
    from mock_hub import MockHub

    hub = MockHub()
    with hub.serving() as hub.url:
        yield hub


@pytest.fixture
def environment(hub, tmp_path):
    """The environment of a user who has this hub, and a cache of the test's own."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    return {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own


@pytest.fixture
def user(environment, tmp_path):
    """Runs Python as that user."""

    def run(*arguments, **changed) -> subprocess.CompletedProcess:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=environment | changed, capture_output=True, text=True, cwd=tmp_path)

    return run
