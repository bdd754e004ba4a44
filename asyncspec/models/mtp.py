"""The multi-token-prediction module of a policy: one more block, applied to the trunk's output again and again.

Its input at position t is the trunk's output at position t (after the final norm) and the embedding of token t+1; it
predicts token t+2 with the policy's own head. To predict further tokens, it takes its own output in place of the
trunk's (DeepSeek-V3, arXiv 2412.19437, section 2.2; one module used recurrently, as in Qwen3-Next). The embedding and
the head are the policy's and not part of the module.

Tensors are named `mtp.*` as in Qwen3-Next's checkpoints; the file may also hold the policy's tensors.

Shape suffixes: B batch, L positions, D model dimension, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from asyncspec.models import CheckpointError
from asyncspec.models.contents import MTP_PREFIX, check_mtp
from asyncspec.models.hf_files import read_tensors, write_checkpoint
from asyncspec.models.policy import PolicyShape, adapter, build
from asyncspec.models.shape import MTP_ARCHITECTURES

_RENAMED = {"pre_fc_norm_hidden": "hidden_norm", "pre_fc_norm_embedding": "embed_norm", "fc": "fc", "norm": "norm"}


class MTP(nn.Module):
    """Trained and decoded through the same calls as `Eagle3`: fuse, rope, forward."""

    def __init__(self, shape: PolicyShape, lm_head: torch.Tensor, positions: int = 0) -> None:
        """
        Args:
            shape: shape of the policy.
            lm_head: the policy's head, [V, D]; used without a copy, never trained here.
            positions: length of the RoPE table; 0: the shape's.
        """
        super().__init__()
        self.shape, self._lm_head = shape, lm_head.detach()
        self.aux_layers = (shape.n_layers,)  # the trunk's output
        self.hidden_norm, self.embed_norm, self.norm = (nn.RMSNorm(shape.dim, eps=shape.norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * shape.dim, shape.dim, bias=False)
        trunk = build(replace(shape, n_layers=1, vocab_size=8, tied=False), positions)
        trunk.init_states()
        self._config, self.block = trunk.config, trunk.layers["0"]

    def fuse(self, features_BLE: torch.Tensor) -> torch.Tensor:
        return features_BLE

    def rope(self, positions_BL: torch.Tensor) -> torch.Tensor:
        """Return the positions themselves, which is what `forward` takes."""
        return positions_BL

    def forward(self, hidden_BLD, embeds_BLD, positions_BL, attend):
        """Run one pass.

        Args:
            hidden_BLD: the trunk's output, or the module's own output at the position before.
            embeds_BLD: the policy's embedding of the following token.
            attend: callable(q_BLNH, k_BLNH, v_BLNH) -> out_BLNH; it holds the keys and values of earlier positions.

        Returns:
            out_BLD to feed back, also the input of `logits`.
        """
        x_BLD = self.fc(torch.cat([self.embed_norm(embeds_BLD), self.hidden_norm(hidden_BLD)], -1))
        inner = self.block.attention.inner_attention
        inner.forward = lambda q, k, v, **_: attend(q, k, v)
        try:
            out_BLD = self.norm(self.block(x_BLD, None, positions_BL))
        finally:
            del inner.forward
        return out_BLD

    def logits(self, out_TD: torch.Tensor) -> torch.Tensor:
        """Return logits of the token after the following one, [T, V], from outputs."""
        return F.linear(out_TD, self._lm_head)

    def state_hf(self) -> dict[str, torch.Tensor]:
        """Return all tensors under their `mtp.*` names."""
        block = {f"layers.0.{k}": v.detach() for k, v in self.block.state_dict().items()}
        state = {k.replace("model.", "mtp.", 1): v for k, v in adapter(self._config).to_hf(block).items()}
        return state | {
            f"mtp.{theirs}.weight": getattr(self, ours).weight.detach() for theirs, ours in _RENAMED.items()
        }

    def load_hf(self, tensors: dict[str, torch.Tensor], where: str) -> None:
        """Load tensors by their `mtp.*` names.

        Raises:
            CheckpointError: a tensor holds values that are not finite.
        """
        mine = {k: v.float() for k, v in tensors.items() if k.startswith(MTP_PREFIX)}
        for name, tensor in mine.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{where}: tensor {name} holds values that are not finite")
        block = adapter(self._config).from_hf(
            {k.replace("mtp.", "model.", 1): v for k, v in mine.items() if k.startswith("mtp.layers.")}
        )
        self.block.load_state_dict({k.removeprefix("layers.0."): v for k, v in block.items()})
        with torch.no_grad():
            for theirs, ours in _RENAMED.items():
                getattr(self, ours).weight.copy_(mine[f"mtp.{theirs}.weight"])


def load(directory: Path, policy: PolicyShape, lm_head: torch.Tensor, positions: int = 0) -> MTP:
    """Read the `mtp.*` tensors of a checkpoint and check that they fit the policy.

    Args:
        positions: length of the RoPE table; 0: the shape's.

    Raises:
        CheckpointError: the files are missing or broken, or they were made for another policy's shape.
    """
    check_mtp(directory, policy)
    module = MTP(policy, lm_head, positions)
    module.load_hf(read_tensors(directory), str(directory))
    return module


def save(module: MTP, directory: Path) -> None:
    """Write the module alone: config.json and its `mtp.*` tensors."""
    write_checkpoint(
        directory,
        module.shape.to_hf()
        | {"architectures": [MTP_ARCHITECTURES[module.shape.model_type]], "num_nextn_predict_layers": 1},
        module.state_hf(),
    )
