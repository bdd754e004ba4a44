"""Engines turn prompts into rollouts. All implement `protocol`; `torch_engine` runs wherever torch does."""

# Sizes that the memory's estimate needs too, without the libraries that an engine loads.
LINE = 16  # floats in a cache line; an unaligned row makes every vector load touch two lines
PROMPT_ROWS = 16  # cache rows for prompts whose samples wait for slots
