"""Drafters, which propose tokens for the engine to verify. `make` chooses one by its name in the configuration."""
