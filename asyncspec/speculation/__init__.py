"""Speculation: random numbers, sampling, exact verification, drafters."""
