"""Several ranks that hold one policy together: FSDP2 over the data, tensor parallelism within a layer, or both.

torchtitan shards the model; this file connects the ranks, gives torchtitan our few settings, and gathers what is
sharded. The ranks form a grid [data, tensor]: the ranks of a row read the same groups, and the ranks of a column hold
shards of the same part of each matrix. With replicas, the rows are divided evenly among copies of the model.

    4 ranks, tensor_parallel=2:    0 1    read one group
                                   2 3    read another

With context parallelism, the ranks of several rows read the same groups and share their tokens, see context.py.

The trainer publishes weights from a snapshot of each rank's shards, see gather.py. Of the weights that a logprob actor
receives, each rank keeps its `share`. So the whole model never has to fit on one rank's device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial

import psutil
import torch
import torch.distributed as dist

from asyncspec.deadlines import MEET_S, REGROUP_S
from asyncspec.models.gather import Gatherer, ShardedSnapshot
from asyncspec.wire.addresses import own_address
from asyncspec.wire.layout import Layout

SPMD_BACKEND = "partial_dtensor"  # torchtitan's default needs a later torch than 2.13
_interfaces: dict[str, str] = {}  # variables of the environment that `_use_interface` has set


class Ranks:
    """This process as one of the ranks that hold a model."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int = 1,
        tensor_parallel: int = 1,
        dtype: str = "",
        replicas: int = 1,
        reduce_dtype: str = "float32",
        expert_parallel: int = 1,
        context_parallel: int = 1,
    ) -> None:
        """
        Args:
            name: the leading actor's name, by which the ranks find each other.
            rank: rank of this process, from 0 to size - 1.
            tensor_parallel: the number of ranks that divide each matrix.
            dtype: the dtype that float32 weights are cast to for computing; "": they are not cast.
            replicas: the number of copies of the model among the ranks; each is sharded.
            reduce_dtype: the dtype in which the ranks add up gradients.
            expert_parallel: the number of ranks that divide the experts of each layer.
            context_parallel: the number of ranks that share the tokens of a row, each with its `tensor_parallel`.
        """
        self.name, self.rank, self.size, self.tensor_parallel, self.dtype = name, rank, size, tensor_parallel, dtype
        self.replicas, self.reduce_dtype, self.expert_parallel = replicas, reduce_dtype, expert_parallel
        self.context_parallel, self.context = context_parallel, None
        self.sharing = tensor_parallel * context_parallel  # ranks that process the same groups
        self.data_size, self.data_rank = size // self.sharing, rank // self.sharing
        self.sharded = size > 1 or dtype not in ("", "float32")  # False: one process, without torch.distributed
        self.store: dist.Store | None = None  # where the ranks leave word for each other; set by `join`

    def connect(self, store_host: str, store_port: int, device: str, join_s: float, collective_s: float) -> None:
        """Form torch's default group with the other ranks. Collective.

        Args:
            store_host, store_port: address of a store that all ranks can reach.
            device: device of this rank's shards.
            join_s: seconds to wait for the others.
            collective_s: seconds that one collective may take.

        Raises:
            RuntimeError: not all ranks joined.
        """
        if dist.is_initialized():  # this process was a rank before the run was restarted
            dist.destroy_process_group()
        _use_interface(_interface(own_address(store_host, store_port)))
        store = dist.TCPStore(store_host, store_port, is_master=False, timeout=timedelta(seconds=join_s))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo",
            store=dist.PrefixStore(self.name, store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=collective_s),
        )
        self.store = dist.PrefixStore(f"{self.name}/word", store)

    def join(self, store_host: str, store_port: int, device: str, join_s: float, collective_s: float) -> None:
        """Connect to the other ranks, and form the grid. Collective. Arguments and errors are those of `connect`."""
        if not self.sharded:
            return
        self.connect(store_host, store_port, device, join_s, collective_s)
        _tell_torchtitan(torch.device(device).type)
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  torchtitan's backend for axes of one rank
        from torchtitan.distributed import ParallelDims

        self._dims = ParallelDims(
            dp_replicate=self.replicas,
            dp_shard=self.data_size // self.replicas,
            cp=self.context_parallel,
            tp=self.tensor_parallel,
            pp=1,
            ep=self.expert_parallel,
            world_size=self.size,
            spmd_backend=SPMD_BACKEND,
        )
        self._dims.build_mesh()
        if self.context_parallel > 1:
            self.context = self._dims.get_mesh("cp").get_group()
        # A receiver may come late to a broadcast, and then its group may be formed anew: until then a bucket waits.
        patience = timedelta(seconds=MEET_S + REGROUP_S + join_s)
        self._gatherer = Gatherer(list(range(self.size // self.replicas)), self.rank, device, patience)

    def patient_group(self, collective_s: float) -> dist.ProcessGroup | None:
        """Return a group of all ranks through host memory, whose collectives may take longer than those of training.
        None if this is the only rank. Collective.
        """
        if self.size == 1:
            return None
        return dist.new_group(timeout=timedelta(seconds=collective_s), backend="gloo")

    def meet(self, where: str, timeout_s: float) -> None:
        """Wait for the other ranks, which may take longer than a collective. Collective.

        Args:
            where: a name for this meeting; a rank meets the others there once.

        Raises:
            RuntimeError: a rank did not come within `timeout_s` seconds.
        """
        if self.store is None:
            return
        self.store.set(f"{where}/{self.rank}", "")
        for rank in range(self.size):
            try:
                self.store.wait([f"{where}/{rank}"], timedelta(seconds=timeout_s))
            except dist.DistStoreError as error:
                raise RuntimeError(f"rank {rank} of {self.name} has not {where} within {timeout_s:.0f} s") from error

    def shard(self, model, trained: bool, recompute: bool = False, compiled: bool = False) -> None:
        """Shard a policy on the meta device, or one that every rank holds whole, in place. Collective.

        Args:
            trained: whether passes go forward and backward; if not, gathered weights are released right after use.
            recompute: whether the backward pass computes activations again.
            compiled: whether torch.compile compiles each layer.
        """
        from torch.utils.checkpoint import checkpoint

        for layer in model.layers.values() if recompute or compiled else ():
            forward = _compiled(layer) if compiled else layer.forward
            # Inside FSDP's hooks, so that a layer is recomputed while its weights are gathered.
            layer.forward = partial(checkpoint, forward, use_reentrant=False) if recompute else forward
        if not self.sharded:
            return
        from torch.distributed.fsdp import FSDPModule
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

        if self.tensor_parallel > 1 or self.expert_parallel > 1:
            model.parallelize(self._dims)
            if model.enable_weight_tying:  # sharding the two one by one has untied them
                model.lm_head.weight = model.tok_embeddings.weight
        copies = ["dp_replicate"] if self.replicas > 1 else []
        mesh = self._dims.get_mesh([*copies, "fsdp"])
        dtypes = {
            "param_dtype": getattr(torch, self.dtype) if self.dtype else None,
            "reduce_dtype": getattr(torch, self.reduce_dtype),
        }
        if (own := getattr(model, "apply_fsdp", None)) is not None:  # a model of transformers
            own(mesh, **dtypes)
        else:
            apply_fsdp_to_decoder(
                model,
                mesh,
                pp_enabled=False,
                reshard_after_forward_policy="default" if trained else "always",
                ep_degree=self.expert_parallel,
                edp_mesh=self._dims.get_mesh([*copies, "efsdp"]) if self.expert_parallel > 1 else None,
                **dtypes,
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo cannot divide while it sums, and nothing has to be divided
                module.set_force_sum_reduction_for_comms(True)

    def sum_over_groups(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values that were counted over groups, in place. Collective.

        Ranks that process the same groups count once.
        """
        return self._sum(values, self.sharing)

    def sum_over_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values that were counted over the tokens of passes, in place; tensor-parallel ranks, which have the same
        tokens, count once. Collective.
        """
        return self._sum(values, self.tensor_parallel)

    def _sum(self, values: torch.Tensor, alike: int) -> torch.Tensor:
        if self.sharded:
            if self.rank % alike:
                values.zero_()
            dist.all_reduce(values)
        return values

    def snapshot(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], tell: Callable[[], None]
    ) -> ShardedSnapshot:
        """Return a snapshot of this rank's shards."""
        return ShardedSnapshot(layout, tensors, self._gatherer, tell)


def _compiled(layer) -> Callable:
    """Return a layer's compiled forward pass. Its attention, which differs from pass to pass, is not compiled."""
    inner = layer.attention.inner_attention
    inner.forward = torch.compiler.disable(inner.forward)
    return torch.compile(layer.forward, dynamic=True)


def share(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Return where this rank's part of a parameter lies in the whole tensor; () if the part is the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return ()
    sizes, firsts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(first, first + size) for size, first in zip(sizes, firsts))


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return parameters in lists, of which each has those that the same mesh of ranks divides: torch computes with them
    together. With expert parallelism another mesh divides the experts.
    """
    found: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [*found.values()]


def reset_fsdp_state(model) -> None:
    """Drop what FSDP records in each forward pass for the backward pass, which never comes if nothing is trained. Does
    nothing to a model without FSDP.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reset_iter_state()


def release(model) -> None:
    """Give back the weights that a forward pass has gathered, so that the parameters are this rank's shards again. Does
    nothing to a model without FSDP.
    """
    from torch.distributed.fsdp import FSDPModule

    reset_fsdp_state(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sync_gradients(model, now: bool) -> None:
    """Choose whether the next backward pass adds up the ranks' gradients. If not, each rank keeps its own whole. Does
    nothing to a model without FSDP.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def drop_kept_gradients(model) -> None:
    """Drop the gradients that this rank keeps because they were not yet added up."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tell_torchtitan(kind: str) -> None:
    """Set torchtitan's device, which it otherwise chooses by the hardware that it finds when it is imported."""
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = kind, getattr(torch, kind)
    import torchtitan.distributed.parallel_dims as dims
    import torchtitan.distributed.utils as utils_of_ranks

    dims.device_type = kind
    utils_of_ranks.set_spmd_backend(SPMD_BACKEND)  # which `ParallelDims` does not tell the dispatchers of experts


def _use_interface(name: str) -> None:
    """Have gloo and NCCL use a network interface, unless the user's environment names one. By default they would choose
    one by the host's name.
    """
    # NCCL takes a name without "=" for a prefix: eth1 would be eth10, too.
    for variable, value in (("GLOO_SOCKET_IFNAME", name), ("NCCL_SOCKET_IFNAME", f"={name}")):
        if os.environ.get(variable) == _interfaces.get(variable):  # unset, or set here for an earlier run
            os.environ[variable] = _interfaces[variable] = value


def _interface(address: str) -> str:
    """Return the name of the network interface that has this address."""
    for name, held in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in held):
            return name
    raise RuntimeError(f"no network interface has the address {address}")
