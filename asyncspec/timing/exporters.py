"""What a run leaves behind: metrics.jsonl and TensorBoard, trace.json, and lines on the console."""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from asyncspec.console import terminal
from asyncspec.messages import GroupRecord, Span, StepDone


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, up to one that a crash cut short or that is damaged."""
    rows: list[dict] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


class RunMetrics:
    """metrics.jsonl, one object a step, and the same numbers as TensorBoard scalars."""

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        """
        Args:
            first_step: what an earlier part of the run wrote of this step and later ones is void.
        """
        from torch.utils.tensorboard import SummaryWriter

        path = run_dir / "metrics.jsonl"
        rows = [row for row in read_rows(path) if row["step"] < first_step] if path.exists() else []
        if path.exists():
            partial = path.with_name("metrics.jsonl.partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
            partial.replace(path)
        self.last = rows[-1] if rows else None
        # For the table at the end; whole rows of a long run would fill the memory.
        self.columns = {
            key: array("f", [math.nan if row[key] is None else row[key] for row in rows])
            for key in (*(key for _, key in TABLE_ROWS), "lag/max")
        }
        known = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
        self.first_accuracy = known[0] if known else None
        self._file = open(path, "a")
        self._board = SummaryWriter(str(run_dir / "tb"), purge_step=first_step or None)
        self._held: dict | None = None

    def write(self, row: dict, final: bool = False) -> None:
        """Write a step's row; the final one waits for the evaluation of the last version."""
        self._held = self.last = row
        for key, column in self.columns.items():
            column.append(row[key])
        if not final:
            self.flush()

    def evaluated(self, accuracy: dict) -> None:
        """Note an evaluation: its eval/ fields."""
        if self._held is not None and self._held["policy_version"] == accuracy["eval/policy_version"]:
            self._held |= accuracy
            self.flush()
        self._board.add_scalar("eval/accuracy_by_version", accuracy["eval/accuracy"], accuracy["eval/policy_version"])

    def picture(self, steps: Sequence[StepDone]) -> None:
        """What the trainer and each group did during some steps, as a figure; drawn in a thread."""

        def draw() -> None:
            from asyncspec.report.figures import gantt

            self._board.add_figure("time/gantt", gantt(steps), steps[-1].step)

        threading.Thread(target=draw, name="gantt", daemon=True).start()

    def flush(self) -> None:
        if self._held is None:
            return
        row, self._held = self._held, None
        # A number that is not finite is no JSON; null says "unknown".
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        for key, value in clean.items():
            if isinstance(value, (int, float)) and key not in ("step", "policy_version"):
                self._board.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self.flush()
        self._file.close()
        self._board.close()


FLOW = {"logprob": "t", "train": "f"}  # spans that a ticket's arrow passes through, or ends in


