"""rollouts.jsonl: rollouts for people to read, with what trainer and generator thought of each token.

The controller marks the tickets whose rollouts are written (actors/tickets.py). The trainer, or for an evaluation the
generator, attaches a `Shown` to its report of such a group. The controller turns tokens into text and writes one JSON
object for each rollout:

    step, ticket, sample, evaluation, data_source
    prompt, response, answer, reward, advantage, truncated, tokens
    gap_mean, gap_max            mean and largest distance of a token's logprobs, proximal and behavior
    environment_tokens           how many of the tokens an environment wrote; their gaps are 0
    version_min, version_max, versions   versions: [[version, tokens], ...], in order; -1: an environment's
    pieces, gaps                 text and proximal - behavior of each of the first MOST_TOKENS tokens

An evaluation has no advantage and no gaps; its step is the version that was evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from asyncspec.files import LineFile, LineFiles, replace_file
from asyncspec.wire import messages as m
from asyncspec.wire.facts import sampled
from asyncspec.wire.shown import Sample, Shown

FILE = "rollouts.jsonl"
MOST_TOKENS = 2000  # of a rollout whose tokens are written one by one: about 40 kB
COLUMNS = ("step", "prompt", "response", "answer", "reward", "advantage", "truncated", "tokens", "gap_mean", "gap_max")

Decode = Callable[[Sequence[int], bool], tuple[str, list[str]]]  # tokens, truncated -> the response, each token's text


def shown(
    ticket: m.Ticket,
    arrays: m.Arrays,
    rewards: Sequence[float | None],
    truncated: Sequence[bool],
    advantages: Sequence[float] | None = None,
) -> Shown:
    """Return a group as it is reported to the controller.

    Args:
        arrays: of the group. Without `proximal` the rollouts have no gaps.
    """
    ends = np.cumsum(arrays["lengths"])
    row = json.loads(ticket.row) if ticket.row else {}
    samples = []
    sampled_T = sampled(arrays)
    for sample, (begin, end) in enumerate(zip(ends - arrays["lengths"], ends)):
        gaps = own = None
        if "proximal" in arrays:
            gaps = arrays["proximal"][begin:end].astype(np.float64) - arrays["behavior"][begin:end]
            gaps = np.where(sampled_T[begin:end], gaps, 0.0)
            own = np.abs(gaps[sampled_T[begin:end]])
        samples.append(
            Sample(
                tokens=arrays["tokens"][begin:end].tolist(),
                reward=None if (reward := rewards[sample]) is None else float(reward),
                truncated=bool(truncated[sample]),
                versions=[(int(v), len(list(same))) for v, same in groupby(arrays["versions"][begin:end].tolist())],
                advantage=None if advantages is None else float(advantages[sample]),
                gap_mean=None if own is None else float(own.mean()),
                gap_max=None if own is None else float(own.max()),
                gaps=[] if gaps is None else [round(gap, 4) for gap in gaps[:MOST_TOKENS].tolist()],
            )
        )
    return Shown(
        ticket_id=ticket.ticket_id,
        step=ticket.step,
        evaluation=ticket.evaluation,
        prompt=ticket.prompt,
        answer=ticket.answer,
        data_source=str(row["data_source"]) if isinstance(row, dict) and row.get("data_source") is not None else "",
        samples=samples,
    )


def rows_of(group: Shown, decode: Decode) -> list[dict]:
    """Return the rows of a group's rollouts."""
    rows = []
    for number, sample in enumerate(group.samples):
        response, pieces = decode(sample.tokens, sample.truncated)
        versions = [version for version, _ in sample.versions if version >= 0]
        rows.append(
            {
                "step": group.step,
                "ticket": group.ticket_id,
                "sample": number,
                "evaluation": group.evaluation,
                "data_source": group.data_source,
                "prompt": group.prompt,
                "response": response,
                "answer": group.answer,
                "reward": sample.reward,
                "advantage": sample.advantage,
                "truncated": sample.truncated,
                "tokens": len(sample.tokens),
                "environment_tokens": sum(count for version, count in sample.versions if version < 0),
                "gap_mean": sample.gap_mean,
                "gap_max": sample.gap_max,
                "version_min": min(versions),
                "version_max": max(versions),
                "versions": [list(run) for run in sample.versions],
                "pieces": pieces[:MOST_TOKENS],
                "gaps": sample.gaps,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return rows as a table of COLUMNS, for boards."""
    return [[row[column] for column in COLUMNS] for row in rows]


class RolloutFile:
    """Writer of rollouts.jsonl. It is for people: it is dropped when it cannot be written."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None], first_step: int = 0) -> None:
        """
        Args:
            tell: called with one line when the file cannot be written.
            first_step: the step that the run starts or resumes with. Rollouts of this step and later ones, which an
                earlier part of the run wrote, are removed.
        """
        alone = LineFiles(run_dir, lambda failure: tell(f"{failure}; the rest goes on without it"), spare=0)
        self._file: LineFile | None = None
        try:
            if (run_dir / FILE).exists():
                kept = [
                    json.dumps(row) + "\n"
                    for row in read(run_dir)
                    if row["step"] < first_step or (row.get("evaluation") and row["version_max"] <= first_step)
                ]
                replace_file(run_dir / FILE, "".join(kept))
            self._file = alone.open(FILE)
        except OSError as error:
            alone.fail(run_dir / FILE, error)

    def write(self, rows: Sequence[dict]) -> None:
        if self._file is not None:
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read(run_dir: Path) -> Iterator[dict]:
    """Yield the rollouts of a run, up to a line that a crash cut short; none if it has no such file."""
    if not (run_dir / FILE).is_file():
        return
    with open(run_dir / FILE, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                return
            yield row
