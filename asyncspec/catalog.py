"""What a run leaves behind: its files, its metrics, and its exit codes.

The reference pages in docs/ are generated from these tables (`scripts/make_reference.py`). A test compares them with
what a run really writes. In a name, capitals stand for something that varies: ACTOR, POSITION, ROLE, KIND, STEP, SET,
TOOL, K.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

EXIT_CODES = {
    0: "The command did what it was asked to do.",
    1: "A run failed; `asyncspec audit` found a violation; a check of `asyncspec doctor` failed; or `asyncspec status` "
    "was asked about a run that failed, was stopped, or is silent.",
    2: "Wrong input. One line on standard error says what was expected.",
    130: "Interrupted. A run that had started has written a checkpoint, unless it was interrupted twice "
    "or its time to stop was over.",
}


class RunFile(NamedTuple):
    name: str
    meaning: str


RUN_FILES = (
    RunFile(
        "config.yaml", "the whole configuration of the run, with the commits of what is on a hub; `--resume` reads it"
    ),
    RunFile("config-until-step-STEP.yaml", "the configuration that was used before the run was resumed at this step"),
    RunFile("inputs.json", "digests of the data and the tokenizer; `--resume` refuses others"),
    RunFile("metrics.jsonl", "one JSON object for each step; see [metrics](metrics.md)"),
    RunFile("evaluations.jsonl", "one JSON object for each complete evaluation, with the eval/ metrics"),
    RunFile("timeline.jsonl", "for each step its groups, the stages they were in, and what the trainer waited for"),
    RunFile("rollouts.jsonl", "rollouts to read: prompt, response, reward, and what was thought of each token"),
    RunFile("ledger.jsonl", "one line for each event in a ticket's life and each fault; `asyncspec audit` reads it"),
    RunFile("status.json", "who is up, what is waited for, the lag, and when it will end; `asyncspec status` reads it"),
    RunFile("trace.json", "what each actor did and when; open it in Perfetto (https://ui.perfetto.dev)"),
    RunFile("trace-from-step-STEP.json", "the same after the run was resumed at this step"),
    RunFile("trace-from-step-STEP-COUNT.json", "the same, where the run was resumed more than once at this step"),
    RunFile("tb/", "the metrics for TensorBoard: `tensorboard --logdir runs`"),
    RunFile("wandb/", "the files of wandb, and the id of its run, with `logging.backends=wandb`"),
    RunFile("logs/", "one log file for each actor"),
    RunFile(
        "checkpoint/",
        "the result, as Hugging Face directories: the policy, with its adapters, and the draft if it was adapted",
    ),
    RunFile("exports/", "the policy as a Hugging Face directory, step-N, every `checkpoint.export_every` steps"),
    RunFile("checkpoints/", "what `--resume` starts from: trainer-VERSION and draft-VERSION"),
    RunFile("best/", "with `eval.keep_best`: the version with the best held-out score, its checkpoint and its policy"),
    RunFile("skipped/", "the groups of steps whose gradient was not finite"),
    RunFile("faults/", "a mark for each fault of `deployment.faults` that has happened"),
    RunFile("report.html", "the page that `asyncspec report` writes"),
    RunFile("rollouts.html", "the page of rollouts that it writes beside"),
    RunFile("keys", "the keys that encrypt the run's sockets, readable by their owner only"),
    RunFile("lock", "held while a process trains in this directory"),
    RunFile("rendezvous.json", "where the controller listens, for nodes that join by themselves"),
)


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str


# Metrics that TRL and what follows it have under another name: (ours, the well-known name). Both are written.
KNOWN_AS = (
    ("reward/mean", "reward"),
    ("groups/without_signal", "frac_reward_zero_std"),
    ("tokens/response_mean", "completions/mean_length"),
    ("tokens/response_max", "completions/max_length"),
    ("tokens/truncated", "completions/clipped_ratio"),
    ("loss/kl", "kl"),
    ("loss/entropy", "entropy"),
    ("ppo/clipped", "clip_ratio/region_mean"),
    ("grad/norm", "grad_norm"),
    ("optimizer/lr", "learning_rate"),
)

_OURS = (
    Metric("step", "count", "the step, from 0; step s trains policy version s and makes version s + 1"),
    Metric("policy_version", "version", "the policy version that the step made"),
    Metric("reward/mean", "reward", "mean reward of the step's rollouts"),
    Metric("reward_std", "reward", "standard deviation of the rewards in a group (over n - 1), mean over groups"),
    Metric("environment/turns_mean", "turns", "with an environment: turns of the policy in an episode, on average"),
    Metric("environment/tokens_mean", "tokens", "tokens in a response that the environment wrote; not trained"),
    Metric("environment/ACTOR_open", "count", "episodes that this generator had open"),
    Metric("environment/ACTOR_failed", "count", "its episodes whose environment failed or was late so far"),
    Metric("environment/ACTOR_begun_again", "count", "its episodes that began again so far: their process ended"),
    Metric("tool/TOOL_calls", "count", "calls of a tool in an episode, on average; step: of one that has no name"),
    Metric("tool/TOOL_s", "seconds", "a call of it, on average over the step's episodes"),
    Metric("tool/TOOL_longest_s", "seconds", "the longest of these calls"),
    Metric("reward/ACTOR_failed", "count", "rewards of this generator that failed so far"),
    Metric("eval/score", "reward", "mean reward on the held-out prompts; an accuracy if rewards are 0 or 1"),
    Metric("eval/solved", "share", "held-out rollouts whose reward is at least 1"),
    Metric("eval/score_low", "reward", "lower bound of its 95% interval; see [evaluation](../how-to/evaluation.md)"),
    Metric("eval/score_high", "reward", "upper bound"),
    Metric("eval/pass@K", "share", "prompts that at least one of K rollouts would solve, estimated without bias"),
    Metric("eval/pass@K_low", "share", "lower bound of its 95% interval"),
    Metric("eval/pass@K_high", "share", "upper bound"),
    Metric("eval/prompts", "count", "held-out prompts with at least one reward"),
    Metric("eval/left_out", "count", "held-out prompts without any, which are left out"),
    Metric("eval/failed", "count", "held-out rollouts without a reward: it failed or does not apply"),
    Metric("eval/SET/score", "reward", "the same of one set of `data.eval_file`, as all that follow"),
    Metric("eval/SET/score_low", "reward", "lower bound of its 95% interval"),
    Metric("eval/SET/score_high", "reward", "upper bound"),
    Metric("eval/SET/solved", "share", "rollouts whose reward is at least 1"),
    Metric("eval/SET/pass@K", "share", "prompts that at least one of K rollouts would solve"),
    Metric("eval/SET/pass@K_low", "share", "lower bound of its 95% interval"),
    Metric("eval/SET/pass@K_high", "share", "upper bound"),
    Metric("eval/SET/prompts", "count", "prompts with at least one reward"),
    Metric("eval/SET/left_out", "count", "prompts without any"),
    Metric("eval/SET/failed", "count", "rollouts without a reward"),
    Metric("eval/policy_version", "version", "the oldest policy version that sampled in that evaluation"),
    Metric("eval/policy_version_max", "version", "the newest one"),
    Metric("groups/without_signal", "share", "groups whose rewards are all equal, so that they teach nothing"),
    Metric("groups/trained", "count", "groups that the step trained"),
    Metric(
        "groups/unused",
        "count",
        "groups without signal that `rl.dynamic_sampling` kept from training; other metrics of rollouts count them",
    ),
    Metric("lag/mean", "versions", "how far the step's tokens were behind the policy that trained on them, on average"),
    Metric("lag/max", "versions", "the largest such lag; never above `policy_lag`"),
    Metric("lag/proximal_max", "versions", "the same for the policy that computed the proximal logprobs"),
    Metric("loss/policy", "", "the policy loss, mean over tokens whatever `rl.loss_aggregation` is"),
    Metric("loss/kl", "nats", "KL divergence from the reference policy; 0 without `rl.kl_coef`"),
    Metric(
        "loss/entropy",
        "nats",
        "entropy of the policy's distributions, mean over the tokens of groups with a gradient; over the whole "
        "vocabulary",
    ),
    Metric("ppo/clipped", "share", "tokens whose ratio was clipped; 0 with a loss of your own"),
    Metric("clip_ratio/low_mean", "share", "tokens whose ratio was clipped at its lower bound"),
    Metric("clip_ratio/high_mean", "share", "tokens whose ratio was clipped at its upper bound"),
    Metric(
        "sampling/importance_sampling_ratio/min",
        "",
        "smallest importance weight proximal / behavior of a token, or of a response with "
        "`rl.correction_level=sequence`; before truncation or masking; over all groups",
    ),
    Metric("sampling/importance_sampling_ratio/mean", "", "mean of these weights"),
    Metric("sampling/importance_sampling_ratio/max", "", "largest of these weights"),
    Metric(
        "sampling/sampling_logp_difference/mean",
        "nats",
        "distance of a token's logprobs under proximal and behavior policy, mean over the tokens of all groups",
    ),
    Metric("sampling/sampling_logp_difference/max", "nats", "largest such distance"),
    Metric(
        "sampling/same_version_gap",
        "nats",
        "mean distance over tokens that were scored by the version that sampled them, of the generator with the "
        "largest one; rounding, if each generator has the weights that it names",
    ),
    Metric(
        "sampling/same_version_far",
        "share",
        "tokens whose distance is above 0.1, of those that were scored by the version that sampled them; in float32 "
        "none, if each generator has the weights that it names",
    ),
    Metric(
        "lora/version_gap",
        "nats",
        "with adapters, every ten steps: the same distance, over tokens that were also scored without adapters",
    ),
    Metric(
        "lora/base_gap",
        "nats",
        "mean distance of these tokens' logprobs from those under the policy without adapters, of the nearest "
        "generator; below `lora/version_gap` if its engine has no adapters",
    ),
    Metric("correction/weight_mean", "", "mean importance weight proximal / behavior, after truncation or masking"),
    Metric(
        "correction/truncated", "share", "tokens with a weight below `rl.correction_low` or above `rl.correction_high`"
    ),
    Metric("correction/kl_behavior_proximal", "nats", "estimated KL divergence of proximal from behavior policy"),
    Metric(
        "experts/max_violation",
        "",
        "with a mixture: tokens of a layer's busiest expert over the mean of its experts, less 1; mean over layers",
    ),
    Metric("experts/unused", "share", "experts that no token of the optimizer step was sent to"),
    Metric(
        "experts/replayed_otherwise",
        "share",
        "with rl.routing_replay: of the generator's choices those that the trainer's router would not have made",
    ),
    Metric("grad/norm", "", "norm of the gradient before clipping"),
    Metric("grad/skipped", "count", "steps that were skipped because the gradient was not finite"),
    Metric("optimizer/lr", "", "learning rate of the step; of its last optimizer step, if there are several"),
    Metric("optimizer/steps", "count", "optimizer steps so far, with several of them in a step"),
    Metric("tokens/response_mean", "tokens", "mean response length"),
    Metric("tokens/response_max", "tokens", "longest response"),
    Metric("completions/min_length", "tokens", "shortest response"),
    Metric("tokens/truncated", "share", "responses that reached `sampling.max_response_tokens`"),
    Metric("tickets/duplicates", "count", "groups that arrived twice and were trained once"),
    Metric("time/step", "seconds", "wall time of the step; the parts below sum to it"),
    Metric("time/train", "seconds", "part: forward, backward, optimizer"),
    Metric("time/export", "seconds", "part: the trainer wrote the policy to exports/"),
    Metric("time/data", "seconds", "part: the trainer unpacked groups"),
    Metric("time/transport", "seconds", "part: the group it waited for traveled between two actors"),
    Metric("time/prepare", "seconds", "part: weights were published, or the group waited for them"),
    Metric("time/admission", "seconds", "part: the policy lag did not yet admit the group"),
    Metric("time/exposed_generation", "seconds", "part: the group was being generated, or waited for a slot"),
    Metric("time/exposed_environment", "seconds", "part: the group was held up by environments, its tools included"),
    Metric("time/exposed_reward", "seconds", "part: the group was held up by rewards"),
    Metric("time/exposed_logprob", "seconds", "part: the group was in logprob, or in its queue"),
    Metric("time/recovery", "seconds", "part: the group was lost with an actor and had to be made again"),
    Metric("time/other", "seconds", "part: none of these"),
    Metric("time/generation", "seconds", "time in which any group of the step was being generated, hidden or not"),
    Metric("time/environment", "seconds", "an environment held up any group of the step"),
    Metric("time/logprob", "seconds", "time in which any group of the step was in logprob, hidden or not"),
    Metric("timing/train/exposed_generation", "seconds", "a stopwatch around the trainer's waits, whatever the cause"),
    Metric("spec/draft_length", "tokens", "mean number of tokens proposed for one verification"),
    Metric("spec/acceptance_length", "tokens", "mean number of tokens that one verification emitted"),
    Metric("spec/acceptance_rate", "share", "proposed tokens that were accepted"),
    Metric("spec/acceptance_POSITION", "share", "accepted at this position, of the verifications that reached it"),
    Metric("spec/draft_version", "version", "the newest draft version that proposed in the step"),
    Metric("throughput/tokens_per_s", "tokens/s", "response tokens of the step over its wall time"),
    Metric("draft/loss", "nats", "the draft's training loss"),
    Metric("draft/expected_acceptance_1", "share", "acceptance at the first position, computed from the loss"),
    Metric("draft/updates", "count", "optimizer steps of the draft so far"),
    Metric("draft/skipped", "count", "draft updates whose gradient was not finite"),
    Metric("draft/policy_version", "version", "the policy version that the draft was last trained on"),
    Metric("draft/lag", "versions", "how far that is behind the step's policy"),
    Metric("draft/megabytes", "MB", "supervision offered to the draft adapter so far"),
    Metric("draft/groups_dropped", "count", "groups that the adapter was too slow for"),
    Metric("draft/adapter_lost", "", "1 once the draft adapter has ended and is not replaced"),
    Metric("actors/ACTOR_busy", "share", "share of the last second in which the actor worked"),
    Metric("actors/ACTOR_blocked_input", "share", "share in which it waited for work"),
    Metric("actors/ACTOR_blocked_output", "share", "share in which it waited for a receiver"),
    Metric("actors/ACTOR_idle", "share", "share in which it waited after its last work of the run"),
    Metric("process/ACTOR_mb", "MB", "resident memory of the actor's process"),
    Metric("process/ACTOR_files", "count", "its open file descriptors"),
    Metric("process/ACTOR_threads", "count", "its threads"),
    Metric("process/ACTOR_cpu_s", "s", "seconds that processors have worked for it"),
    Metric("clock/ACTOR_error_ms", "ms", "bound on the error of the clock of an actor on another host"),
    Metric("wire/ACTOR_rejected", "count", "messages that the actor refused"),
    Metric("wire/ACTOR_duplicates", "count", "messages that arrived twice and counted once"),
    Metric("broadcast/KIND_epochs", "count", "epochs of the broadcast group of policy or draft so far"),
    Metric("checkpoint/version", "version", "the newest checkpoint on disk"),
    Metric("checkpoint/failed", "count", "checkpoints that could not be written"),
    Metric(
        "recovery/ROLEs_lost",
        "count",
        "actors of this role that were lost and replaced so far, for example recovery/generators_lost",
    ),
    Metric("recovery/ROLE_s", "seconds", "how long it took to replace the last one"),
    Metric("recovery/tickets_reissued", "count", "tickets that were issued again because an actor was lost"),
    Metric("recovery/restarts", "count", "starts from a checkpoint so far"),
)


def _with_known_names(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Yield metrics, each followed by the same under its well-known name, if it has one."""
    known_as = dict(KNOWN_AS)
    for metric in metrics:
        yield metric
        if known := known_as.get(metric.name):
            only = "; only with `rl.kl_coef`" if known == "kl" else ""
            yield Metric(known, metric.unit, f"the same, under its well-known name{only}")


METRICS = tuple(_with_known_names(_OURS))

_VARIES = {
    "ACTOR": r"[a-z_]+[0-9]*(?:_rank[0-9]+)?(?:\.[0-9]+)*",
    "POSITION": "[0-9]+",
    "ROLE": "[a-z_]+",
    "TOOL": "[A-Za-z0-9_.-]+",
    "KIND": "policy|draft",
}
_VARIES |= {"STEP": "[0-9]+", "COUNT": "[0-9]+", "SET": "[A-Za-z0-9_-]+", "@K": "@[0-9]+"}


def pattern(name: str) -> re.Pattern[str]:
    """A regular expression for a name of these tables."""
    text = re.escape(name)
    for word, expression in _VARIES.items():
        text = text.replace(word, f"(?:{expression})")
    return re.compile(text)
