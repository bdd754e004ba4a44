"""The engine's forward pass as torch.compile takes it: a few layers as one graph, which all of the policy's layers pass
through.

With few live sequences a step costs what launching its operations costs; compiled, most of them are fused. A graph of a
few layers is compiled once and called for each such block, so compiling takes no longer for a deeper policy. Shapes are
dynamic: one graph for one row, one for several, each for one token and for more. Kernels are kept in torch's cache on
disk, so a second start is quick.

Shape suffixes as in decode.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from asyncspec.engine.kv_cache import narrow_attention
from asyncspec.models.policy import PolicyShape

LONGEST_BLOCK = 4  # layers of a graph


class LayerWeights(NamedTuple):
    """What a layer multiplies by, as `decode.DecodeLayer` derives it; matrices transposed: [in, out]."""

    wqkv: torch.Tensor
    # of what queries and keys are scaled by in it, squared; Llama 3 does not normalize heads
    inverse_RH: torch.Tensor | None
    wo: torch.Tensor
    inward: torch.Tensor
    outward: torch.Tensor


class CompiledLayers:
    """All layers of a dense policy, block by block."""

    def __init__(self, shape: PolicyShape, positions: int, device: str) -> None:
        """
        Args:
            positions: of a row of the cache.
            device: its type.
        """
        self.shape = shape
        self.block = max(n for n in range(1, LONGEST_BLOCK + 1) if shape.n_layers % n == 0)
        self._pass = _compiled_block(shape, positions, device)

    def __call__(
        self, x_TD, weights: Sequence[LayerWeights], caches: Sequence[torch.Tensor], index, mask, rotation
    ) -> list[torch.Tensor]:
        """
        Args:
            weights, caches: of all layers; a cache is [slots * G * P, 2H], see `KVCache`.
            index, mask: of rows from 0, all in one group, see `kv_cache.Place`.
            rotation: float32 [T, 1, 1, H / 2, 2], cosine and sine of each position.

        Returns:
            The output of each layer, [T, D].
        """
        outputs: list[torch.Tensor] = []
        for start in range(0, len(weights), self.block):
            layers = slice(start, start + self.block)
            outputs += self._pass(
                outputs[-1] if outputs else x_TD, weights[layers], caches[layers], index, mask, rotation
            )
        return outputs

    @torch.inference_mode()  # as the engine's steps; what is compiled is compiled for the mode, too
    def prepare(self, weights: Sequence[LayerWeights], caches: Sequence[torch.Tensor]) -> None:
        """Compile, or fetch from the cache what was compiled before. Overwrites the first rows of the caches."""
        G, D, H = self.shape.n_kv_heads, self.shape.dim, self.shape.head_dim
        for rows, length, span in ((1, 1, 16), (3, 1, 16), (1, 3, 16), (3, 2, 32)):
            T, own = rows * length, {"device": caches[0].device, "dtype": caches[0].dtype}
            index = torch.arange(T * G, device=caches[0].device)
            mask = torch.zeros(rows * G, length * self.shape.n_heads // G, span, **own)
            x_TD, rotation = torch.zeros(T, D, **own), torch.zeros(T, 1, 1, H // 2, 2, device=caches[0].device)
            for tensor, sides in ((x_TD, (0,)), (index, (0,)), (mask, (0, 1, 2)), (rotation, (0,))):
                for side in sides:
                    torch._dynamo.maybe_mark_dynamic(tensor, side)
            self(x_TD, weights, caches, index, mask, rotation)


@lru_cache
def _compiled_block(shape: PolicyShape, positions: int, device: str):
    G, R, H, D = shape.n_kv_heads, shape.n_heads // shape.n_kv_heads, shape.head_dim, shape.dim
    eps = shape.norm_eps

    def unit(x: torch.Tensor, size: int) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + size * eps)).to(x.dtype)

    def block(x_TD, weights, caches, index, mask, rotation):
        rows, width, span = mask.shape
        B, L = rows // G, width // R
        cosine, sine = rotation.unbind(-1)
        outputs = []
        for w, cache in zip(weights, caches):
            qkv_TGRH = torch.mm(unit(x_TD, D), w.wqkv).view(-1, G, R + 2, H)
            qk = qkv_TGRH[:, :, : R + 1]
            if w.inverse_RH is not None:
                wide = qk.float()
                qk = (wide * torch.rsqrt((wide * wide * w.inverse_RH).sum(-1, keepdim=True) + H * eps)).to(x_TD.dtype)
            real, imaginary = qk.unflatten(-1, (-1, 2)).unbind(-1)
            qk = (
                torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], -1)
                .flatten(-2)
                .to(x_TD.dtype)
            )
            cache.index_copy_(0, index, torch.cat([qk[:, :, R], qkv_TGRH[:, :, R + 1]], -1).view(-1, 2 * H))
            seen = cache.view(-1, positions, 2 * H)[:rows, :span]
            q = qk[:, :, :R].view(B, L, G, R, H).transpose(1, 2).reshape(rows, width, H)
            if q.dtype is torch.float32:
                weight = torch.baddbmm(mask, q, seen[..., :H].transpose(1, 2)).softmax(-1)
                out = torch.bmm(weight, seen[..., H:])
            else:
                out = narrow_attention(q, seen[..., :H], seen[..., H:], mask)
            out = out.view(B, G, L, R, H).transpose(1, 2).reshape(B * L, -1)
            x_TD = torch.addmm(x_TD, out, w.wo)
            gate_TF, up_TF = torch.mm(unit(x_TD, D), w.inward).chunk(2, -1)
            x_TD = torch.addmm(x_TD, F.silu(gate_TF) * up_TF, w.outward)
            outputs.append(x_TD)
        return outputs

    # several engines may share a process
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # Calls from C++: with few tokens half of what is left would be Python. A GPU launches graphs instead.
    return torch.compile(block, fullgraph=True, options={"cpp_wrapper": device == "cpu"})
