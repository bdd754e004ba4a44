"""Back ends of the embedded engine: the libraries that compute its passes, chosen once when the engine is made.

`CpuBackend` serves float32 on one CPU thread, where a numpy call costs a third of a torch call: numpy computes
attention, a pass may leave out tokens, and numba drafts. `TorchBackend` serves everything else: GPUs, bfloat16, and
several threads, where torch is faster at attention over many rows. The library that multiplies a matrix is chosen
per matrix, see matrix.py.
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
    # Whether a pass may compute only some tokens of a rectangle (`Packed`). The calibrator then also measures what
    # attended positions cost.
    packs: bool
    numba: bool  # whether EAGLE-3 and MTP draft in one compiled function, see drafters/numba_draft.py

    def __init__(self, device, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype
        on_cpu = self.device.type == "cpu"
        # A CPU step is timed in processor time, which other processes on the same cores (the trainer, say) do not
        # lengthen.
        self.clock = time.thread_time if on_cpu else time.perf_counter
        self.pass_tokens = 48 if on_cpu else 2048  # one more prefill pass costs as much as these

    @abstractmethod
    def cache(self, layers: int, slots: int, positions: int, shape: LayerShape) -> Cache:
        """Return a new KV cache."""

    def workspaces(self, shape: LayerShape, inputs: int = 1) -> Workspaces:
        """Return the workspaces that passes compute in; `inputs` as for `Workspace`."""
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
    """Return the back end for an engine in this process. numpy has as many threads as torch, see
    `loading.use_threads`.
    """
    alone = torch.device(device).type == "cpu" and dtype is torch.float32 and torch.get_num_threads() == 1
    return (CpuBackend if alone else TorchBackend)(device, dtype)


class Target(NamedTuple):
    """The policy that a drafter proposes for, and the parts of the engine that runs it."""

    model: Any  # the policy, a torchtitan model
    slots: Slots
    sampling: Sampling  # drafts sample in the same way, so that more proposals are accepted
    backend: Backend
