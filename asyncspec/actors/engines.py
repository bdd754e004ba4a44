"""Makes the engine that a configuration names, with the policy and the draft that the run begins with.

A mock engine is not among them: its generator is the launcher's choice, see `launch/roles.py`.
"""

from __future__ import annotations

import os

from asyncspec.config import Config, resolve_path
from asyncspec.engine.protocol import Engine

# For every matrix and number of rows it meets, oneDNN keeps a primitive and torch the description of one: 0.6 MB the
# two, however small the matrix, and 1024 of each by default. An engine meets new numbers of rows for hours, and what is
# kept splits up the heap between tensors. With 64 of each, fewer than one product in a hundred is made ready anew,
# which takes 0.2 ms.
ONEDNN_CACHES = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64")


def make_engine(config: Config, device: str, index: int = 0) -> Engine:
    """For a process of its own: what oneDNN keeps in it is bounded, unless the environment has bounds already.

    Args:
        index: the generator's number, which SGLang server is its own.
    """
    if config.engine.kind == "vllm":
        from asyncspec.engine.vllm_engine import VllmEngine

        return VllmEngine(config, device)
    if config.engine.kind == "sglang":
        from asyncspec.engine.sglang_engine import SglangEngine

        return SglangEngine(config, index)
    import torch

    from asyncspec.drafters.make import drafter_maker
    from asyncspec.engine.torch_engine import TorchEngine
    from asyncspec.models import policy
    from asyncspec.speculation.verify import Sampling

    for name, capacity in ONEDNN_CACHES.items():
        os.environ.setdefault(name, capacity)  # read when oneDNN is first used
    path = resolve_path(config.model.path)
    model, shape = policy.load(path)
    engine = TorchEngine(
        shape,
        drafter_maker(config.speculation.method, resolve_path(config.draft_directory), shape),
        slots=config.engine.slots,
        max_prompt_tokens=config.engine.max_prompt_tokens,
        max_response_tokens=config.sampling.max_response_tokens,
        draft_length=config.speculation.draft_length,
        sampling=Sampling(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k),
        kv_at_swap=config.engine.kv_at_swap,
        device=device,
        dtype=getattr(torch, config.model.dtype),
    )
    engine.load_policy(dict(model.named_parameters()), 0)
    engine.draft_version = 0
    return engine