class TraceFile:
    """trace.json in Chrome's trace event format (opens in Perfetto): one track an actor, another for its GPU, one async
    slice a ticket, an arrow along its way.

    Written as events come; a file cut short by a crash still opens, the format allows the closing bracket to be
    missing.
    """

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        """
        Args:
            first_step: of a run that goes on; its times are of another clock, so each part has a file of its own.
        """
        name, number = "trace.json" if not first_step else f"trace-from-step-{first_step}.json", 1
        while (run_dir / name).exists():
            number += 1
            name = f"trace-from-step-{first_step}-{number}.json"
        self._file = open(run_dir / name, "w")
        self._file.write("[\n")
        self._tracks: dict[str, int] = {}
        self._origin = time.monotonic()
        self._first = True

    def write(self, actor: str, spans: Sequence[Span]) -> None:
        for span in spans:
            args = {k: getattr(span, k) for k in ("step", "ticket", "version") if getattr(span, k) >= 0}
            if span.ticket >= 0 and span.name in FLOW and not span.device:
                self._flow(FLOW[span.name], span.ticket, actor, span.start)
            track = f"{actor} {span.device}" if span.device else actor
            args |= {"device": span.device} if span.device else {}
            self._event(
                {
                    "name": span.name,
                    "ph": "X",
                    "pid": 1,
                    "tid": self._track(track),
                    "cat": actor,
                    "ts": self._us(span.start),
                    "dur": round((span.end - span.start) * 1e6, 1),
                    "args": args,
                }
            )

    def write_group(self, step: int, record: GroupRecord) -> None:
        """The way of a trained ticket through the actors, as nested async slices."""
        common = {"cat": "ticket", "id": record.ticket_id, "pid": 1, "tid": self._track("tickets")}
        args = {"step": step, "versions": [record.version_min, record.version_max], "reward": record.reward_mean}
        outer = {"name": f"ticket {record.ticket_id}", "args": args, **common}
        self._event({"ph": "b", "ts": self._us(record.phases[0].start), **outer})
        for phase in record.phases:
            self._event({"ph": "b", "name": phase.name, "ts": self._us(phase.start), **common})
            self._event({"ph": "e", "name": phase.name, "ts": self._us(phase.end), **common})
        self._event({"ph": "e", "ts": self._us(record.phases[-1].end), **outer})
        self._flow("s", record.ticket_id, record.generator, max(p.end for p in record.phases if p.name == "generate"))

    def _flow(self, phase: str, ticket: int, actor: str, at: float) -> None:
        """A piece of the arrow along a ticket's way: from its generator ("s") through logprob ("t") to the trainer
        ("f").
        """
        self._event(
            {
                "ph": phase,
                "name": "ticket",
                "cat": "way",
                "id": ticket,
                "pid": 1,
                "tid": self._track(actor),
                "ts": self._us(at),
                **({"bp": "e"} if phase == "f" else {}),
            }
        )

    def close(self, clock_error_s: float = 0.0) -> None:
        """End the file, with a word on how far apart the clocks behind the tracks may be."""
        text = f"clocks agree within {1e6 * clock_error_s:.0f} us" if clock_error_s else "one clock"
        self._event({"name": "process_labels", "ph": "M", "pid": 1, "args": {"labels": text, "origin_s": self._origin}})
        self._file.write("\n]\n")
        self._file.close()

    def _us(self, seconds: float) -> float:
        return round((seconds - self._origin) * 1e6, 1)

    def _track(self, actor: str) -> int:
        if actor not in self._tracks:
            self._tracks[actor] = len(self._tracks) + 1
            self._event(
                {"name": "thread_name", "ph": "M", "pid": 1, "tid": self._tracks[actor], "args": {"name": actor}}
            )
        return self._tracks[actor]

    def _event(self, event: dict) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False


RESULTS = (
    "metrics.jsonl",
    "timeline.jsonl",
    "tb/",
    "trace.json",
    "ledger.jsonl",
    "logs/",
    "checkpoint/",
    "checkpoints/",
)
TABLE_ROWS = (
    ("data", "time/data"),
    ("transport", "time/transport"),
    ("prepare (weight sync)", "time/prepare"),
    ("admission by lag", "time/admission"),
    ("exposed generation", "time/exposed_generation"),
    ("exposed reward", "time/exposed_reward"),
    ("exposed logprob", "time/exposed_logprob"),
    ("recovery", "time/recovery"),
    ("train", "time/train"),
    ("other", "time/other"),
    ("step", "time/step"),
    ("generation, hidden or not", "time/generation"),
    ("logprob, hidden or not", "time/logprob"),
)


