"""asyncspec plan: what to configure for a model on some GPUs, before they are paid for."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncspec.commands.output import output_directory
from asyncspec.commands.plan_job import METHODS, MOST_DRAFT, MOST_LAG, MOST_PROMPT, basis, job_of, need
from asyncspec.errors import UserError

if TYPE_CHECKING:
    from asyncspec.simulate.planner import Choice, Job, Outcome

SCALES, LAGS = (0.25, 0.5, 1.0, 2.0, 4.0), (0, 1, 2, 4)
DRAFT_LENGTHS, ACCEPTANCES = (1, 2, 3, 4, 5, 6, 7, 8), (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
TRIED = 4  # choices that are simulated for a point of a picture


def add_parser(commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="choose draft length, generators against trainers, ranks and slots for a model and GPUs",
        description="Simulate a model on GPUs that one need not have, and choose: the draft length, or no speculation; "
        "how many GPUs generate, train and compute logprobs; ranks of a generator; its slots. Writes a table, pictures "
        "and a configuration to --out. Needs --model and --gpus. This takes a minute or two.\n\n"
        "With --config, it says what that configuration would do instead: the seconds of a step, and what they wait "
        "for. Its engine must be vLLM. GPUs, prompts, rollouts, lag and longest response are those of the "
        "configuration, unless --lag or --most-tokens says otherwise.\n\n"
        "With --hardware this, it simulates a run of this machine instead, with other slots, draft lengths and numbers "
        "of generators. Needs --run; of the other flags only --lag and --out count.",
    )
    add = plan.add_argument
    add("--model", metavar="NAME", help="directory with config.json, or a name such as Qwen/Qwen3-8B")
    add("--hardware", required=True, metavar="GPU", help="GB200, B200, H200, H100 or A100, or `this`")
    add(
        "--run",
        dest="calibrated",
        metavar="RUN",
        help="with --hardware this: a run here that `asyncspec simulate calibrate` has fitted",
    )
    add("--config", metavar="NAME", help="YAML file, or the name of a shipped config, to predict; no file is written")
    add("--gpus", type=int, metavar="N", help="number of GPUs")
    add("--lag", type=int, metavar="L", help="policy lag (default: 1; with --run that of the run)")
    add("--prompts", type=int, metavar="N", help="prompts of a step (default: 128)")
    add("--group-size", type=int, metavar="N", help="rollouts of a prompt (default: 16)")
    add("--tokens", type=float, metavar="N", help="mean tokens of a response (default: 4000, or half of the most)")
    add("--most-tokens", type=int, metavar="N", help="most tokens of a response (default: 16384, or what fits)")
    add("--sigma", type=float, default=0.8, metavar="S", help="spread of the logarithm of lengths (default: 0.8)")
    add("--method", default="eagle3", choices=METHODS, help="what drafts (default: eagle3)")
    add("--acceptance", type=float, default=2.8, metavar="A", help="acceptance length with 3 proposals (default: 2.8)")
    add(
        "--spread",
        type=float,
        default=0.05,
        metavar="S",
        help="spread of acceptance between sequences (default: 0.05)",
    )
    add(
        "--precision",
        default="bfloat16",
        choices=("bfloat16", "fp8"),
        help="of the generators' weights (default: bfloat16)",
    )
    add("--out", default="plan", metavar="DIR", help="directory for plan.yaml, plan.json and plan.png (default: plan)")
    plan.set_defaults(run=_plan, parser=plan)


def _plan(args) -> int:
    if args.hardware.lower() == "this":
        from asyncspec.commands.plan_here import plan_here

        for flag in ("model", "gpus"):
            need(getattr(args, flag) is None, flag, getattr(args, flag), "no such flag with --hardware this")
        need(args.lag is None or 0 <= args.lag <= MOST_LAG, "lag", args.lag, f"0 to {MOST_LAG}")
        return plan_here(args, output_directory(args.out))
    if args.config is not None:
        from asyncspec.commands.plan_config import predict

        return predict(args)
    from rich.table import Table

    from asyncspec.console import terminal
    from asyncspec.simulate.planner import plan

    job, console = job_of(args), terminal()
    out = output_directory(args.out)
    found = plan(job)
    if not found:
        raise UserError(
            f"--gpus {args.gpus}: {args.model} does not fit on so few {job.gpu.name}; expected more for its trainer or "
            "its generators"
        )
    best = found[0]
    table = Table(title=f"{args.model} on {args.gpus} {job.gpu.name}, policy lag {args.lag}", title_justify="left")
    for column in ("k", "generators", "slots", "GPUs", "step, s", "waits, s", "limit"):
        table.add_column(column, justify="left" if column == "limit" else "right")
    for each in found:
        c = each.choice
        cells = (str(c.draft_length), f"{c.replicas} x TP{c.degree}", str(c.slots), f"{c.trainers} + {c.logprobs}")
        waits = f"{each.exposed_s:.1f} + {each.exposed_logprob_s:.1f}"
        table.add_row(*cells, f"{each.step_s:.1f}", waits, each.limit)
    console.print(table)
    plain = next((each for each in found if each.choice.draft_length == 0), None)
    console.print("GPUs: those that train + those that compute logprobs. Waits: for generation + for logprobs.")
    if plain is not None and plain is not best:
        console.print(f"With speculation a step is {plain.step_s / best.step_s:.2f} times as fast as without.")
    console.print(basis(best))
    if best.choice.degree > job.gpu.gpus_per_node:
        console.print(_wide(job, best.choice.degree))
    (out / "plan.yaml").write_text(configuration(args, job, best))
    (out / "plan.json").write_text(
        json.dumps([each._asdict() | {"choice": each.choice._asdict()} for each in found], indent=1)
    )
    _draw(job, best, out / "plan.png")
    console.print(f"written: {out / 'plan.yaml'}, {out / 'plan.json'}, {out / 'plan.png'}", soft_wrap=True)
    return 0


def configuration(args, job: Job, best: Outcome) -> str:
    """Return a configuration file for a choice."""
    import yaml

    from asyncspec.simulate.planner import MEMORY_SHARE, arriving, logprob_ranks

    choice, per_node, ranks = best.choice, job.gpu.gpus_per_node, logprob_ranks(job)
    positions = job.model.get("max_position_embeddings", 1 << 20)
    nodes = _nodes(choice, per_node)
    used = MEMORY_SHARE - arriving(job, choice.degree) / job.gpu.memory_bytes
    fields: dict[str, Any] = {
        "policy_lag": job.lag,
        "model": {"path": args.model, "dtype": "bfloat16"},
        "data": {"train_file": "data/train.jsonl", "eval_file": "data/eval.jsonl"},
        "sampling": {"max_response_tokens": int(job.lengths.limit)},
        "engine": {
            "kind": "vllm",
            "slots": choice.slots,
            "tensor_parallel": choice.degree,
            "max_prompt_tokens": max(1, min(MOST_PROMPT, positions - int(job.lengths.limit) - MOST_DRAFT)),
            "gpu_memory_utilization": math.floor(100 * used) / 100,  # the rest is for the weights that arrive
            **({"vllm": "{quantization: fp8}"} if job.precision == "fp8" else {}),
        },
        "speculation": {"method": job.method if choice.draft_length else "none"},
        "rl": {"groups_per_step": job.prompts, "group_size": job.group_size},
        "trainer": {"recompute": True, "tokens_per_pass": int(job.lengths.limit + 2048)},
        "deployment": {
            "device": "cuda",
            "nodes": nodes,
            "start_timeout_s": 1200,
            "stall_timeout_s": 3600,
            "silent_timeout_s": 30,
            "turn_timeout_s": 1800,
            "stop_timeout_s": 60,
        },
    }
    if choice.draft_length:
        fields["speculation"] |= {"draft_length": str(choice.draft_length), "draft_path": "models/draft"}
    if job.method == "mtp" and choice.draft_length:
        fields["draft"] = {"adapt": False}  # several ranks cannot train it
    if ranks > 1:
        fields["logprob"] = {"ranks": ranks}
    wide = f"# {_wide(job, choice.degree)}\n" if choice.degree > per_node else ""
    note = (
        f"# {args.model} on {args.gpus} {job.gpu.name}, from asyncspec plan: a step of {best.step_s:.0f} s, of which "
        f"{best.exposed_s:.0f} s\n# are exposed generation. You supply data/ and models/.\n"
    )
    return note + wide + yaml.safe_dump(fields, sort_keys=False)


def _nodes(choice: Choice, per_node: int) -> str:
    """Return the nodes of a choice, as deployment.nodes has them: trainers first, then logprob actors, then
    generators. A generator that is larger than a node gets a host of its own.
    """
    host = max(per_node, choice.degree)
    left = {"trainer": choice.trainers, "logprob": choice.logprobs, "generator": choice.replicas * choice.degree}
    nodes: list[str] = []
    while any(left.values()):
        alone = not left["trainer"] and not left["logprob"]
        room, played = host if alone else per_node, []
        for role in left:
            taken = 0 if role == "generator" and not alone and choice.degree > per_node else min(room, left[role])
            left[role] -= taken
            room -= taken
            played += [f"{role}:{taken}"] * bool(taken)
        nodes.append("+".join(played))
    return ",".join(f"{len(list(same))}*{node}" for node, same in itertools.groupby(nodes))


def _wide(job: Job, degree: int) -> str:
    """Say what is needed for a generator that has more GPUs than a node."""
    nodes = f"nodes of {job.gpu.name} have {job.gpu.gpus_per_node}"
    return f"asyncspec starts a generator on one host. One of {degree} GPUs needs a host with {degree}; {nodes}."


def _draw(job: Job, best: Outcome, path: Path) -> None:
    """Draw the speedup of generation by draft length and acceptance, and the step by scale and by lag."""
    import matplotlib

    matplotlib.use("Agg")
    from dataclasses import replace

    import matplotlib.pyplot as plt
    import numpy as np

    from asyncspec.simulate.planner import by_acceptance, choices, outcome, quick_s

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    if job.method != "none":
        map_KA = by_acceptance(job, best.choice, ACCEPTANCES, DRAFT_LENGTHS)
        shown = left.imshow(map_KA, origin="lower", aspect="auto", cmap="viridis")
        for i, j in np.argwhere(~np.isnan(map_KA)):
            left.text(j, i, f"{map_KA[i, j]:.1f}", ha="center", va="center", color="white", fontsize=7)
        left.set_xticks(range(len(ACCEPTANCES)), [f"{a:g}" for a in ACCEPTANCES])
        left.set_yticks(range(len(DRAFT_LENGTHS)), DRAFT_LENGTHS)
        left.set_xlabel("acceptance length")
        left.set_ylabel("draft length k")
        left.set_title("speedup of generation")
        figure.colorbar(shown, ax=left)

    def step_s(changed: Job, speculating: bool) -> float:
        those = [c for c in choices(changed) if bool(c.draft_length) == speculating]
        first = sorted(those, key=lambda c: quick_s(changed, c))[:TRIED]
        return min((outcome(changed, c).step_s for c in first), default=float("nan"))

    per_node = job.gpu.gpus_per_node
    counts = [gpus for gpus in (int(scale * job.gpus) for scale in SCALES) if gpus >= 3 and gpus % per_node == 0]
    for axes, name, values, changed in (
        (middle, "GPUs", counts, lambda value: replace(job, gpus=value)),
        (right, "policy lag", LAGS, lambda value: replace(job, lag=value)),
    ):
        for speculating in (False, True) if job.method != "none" else (False,):
            label = "with speculation" if speculating else "without"
            axes.plot(values, [step_s(changed(value), speculating) for value in values], "o-", label=label)
        axes.set_xticks(values, map(str, values))
        axes.set_xlabel(name)
        axes.set_ylabel("seconds of a step")
        axes.set_ylim(0)
        axes.legend()
    middle.set_xscale("log", base=2)
    middle.set_xticks(counts, map(str, counts))
    middle.minorticks_off()
    figure.savefig(path, dpi=110)
    plt.close(figure)
