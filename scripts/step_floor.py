#!/usr/bin/env python3
"""Say what bounds a step of a run on CPU cores, and how far each actor is from its own floor.

    scripts/step_floor.py RUN

An actor's floor is the time that one thread needs for its matrix products alone, at the sizes at which the actor
multiplies: the trainer's pass forward and twice as much backward, the logprob actor's forward, and the generator's
rounds with as many rows as were live. Attention, norms, sampling, the optimizer and messages are what is above it. The
draft's own products are part of the generator's floor.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from rich.table import Table

from asyncspec import config as configuration
from asyncspec.console import terminal
from asyncspec.drafts import draft as drafts
from asyncspec.errors import UserError
from asyncspec.models import policy
from asyncspec.report.run import Run
from asyncspec.tasks.data import load_problems
from asyncspec.timing import whatif

TIMES = 30


def products(weights: list[torch.Tensor], rows: int) -> float:
    """Return the seconds that one thread needs to multiply this many rows by each of these matrices once."""
    inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


@torch.inference_mode()
def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: step_floor.py RUN")
    torch.set_num_threads(1)
    try:
        run = Run.read(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"step_floor.py: {error}")
    c, steps, rows = run.config, run.steps[whatif.SKIP :], run.rows[whatif.SKIP :]
    if not steps or len(steps) != len(rows):
        sys.exit(f"step_floor.py: {sys.argv[1]}: expected a timeline of more than {whatif.SKIP} steps")
    kinds, alone = (c.engine.kind, c.trainer.kind), (c.trainer.ranks, c.deployment.logprobs, c.deployment.generators)
    if kinds != ("torch", "torch") or alone != (1, 1, 1) or c.deployment.device == "cuda":
        sys.exit("step_floor.py: expected a run on CPUs with one trainer, one logprob actor and one embedded engine")
    model, shape = policy.load(configuration.resolve_path(c.model.path))
    trunk = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    head = [model.lm_head.weight]
    groups = [group for step in steps for group in step.groups]
    responses = sum(sum(group.response_tokens) for group in groups) / len(steps)
    problems = load_problems(c).training
    characters = statistics.fmean(len(problem.prompt) for problem in problems)  # a token each, in the shipped policy
    positions = int(responses + characters * len(groups) / len(steps))
    passes = max(1, round(positions / (c.trainer.tokens_per_pass or positions)))
    forward = passes * (products(trunk, positions // passes) + products(head, int(responses) // passes))
    speed = whatif.fitted(steps, c.engine.slots)
    verifications = sum(group.verifications for group in groups) / len(steps)
    proposed = sum(group.proposed for group in groups) / len(steps)
    generation = statistics.fmean(row["time/generation"] for row in rows)
    # Rounds: generation = rounds * fixed + verifications * each.
    rounds = max(1.0, (generation - verifications * speed.each) / speed.fixed)
    drafted = []
    if c.drafting and c.draft_directory:
        draft = drafts.load(c.speculation.method, configuration.resolve_path(c.draft_directory), shape, model)
        drafted = [p for name, p in draft.module.named_parameters() if p.ndim == 2 and "embed" not in name]
    live, length = verifications / rounds, proposed / verifications
    engine = rounds * products([*trunk, *head], max(1, int(live * (1 + length))))
    engine += rounds * length * products(drafted, max(1, int(live))) if drafted else 0.0
    step = statistics.fmean(row["time/step"] for row in rows)
    busy = {
        "trainer": statistics.fmean(row["time/train"] for row in rows),
        "logprob": statistics.fmean(row["time/logprob"] for row in rows),
        "generator": generation,
    }
    floors = {"trainer": 3 * forward, "logprob": forward, "generator": engine}
    table = Table(title=f"a step of {step:.2f} s, policy lag {c.policy_lag}", title_justify="left")
    for column in ("actor", "busy, s", "share of the step", "products alone, s", "busy over it"):
        table.add_column(column, justify="left" if column == "actor" else "right")
    for name, seconds in busy.items():
        floor = floors[name]
        table.add_row(name, f"{seconds:.2f}", f"{seconds / step:.0%}", f"{floor:.3f}", f"{seconds / floor:.1f}")
    terminal().print(table)
    print(f"{positions} positions in {passes} passes; {rounds:.0f} rounds of {live:.1f} responses, draft {length:.1f}")


if __name__ == "__main__":
    main()
