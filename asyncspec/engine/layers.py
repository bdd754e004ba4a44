"""The layers of a decoder as the engine computes them: few operations, in memory whose views are made once.

An engine step over few tokens takes as long as launching its operations. So these layers take the parameters of a
model's modules and do in 20 operations what the modules do in 70. Norm weights and the scale of attention are
multiplied into matrices. Matrices with the same input are joined. The norms of a token and of all its heads are one
product (`HeadNorm`). Qwen's RoPE rotates two halves of each query and key; these halves are interleaved here, as in
Llama 3, so that rotating is one complex multiplication. `reload` derives all of this again when parameters change.

Shape suffixes: those of workspace.py, and P cache positions, O outputs of a matrix; in `Mixture` E experts, K experts
of a token, N = T * K tokens sorted by expert.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from asyncspec.engine.backend import Access, Cache
from asyncspec.engine.matrix import Derived, Matrix
from asyncspec.engine.workspace import PAD, LayerShape, Workspace
from asyncspec.models.eagle3 import DraftShape
from asyncspec.models.policy import PolicyShape

LEAST_SCALE = 1e-9  # smallest weight of a head norm that is multiplied into a matrix


def scale(norm) -> torch.Tensor:
    """Return the factor of an RMSNorm module that `Workspace.normalize` leaves out, float32."""
    return norm.weight.float() * norm.weight.shape[-1] ** 0.5


def scaled(weight: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return a matrix times a factor from `scale`, rounded once to the matrix's dtype."""
    return (weight.float() * by).to(weight.dtype)


class RMSNorm:
    """An RMSNorm whose weight is not multiplied into a matrix."""

    def __init__(self, norm, derived: Derived) -> None:
        self.norm, self.derived = norm, derived

    def reload(self) -> None:
        self.weight = self.derived.keep(scale(self.norm))

    def __call__(self, space: Workspace) -> torch.Tensor:
        """Return the RMSNorm of the workspace's x, [T, D]."""
        space.normalize()
        unit_TD = space.unit.tensor
        return (unit_TD * self.weight).to(unit_TD.dtype)