class Console:
    """Lines for the person who watches: one a step, a table at the end; on a terminal, bars below them for steps,
    queues and lag.
    """

    def __init__(self, config, run_dir: Path, first_step: int = 0) -> None:
        self.config, self.run_dir, self.first_step = config, run_dir, first_step
        self._out = terminal(soft_wrap=True)
        self._started = time.monotonic()
        self._filled: float | None = None  # when the first step ended
        self._accuracies: list[float] = []
        k = f"{config.speculation.method}, k={config.speculation.draft_length}" if config.drafting else "no speculation"
        self._bars: Progress | None = None
        self.line(
            f"asyncspec: {config.steps} steps of {config.rl.groups_per_step} prompts x {config.rl.group_size} samples, "
            f"policy lag {config.policy_lag}, {k}, seed {config.seed} -> {run_dir}"
        )

    def resumed(self, metrics: RunMetrics) -> None:
        """Say where a run goes on that was begun before; its first accuracy was measured then."""
        if metrics.first_accuracy is not None:
            self._accuracies = [metrics.first_accuracy, metrics.last["eval/accuracy"]]
        self.line(f"going on from version {self.first_step}, with {self.first_step} steps trained")

    def line(self, text: str) -> None:
        self._out.print(text)

    def status(self, steps: int, generating: int, generated: int, lag: int) -> None:
        """What the bars show; plain output has none.

        Args:
            steps: trained so far.
            generating, generated: tickets in a generator, and past it but not trained.
            lag: versions that the tickets of the newest step issued are ahead of the policy.
        """
        if not self._out.is_terminal:
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description:>12}"),
                BarColumn(40),
                MofNCompleteColumn(),
                console=self._out,
                refresh_per_second=4,
                transient=True,
            )
            admitted = (self.config.policy_lag + 1) * self.config.rl.groups_per_step
            for name, total in (
                ("steps", self.config.steps),
                ("generating", admitted),
                ("generated", admitted),
                ("lag", self.config.policy_lag),
            ):
                self._bars.add_task(name, total=total)
            self._bars.start()
        for task, value in zip(self._bars.task_ids, (steps, generating, generated, lag)):
            self._bars.update(task, completed=value)

    def evaluated(self, accuracy: dict, rollouts: int) -> None:
        self._accuracies.append(accuracy["eval/accuracy"])
        oldest, newest = accuracy["eval/policy_version"], accuracy["eval/policy_version_max"]
        versions = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        self.line(f"held-out accuracy {self._accuracies[-1]:.1%} with {versions} ({rollouts} rollouts)")

    def step(self, row: dict) -> None:
        done = row["step"] + 1
        if self._filled is None:  # the first step holds the filling of the pipeline, and tells nothing of the others
            self._filled, left = time.monotonic(), ""
        else:
            seconds = int((time.monotonic() - self._filled) / (done - self.first_step - 1) * (self.config.steps - done))
            left = f"  left {seconds // 60}:{seconds % 60:02d}"
        self.line(
            f"step {done:>4}/{self.config.steps}  reward {row['reward/mean']:.3f}  lag "
            f"{row['lag/mean']:.2f}/{row['lag/max']:.0f}  "
            f"tokens {row['tokens/response_mean']:.0f}  acceptance {row['spec/acceptance_length']:.2f}  "
            f"step {row['time/step']:.2f} s (train {row['time/train']:.2f}, exposed generation "
            f"{row['time/exposed_generation']:.2f}){left}"
        )

    def end(self, failure: str, reason: str, metrics: RunMetrics, resuming: bool = False) -> None:
        if self._bars is not None:
            self._bars.stop()
        if resuming:
            self.line(f"{reason}: all is started again from the last checkpoint")
            return
        columns = metrics.columns
        if steps := len(columns["time/step"]):
            # The first step holds the filling of the pipeline; with more than one it is shown apart.
            table = Table(
                title=f"Seconds per step, median and mean of {steps - 1 or 1} steps after the first",
                title_justify="left",
            )
            for heading in ("part", "median", "mean", "share", "first step"):
                table.add_column(heading, justify="left" if heading == "part" else "right")
            total = float(np.mean(columns["time/step"][1:] or columns["time/step"]))
            for label, key in TABLE_ROWS:
                values = columns[key][1:] or columns[key]
                table.add_row(
                    label,
                    f"{np.median(values):.3f}",
                    f"{np.mean(values):.3f}",
                    f"{np.mean(values) / total:.0%}",
                    f"{columns[key][0]:.3f}",
                    end_section=key in ("time/other", "time/step"),
                )
            self._out.print(table)
        if self._accuracies and steps:
            reached = f" -> {self._accuracies[-1]:.1%}" if len(self._accuracies) > 1 else ""
            self.line(
                f"held-out accuracy {self._accuracies[0]:.1%}{reached}; "
                f"largest lag {max(columns['lag/max']):.0f} of {self.config.policy_lag} allowed; "
                f"{time.monotonic() - self._started:.0f} s"
            )
        if failure:
            self.line(f"failed: {failure}")
        elif reason != "finished":
            self.line(
                f"stopped early: {reason}; "
                + ("the checkpoint holds what was trained" if steps else "nothing was trained yet")
            )
        if reason != "finished" and steps:
            self.line(f"to go on: asyncspec train --resume {self.run_dir}")
        left = [name for name in RESULTS if (self.run_dir / name).exists()]
        self.line(f"results in {self.run_dir}: {', '.join(left)}")
