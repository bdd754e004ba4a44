"""Fits the work of each piece of a run to its spans, so that runs with other settings can be simulated.

Everything comes from a run's config.yaml, timeline.jsonl and trace.json. On CPUs, work is processor time: what a piece
takes on a core of its own. On GPUs it is the time of its span.

`asyncspec simulate calibrate RUN` prints how far each fit is from what was measured.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST
from asyncspec.config import Config, from_yaml
from asyncspec.errors import UserError
from asyncspec.simulate.fitted_rounds import Fit, FittedRounds, fit_rounds, quality
from asyncspec.timing import timeline
from asyncspec.timing.exporters import read_trace
from asyncspec.timing.metrics import read_rows
from asyncspec.wire.facts import ENTERING, GroupRecord, Rounds
from asyncspec.wire.messages import Span, StepDone

SKIP = 2  # first steps, in which caches and libraries warm up


@dataclass
class Work:
    """The seconds of work of each piece."""

    rounds: FittedRounds
    enter_s: float = 0.0  # a sequence gets a slot
    finish_s: float = 0.0  # a generator's other work, for each group
    swap_s: float = 0.0  # a generator swaps in a policy
    swap_draft_s: float = 0.0
    reward_s: float = 0.0  # from a group's end until its rewards are known
    logprob_s: float = 0.0  # a group
    logprob_token_s: float = 0.0  # each of its tokens
    group_s: float = 0.0  # the trainer takes a group
    pass_s: float = 0.0  # a pass
    token_s: float = 0.0  # each of its tokens
    response_s: float = 0.0  # each of its responses
    update_s: float = 0.0  # the optimizer's step and the publication
    adapt_s: float = 0.0  # the draft adapter learns from a group
    adapted: float = 0.0  # groups that it learns from in a step
    control_s: float = 0.0  # whatever else the processes do, for each group
    delivery_s: float = 0.0  # from a publication until a generator has the version
    sharing: float = 1.0  # of the cores' time that is used while more actors are busy than there are cores
    retention: list[float] = field(default_factory=list)  # acceptance rate by position, given all before it
    fits: dict[str, Fit] = field(default_factory=dict)

    def emitted(self, k: int) -> float:
        """Return the expected tokens of a sequence in a round."""
        return 1.0 + float(np.cumprod(self.retention[:k]).sum())

    def beyond(self, k: int) -> float:
        """Return by how many tokens the last round of a response overshoots its end on average."""
        reaches = np.append(1.0, np.cumprod(self.retention[:k]))  # the chance of more than 0, 1, ... tokens
        squares = float((reaches * (2 * np.arange(k + 1) + 1)).sum())
        return (squares / float(reaches.sum()) - 1) / 2


class Piece(NamedTuple):
    """A span, and the seconds of its work."""

    actor: str
    span: Span
    work: float


def _line(at: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, Fit]:
    """Fit fixed + each * at, neither below 0."""
    from scipy.optimize import nnls

    x, y = np.array(at, float), np.array(seconds, float)
    (fixed, each), _ = nnls(np.stack([np.ones_like(x), x], axis=1), y)
    return float(fixed), float(each), quality(fixed + each * x, y)


class Pass(NamedTuple):
    """A pass of the trainer. ticket: the group that fills it; -1: the end of its step does."""

    ticket: int
    tokens: float
    responses: float


def trained_tokens(group: GroupRecord) -> int:
    """Return the tokens that the trainer passes over for a group: none without a signal."""
    return sum(group.response_tokens) + group.prompt_tokens if group.rewards_differ else 0


def passes(step: StepDone, pass_tokens: float) -> list[Pass]:
    """Return the passes of a step. What does not fill one is taken in the last one."""
    found, pool, responses = [], 0.0, 0.0
    for group in sorted(step.groups, key=lambda g: g.place):
        pool += trained_tokens(group)
        responses += len(group.response_tokens) * group.rewards_differ
        while pool >= pass_tokens:
            share = pass_tokens / pool
            found.append(Pass(group.ticket_id, pass_tokens, responses * share))
            pool, responses = pool - pass_tokens, responses * (1 - share)
    return [*found, Pass(-1, pool, responses)]


def calibrate(run_dir: Path) -> Work:
    """Fit a run's pieces of work.

    Raises:
        UserError: the run lacks what is needed, and the message says what.
    """
    config, steps = read_config(run_dir), read_steps(run_dir)
    if config.environment.name:
        raise UserError(f"{run_dir}: environment.name={config.environment.name!r}; expected a run without environments")
    try:
        return _fitted(run_dir, config, steps)
    except FileNotFoundError as error:
        raise UserError(
            f"{run_dir}: expected {Path(error.filename).name} in it, as a run with deployment.record=true"
        ) from None
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{run_dir}: its files are damaged or cut short: {error}") from None


def _fitted(run_dir: Path, config: Config, steps: Sequence[StepDone]) -> Work:
    on_cpu, by_name = config.deployment.device == "cpu", defaultdict(list)
    for actor, span in read_trace(run_dir):
        by_name[span.name].append(Piece(actor, span, span.cpu if on_cpu else span.end - span.start))
    rounds = [each for piece in by_name["generate"] for each in piece.span.rounds]
    if not any(each.tokens for each in rounds):
        raise UserError(f"{run_dir}: its engine measured no rounds; expected engine.kind=torch")
    traced = len({piece.span.step for piece in by_name["train"]})
    if traced < len(steps) or not by_name["logprob"]:
        raise UserError(f"{run_dir}: {traced} steps in trace.json; expected {len(steps)}, as in timeline.jsonl")
    groups = [group for step in steps for group in step.groups]
    found, fits = fit_rounds(rounds)
    work = Work(found, fits={"rounds": fits})
    entering = [each for each in rounds if _enters(each)]
    if sequences := sum(each.count for each in entering):
        work.enter_s = sum(each.seconds for each in entering) / sequences
        # The span in which the engine times itself has other work.
        usual = [p for p in by_name["generate"] if all(each.tokens > 0 or _enters(each) for each in p.span.rounds)]
        other = sum(piece.work - sum(each.seconds for each in piece.span.rounds) for piece in usual)
        ended = sum(each.count for piece in usual for each in piece.span.rounds if _enters(each))
        work.finish_s = max(0.0, other) * config.rl.group_size / max(1, ended)
    _fit_generator(work, by_name, groups)
    _fit_logprob(work, by_name, groups)
    _fit_trainer(work, by_name, steps, config)
    if adapting := by_name["adapt"]:
        work.adapt_s = statistics.fmean(piece.work for piece in adapting)
        work.adapted = len(adapting) / len(steps)
    _fit_rest(work, by_name, run_dir, len(groups), len(steps))
    return work


def _enters(rounds: Rounds) -> bool:
    return rounds.draft_length == ENTERING


def read_config(run_dir: Path) -> Config:
    """Return a run's configuration.

    Raises:
        UserError: the directory has none.
    """
    try:
        return from_yaml((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{run_dir}: expected a run's directory, with config.yaml") from None


def read_steps(run_dir: Path) -> list[StepDone]:
    """Return a run's steps, without those that were skipped.

    Raises:
        UserError: they are too few, or the directory has none.
    """
    try:
        steps = [step for step in timeline.read(run_dir) if not step.skipped]
    except FileNotFoundError:
        raise UserError(f"{run_dir}: expected a run's directory, with timeline.jsonl") from None
    if len(steps) < SKIP + 3:
        raise UserError(f"{run_dir}: {len(steps)} steps; expected at least {SKIP + 3}")
    return steps


def _fit_generator(work: Work, by_name: dict[str, list[Piece]], groups: Sequence[GroupRecord]) -> None:
    for kind, name in (("policy", "swap_s"), ("draft", "swap_draft_s")):
        if of_kind := [piece.work for piece in by_name[f"swap {kind}"] if piece.actor.startswith("generator")]:
            setattr(work, name, statistics.fmean(of_kind))
    work.reward_s = statistics.median(
        sum(phase.end - phase.start for phase in group.phases if phase.name == "reward") for group in groups
    )
    reached, accepted = np.zeros(LONGEST), np.zeros(LONGEST)
    for group in groups:
        reached[: len(group.reached_at)] += group.reached_at
        accepted[: len(group.accepted_at)] += group.accepted_at
    rate = 1.0
    for came, passed in zip(reached, accepted):  # a position that few reached is like the one before it
        rate = (16 * rate + passed) / (16 + came)
        work.retention.append(float(rate))


def _fit_logprob(work: Work, by_name: dict[str, list[Piece]], groups: Sequence[GroupRecord]) -> None:
    tokens = {group.ticket_id: sum(group.response_tokens) for group in groups}
    scored = [piece for piece in by_name["logprob"] if piece.span.ticket in tokens]
    work.logprob_s, work.logprob_token_s, work.fits["logprob"] = _line(
        [tokens[piece.span.ticket] for piece in scored], [piece.work for piece in scored]
    )
    if offered := by_name["offer"]:  # it makes the draft's supervision
        work.logprob_s += sum(piece.work for piece in offered) / len(scored)


def _fit_trainer(work: Work, by_name: dict[str, list[Piece]], steps: Sequence[StepDone], config: Config) -> None:
    """Fit pass + tokens * token + responses * response, and update at the end of a step, to the trainer's spans."""
    by_step: dict[int, list[Piece]] = defaultdict(list)
    for piece in by_name["train"]:
        by_step[piece.span.step].append(piece)
    idle, rows, took = [], [], []
    for step in steps[SKIP:]:
        filled: dict[int, list[Pass]] = defaultdict(list)
        for each in passes(step, config.trainer.tokens_per_pass):
            filled[each.ticket].append(each)
        for piece in by_step[step.step]:
            those, ends = filled.get(piece.span.ticket, ()), piece.span.ticket < 0
            if not those:
                idle.append(piece.work)
                continue
            tokens, responses = sum(each.tokens for each in those), sum(each.responses for each in those)
            rows.append((sum(each.tokens > 0 for each in those), tokens, responses, float(ends)))
            took.append(piece.work)
    work.group_s = statistics.median(idle) if idle else 0.0
    found, work.fits["passes and updates"] = _robust(np.array(rows, float), np.array(took))
    work.pass_s, work.token_s, work.response_s, work.update_s = found
    work.update_s += sum(piece.work for piece in by_name["prepare"]) / len(steps)


