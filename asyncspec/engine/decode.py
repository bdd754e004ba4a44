"""The policy's forward pass as the engine runs it: torchtitan's parameters, few operations, a slot KV cache.

On a CPU, and on a GPU with few sequences, an engine step costs what launching its operations costs. So the engine does
not call the model's modules: it reads their parameters and does in 20 operations a layer what they do in 70, in memory
of which all views are made once (workspace.py). Norms' weights and the scale of attention go into matrices, matrices
that read the same input are joined, the norms of a token and of all its heads are one product (`HeadNorm`), and the
halves of each query and key that Qwen3's RoPE rotates are interleaved, as Llama 3's are already, so that rotating is
one complex multiplication. `reload` derives all that anew when parameters change; tests/test_engine.py holds both
forward passes to the same logits.

Shape suffixes: those of workspace.py, and P cache positions, O outputs of a matrix; in `Mixture` E experts, K of a
token, N = T * K sorted by expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
import torch.nn.functional as F

from asyncspec.engine.graphs import TOKENS, Graphs
from asyncspec.engine.kv_cache import KVCache, Place, Spans
from asyncspec.engine.matrix import Matrix
from asyncspec.engine.memory import Arena
from asyncspec.engine.numpy_cache import NumpyKVCache, NumpyPlace, Packed, make_cache
from asyncspec.engine.workspace import PAD, LayerShape, Workspace, Workspaces
from asyncspec.models.eagle3 import DraftShape
from asyncspec.models.policy import PolicyShape, dtype_of

LEAST_SCALE = 1e-9  # of a norm of heads, that goes into the weight before it


def scale(norm) -> torch.Tensor:
    """What `Workspace.normalize` leaves out of an RMSNorm module; float32."""
    return norm.weight.float() * norm.weight.shape[-1] ** 0.5


def scaled(weight: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A matrix with what `scale` gives in it, rounded once to the matrix's dtype."""
    return (weight.float() * by).to(weight.dtype)


class RMSNorm:
    """A whole RMSNorm."""

    def __init__(self, norm, arena: Arena) -> None:
        self.norm, self.arena = norm, arena

    def reload(self) -> None:
        self.weight = self.arena.keep(scale(self.norm))

    def __call__(self, space: Workspace) -> torch.Tensor:
        """Of x, [T, D]."""
        space.normalize()
        unit_TD = space.unit.tensor
        return (unit_TD * self.weight).to(unit_TD.dtype)


