"""One policy update from any number of groups, added one at a time, in one rank or in several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from asyncspec.config import OptimizerConfig, RLConfig
from asyncspec.ledger import checkpoint
from asyncspec.models import packed
from asyncspec.models.packed import Row, Scores
from asyncspec.models.parallel import Ranks, drop_kept_gradients, sync_gradients
from asyncspec.rl.batch import Part, Pool, pack
from asyncspec.rl.grpo import REPORTED, group_advantages, policy_loss
from asyncspec.wire import messages as m


def decayed(model, weight_decay: float) -> list[dict]:
    """Return an optimizer's groups of a policy's parameters: the matrices decay; norms, biases and embedding do not.

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
        keep: int | None = None,
        sync_each_pass: bool = True,
    ) -> None:
        """
        Args:
            ranks: the ranks that hold the model; None: this process alone, in float32.
            tokens_per_pass: responses are packed to passes of this many tokens.
            keep: how many of the most probable tokens `run` keeps of each distribution; 0: all; None: it keeps nothing.
            sync_each_pass: whether ranks add up their gradients after each pass, rather than after a step's last one.
        """
        self.pool = Pool(1 if ranks is None else ranks.data_size, tokens_per_pass)
        self.model, self.rl, self.temperature, self.cfg, self.ranks = model, rl, temperature, optimizer_config, ranks
        o = optimizer_config
        self.optimizer = torch.optim.AdamW(
            decayed(model, o.weight_decay), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=0.0
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / max(1, o.warmup_steps))
        )
        self.device = next(model.parameters()).device
        self.keep, self.sync_each_pass = keep, sync_each_pass
        self.to_sync = False  # whether ranks keep gradients that are not yet added up
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
        self.pool.clear()
        if self.to_sync:
            drop_kept_gradients(self.model)
        self.to_sync = False
        self.tokens, self.tokens_with_signal, self.sums = 0, 0, defaultdict(float)

    def has_gradient(self, group: m.Group) -> bool:
        """Whether the samples differ in reward, or there is a KL term; otherwise the gradient is exactly zero."""
        return self.rl.kl_coef > 0 or bool(group_advantages(group.rewards, self.rl.advantage).any())

    def add(self, group: m.Group, arrays: m.Arrays) -> list[list[list[Part]]]:
        """Count a group, and let its responses wait for a pass if it has a gradient.

        Returns:
            The rounds of passes that are full. Each data rank must `run` its pass of each round.
        """
        tokens = int(arrays["lengths"].sum())
        self.tokens += tokens
        if not self.has_gradient(group):
            return []
        self.tokens_with_signal += tokens
        advantages_G = group_advantages(group.rewards, self.rl.advantage).numpy()
        used = {name: array for name, array in arrays.items() if name != "versions"}
        return self.pool.add(Part(group.ticket.prompt_tokens, used | {"advantages": advantages_G}))

    def flush(self) -> list[list[list[Part]]]:
        """Return the rounds of passes that are not full; at least one, if gradients still have to be added up."""
        rounds = self.pool.flush()
        if not rounds and self.to_sync:
            rounds.append([[] for _ in range(self.pool.ranks)])
        return rounds

    def run(self, parts: Sequence[Part], last: bool = True) -> tuple[Row, Scores] | None:
        """Run one pass forward and backward. Collective.

        Args:
            parts: what `add` or `flush` returned for this rank; empty to take part with a gradient of zero.
            last: whether this is the last pass of `flush`.

        Returns:
            With `keep`, the row and its results; otherwise None.
        """
        sync = last or self.sync_each_pass
        sync_gradients(self.model, sync)
        self.to_sync = not sync
        if not parts:
            row = packed.empty_row(self.device)
            (0 * packed.run(self.model, row, self.temperature).chosen.logprob_T.sum()).backward()
            return None
        row, aux_layers = pack(parts, self.device), (len(self.model.layers),) if self.keep is not None else ()
        scores = packed.run(self.model, row, self.temperature, self.keep, aux_layers)
        arrays = {
            name: torch.from_numpy(np.concatenate([part.arrays[name] for part in parts])).to(self.device)
            for name in parts[0].arrays
        }
        loss, stats = policy_loss(
            scores.chosen.logprob_T,
            arrays["proximal"],
            arrays["behavior"],
            arrays["advantages"].repeat_interleave(arrays["lengths"]),
            arrays.get("reference"),
            self.rl,
        )
        loss.backward()
        for name, value in stats.items():
            self.sums[name] += float(value)
        return None if self.keep is None else (row, scores)

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
