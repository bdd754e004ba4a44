"""Engines: what turns prompts into rollouts. `protocol` is what all share; `torch_engine` runs anywhere torch does."""
