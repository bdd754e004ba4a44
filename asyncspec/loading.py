"""Loading libraries without what they do besides, a third of the time that a process takes to start; and with how many
threads they compute.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without garbage collection, which as libraries are loaded would go through all that was loaded before, again and
    again.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def without_gpus() -> Iterator[None]:
    """Who asks torch for GPUs within it hears that there are none: to ask is to begin CUDA, which nothing survives that
    is forked later.

    torchtitan asks as it is imported; what it hears is set again for each actor, see models/parallel.py.
    """
    import torch

    asked = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count")}
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
    try:
        yield
    finally:
        for name, function in asked.items():
            setattr(torch.cuda, name, function)


@contextmanager
def compiling_later() -> Iterator[None]:
    """Within it `torch.compile(function, ...)` does nothing until what it returns is called; other uses of it are as
    ever.

    torchtitan calls it as it is imported, for functions that we do not use, and would so load torch's compiler.
    """
    import torch

    compile_now = torch.compile

    def later(*arguments, **options) -> Callable:
        if len(arguments) != 1 or not inspect.isfunction(function := arguments[0]):
            return compile_now(*arguments, **options)
        compiled = cache(lambda: compile_now(function, **options))

        @wraps(function)
        def call(*args, **kwargs):
            return compiled()(*args, **kwargs)

        return call

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = compile_now


def use_threads(count: int) -> None:
    """Set the number of threads of torch and of numpy's BLAS, which torch's setting does not reach."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(count)
    threadpool_limits(count, user_api="blas")
