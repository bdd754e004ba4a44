"""Timing: record spans, charge waits to their causes, and write metrics, traces and timelines."""
