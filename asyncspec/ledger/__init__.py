"""The record of a run: the fate of each ticket, the audit that checks it, and the checkpoints to resume from."""
