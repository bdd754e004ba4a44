"""Versions of small weights for tests of broadcasts."""

import time

import torch

SHAPES = {"a": (300, 200), "b": (7,), "c": (1,), "d": (128, 3, 5)}


def tensors(version):
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


def wait_until_idle(publisher):
    deadline = time.monotonic() + 60
    while publisher.busy and time.monotonic() < deadline:
        publisher.check()
        time.sleep(0.001)
