"""Fits the work of each piece of a run to its spans, so that runs with other settings can be simulated.

Everything comes from a run's config.yaml, timeline.jsonl and trace.json. On CPUs, work is processor time: what a piece
takes on a core of its own. The engine's rounds are fitted with a straight line in what a round has:

    fixed + live * row + k * (draft + live * draft_row) + (k > 0) * (verify + live * verify_row) + positions * position

`asyncspec simulate calibrate RUN` prints how far each fit is from what was measured.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncspec.config import Config, from_yaml
from asyncspec.errors import UserError
from asyncspec.timing import timeline
from asyncspec.wire.facts import ENTERING, GroupRecord, Rounds
from asyncspec.wire.messages import StepDone

TERMS = ("fixed", "row", "draft", "draft_row", "verify", "verify_row", "position")
SKIP = 2  # first steps, in which caches and libraries warm up
LONGEST = 15


class Fit(NamedTuple):
    """How far a fit is from what was measured: of each piece, the ratio of fitted to measured, at three quartiles."""

    pieces: int
    seconds: float  # measured, all pieces together
    low: float
    middle: float
    high: float


@dataclass
class Work:
    """The seconds of work of each piece."""

    round_s: dict[str, float]  # by the names in TERMS
    enter_s: float = 0.0  # a sequence gets a slot
    swap_s: float = 0.0  # a generator swaps in a policy
    swap_draft_s: float = 0.0
    reward_s: float = 0.0  # from a group's end until its rewards are known
    logprob_s: float = 0.0  # a group
    logprob_token_s: float = 0.0  # each of its tokens
    logprob_swap_s: float = 0.0
    group_s: float = 0.0  # the trainer takes a group
    pass_s: float = 0.0  # a pass
    token_s: float = 0.0  # each of its tokens
    update_s: float = 0.0  # the optimizer's step and the publication
    adapt_s: float = 0.0  # the draft adapter learns from a group
    adapted: float = 0.0  # groups that it learns from in a step
    other_s: float = 0.0  # everything else, in a step
    delivery_s: float = 0.0  # from a publication until a generator has the version
    retention: list[float] = field(default_factory=list)  # acceptance rate by position, given all before it
    fits: dict[str, Fit] = field(default_factory=dict)

    def round_seconds(self, live, k, positions):
        """Return the seconds of a round. The arguments may be arrays; positions: of all live sequences."""
        return sum(self.round_s[name] * value for name, value in zip(TERMS, terms(live, k, positions)))

    def emitted(self, k: int) -> float:
        """Return the expected tokens of a sequence in a round."""
        return 1.0 + float(np.cumprod(self.retention[:k]).sum())


def terms(live, k, positions) -> tuple:
    """Return what each of TERMS is multiplied by."""
    verifies = (np.asarray(k) > 0) * 1.0
    return np.ones_like(verifies), live, k, k * np.asarray(live), verifies, verifies * live, positions


class Trace(NamedTuple):
    """A span of trace.json."""

    actor: str
    name: str
    start: float  # seconds of the file's clock
    seconds: float
    cpu: float
    step: int
    ticket: int
    rounds: list[Rounds]


def spans(run_dir: Path) -> Iterator[Trace]:
    """Yield the spans of a run's trace.json, up to a line that a crash cut short."""
    with open(run_dir / "trace.json", encoding="utf-8") as lines:
        for line in lines:
            line = line.strip().rstrip(",")
            if not line.startswith("{"):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                return
            if event["ph"] != "X" or "device" in event["args"]:
                continue
            args = event["args"]
            yield Trace(
                event["cat"],
                event["name"],
                1e-6 * event["ts"],
                1e-6 * event["dur"],
                1e-3 * args.get("cpu_ms", 0.0),
                args.get("step", -1),
                args.get("ticket", -1),
                [Rounds(*each) for each in args.get("rounds", ())],
            )


def fit_rounds(rounds: Sequence[Rounds]) -> tuple[dict[str, float], Fit]:
    """Fit TERMS to rounds, weighted so that each second counts alike in proportion."""
    from scipy.optimize import nnls

    cells: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(4))
    for each in rounds:
        if each.draft_length != ENTERING:
            cells[each.live, each.draft_length] += (each.count, each.seconds, each.tokens, each.positions)
    live, k = (np.array(column, float) for column in zip(*cells))
    count, measured, _, positions = np.array(list(cells.values())).T
    mean, at = measured / count, positions / count
    rows = np.stack(np.broadcast_arrays(*terms(live, k, at)), axis=1).astype(float)
    # The relative error of each cell counts, by the square root of its seconds.
    weight = np.sqrt(measured) / mean
    found, _ = nnls(rows * weight[:, None], mean * weight)
    return dict(zip(TERMS, found.tolist())), _quality(rows @ found * count, measured)


def _quality(fitted: np.ndarray, measured: np.ndarray) -> Fit:
    """Return the quality of a fit; quartiles are weighted by seconds."""
    ratio, order = fitted / measured, np.argsort(fitted / measured)
    at = np.cumsum(measured[order]) / measured.sum()
    quartiles = [float(ratio[order][min(len(order) - 1, np.searchsorted(at, q))]) for q in (0.25, 0.5, 0.75)]
    return Fit(len(measured), float(measured.sum()), *quartiles)


def _line(at: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, Fit]:
    """Fit fixed + each * at, neither below 0."""
    from scipy.optimize import nnls

    x, y = np.array(at, float), np.array(seconds, float)
    (fixed, each), _ = nnls(np.stack([np.ones_like(x), x], axis=1), y)
    return float(fixed), float(each), _quality(fixed + each * x, y)


