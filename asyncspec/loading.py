"""Load libraries without their side work, which takes a third of a process's start, and set their number of threads."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, which would go through all loaded objects again and again while libraries load."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def without_gpus() -> Iterator[None]:
    """Make torch report that there are no GPUs. Asking torch for GPUs initializes CUDA, and a process that is forked
    after that cannot use it.

    torchtitan asks when it is imported. The device that it derives from the answer is set again for each actor, see
    models/parallel.py.
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
    """Make `torch.compile(function, ...)` compile only when its result is first called. Its other uses stay the same.

    torchtitan calls it when it is imported, for functions that asyncspec does not use, and would load torch's compiler.
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
    """Set the number of threads of torch and of numpy's BLAS, which torch's own setting does not affect."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(count)
    threadpool_limits(count, user_api="blas")
