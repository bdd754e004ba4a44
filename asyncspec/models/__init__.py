"""Policies (torchtitan models), drafts, and their Hugging Face files."""

HEAD_ROWS = 512  # rows whose logits a pass over a packed row makes at once


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one line for the user."""
