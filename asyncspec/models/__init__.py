"""Policies (torchtitan's), drafts, and their Hugging Face files."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line for the user."""
