"""The simulator: what a step would cost on devices and pipelines that one does not have."""
