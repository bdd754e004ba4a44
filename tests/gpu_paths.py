"""Has vLLM do on a CPU what it does on GPUs: its second model runner, and asynchronous scheduling.

The runner's kernels are executed by Triton's interpreter, so this says nothing of compiled kernels, CUDA graphs or
streams. Call `before_import` before torch is imported, and `after_import` before an engine is made.
"""

import os
import random
import types


def before_import():
    """Turn the runner on, and have Triton find a back end: its interpreter."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    import numpy as np
    import triton.backends
    import triton.runtime.interpreter as interpreter

    class Driver:
        is_active = classmethod(lambda cls: True)

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
    # Some of vLLM's kernels compute a mask as int1, which the interpreter's loads and stores refuse.
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask):
        return mask if mask.data.dtype == np.bool_ else interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    builder.create_masked_load = lambda self, pointers, mask, *rest, **named: load(
        self, pointers, as_bool(mask), *rest, **named
    )
    builder.create_masked_store = lambda self, pointers, value, mask, *rest, **named: store(
        self, pointers, value, as_bool(mask), *rest, **named
    )


def after_import():
    """Replace what the interpreter cannot execute: libdevice's log1p, and the kernel of top-k and top-p."""
    import triton.language as tl
    import vllm.v1.sample.ops.topk_topp_sampler as filters
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as utils

    utils.tldevice = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    filters.HAS_TRITON = False


class AnyLength:
    """Chooses lengths at random, so that nothing is timed: the interpreter is slow."""

    watches = False

    def __init__(self):
        self.random = random.Random(3)

    def choose(self, live):
        return self.random.choice((0, 0, 1, 2, 3))


def change_lengths_at_random():
    """Have draft_length=auto change the length of each step, without a calibration."""
    from asyncspec.engine.vllm_length import VllmLength

    VllmLength.calibrate = lambda self, *_: setattr(self, "chooser", AnyLength())


def check(engine):
    """Assert that an engine runs it."""
    runner = type(engine._vllm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    assert ".worker.gpu." in "".join(base.__module__ for base in runner.__mro__), runner.__mro__


def schedule_asynchronously():
    """Have vLLM schedule a step while the one before it is in flight. Its platform for CPUs turns that off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update(cls, config):
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update)
