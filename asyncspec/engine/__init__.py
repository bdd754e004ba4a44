"""Engines turn prompts into rollouts. All implement `protocol`; `torch_engine` runs wherever torch does."""

# These sizes stand here so that launch/estimate.py can use them without loading torch.
LINE = 16  # floats in a cache line; an unaligned row makes every vector load touch two lines
PROMPT_ROWS = 16  # cache rows for prompts whose samples wait for slots
