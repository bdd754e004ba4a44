"""The actors: controller, generator, logprob, trainer, draft_adapter. One file each; base.py holds what they share."""
