"""One optimizer step from any number of groups, added one at a time, in one rank or in several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from asyncspec.config import Config
from asyncspec.ledger import checkpoint
from asyncspec.models import experts, packed
from asyncspec.models.packed import Row, Scores
from asyncspec.models.parallel import Ranks, by_mesh, drop_kept_gradients, sync_gradients
from asyncspec.models.policy import whole
from asyncspec.rl.advantage import shaped_rewards
from asyncspec.rl.batch import Part, Pool, pack
from asyncspec.rl.loss import REPORTED, Tokens, divisor, policy_loss
from asyncspec.rl.optimizer import learning_rate, make_optimizers
from asyncspec.rl.own import estimator_of, loss_of
from asyncspec.wire import messages as m
from asyncspec.wire.facts import EXPERTS, sampled_lengths


class GradientAccumulator:
    """Accumulates the gradient of the loss over all groups added: a sum over tokens, divided once. The division of
    groups into calls, passes and ranks does not matter.

        rl.advantage_estimator=grpo                  add g0, a pass | add g1, a pass | flush: the rest  | step
        rl.advantage_estimator=reinforce_plus_plus   add g0         | add g1         | flush: all passes | step
    """

    def __init__(self, model, config: Config, ranks: Ranks | None = None, keep: int | None = None) -> None:
        """
        Args:
            ranks: the ranks that hold the model; None: this process alone, in float32.
            keep: how many of the most probable tokens `run` keeps of each distribution; 0: all; None: it keeps nothing.

        Raises:
            ValueError: the user's own loss or estimator cannot be imported.
        """
        trainer = config.trainer
        self.model, self.config, self.rl, self.ranks, self.keep = model, config, config.rl, ranks, keep
        self.pool = Pool(1 if ranks is None else ranks.data_size, trainer.tokens_per_pass)
        self.estimator, self.loss = estimator_of(config.rl.advantage_estimator), loss_of(config.rl.loss_type)
        self.optimizers = make_optimizers(model, trainer.optimizer)
        self.updates = 0  # steps taken
        self.device = next(model.parameters()).device
        self.sync_each_pass = trainer.gradient_sync == "pass"
        self.to_sync = False  # whether ranks keep gradients that are not yet added up
        self.clear()

    def state(self) -> dict:
        """Return everything that the next step depends on, for `restore`."""
        return {**checkpoint.learned(self.model, *self.optimizers), "updates": self.updates}

    def restore(self, state: dict) -> None:
        """Restore from a `state` that `checkpoint.load` has filled. The learning rate is the configuration's, at the
        same point of its schedule.
        """
        self.updates = state["updates"]

    def clear(self) -> None:
        """Drop the groups added since the last step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.pool.clear()
        if self.to_sync:
            drop_kept_gradients(self.model)
        self.to_sync = False
        experts.reset(self.model)
        self._collected: list[tuple[m.Group, m.Arrays]] = []  # whose advantages need the whole step
        self.tokens, self.responses, self.tokens_with_signal, self.sums = 0, 0, 0, defaultdict(float)

    @property
    def whole_step(self) -> bool:
        """Whether the advantages of a group depend on the other groups of its step."""
        return getattr(self.estimator, "whole_step", False)

    def add(self, group: m.Group, arrays: m.Arrays, advantage_G: np.ndarray | None = None) -> list[list[list[Part]]]:
        """Take a group. Its responses wait for a pass if it has a gradient; with an estimator that looks at the whole
        step they wait for `flush`.

        Args:
            advantage_G: what `advantages` returned for the group; None: it is not known yet.

        Returns:
            The rounds of passes that are full. Each data rank must `run` its pass of each round.
        """
        if advantage_G is not None:
            return self._put(group, arrays, advantage_G)
        self._collected.append((group, arrays))
        return [] if self.whole_step else self._put_collected()

    def flush(self) -> list[list[list[Part]]]:
        """Return the rounds of passes that are left; at least one, if gradients still have to be added up."""
        rounds = [*self._put_collected(), *self.pool.flush()]
        if not rounds and self.to_sync:
            rounds.append([[] for _ in range(self.pool.ranks)])
        return rounds

    def _put_collected(self) -> list[list[list[Part]]]:
        groups, self._collected = self._collected, []
        advantages = self.advantages(groups)
        return [each for item, advantage_G in zip(groups, advantages) for each in self._put(*item, advantage_G)]

    def _put(self, group: m.Group, arrays: m.Arrays, advantage_G: np.ndarray) -> list[list[list[Part]]]:
        """Put the responses of a group into the pool, if it has a gradient. Return the rounds that are full."""
        part = Part(
            group.ticket.prompt_tokens,
            {name: array for name, array in arrays.items() if name not in ("versions", "base")}
            | {"advantages": advantage_G},
        )
        if self.rl.mask_truncated and any(group.truncated):
            kept = [index for index, truncated in enumerate(group.truncated) if not truncated]
            if not kept:
                return []
            part = part.of(kept)
        tokens = int(sampled_lengths(part.arrays).sum())
        self.tokens += tokens
        self.responses += len(part.arrays["lengths"])
        if not self._has_gradient(part):
            return []
        self.tokens_with_signal += tokens
        return self.pool.add(part)

    def advantages(self, groups: Sequence[tuple[m.Group, m.Arrays]]) -> list[np.ndarray]:
        """Return the advantages of each group, float32.

        Args:
            groups: with `whole_step` all groups of the step.
        """
        if not groups:
            return []
        shaped = [
            shaped_rewards(
                torch.tensor(group.rewards, dtype=torch.float64),
                arrays,
                self.rl,
                self.config.sampling.max_response_tokens,
            )
            for group, arrays in groups
        ]
        sizes = [len(each) for each in shaped]
        group_R = torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes))
        length_R = torch.from_numpy(np.concatenate([sampled_lengths(arrays) for _, arrays in groups]))
        advantage_R = self.estimator(torch.cat(shaped), group_R, length_R)
        return [each.numpy() for each in advantage_R.float().split(sizes)]

    def _has_gradient(self, part: Part) -> bool:
        """Return whether a part can have a gradient: some advantage is not zero, or entropy or KL is in the loss."""
        terms = self.rl.entropy_coef > 0 or (self.rl.kl_coef > 0 and self.rl.kl_in == "loss")
        return terms or bool(part.arrays["advantages"].any())

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
        temperature, context = self.config.sampling.temperature, None if self.ranks is None else self.ranks.context
        if not parts:
            row = packed.empty_row(self.device)
            (0 * packed.run(self.model, row, temperature, context=context).chosen.logprob_T.sum()).backward()
            return None
        row, aux_layers = pack(parts, self.device), (len(self.model.layers),) if self.keep is not None else ()
        scores = packed.run(self.model, row, temperature, self.keep, aux_layers, entropy=True, context=context)
        arrays = {
            name: torch.from_numpy(np.concatenate([part.arrays[name] for part in parts])).to(self.device)
            for name in parts[0].arrays
            if name not in EXPERTS
        }
        tokens, logprob_T, entropy_T = sampled_of(arrays, scores.chosen.logprob_T, scores.chosen.entropy_T)
        loss, stats = policy_loss(logprob_T, tokens, self.rl, self.loss, entropy_T)
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
            [self.tokens, self.responses, self.tokens_with_signal, *(self.sums[name] for name in REPORTED)],
            dtype=torch.float64,
            device=self.device,
        )
        totals = totals if self.ranks is None else self.ranks.sum_over_groups(totals)
        tokens, responses, with_signal, *sums = totals.tolist()
        divided_by = divisor(self.rl, tokens, responses, self.config.sampling.max_response_tokens)
        settings = self.config.trainer.optimizer
        parts = by_mesh(parameter for parameter in self.model.parameters() if parameter.grad is not None)
        norm = torch.zeros((), device=self.device)
        for part in parts:
            for parameter in part:
                parameter.grad /= divided_by
            norm = torch.hypot(norm, whole(torch.nn.utils.get_total_norm([parameter.grad for parameter in part])))
        if not norm.isfinite():
            raise FloatingPointError(f"gradient norm {float(norm)}: the step was not taken")
        for part in parts:
            torch.nn.utils.clip_grads_with_norm_(part, settings.max_grad_norm, norm)
        stats = {name: value / with_signal for name, value in zip(REPORTED, sums)} if with_signal else {}
        lr = learning_rate(settings, self.updates, self.config.steps * self.rl.updates_per_step)
        stats |= {"grad/norm": float(norm), "optimizer/lr": lr, **experts.balance(self.model, self.ranks)}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.updates += 1
        self.clear()
        return stats


def sampled_of(
    arrays: dict[str, torch.Tensor], logprob_T: torch.Tensor, entropy_T: torch.Tensor | None
) -> tuple[Tokens, torch.Tensor, torch.Tensor | None]:
    """Return what a loss is about: the tokens of a pass that the policy sampled, their logprobs and their entropies.

    Args:
        arrays: of all responses of the pass.
        logprob_T, entropy_T: of all their tokens.
    """
    length_R, values = arrays["lengths"].long(), [arrays["proximal"], arrays["behavior"], arrays.get("reference")]
    if "loss_mask" in arrays:
        mask_T = arrays["loss_mask"].bool()
        length_R = torch.segment_reduce(mask_T.float(), "sum", lengths=length_R).long()
        logprob_T, entropy_T, *values = (
            None if each is None else each[mask_T] for each in (logprob_T, entropy_T, *values)
        )
    proximal_T, behavior_T, reference_T = values
    advantage_T = arrays["advantages"].repeat_interleave(length_R)
    return Tokens(proximal_T, behavior_T, advantage_T, length_R, reference_T), logprob_T, entropy_T
