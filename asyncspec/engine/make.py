"""From a configuration to an engine, with the policy and the draft that the run begins with."""

from __future__ import annotations

from asyncspec.config import Config, resolve_path
from asyncspec.engine.base import Engine


def make_engine(config: Config, device: str) -> Engine:
    if config.engine.kind == "mock":
        from asyncspec.mock.engine import MockEngine

        return MockEngine(config)
    from asyncspec.engine.torch_engine import TorchEngine
    from asyncspec.models import policy
    from asyncspec.speculation.make import drafter_maker

    path = resolve_path(config.model.path)
    model, shape = policy.load(path)
    engine = TorchEngine(
        shape, drafter_maker(config.speculation.method, resolve_path(config.draft_directory), shape), slots=config.engine.slots,
        max_prompt_tokens=config.engine.max_prompt_tokens, max_response_tokens=config.sampling.max_response_tokens,
        draft_length=config.speculation.draft_length, temperature=config.sampling.temperature, top_p=config.sampling.top_p,
        top_k=config.sampling.top_k, kv_at_swap=config.engine.kv_at_swap, compile_layers=config.engine.compile, device=device)
    engine.load_policy(dict(model.named_parameters()), 0)
    engine.draft_version = 0
    return engine
