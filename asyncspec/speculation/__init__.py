"""Speculation: random numbers, sampling, exact verification, and the choice of the draft length."""
