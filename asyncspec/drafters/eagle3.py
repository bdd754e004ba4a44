"""EAGLE-3 in the engine: the forward pass of `models.eagle3.Eagle3` over a KV cache, in few operations.

See engine/layers.py.
"""

from __future__ import annotations

import torch

from asyncspec.drafters.features import DecodeFeatures
from asyncspec.engine.backend import Target
from asyncspec.engine.layers import MLP, DecodeLayer, RoPE, layer_shape, scale, scaled
from asyncspec.engine.workspace import Buffer, Workspace
from asyncspec.models.eagle3 import Eagle3
from asyncspec.models.rope import rotations


class Eagle3Layer(DecodeLayer):
    """A decoder layer whose heads come from both inputs, each normalized. Its residual stream is x alone."""

    def project(self, space: Workspace) -> None:
        self.wqkv.write(space.units, space.heads)
        space.widen()


class DecodeEagle3(DecodeFeatures):
    def __init__(self, draft: Eagle3, target: Target) -> None:
        shape, own = layer_shape(draft.shape, head_norms=False), draft.shape
        turns_PH = rotations(own.head_dim, target.slots.positions, own.rope_theta, own.rope_scaling)
        rope = RoPE(turns_PH.to(target.backend.device), shape.queries)
        super().__init__(draft, shape, rope, target)
        layer = draft.midlayer
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        mlp = MLP(norm, mlp.gate_proj, mlp.up_proj, mlp.down_proj, self.derived)
        self.layer = Eagle3Layer(0, self.cache, self.derived, mlp)

    def reload(self) -> None:
        self.derived.clear()
        layer, (_, G, _, H, *_) = self.draft.midlayer, self.shape
        a = layer.self_attn
        heads = [w.weight.view(G, -1, H, w.weight.shape[-1]) for w in (a.q_proj, a.k_proj, a.v_proj)]
        norms_I = torch.cat([scale(layer.input_layernorm), scale(layer.hidden_norm)])
        self.layer.load(torch.cat(heads, 1), norms_I, a.o_proj.weight, halves=True)
        self.fc = self.derived.matrix(self.draft.fc.weight)
        self.lm_head = self.derived.matrix(scaled(self.draft.lm_head.weight, scale(self.draft.norm)))

    def fuse(self, features_TE: torch.Tensor, space: Workspace) -> None:
        self.fc.write(Buffer.of(features_TE), space.x)

    def logits(self, space: Workspace) -> torch.Tensor:
        space.normalize()
        logits_BU = self.lm_head(space.unit.tensor)
        if self.draft.d2t_U is None:
            return logits_BU
        logits_BV = logits_BU.new_full((len(logits_BU), self.draft.shape.vocab_size), float("-inf"))
        return logits_BV.index_copy_(1, self.draft.d2t_U, logits_BU)

    def own_weights(self) -> dict:
        tokens = {} if self.draft.d2t_U is None else {"token_U": self.draft.d2t_U.numpy()}
        return {"fuse_ED": self.fc.to_numpy(), **tokens}
