"""Makes the engine that a configuration names, with the policy and the draft that the run begins with.

It makes no mock engine: the launcher chooses a mock generator instead, see `launch/roles.py`.
"""

from __future__ import annotations

import os

from asyncspec.config import Config, resolve_path
from asyncspec.engine.protocol import Engine
from asyncspec.models.parallel import Ranks

# For every matrix and number of rows that it meets, oneDNN keeps a primitive, and torch keeps its description. The two
# take 0.6 MB, however small the matrix, and by default 1024 of each are kept. An engine meets new numbers of rows for
# hours, and these objects fragment the heap between tensors. With 64 of each, fewer than one product in a hundred has
# to be prepared anew, which takes 0.2 ms.
ONEDNN_CACHES = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64")


def make_engine(config: Config, device: str, index: int = 0, ranks: Ranks | None = None) -> Engine:
    """Make the engine of a generator. The embedded engine bounds oneDNN's caches in its process, unless the environment
    does.

    Args:
        index: the generator's number, which selects its SGLang server.
        ranks: this process as one of the ranks that hold the policy, with vLLM; None: it holds all of it.
    """
    if config.engine.kind == "vllm":
        from asyncspec.engine.vllm_engine import VllmEngine

        return VllmEngine(config, device, ranks)
    if config.engine.kind == "sglang":
        from asyncspec.engine.sglang_engine import SglangEngine

        return SglangEngine(config, index)
    import torch

    from asyncspec.drafters.make import drafter_maker
    from asyncspec.engine.torch_engine import TorchEngine
    from asyncspec.models import policy
    from asyncspec.speculation.verify import Sampling

    for name, capacity in ONEDNN_CACHES.items():
        os.environ.setdefault(name, capacity)  # oneDNN reads them at its first use
    path = resolve_path(config.model.path)
    dtype = getattr(torch, config.model.dtype)
    model, shape = policy.load(path, positions=1, dtype=dtype)  # it runs no pass
    engine = TorchEngine(
        shape,
        drafter_maker(config.speculation.method, resolve_path(config.draft_directory), shape),
        slots=config.engine.slots,
        max_prompt_tokens=config.engine.max_prompt_tokens,
        max_response_tokens=config.sampling.max_response_tokens,
        draft_length=config.speculation.draft_length,
        sampling=Sampling(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k),
        kv_at_swap=config.engine.kv_at_swap,
        kept=config.kept,
        routing=config.rl.routing_replay,
        device=device,
        dtype=dtype,
    )
    engine.load_policy(dict(model.named_parameters()), 0)
    engine.draft_version = 0
    return engine
