"""Policies (torchtitan models), drafts, and their Hugging Face files."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one line for the user."""
