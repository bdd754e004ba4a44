"""asyncspec plan --config: what a configuration would do on GPUs that one need not have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncspec.errors import UserError

if TYPE_CHECKING:
    from asyncspec.config import Config
    from asyncspec.simulate.planner import Choice


def predict(args) -> int:
    """Simulate a configuration with the lengths and the acceptance of the flags, and print what it waits for."""
    from rich.table import Table

    from asyncspec.commands.plan_job import METHODS, basis, job_of
    from asyncspec.config import load, resolve_path, vllm_options
    from asyncspec.console import terminal
    from asyncspec.simulate.planner import outcome, slots_of

    config = load(args.config, files=False)
    if config.engine.kind != "vllm":
        raise UserError(f"--config {args.config}: engine.kind={config.engine.kind}: expected vllm, which is simulated")
    if config.drafting and config.fixed_draft_length is None:
        raise UserError(f"--config {args.config}: speculation.draft_length: expected a whole number, as in 3")
    for flag in ("gpus", "prompts", "group_size"):
        given = getattr(args, flag)
        if given is not None:
            raise UserError(f"--{flag.replace('_', '-')} {given}: expected no such flag with --config, which says it")
    choice = choice_of(config)
    args.gpus = choice.trainers + choice.logprobs + choice.replicas * choice.degree
    args.prompts, args.group_size = config.rl.groups_per_step, config.rl.group_size
    args.lag = config.policy_lag if args.lag is None else args.lag
    args.most_tokens = config.sampling.max_response_tokens if args.most_tokens is None else args.most_tokens
    method = config.speculation.method
    if method not in METHODS:
        raise UserError(
            f"--config {args.config}: speculation.method={method}: expected {', '.join(METHODS)}, which are simulated"
        )
    args.method = method
    options = vllm_options.parse(config.engine.vllm)
    args.precision = "fp8" if options.get("quantization") == "fp8" else "bfloat16"
    if args.model is None and resolve_path(config.model.path).is_dir():
        args.model = str(resolve_path(config.model.path))
    job = job_of(args)
    fitting = slots_of(replace(job, prompts=job.prompts * 1000), choice.degree, choice.replicas)
    if not fitting:
        raise UserError(f"--config {args.config}: the policy does not fit on {job.gpu.name}; expected more ranks of it")
    found = outcome(job, choice._replace(slots=min(choice.slots, fitting)))
    console = terminal()
    table = Table(title=f"{args.config} on {args.gpus} {job.gpu.name}, policy lag {job.lag}", title_justify="left")
    for column in ("step, s", "training, s", "waits, s", "one batch alone, s", "limit"):
        table.add_column(column, justify="left" if column == "limit" else "right")
    waits = f"{found.exposed_s:.1f} + {found.exposed_logprob_s:.1f}"
    table.add_row(f"{found.step_s:.1f}", f"{found.train_s:.1f}", waits, f"{found.generation_s:.1f}", found.limit)
    console.print(table)
    console.print("Waits: for generation + for logprobs. One batch alone: generating a step's rollouts, nothing else.")
    filled = min(choice.slots, (job.lag + 1) * job.rollouts / choice.replicas)
    console.print(
        f"A generator has {choice.slots} slots, of which the lag fills {filled:.0f}. Its KV cache holds about "
        f"{fitting} sequences of {job.prompt + job.lengths.mean:.0f} tokens."
    )
    console.print(basis(found))
    return 0


def choice_of(config: Config) -> Choice:
    """Return how a configuration divides the GPUs."""
    from asyncspec.simulate.planner import Choice

    return Choice(
        degree=config.engine.tensor_parallel,
        trainers=config.trainer.ranks,
        logprobs=config.deployment.logprobs * config.logprob.ranks,
        replicas=config.deployment.generators,
        slots=config.engine.slots,
        draft_length=config.fixed_draft_length or 0 if config.drafting else 0,
    )