def interleaved(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Interleave the two halves of a head along `dim`: neighbors become the real and imaginary parts that RoPE
    rotates.
    """
    first, second = weight.chunk(2, dim)
    return torch.stack([first, second], dim + 1).flatten(dim, dim + 1)


class RoPE:
    """Rotary embedding of joined heads (`DecodeLayer.wqkv`). A pass gathers its rotations once for all layers."""

    def __init__(self, turns_PH: torch.Tensor, queries: int) -> None:
        """
        Args:
            turns_PH: complex, the rotation of each pair of a head's dimensions.
            queries: query heads that share a key-value head.
        """
        # Values are multiplied by one: a product over whole rows takes a third of the time of one that leaves them out.
        self._rotation_PR = torch.cat([*[turns_PH] * (queries + 1), torch.ones_like(turns_PH)], 1)
        self.half = turns_PH.shape[1]

    @classmethod
    def of(cls, model) -> RoPE:
        """Convert a policy's table: rotations (Llama 3), or cosines, then sines, each with two equal halves (Qwen)."""
        attention = next(iter(model.layers.values())).attention
        table, queries = attention.rope.cache, attention.n_heads // attention.n_kv_heads
        if table.is_complex():
            return cls(table, queries)
        cos_PH, sin_PH = table.chunk(2, dim=-1)
        half = cos_PH.shape[-1] // 2
        return cls(torch.complex(cos_PH[:, :half], sin_PH[:, :half]), queries)

    def to_numpy(self) -> np.ndarray:
        """Return cosine and sine for each position and pair of a head, float32 [P, H / 2, 2]."""
        return torch.view_as_real(self._rotation_PR[:, : self.half]).numpy()

    def at(self, position_BL: torch.Tensor) -> torch.Tensor:
        """Return the rotations of a group's heads at these positions, complex [T, 1, R * H / 2]."""
        return self._rotation_PR.index_select(0, position_BL.flatten()).unsqueeze(1)


class HeadNorm:
    """The RMSNorm of a token and those of its queries and keys, all applied to the products with `wqkv`.

    Let x be the token's residual stream, q = x @ weight.T a query or key, v a value, and s the scales of the head
    norms, which are already multiplied into the weight. The normalized heads are

        q / sqrt(sum(q^2 / s^2) + H * eps * (sum(x^2) + D * eps))      v / sqrt(sum(x^2) + D * eps)

    One matrix product of the squares of x, of its constant and of the heads gives the sums under all roots.
    """

    def __init__(self, q_norm, k_norm, shape: LayerShape, derived: Derived) -> None:
        """
        Args:
            q_norm, k_norm: RMSNorm modules.
        """
        self.modules, self.shape, self.derived = (q_norm, k_norm), shape, derived

    def reload(self) -> torch.Tensor:
        """Return the scales to multiply into the weight, float32 [R, H]."""
        D, G, Q, H, *_ = self.shape
        queries_H, key_H = (interleaved(scale(norm), 0) for norm in self.modules)
        queries_H = queries_H * H**-0.5  # the scale of attention
        scale_RH = torch.stack([*[queries_H] * Q, key_H, torch.ones_like(key_H)])
        # The norm divides by the scales, so none may be zero. One as small as LEAST_SCALE has the same effect as zero.
        scale_RH = torch.where(scale_RH.abs() < LEAST_SCALE, LEAST_SCALE, scale_RH)
        self.inverse_RH = self.derived.keep(scale_RH[:-1] ** -2)
        sums_NI = scale_RH.new_zeros(G * (Q + 2), D + PAD + G * (Q + 2) * H)
        sums_GRI, sums_GRGRH = sums_NI.view(G, Q + 2, -1), sums_NI[:, D + PAD :].view(G, Q + 2, G, Q + 2, H)
        sums_GRI[:, :-1, : D + 1], sums_GRI[:, -1, : D + 1] = H * self.modules[0].eps, 1.0
        for group in range(G):
            for head in range(Q + 1):
                sums_GRGRH[group, head, group, head] = self.inverse_RH[head]
        self.sums = self.derived.matrix(sums_NI)
        return scale_RH

    def __call__(self, space: Workspace) -> None:
        space.square()
        self.sums.write(space.squares, space.factors)
        space.factors.tensor.rsqrt_()
        space.heads_TNH.mul_(space.factors_TN1)


class MLP:
    """SwiGLU after a norm: x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, norm, gate, up, down, derived: Derived) -> None:
        """
        Args:
            norm: an RMSNorm module.
            gate, up, down: Linear modules.
        """
        self.modules, self.derived = (norm, gate, up, down), derived

    def reload(self) -> None:
        norm, gate, up, down = self.modules
        self.inward = self.derived.matrix(scaled(torch.cat([gate.weight, up.weight]), scale(norm)))
        self.outward = self.derived.matrix(down.weight)

    def __call__(self, space: Workspace) -> None:
        space.normalize()
        self.inward.write(space.unit, space.inward)
        F.silu(space.gate.tensor, inplace=True).mul_(space.up_TF)
        self.outward.add(space.gate, space)


class Mixture:
    """A mixture of SwiGLU experts after a norm: x += sum over the token's experts of weight * expert(norm(x))."""

    def __init__(self, norm, moe, derived: Derived) -> None:
        """
        Args:
            norm: an RMSNorm module.
            moe: torchtitan's MoE module.
        """
        self.modules, self.derived = (norm, moe), derived
        self.per_token, self.normed = moe.router.top_k, moe.router.route_norm
        self.count = moe.router.num_experts
        self._expert_E = torch.arange(self.count, device=norm.weight.device)
        self.expert_TK: torch.Tensor | None = None  # int64, of the last pass

    def reload(self) -> None:
        (norm, moe), experts = self.modules, self.modules[1].routed_experts.inner_experts
        # in float32, like torchtitan's router on a GPU
        self.router = self.derived.matrix(moe.router.gate.weight.float() * scale(norm))
        self.inward_EDF = self.derived.keep(
            scaled(torch.cat([experts.w1_EFD, experts.w3_EFD], 1), scale(norm))
        ).transpose(1, 2)
        self.outward_EFD = experts.w2_EDF.transpose(1, 2)

    def __call__(self, space: Workspace) -> None:
        space.normalize()
        x_TD, normed_TD = space.x.tensor, space.unit.tensor
        score_TK, expert_TK = self.router(normed_TD.float()).softmax(-1).topk(self.per_token, sorted=False)
        self.expert_TK = expert_TK
        if self.normed:
            score_TK = score_TK / score_TK.sum(-1, keepdim=True)
        expert_N, order_N = expert_TK.flatten().sort(stable=True)
        end_E = torch.searchsorted(expert_N, self._expert_E, right=True, out_int32=True)
        # One grouped product was faster than a loop over experts or gathering the matrices of each token's experts.
        gate_NF, up_NF = torch._grouped_mm(normed_TD[order_N // self.per_token], self.inward_EDF, offs=end_E).chunk(
            2, -1
        )
        out_ND = torch._grouped_mm(F.silu(gate_NF).mul_(up_NF), self.outward_EFD, offs=end_E)
        out_TKD = torch.empty_like(out_ND).index_copy_(0, order_N, out_ND).view(*expert_TK.shape, -1)
        # slower in place, because x is strided
        x_TD.copy_(torch.baddbmm(x_TD.unsqueeze(1), score_TK.to(x_TD.dtype).unsqueeze(1), out_TKD).squeeze(1))


class DecodeLayer:
    """A decoder layer over a KV cache: x += attention(norm(x)), then x += mlp(norm(x))."""

    wqkv: Matrix
    wo: Matrix
    bias: torch.Tensor | None  # of the heads, float32 [W]

    def __init__(
        self,
        index: int,
        cache: Cache,
        derived: Derived,
        mlp: MLP | Mixture,
        head_norm: HeadNorm | None = None,
    ) -> None:
        """
        Args:
            index: the layer's index in the cache.
            derived: keeps its matrices.
        """
        self.index, self.cache, self.derived = index, cache, derived
        self.mlp, self.head_norm = mlp, head_norm

    def load(
        self,
        weight_GRHI: torch.Tensor,
        scale_I: torch.Tensor,
        wo: torch.Tensor,
        halves: bool,
        bias_GRH: torch.Tensor | None = None,
    ) -> None:
        """Derive the layer's matrices from parameters.

        Args:
            weight_GRHI: weights of each group's queries, key and value.
            scale_I: `scale` of the norm before them.
            halves: whether RoPE pairs the two halves of a head; otherwise it pairs neighbors.
            bias_GRH: what is added to the products with the weights; only without head norms.
        """
        Q, H = weight_GRHI.shape[1] - 2, weight_GRHI.shape[2]

        def paired(t_GRH: torch.Tensor) -> torch.Tensor:
            return torch.cat([interleaved(t_GRH[:, : Q + 1], 2), t_GRH[:, Q + 1 :]], 1) if halves else t_GRH

        weight_GRHI, self.bias = paired(weight_GRHI), None
        scale_GRHI = scale_I.repeat(*weight_GRHI.shape[:3], 1)
        if self.head_norm is None:
            scale_GRHI[:, :Q] *= H**-0.5  # the scale of attention
        else:
            scale_GRHI *= self.head_norm.reload().unsqueeze(-1)
        self.wqkv = self.derived.matrix(scaled(weight_GRHI, scale_GRHI).flatten(0, 2))
        self.wo = self.derived.matrix(wo)
        if bias_GRH is not None:
            bias_GRH = paired(bias_GRH.detach().float()).clone()
            bias_GRH[:, :Q] *= H**-0.5
            self.bias = self.derived.keep(bias_GRH.flatten())
        self.mlp.reload()

    def project(self, space: Workspace) -> None:
        """Compute the heads from the layer's input, and widen them to float32."""
        if self.head_norm is None:
            space.normalize()
            self.wqkv.write(space.unit, space.heads)
            space.widen(self.bias)
        else:
            self.wqkv.write(space.x, space.heads)
            space.widen()
            self.head_norm(space)

    def write(self, space: Workspace, access: Access, rotation: torch.Tensor) -> None:
        """Write keys and values to the cache. In a draft's only layer, later positions need nothing more."""
        self.project(space)
        space.rotate(rotation)
        space.narrow()
        self.cache.write(self.index, access, space)

    def __call__(self, space: Workspace, access: Access, rotation: torch.Tensor) -> None:
        """Write keys and values to the cache, then replace x by the layer's output."""
        self.write(space, access, rotation)
        self.cache.attend(self.index, access, space)
        self.wo.add(space.attended, space)
        self.mlp(space)


class PolicyLayer(DecodeLayer):
    """A block of the policy, or of its multi-token-prediction module."""

    def __init__(self, block, shape: LayerShape, index: int, cache: Cache, derived: Derived) -> None:
        """
        Args:
            block: torchtitan's TransformerBlock.
        """
        self.block, self.shape, attention = block, shape, block.attention
        # Llama 3 and Qwen2 have no head norms.
        head_norm = attention.q_norm and HeadNorm(attention.q_norm, attention.k_norm, shape, derived)
        if getattr(block, "moe_enabled", False):
            mlp = Mixture(block.ffn_norm, block.moe, derived)
        else:
            dense = block.feed_forward
            mlp = MLP(block.ffn_norm, dense.w1, dense.w3, dense.w2, derived)
        super().__init__(index, cache, derived, mlp, head_norm)

    def reload(self) -> None:
        """Derive all matrices from the parameters again."""
        attention, (D, G, Q, *_) = self.block.attention, self.shape
        wqkv, halves = attention.qkv_linear.wqkv, not attention.rope.cache.is_complex()
        bias_GRH = None if wqkv.bias is None else wqkv.bias.view(G, Q + 2, -1)
        weight_GRHD = wqkv.weight.view(G, Q + 2, -1, D)
        self.load(weight_GRHD, scale(self.block.attention_norm), attention.wo.weight, halves, bias_GRH)


def layer_shape(shape: PolicyShape | DraftShape, head_norms: bool) -> LayerShape:
    """Return the layer shape of a policy or of a draft."""
    hidden_dim = 0 if getattr(shape, "experts", None) is not None else shape.hidden_dim
    return LayerShape(
        shape.dim,
        shape.n_kv_heads,
        shape.n_heads // shape.n_kv_heads,
        shape.head_dim,
        hidden_dim,
        shape.norm_eps,
        head_norms,
    )
