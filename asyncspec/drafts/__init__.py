"""Drafts with weights: their supervision and their training, offline and while the policy changes."""