def trained_tokens(group: GroupRecord) -> float:
    """Return the tokens that the trainer passes over for a group: none without a signal."""
    return sum(group.response_tokens) if group.rewards_differ else 0.0


def passes(step: StepDone, pass_tokens: float) -> dict[int, float]:
    """Return the tokens of the passes that a step's groups fill, by the ticket of the group that fills one."""
    found, pool = {}, 0.0
    for group in sorted(step.groups, key=lambda g: g.place):
        pool += trained_tokens(group)
        if pool >= pass_tokens:
            found[group.ticket_id], pool = pass_tokens, pool - pass_tokens
    found[-1] = pool
    return found


def calibrate(run_dir: Path) -> Work:
    """Fit a run's pieces of work.

    Raises:
        UserError: the run lacks what is needed, and the message says what.
    """
    config, steps = read_config(run_dir), read_steps(run_dir)
    if not (run_dir / "trace.json").exists():
        raise UserError(f"{run_dir}: expected a run with deployment.record=true, which has trace.json")
    by_name: dict[str, list[Trace]] = defaultdict(list)
    for span in spans(run_dir):
        by_name[span.name].append(span)
    rounds = [each for span in by_name["generate"] for each in span.rounds]
    if not rounds:
        raise UserError(f"{run_dir}: its engine measured no rounds; expected engine.kind=torch")
    groups = [group for step in steps for group in step.groups]
    found, fits = fit_rounds(rounds)
    work = Work(found, fits={"rounds": fits})
    entering = [each for each in rounds if each.draft_length == ENTERING]
    if sequences := sum(each.count for each in entering):
        work.enter_s = sum(each.seconds for each in entering) / sequences
    _fit_generator(work, by_name, groups)
    _fit_logprob(work, by_name, groups)
    _fit_trainer(work, by_name, steps, config)
    if adapting := by_name["adapt"]:
        work.adapt_s = statistics.fmean(span.cpu for span in adapting)
        work.adapted = len(adapting) / len(steps)
    return work


def read_config(run_dir: Path) -> Config:
    try:
        return from_yaml((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{run_dir}: expected a run's directory, with config.yaml") from None


def read_steps(run_dir: Path) -> list[StepDone]:
    try:
        steps = [step for step in timeline.read(run_dir) if not step.skipped]
    except FileNotFoundError:
        raise UserError(f"{run_dir}: expected a run's directory, with timeline.jsonl") from None
    if len(steps) < SKIP + 3:
        raise UserError(f"{run_dir}: {len(steps)} steps; expected at least {SKIP + 3}")
    return steps


def _fit_generator(work: Work, by_name: dict[str, list[Trace]], groups: Sequence[GroupRecord]) -> None:
    for kind, name in (("policy", "swap_s"), ("draft", "swap_draft_s")):
        if of_kind := [s.cpu for s in by_name[f"swap {kind}"] if s.actor.startswith("generator")]:
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


def _fit_logprob(work: Work, by_name: dict[str, list[Trace]], groups: Sequence[GroupRecord]) -> None:
    tokens = {group.ticket_id: sum(group.response_tokens) for group in groups}
    scored = [span for span in by_name["logprob"] if span.ticket in tokens]
    work.logprob_s, work.logprob_token_s, work.fits["logprob"] = _line(
        [tokens[span.ticket] for span in scored], [span.cpu for span in scored]
    )
    if offered := by_name["offer"]:  # it makes the draft's supervision
        work.logprob_s += sum(span.cpu for span in offered) / len(scored)
    if of_kind := [s.cpu for s in by_name["swap policy"] if s.actor.startswith("logprob")]:
        work.logprob_swap_s = statistics.fmean(of_kind)


def _fit_trainer(work: Work, by_name: dict[str, list[Trace]], steps: Sequence[StepDone], config: Config) -> None:
    by_step: dict[int, list[Trace]] = defaultdict(list)
    for span in by_name["train"]:
        by_step[span.step].append(span)
    idle, at, took, updates = [], [], [], []
    for step in steps[SKIP:]:
        filled = passes(step, config.trainer.tokens_per_pass)
        for span in by_step[step.step]:
            if span.ticket >= 0 and span.ticket in filled:
                at.append(filled[span.ticket])
                took.append(span.cpu)
            elif span.ticket >= 0:
                idle.append(span.cpu)
            else:
                updates.append((filled[-1], span.cpu))
    work.group_s = statistics.median(idle) if idle else 0.0
    last, of_last = zip(*updates)
    fixed, each, work.fits["updates"] = _line(last, of_last)
    work.token_s, work.update_s = each, fixed
    if at:  # a full pass shows what a pass costs beyond its tokens
        work.pass_s = max(0.0, statistics.median(took) - work.group_s - each * statistics.fmean(at))
        work.update_s = max(0.0, fixed - work.pass_s)
    work.update_s += sum(span.cpu for span in by_name["prepare"]) / len(steps)


def save(work: Work, path: Path) -> None:
    path.write_text(json.dumps(asdict(work), indent=1) + "\n")


def read(path: Path) -> Work:
    """Return what `save` has written.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found = Work(**json.loads(path.read_text(encoding="utf-8")))
        found.fits = {name: Fit(*fit) for name, fit in found.fits.items()}
        return found
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path}: damaged; try: asyncspec simulate calibrate {path.parent}") from None
