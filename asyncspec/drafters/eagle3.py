"""EAGLE-3 as a drafter: `models.eagle3.Eagle3` over a KV cache, in few operations; see engine/decode.py."""

from __future__ import annotations

import torch

from asyncspec.drafters.features import FeatureDrafter
from asyncspec.drafters.numba_draft import Weights
from asyncspec.engine.decode import MLP, Block, RoPE, interleaved, layer_shape, scale, scaled
from asyncspec.engine.matrix import Matrix
from asyncspec.engine.memory import Arena
from asyncspec.engine.numpy_cache import make_cache
from asyncspec.engine.workspace import Buffer, Workspace, Workspaces
from asyncspec.models.eagle3 import Eagle3
from asyncspec.models.policy import cast, dtype_of
from asyncspec.speculation.drafter import Slots


class DecodeEagle3(Block):
    def __init__(self, draft: Eagle3, slots: Slots) -> None:
        self.draft, self.layer_shape, self.arena = draft, layer_shape(draft.shape, head_norms=False), Arena()
        layer, dtype = draft.midlayer, draft.fc.weight.dtype
        super().__init__(0, make_cache(1, *slots.token_SP.shape, self.layer_shape, slots.device, dtype))
        self.spaces = Workspaces(self.layer_shape, dtype, slots.device, inputs=2)
        self.rope = RoPE(draft.shape.angles(slots.positions).to(slots.device), self.layer_shape.queries)
        self.mlp = MLP(
            layer.post_attention_layernorm, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj, self.arena
        )

    def reload(self) -> None:
        """Derive from the parameters anew what is derived from them."""
        self.arena.clear()
        layer, (_, G, _, H, *_) = self.draft.midlayer, self.layer_shape
        a = layer.self_attn
        q, k, v = (w.weight.view(G, -1, H, w.weight.shape[-1]) for w in (a.q_proj, a.k_proj, a.v_proj))
        norms = torch.cat([scale(layer.input_layernorm), scale(layer.hidden_norm)])
        queries, others = (
            scaled(interleaved(q, 2), norms * H**-0.5),
            scaled(torch.cat([interleaved(k, 2), v], 1), norms),
        )
        self.wqkv = Matrix(torch.cat([queries, others], 1).flatten(0, 2), self.arena)
        self.wo, self.fc = Matrix(a.o_proj.weight, self.arena), Matrix(self.draft.fc.weight, self.arena)
        self.lm_head = Matrix(scaled(self.draft.lm_head.weight, scale(self.draft.norm)), self.arena)
        self.mlp.reload()

    def fuse(self, features_TE: torch.Tensor, space: Workspace) -> None:
        self.fc.write(Buffer.of(features_TE), space.x)

    def logits(self, space: Workspace) -> torch.Tensor:
        space.normalize()
        logits_BU = self.lm_head(space.unit)
        if self.draft.d2t_U is None:
            return logits_BU
        logits_BV = logits_BU.new_full((len(logits_BU), self.draft.shape.vocab_size), float("-inf"))
        return logits_BV.index_copy_(1, self.draft.d2t_U, logits_BU)

    def to_numpy(self, embedding_VD: torch.Tensor) -> Weights:
        some = {} if self.draft.d2t_U is None else {"token_U": self.draft.d2t_U.numpy()}
        return Weights(
            embedding_VD.detach().numpy(),
            self.wqkv.to_numpy(),
            self.wo.to_numpy(),
            self.mlp.inward.to_numpy(),
            self.mlp.outward.to_numpy(),
            self.lm_head.to_numpy(),
            self.rope.to_numpy(),
            fuse_ED=self.fc.to_numpy(),
            **some,
        )

    def project(self, space: Workspace) -> None:
        space.normalize_inputs()
        self.wqkv.write(space.units, space.heads)
        space.widen()


def eagle3_drafter(draft: Eagle3, model, slots: Slots, settings) -> FeatureDrafter:
    draft = cast(draft.to(slots.device), dtype_of(model)).requires_grad_(False)
    return FeatureDrafter(draft, DecodeEagle3(draft, slots), model.tok_embeddings.weight, slots, settings)