def interleaved(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """The two halves of a head along `dim`, interleaved: neighbours are then real and imaginary part of what RoPE
    rotates.
    """
    first, second = weight.chunk(2, dim)
    return torch.stack([first, second], dim + 1).flatten(dim, dim + 1)


class RoPE:
    """Rotary embedding of joined heads (`DecodeLayer.wqkv`). A pass gathers its rotations once for all layers."""

    def __init__(self, angles_PH: torch.Tensor, queries: int) -> None:
        """
        Args:
            angles_PH: radians, for half of a head's dimensions.
            queries: heads that share a key-value head.
        """
        turned_PH = torch.polar(torch.ones_like(angles_PH), angles_PH)
        # Values are turned by nothing: a product over whole rows takes a third of the time of one that leaves them out.
        self._rotation_PR, self.half = (
            torch.cat([*[turned_PH] * (queries + 1), torch.ones_like(turned_PH)], 1),
            angles_PH.shape[1],
        )

    @classmethod
    def of(cls, model) -> RoPE:
        """Read a policy's table: rotations (Llama 3), or cosines, then sines, both halves alike (Qwen3)."""
        attention = next(iter(model.layers.values())).attention
        table, queries = attention.rope.cache, attention.n_heads // attention.n_kv_heads
        if table.is_complex():
            return cls(table.angle(), queries)
        cos_PH, sin_PH = table.chunk(2, dim=-1)
        half = cos_PH.shape[-1] // 2
        return cls(torch.atan2(sin_PH[:, :half], cos_PH[:, :half]), queries)

    def to_numpy(self) -> np.ndarray:
        """Cosine and sine of each position and pair of a head, float32 [P, H / 2, 2]."""
        return torch.view_as_real(self._rotation_PR[:, : self.half]).numpy()

    def at(self, position_BL: torch.Tensor) -> torch.Tensor:
        """[T, 1, R * H / 2], complex: those of a group's heads."""
        return self._rotation_PR.index_select(0, position_BL.flatten()).unsqueeze(1)


class HeadNorm:
    """The RMSNorm of a token and, behind it, those of its queries and keys, all on their products: with x the token's
    residual stream, q = x @ weight.T of a query or key, v of a value, and s the norms' own scales, which that weight
    has in it already,

        q / sqrt(sum(q^2 / s^2) + H * eps * (sum(x^2) + D * eps))      v / sqrt(sum(x^2) + D * eps)

    The sums under all roots are one product of the squares of x, its constant and the heads with a matrix.
    """

    def __init__(self, q_norm, k_norm, shape: LayerShape, arena: Arena) -> None:
        """Takes modules."""
        self.modules, self.shape, self.arena = (q_norm, k_norm), shape, arena

    def reload(self) -> torch.Tensor:
        """Returns the scales that are to go into the weight, float32 [R, H]."""
        D, G, Q, H, *_ = self.shape
        queries_H, key_H = (interleaved(scale(norm), 0) for norm in self.modules)
        queries_H = queries_H * H**-0.5  # of attention
        scale_RH = torch.stack([*[queries_H] * Q, key_H, torch.ones_like(key_H)])
        # What a weight of nothing has scaled cannot be scaled back; so little cannot be told from nothing.
        scale_RH = torch.where(scale_RH.abs() < LEAST_SCALE, LEAST_SCALE, scale_RH)
        self.inverse_RH = self.arena.keep(scale_RH[:-1] ** -2)
        sums_NI = scale_RH.new_zeros(G * (Q + 2), D + PAD + G * (Q + 2) * H)
        sums_GRI, sums_GRGRH = sums_NI.view(G, Q + 2, -1), sums_NI[:, D + PAD :].view(G, Q + 2, G, Q + 2, H)
        sums_GRI[:, :-1, : D + 1], sums_GRI[:, -1, : D + 1] = H * self.modules[0].eps, 1.0
        for group in range(G):
            for head in range(Q + 1):
                sums_GRGRH[group, head, group, head] = self.inverse_RH[head]
        self.sums = Matrix(sums_NI, self.arena)
        return scale_RH

    def __call__(self, space: Workspace) -> None:
        space.square()
        self.sums.write(space.squares, space.factors)
        space.factors.tensor.rsqrt_()
        space.heads_TNH.mul_(space.factors_TN1)


class MLP:
    """SwiGLU behind a norm: x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, norm, gate, up, down, arena: Arena) -> None:
        """Takes modules: an RMSNorm and three Linears."""
        self.modules, self.arena = (norm, gate, up, down), arena

    def reload(self) -> None:
        norm, gate, up, down = self.modules
        self.inward = Matrix(scaled(torch.cat([gate.weight, up.weight]), scale(norm)), self.arena)
        self.outward = Matrix(down.weight, self.arena)

    def __call__(self, space: Workspace) -> None:
        space.normalize()
        self.inward.write(space.unit, space.inward)
        F.silu(space.gate.tensor, inplace=True).mul_(space.up_TF)
        self.outward.add(space.gate, space)


class Mixture:
    """A mixture of SwiGLU experts behind a norm: x += sum over the token's experts of weight * expert(norm(x))."""

    def __init__(self, norm, moe, arena: Arena) -> None:
        """Takes modules: an RMSNorm and torchtitan's MoE."""
        self.modules, self.arena = (norm, moe), arena
        self.per_token, self.normed = moe.router.top_k, moe.router.route_norm
        self._expert_E = torch.arange(moe.router.num_experts, device=norm.weight.device)

    def reload(self) -> None:
        (norm, moe), experts = self.modules, self.modules[1].routed_experts.inner_experts
        # in float32, as torchtitan's on a GPU
        self.router = Matrix(moe.router.gate.weight.float() * scale(norm), self.arena)
        self.inward_EDF = self.arena.keep(
            scaled(torch.cat([experts.w1_EFD, experts.w3_EFD], 1), scale(norm))
        ).transpose(1, 2)
        self.outward_EFD = experts.w2_EDF.transpose(1, 2)

    def __call__(self, space: Workspace) -> None:
        space.normalize()
        x_TD, normed_TD = space.x.tensor, space.unit.tensor
        score_TK, expert_TK = self.router(normed_TD.float()).softmax(-1).topk(self.per_token, sorted=False)
        if self.normed:
            score_TK = score_TK / score_TK.sum(-1, keepdim=True)
        expert_N, order_N = expert_TK.flatten().sort(stable=True)
        end_E = torch.searchsorted(expert_N, self._expert_E, right=True, out_int32=True)
        # One grouped product was faster than a loop over experts, and than gathering the matrices of each token's.
        gate_NF, up_NF = torch._grouped_mm(normed_TD[order_N // self.per_token], self.inward_EDF, offs=end_E).chunk(
            2, -1
        )
        out_ND = torch._grouped_mm(F.silu(gate_NF).mul_(up_NF), self.outward_EFD, offs=end_E)
        out_TKD = torch.empty_like(out_ND).index_copy_(0, order_N, out_ND).view(*expert_TK.shape, -1)
        # in place it is slower: x is strided
        x_TD.copy_(torch.baddbmm(x_TD.unsqueeze(1), score_TK.to(x_TD.dtype).unsqueeze(1), out_TKD).squeeze(1))


class DecodeModel:
    """A policy over its own KV cache."""

    def __init__(self, model, shape: PolicyShape, slots: int, positions: int, device) -> None:
        """
        Args:
            model: torchtitan's, see `models.policy.build`; computed in its parameters' dtype, float32 or bfloat16.
                After they change call `reload`, and before the first pass.
            slots, positions: rows and length of the cache.
        """
        layers = layer_shape(shape, next(iter(model.layers.values())).attention.q_norm is not None)
        self.cache = cache = make_cache(shape.n_layers, slots, positions, layers, device, dtype_of(model))
        self.rope = RoPE.of(model)
        self.embedding, self._head = model.tok_embeddings.weight, model.lm_head
        self.arena = Arena()
        self.spaces = Workspaces(layers, dtype_of(model), device)
        self.norm = RMSNorm(model.norm, self.arena)
        self.layers = [
            DecodeLayer(layer, layers, index, cache, self.arena) for index, layer in enumerate(model.layers.values())
        ]
        self.graphs: Graphs | None = None
        # torch's grouped products wait for the host in float32.
        self._captures, self._rows = shape.experts is None or dtype_of(model) is torch.bfloat16, slots

    def reload(self) -> None:
        """Derive from the parameters anew what is derived from them."""
        self.arena.clear()
        self.norm.reload()
        self.lm_head = Matrix(self._head.weight, self.arena)
        for layer in self.layers:
            layer.reload()

    def launch_by(self, graphs: Graphs | None) -> None:
        """Launch passes over few tokens by these from now on, if they can be captured; None: kernel by kernel."""
        self.graphs = graphs if self._captures else None

    def attends_at_once(self, tokens: int) -> bool:
        """Whether a pass over so many tokens attends over all rows as one group, however they are parted."""
        return self.graphs is not None and tokens <= TOKENS

    @property
    def packs(self) -> bool:
        """Whether a pass may be over some of the tokens of a rectangle."""
        return isinstance(self.cache, NumpyKVCache)

    def hidden_states(
        self, first_row: int, token_BL, position_BL, spans: Spans, aux_layers=(), packed: Packed | None = None
    ):
        """Read tokens into the cache at rows from `first_row`.

        Args:
            position_BL: int64, where each token stands in its row.
            spans: host-side bounds of the positions, see `KVCache.at`.
            packed: only those tokens, T of them, if it `packs`.

        Returns:
            hidden_BLD after the final norm, and the inputs of `aux_layers`, each [B, L, D]; or [T, 1, D].
        """
        if packed is not None:
            hidden_BLD, *kept_BLD = self._pass(token_BL, position_BL, spans, aux_layers, first_row, packed)
        elif self.graphs is None:
            hidden_BLD, *kept_BLD = self._pass(token_BL, position_BL, spans, aux_layers, first_row)
        else:
            spare = self._rows - first_row if first_row else None
            hidden_BLD, *kept_BLD = self.graphs(
                self._pass, (token_BL, position_BL), spans, aux_layers, first_row, most=spare
            )
        return hidden_BLD, kept_BLD

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] of [..., D], as `hidden_states` gives them."""
        return self.lm_head(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)

    def _pass(
        self,
        token_BL,
        position_BL,
        spans: Spans,
        aux_layers: tuple[int, ...],
        first_row: int = 0,
        packed: Packed | None = None,
    ) -> list[torch.Tensor]:
        if packed is None:
            where = self.cache.at(first_row, position_BL, spans)
        else:
            where, at_T1 = (
                self.cache.at(first_row, position_BL, spans, packed),
                torch.from_numpy(packed.at_T).unsqueeze(1),
            )
            token_BL, position_BL = token_BL.flatten()[at_T1], position_BL.flatten()[at_T1]
        (B, L), rotation, kept = token_BL.shape, self.rope.at(position_BL), []
        space = self.spaces(B, L)
        torch.index_select(self.embedding, 0, token_BL.flatten(), out=space.x.tensor)
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                kept.append(space.x.tensor.clone())
            layer(space, where, rotation)
        hidden_TD = self.norm(space)
        if len(self.layers) in aux_layers:
            kept.append(hidden_TD)
        return [kept_TD.view(B, L, -1) for kept_TD in (hidden_TD, *kept)]


class Block(ABC):
    """What a layer of the policy and that of a draft have in common: all but how heads come to be. `wo` and `mlp` are
    theirs to give.
    """

    wo: Matrix
    mlp: MLP | Mixture

    def __init__(self, index: int, cache: KVCache | NumpyKVCache) -> None:
        """
        Args:
            index: the layer's number in the cache.
        """
        self.index, self.cache = index, cache

    @abstractmethod
    def project(self, space: Workspace) -> None:
        """Heads, from what comes into the layer; widened."""

    def read(self, space: Workspace, where: Place | NumpyPlace, rotation: torch.Tensor) -> None:
        """Keys and values go to the cache: all that later positions ask of a draft's layer."""
        self.project(space)
        space.rotate(rotation)
        space.narrow()
        self.cache.write(self.index, where, space)

    def __call__(self, space: Workspace, where: Place | NumpyPlace, rotation: torch.Tensor) -> None:
        """Besides, x becomes what comes out of the layer."""
        self.read(space, where, rotation)
        self.cache.attend(self.index, where, space)
        self.wo.add(space.attended, space)
        self.mlp(space)


class DecodeLayer(Block):
    """One block of the policy."""

    def __init__(self, layer, shape: LayerShape, index: int, cache: KVCache | NumpyKVCache, arena: Arena) -> None:
        """
        Args:
            layer: torchtitan's TransformerBlock.
            index: the layer's number in the cache.
            arena: where its matrices go.
        """
        super().__init__(index, cache)
        self.layer, self.shape, self.arena = layer, shape, arena
        attention = layer.attention
        # Llama 3 has none
        self.head_norm = attention.q_norm and HeadNorm(attention.q_norm, attention.k_norm, shape, arena)
        if getattr(layer, "moe_enabled", False):
            self.mlp = Mixture(layer.ffn_norm, layer.moe, arena)
        else:
            mlp = layer.feed_forward
            self.mlp = MLP(layer.ffn_norm, mlp.w1, mlp.w3, mlp.w2, arena)

    def reload(self) -> None:
        """Derive from the parameters anew what is derived from them."""
        attention, (D, G, Q, *_) = self.layer.attention, self.shape
        weight_GRHD = attention.qkv_linear.wqkv.weight.view(G, Q + 2, -1, D)
        if not attention.rope.cache.is_complex():
            weight_GRHD = torch.cat([interleaved(weight_GRHD[:, : Q + 1], 2), weight_GRHD[:, Q + 1 :]], 1)
        scale_GRHD = scale(self.layer.attention_norm).repeat(*weight_GRHD.shape[:3], 1)
        if self.head_norm is not None:
            scale_GRHD *= self.head_norm.reload().unsqueeze(-1)
        else:
            scale_GRHD[:, :Q] *= weight_GRHD.shape[2] ** -0.5
        self.wqkv = Matrix(scaled(weight_GRHD, scale_GRHD).flatten(0, 2), self.arena)
        self.wo = Matrix(attention.wo.weight, self.arena)
        self.mlp.reload()

    def project(self, space: Workspace) -> None:
        if self.head_norm is None:
            space.normalize()
            self.wqkv.write(space.unit, space.heads)
            space.widen()
        else:
            self.wqkv.write(space.x, space.heads)
            space.widen()
            self.head_norm(space)


def layer_shape(shape: PolicyShape | DraftShape, head_norms: bool) -> LayerShape:
    """Of a policy's layers, or of a draft's."""
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
