"""The actors: controller, generator, logprob, trainer, draft_adapter. One file each; `base` is what they share."""