def _robust(rows: np.ndarray, took: np.ndarray) -> tuple[list[float], Fit]:
    """Fit rows @ x to `took` with x not below 0, and again without what is far off."""
    from scipy.optimize import nnls

    kept = np.ones(len(took), bool)
    for _ in range(3):
        found, _ = nnls(rows[kept], took[kept])
        off = np.abs(rows @ found - took)
        kept = off <= 4 * np.median(off) + 1e-9
    return found.tolist(), quality(rows[kept] @ found, took[kept])


def _fit_rest(work: Work, by_name: dict[str, list[Piece]], run_dir: Path, groups: int, steps: int) -> None:
    """Fit what is in no span: how long a version travels, and what the processes do besides."""
    published = {piece.span.version: piece.span.end for piece in by_name["prepare"]}  # the last one of a step
    travels = [
        piece.span.start - published[piece.span.version - 1]
        for piece in by_name["swap policy"]
        if piece.actor.startswith("generator") and piece.span.version - 1 in published
    ]
    work.delivery_s = max(0.0, statistics.median(travels)) if travels else 0.0
    rows = read_rows(run_dir / "metrics.jsonl")[SKIP:]
    names = [key for key in rows[-1] if key.startswith("process/") and key.endswith("_cpu_s")]
    used = sum(rows[-1][name] - rows[0].get(name, rows[-1][name]) for name in names) / max(1, len(rows) - 1)
    shown = sum(piece.work for pieces in by_name.values() for piece in pieces) / steps
    work.control_s = max(0.0, used - shown) * steps / groups


