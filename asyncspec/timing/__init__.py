"""Timing: spans, the attribution of waits to their causes, and what is written of them."""
