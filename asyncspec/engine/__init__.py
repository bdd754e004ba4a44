"""Engines turn prompts into rollouts. All implement `protocol`; `torch_engine` runs wherever torch does."""
