"""The sections of a configuration that choose what the policy learns from its rollouts: rl and trainer.optimizer.

check_learning.py refuses combinations. docs/explanation/algorithms.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncspec.config.fields import knob

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")  # look at one group
STEP_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")  # look at all groups of a step
ESTIMATORS = (*GROUP_ESTIMATORS, *STEP_ESTIMATORS)
LOSSES = ("ppo", "cispo", "gspo")


@dataclass
class RLConfig:
    group_size: int = knob(8, "rollouts per prompt; their rewards are compared to get advantages", least=2)
    groups_per_step: int = knob(16, "prompts per step, with rl.group_size rollouts each", least=1)
    mini_batch_size: int = knob(
        0,
        "groups of an optimizer step, a divisor of rl.groups_per_step; with fewer than all, or with rl.num_iterations "
        "above 1, a policy version comes from several optimizer steps; 0: all groups",
        least=0,
    )
    num_iterations: int = knob(1, "times that a step trains on each of its groups", least=1)
    dynamic_sampling: str = knob(
        "none",
        "what becomes of groups whose rewards are all equal; none: they count in the step; filter: they are left out; "
        "replace: others are generated in their places (DAPO)",
        choices=("none", "filter", "replace"),
    )
    max_batches: int = knob(
        8,
        "groups that rl.dynamic_sampling=replace generates for one place at most; the last one is left out if its "
        "rewards are equal too",
        least=2,
        most=256,
    )
    advantage_estimator: str = knob(
        "grpo",
        f"{', '.join(ESTIMATORS)}, or module:function; grpo is (r - mean) / std in the group, dr_grpo r - mean, rloo "
        "r - mean of the others; reinforce_plus_plus compares all rollouts of a step, so training begins when the last "
        "one is there",
    )
    loss_type: str = knob(
        "ppo",
        f"{', '.join(LOSSES)}, or module:function; ppo clips each token's ratio, gspo each response's, and cispo clips "
        "the ratio as a weight without gradient",
    )
    loss_aggregation: str = knob(
        "token-mean",
        "how the tokens' losses become one; token-mean: mean over tokens; seq-mean-token-mean: each response counts "
        "alike; seq-mean-token-sum: sums over responses, then their mean; seq-mean-token-sum-norm: the same over "
        "sampling.max_response_tokens; token-sum: the sum",
        choices=(
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
            "token-sum",
        ),
    )
    clip_low: float = knob(0.2, "clipping: the ratio's lower bound is 1 - clip_low; 1: no lower bound", above=0, most=1)
    clip_high: float = knob(0.28, "clipping: the ratio's upper bound is 1 + clip_high (DAPO's clip-higher)", above=0)
    clip_dual: float = knob(
        0.0,
        "upper bound of the ratio where the advantage is negative (dual clip), more than 1; with rl.loss_type=ppo; 0: "
        "none",
        least=0,
    )
    correction_level: str = knob(
        "token",
        "what has an importance weight pi_proximal / pi_behavior of its own: each token; or each response, with "
        "the product over its tokens",
        choices=("token", "sequence"),
    )
    correction_action: str = knob(
        "truncate",
        "off-policy correction; truncate: weights are clamped to rl.correction_low and rl.correction_high; mask: what "
        "is outside has weight 0; none: all weights are 1",
        choices=("truncate", "mask", "none"),
    )
    correction_low: float = knob(0.0, "smallest weight that is not truncated or masked", least=0, most=1)
    correction_high: float = knob(2.0, "largest weight that is not truncated or masked", least=1)
    kl_coef: float = knob(0.0, "weight of KL(policy || reference); 0: no KL term and no reference pass", least=0)
    kl_estimator: str = knob(
        "k3",
        "estimate of the KL from a token's logprobs, with d = log pi - log pi_reference; k1: d; k2: d^2 / 2; k3: "
        "exp(-d) - 1 + d; k1 in the loss has a gradient of zero on average",
        choices=("k1", "k2", "k3"),
    )
    kl_in: str = knob(
        "loss",
        "where the KL counts: in the loss, or in the reward of a rollout, from which its sum over the tokens is "
        "subtracted",
        choices=("loss", "reward"),
    )
    entropy_coef: float = knob(
        0.0, "weight of the entropy of the policy's distributions, which the loss rewards; 0: not computed", least=0
    )
    overlong_buffer: int = knob(
        0,
        "the last tokens before sampling.max_response_tokens; a response that reaches into them loses reward in "
        "proportion (DAPO's soft overlong punishment); 0: none",
        least=0,
    )
    overlong_penalty: float = knob(
        1.0, "reward that a response of sampling.max_response_tokens loses with rl.overlong_buffer", least=0
    )
    routing_replay: bool = knob(
        False,
        "with a mixture of experts: trainer and logprob send each token to the experts to which the generator sent it "
        "(R3); the reference chooses its own",
    )
    mask_truncated: bool = knob(
        False, "leave truncated responses out of the loss; their rewards still count in the advantages of the others"
    )

    @property
    def groups_per_update(self) -> int:
        """The groups of an optimizer step."""
        return self.mini_batch_size or self.groups_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps from one policy version to the next."""
        return self.num_iterations * (self.groups_per_step // self.groups_per_update)

    @property
    def tries(self) -> int:
        """Groups that may be generated for one place of a step."""
        return self.max_batches if self.dynamic_sampling == "replace" else 1


@dataclass
class OptimizerConfig:
    kind: str = knob(
        "adamw",
        "adamw; or muon, for matrices except embedding and head, with AdamW for the rest",
        choices=("adamw", "muon"),
    )
    lr: float = knob(2e-4, "learning rate after warm-up; Muon's steps are scaled to AdamW's size", above=0, most=1)
    schedule: str = knob(
        "constant",
        "learning rate after warm-up: constant, or falling to 0 at the end of `steps`, in a line or half a cosine",
        choices=("constant", "linear", "cosine"),
    )
    beta1: float = knob(0.9, "AdamW's decay of the mean of gradients", least=0, below=1)
    beta2: float = knob(0.95, "AdamW's decay of the mean of squared gradients", least=0, below=1)
    eps: float = knob(1e-8, "AdamW's epsilon, added to the root in the denominator", above=0)
    momentum: float = knob(0.95, "Muon's decay of the mean of gradients", least=0, below=1)
    weight_decay: float = knob(
        0.0, "decoupled weight decay of matrices; norms, biases and embedding have none; 0: none", least=0
    )
    max_grad_norm: float = knob(1.0, "norm to which a larger gradient is clipped", above=0)
    warmup_steps: int = knob(3, "optimizer steps of linear learning-rate warm-up; 0: none", least=0)
