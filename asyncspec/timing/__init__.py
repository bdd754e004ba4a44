"""Timing: spans, attribution of waits to their causes, exporters."""
