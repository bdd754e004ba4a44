"""Engines: what turns prompts into rollouts. `protocol` says what each does; `torch_engine` runs anywhere torch does."""
