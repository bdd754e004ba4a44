"""Benchmarks of one form: interleaved variants in one run, medians with spread, a table, result.json and a plot."""
