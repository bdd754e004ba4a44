"""The record of a run: each ticket's fate, the audit that checks it, and the checkpoints to resume from."""
