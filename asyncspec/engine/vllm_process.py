"""Setup and repairs for vLLM inside one of our processes, mostly on CPUs. Imports vLLM only when called."""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO

import torch

_compiled: TextIO | None = None  # the lock of this process's directory for what vLLM compiles


def prepare(threads: int) -> None:
    """Have vLLM run in this process, on this many threads, without usage reports. Call it before vLLM is imported."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # The n-gram proposer's Numba sets the number of OpenMP threads for the whole process.
        "NUMBA_NUM_THREADS": str(threads),
    }


def use_own_caches() -> None:
    """Have vLLM and Triton keep what they compile on this machine's disk, in the first directory that no other living
    process uses. vLLM replaces files in place, and would read another process's half-written ones. A later run finds
    them again. VLLM_CACHE_ROOT overrules this.
    """
    global _compiled
    if _compiled is not None or "VLLM_CACHE_ROOT" in os.environ:
        return
    root = Path(tempfile.gettempdir()) / f"asyncspec-compiled-{os.getuid()}"
    if not root.exists():
        root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        root = Path(tempfile.mkdtemp(prefix=root.name))  # somebody else could put code there
    for number in itertools.count():
        directory = root / str(number)
        directory.mkdir(exist_ok=True)
        lock = open(directory / "lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        _compiled = lock
        os.environ |= {"VLLM_CACHE_ROOT": str(directory), "TRITON_CACHE_DIR": str(directory / "triton")}
        return


def head_factor(head_dim: int) -> int:
    """Return the factor by which heads must be widened for vLLM's CPU attention (see models/widen.py)."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    return next((factor for factor in range(1, 1 + max(sizes)) if factor * head_dim in sizes), 1)


def repair_rejection_sampler() -> None:
    """Replace two functions of vLLM 0.32 that its rejection sampler calls on CPUs.

    The kernel that repeats each request's temperature, top-p and top-k for its proposals writes into a copy unless its
    input is int64, so temperatures come out as uninitialized memory. And top-k fails in a step in which no request has
    a proposal left.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        repeated = x.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))
        return repeated.masked_fill(repeated == replace_from, replace_to) if replace_from != replace_to else repeated

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_top_k_top_p = lambda logits, k, p: (
        apply_top_k_top_p(logits, k, p) if len(logits) else logits
    )


def pack_heads(model: torch.nn.Module) -> None:
    """Pack a policy's head again after an update on a CPU. A head tied to the embedding is not loaded itself, so its
    packed copy is still that of the old embedding.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def use_ranks(rank: int, device: str) -> None:
    """Have vLLM's executor for external launchers compute on a device, as one of the ranks of torch's default group."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    index = torch.device(device).index or 0
    # By default it reads torchrun's variables. The default group exists, so the method of forming it is not used.
    ExecutorWithExternalLauncher._distributed_args = lambda self: ("env://", rank, index)
    # On CPUs ranks of one host sum through shared memory, whose names all groups of a host share, and in which a rank
    # waits for ever for one that is gone. gloo notices it at once.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def keep_kernels() -> None:
    """Keep vLLM from registering its kernels a second time: they are registered, and its search for their users fails
    once Numba is loaded (vLLM 0.32, CPUs).
    """
    from vllm.platforms import current_platform

    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
