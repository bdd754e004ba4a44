"""What computes the engine's passes: chosen once, when an engine is made, and passed down.

`CpuBackend` is for float32 on one thread of a CPU, where a call of numpy's costs a third of one of torch's: numpy
attends, a pass may leave out tokens, and numba drafts. `TorchBackend` is for everything else: GPUs, bfloat16, and
several threads, on which torch attends to many rows faster. Which library multiplies a matrix is the matrix's own
choice, see matrix.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from asyncspec.engine.kv_cache import CacheAccess, KVCache
from asyncspec.engine.numpy_cache import NumpyCacheAccess, NumpyKVCache, NumpyWorkspace
from asyncspec.engine.workspace import LayerShape, Workspace, Workspaces
from asyncspec.speculation.drafter import Slots
from asyncspec.speculation.verify import Sampling

Cache = KVCache | NumpyKVCache
Access = CacheAccess | NumpyCacheAccess


class Backend(ABC):
    workspace: type[Workspace]
    # A pass may be over some of the tokens of a rectangle (`Packed`), and what it costs by attended positions is known.
    packs: bool
    numba: bool  # EAGLE-3 and MTP draft in one function, see drafters/numba_draft.py

    def __init__(self, device, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype
        on_cpu = self.device.type == "cpu"
        # On processors a step costs their own time, which others that share them (the trainer, say) do not lengthen.
        self.clock = time.thread_time if on_cpu else time.perf_counter
        self.pass_tokens = 48 if on_cpu else 2048  # a further pass over prompts costs what so many tokens cost

    @abstractmethod
    def cache(self, layers: int, slots: int, positions: int, shape: LayerShape) -> Cache:
        """A KV cache."""

    def workspaces(self, shape: LayerShape, inputs: int = 1) -> Workspaces:
        """The memory of passes; `inputs` as for `Workspace`."""
        return Workspaces(self.workspace, shape, self.dtype, self.device, inputs)


class CpuBackend(Backend):
    workspace, packs, numba = NumpyWorkspace, True, True

    def cache(self, layers: int, slots: int, positions: int, shape: LayerShape) -> NumpyKVCache:
        return NumpyKVCache(layers, slots, positions, shape)


class TorchBackend(Backend):
    workspace, packs, numba = Workspace, False, False

    def cache(self, layers: int, slots: int, positions: int, shape: LayerShape) -> KVCache:
        return KVCache(layers, slots, positions, shape, self.device, self.dtype)


def backend_for(device, dtype: torch.dtype) -> Backend:
    """The back end for an engine of this process; numpy has as many threads as torch, see `loading.use_threads`."""
    alone = torch.device(device).type == "cpu" and dtype is torch.float32 and torch.get_num_threads() == 1
    return (CpuBackend if alone else TorchBackend)(device, dtype)


class Target(NamedTuple):
    """What a drafter is made for: a policy, and the engine that runs it."""

    model: Any  # torchtitan's
    slots: Slots
    sampling: Sampling  # which a draft follows, to be accepted more
    backend: Backend
