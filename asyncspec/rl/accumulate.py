"""One policy update from any number of groups, added one at a time, in one rank or in several."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from asyncspec.config import OptimizerConfig, RLConfig
from asyncspec.ledger import checkpoint
from asyncspec.models.parallel import Ranks
from asyncspec.rl.batch import padded, passes, response_logprobs
from asyncspec.rl.grpo import REPORTED, group_advantages, policy_loss
from asyncspec.wire import messages as m


def decayed(model, weight_decay: float) -> list[dict]:
    """Return an optimizer's groups of a policy's parameters: the matrices decay, the norms and the embedding do not.

    A tied head is the embedding.
    """
    kept = {id(model.tok_embeddings.weight)}
    matrices, others = [], []
    for parameter in model.parameters():
        (matrices if parameter.ndim > 1 and id(parameter) not in kept else others).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]


class GradientAccumulator:
    """Accumulates the gradient of sum(token losses) / number of tokens over all groups added. The division of groups
    into calls and ranks does not matter.
    """

    def __init__(
        self,
        model,
        optimizer_config: OptimizerConfig,
        rl: RLConfig,
        temperature: float,
        ranks: Ranks | None = None,
        tokens_per_pass: int = 1 << 30,
        keep_first: bool = False,
    ) -> None:
        """
        Args:
            ranks: the ranks that hold the model; None: this process alone, in float32.
            tokens_per_pass: a group with more tokens, padded, takes several passes.
            keep_first: whether `add` returns its first pass, whose logits are then kept during the others.
        """
        self.tokens_per_pass = tokens_per_pass
        self.model, self.rl, self.temperature, self.cfg, self.ranks = model, rl, temperature, optimizer_config, ranks
        o = optimizer_config
        self.optimizer = torch.optim.AdamW(
            decayed(model, o.weight_decay), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=0.0
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / max(1, o.warmup_steps))
        )
        self.device = next(model.parameters()).device
        self.keep_first, self._hidden = keep_first, None
        if keep_first:
            model.lm_head.register_forward_pre_hook(self._keep_hidden)
        self.clear()

    def state(self) -> dict:
        """Return everything that the next step depends on, for `restore`."""
        return {**checkpoint.learned(self.model, self.optimizer), "updates": self.schedule.last_epoch}

    def restore(self, state: dict) -> None:
        """Restore from a `state` that `checkpoint.load` has filled. The learning rate is the configuration's, at the
        same point of its schedule.
        """
        self.schedule.last_epoch = updates = state["updates"]
        self.schedule._last_lr = [
            base * factor(updates) for base, factor in zip(self.schedule.base_lrs, self.schedule.lr_lambdas)
        ]
        for group, lr in zip(self.optimizer.param_groups, self.schedule._last_lr):
            group["lr"] = lr

    def clear(self) -> None:
        """Drop the groups added since the last step."""
        self.optimizer.zero_grad()
        self.tokens, self.tokens_with_signal, self.sums = 0, 0, defaultdict(float)

    def has_gradient(self, group: m.Group) -> bool:
        """Whether the samples differ in reward, or there is a KL term; otherwise the gradient is exactly zero."""
        return self.rl.kl_coef > 0 or bool(group_advantages(group.rewards, self.rl.advantage).any())

    def passes(self, group: m.Group, arrays: m.Arrays) -> int:
        """Return how many passes `add` makes for a group with a gradient."""
        return len(passes(group.ticket.prompt_tokens, arrays, self.tokens_per_pass))

    def add(self, group: m.Group, arrays: m.Arrays) -> tuple[torch.Tensor, ...] | None:
        """Run forward and backward over one group.

        Collective if the group has a gradient: the other ranks must make as many passes, with groups of their own or
        with `add_nothing`.

        Returns:
            With `keep_first`: tokens_GL, mask_GL, logits_GLV and hidden_GLD of the first forward pass, detached. None
            without it, or if the group has no gradient.
        """
        tokens = int(arrays["lengths"].sum())
        self.tokens += tokens
        if not self.has_gradient(group):
            return None
        self.tokens_with_signal += tokens
        advantages, seen, first = group_advantages(group.rewards, self.rl.advantage), 0, None
        for part in passes(group.ticket.prompt_tokens, arrays, self.tokens_per_pass):
            samples = len(part["lengths"])
            kept = self._pass(
                group.ticket.prompt_tokens, part, advantages[seen : seen + samples], self.keep_first and not seen
            )
            seen, first = seen + samples, first or kept
        return first

    def _pass(
        self, prompt: list[int], arrays: m.Arrays, advantage_G: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, ...] | None:
        lengths_G = torch.from_numpy(arrays["lengths"].astype(np.int64))
        tokens_GL, mask_GL = padded(prompt, arrays, self.device)
        proximal_T, behavior_T = (torch.from_numpy(arrays[k].copy()).to(self.device) for k in ("proximal", "behavior"))
        logits_GLV = self._logits(tokens_GL)
        logprob_T = response_logprobs(logits_GLV, tokens_GL, mask_GL, self.temperature)
        reference_T = torch.from_numpy(arrays["reference"].copy()).to(self.device) if "reference" in arrays else None
        loss, stats = policy_loss(
            logprob_T,
            proximal_T,
            behavior_T,
            advantage_G.repeat_interleave(lengths_G).to(self.device),
            reference_T,
            self.rl,
        )
        loss.backward()
        for name, value in stats.items():
            self.sums[name] += float(value)
        hidden_GLD, self._hidden = self._hidden, None
        return (tokens_GL, mask_GL, logits_GLV.detach(), hidden_GLD) if keep else None

    def add_nothing(self) -> None:
        """Take part in one pass of the other ranks, with a gradient of zero. Collective."""
        (0 * self._logits(torch.zeros(1, 2, dtype=torch.int64, device=self.device)).sum()).backward()

    def step(self) -> dict[str, float]:
        """Divide once, clip and update the weights. Collective.

        Returns:
            The gradient norm, the learning rate and, if any group had a gradient, the means of REPORTED over the
            tokens of these groups.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        totals = torch.tensor(
            [self.tokens, self.tokens_with_signal, *(self.sums[name] for name in REPORTED)],
            dtype=torch.float64,
            device=self.device,
        )
        tokens, with_signal, *sums = (totals if self.ranks is None else self.ranks.sum_over_groups(totals)).tolist()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        for grad in grads:
            grad /= tokens
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not norm.isfinite():
            raise FloatingPointError(f"gradient norm {float(norm)}: the step was not taken")
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.max_grad_norm, norm)
        stats = {name: value / with_signal for name, value in zip(REPORTED, sums)} if with_signal else {}
        stats |= {"grad/norm": float(norm), "optimizer/lr": self.schedule.get_last_lr()[0]}
        self.optimizer.step()
        self.schedule.step()
        self.clear()
        return stats

    def _logits(self, tokens_GL: torch.Tensor) -> torch.Tensor:
        """Return logits_GLV, float32 [G, L, V], with gradient."""
        logits_GLV = self.model(tokens_GL)
        return (logits_GLV.full_tensor() if isinstance(logits_GLV, DTensor) else logits_GLV).float()

    def _keep_hidden(self, module, inputs: tuple) -> None:
        self._hidden = inputs[0].detach()