def save(work: Work, path: Path) -> None:
    path.write_text(json.dumps(asdict(work), indent=1) + "\n")


def read(path: Path) -> Work:
    """Return what `save` has written.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found = Work(**json.loads(path.read_text(encoding="utf-8")))
        found.rounds = FittedRounds(**found.rounds)
        found.fits = {name: Fit(*fit) for name, fit in found.fits.items()}
        _check(found)
        return found
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(f"{path}: damaged; try: asyncspec simulate calibrate {path.parent}") from None


def _check(work: Work) -> None:
    """Check that numbers are what a fit gives.

    Raises:
        ValueError, TypeError: some are not.
    """
    numbers = [value for value in vars(work).values() if not isinstance(value, FittedRounds | list | dict)]
    cost = work.rounds
    lists = (cost.lives, cost.ks, cost.positions, cost.weights, work.retention, *cost.table_s)
    held = np.array([*numbers, *(value for each in lists for value in each)], dtype=float)
    shapes = len(cost.table_s) == len(cost.positions) == len(cost.lives)
    rows = all(len(row) == len(cost.ks) for row in cost.table_s)
    weights = len(cost.weights) == len(cost.names) and bool(work.retention)
    values = bool(np.isfinite(held).all() and (held >= 0).all()) and 0 < work.sharing <= 1
    if not (shapes and rows and weights and values and min(cost.lives, default=1) >= 1 and max(work.retention) <= 1):
        raise ValueError("unlikely numbers")
