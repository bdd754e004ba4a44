"""Engines: what turns prompts into rollouts. `base` is the protocol; `torch_engine` runs anywhere torch does."""
