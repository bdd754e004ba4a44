"""Files that a run leaves behind: metrics.jsonl, its copy for the boards, and trace.json."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncspec.files import LineFile, LineFiles, replace_file
from asyncspec.timing.boards import BY_VERSION, Boards
from asyncspec.timing.metrics import TABLE_ROWS, read_rows
from asyncspec.wire.facts import Rounds
from asyncspec.wire.messages import GroupRecord, Span, StepDone

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunMetrics:
    """Writer of metrics.jsonl, one object per step, and of the same numbers to boards."""

    def __init__(self, files: LineFiles, open_boards: Callable[[int], Boards], first_step: int = 0) -> None:
        """Open the file and the boards.

        Args:
            files: the run's files.
            open_boards: callable(steps that an earlier part of the run has shown) -> the boards.
            first_step: the step that the run starts or resumes with. Rows of this step and later ones, which an
                earlier part of the run wrote, are removed.
        """
        path = files.folder / "metrics.jsonl"
        before = read_rows(path) if path.exists() else []
        rows = [row for row in before if row["step"] < first_step]
        if path.exists():
            replace_file(path, "".join(json.dumps(row) + "\n" for row in rows))
        self.last = rows[-1] if rows else None
        # The table at the end needs these columns only. All rows of a long run would fill the memory.
        self.columns = {
            key: array("f", [math.nan if row[key] is None else row[key] for row in rows])
            for key in (*(key for _, key in TABLE_ROWS), "lag/max")
        }
        self.first_evaluation = next((row for row in rows if row.get("eval/score") is not None), None)
        self._file = files.open(path.name)
        self.boards = open_boards(before[-1]["step"] + 1 if before else 0)
        self._held: dict | None = None

    def write(self, row: dict, final: bool = False) -> None:
        """Write a step's row. The final row is held back until the last version is evaluated."""
        self._held = self.last = row
        for key, column in self.columns.items():
            column.append(row[key])
        if not final:
            self.flush()

    def evaluated(self, evaluation: dict) -> None:
        """Write an evaluation's eval/ fields to the boards, and into the row that was held back for them."""
        if self._held is not None and self._held["policy_version"] == evaluation["eval/policy_version"]:
            self._held |= evaluation
            self.flush()
        names = [name for name, value in evaluation.items() if value is not None and "policy_version" not in name]
        found = {f"{name}{BY_VERSION}": evaluation[name] for name in names}
        self.boards.scalars(found, evaluation["eval/policy_version"])

    def picture(self, steps: Sequence[StepDone]) -> None:
        """Draw what the trainer and each group did during some steps, as a figure for the boards."""

        def draw() -> Figure:
            from asyncspec.timing.gantt import gantt

            return gantt(steps)

        self.boards.figure("time/gantt", draw, steps[-1].step)

    def flush(self) -> None:
        if self._held is None:
            return
        row, self._held = self._held, None
        # JSON has no infinity and no NaN; null means "unknown".
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        shown = {
            key: value
            for key, value in clean.items()
            if isinstance(value, (int, float)) and key not in ("step", "policy_version")
        }
        self.boards.scalars(shown, row["step"])

    def close(self) -> None:
        self.flush()
        self._file.close()


FLOW = {"logprob": "t", "train": "f"}  # spans that a ticket's arrow passes through ("t") or ends in ("f")


class TraceFile:
    """Writer of trace.json, in Chrome's trace event format (opens in Perfetto). Each actor has a track, and its GPU
    another. Each ticket has an async slice, and an arrow that follows it through the actors.

    Events are written as they arrive. A file that a crash cut short still opens, because the format allows the
    closing bracket to be missing.
    """

    def __init__(self, run_dir: Path, tell: Callable[[str], None], first_step: int = 0) -> None:
        """Open the file.

        Args:
            run_dir: the run's directory.
            tell: called with one line when the file cannot be written. It is for people: it is dropped then.
            first_step: the step that a resumed run starts with; 0: a new run. A resumed run has another clock, so it
                writes a file of its own.
        """
        name, number = "trace.json" if not first_step else f"trace-from-step-{first_step}.json", 1
        while (run_dir / name).exists():
            number += 1
            name = f"trace-from-step-{first_step}-{number}.json"
        alone = LineFiles(run_dir, lambda failure: tell(f"{failure}; the rest goes on without it"), spare=0)
        self._file: LineFile | None = None
        try:
            self._file = alone.open(name, new=True)
        except OSError as error:
            alone.fail(run_dir / name, error)
        self._new = ["[\n"]  # what is not written yet
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
            args |= {"cpu_ms": round(1e3 * span.cpu, 3)} if span.cpu else {}
            args |= {"rounds": [msgspec.structs.astuple(each) for each in span.rounds]} if span.rounds else {}
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
        self._write()

    def write_group(self, step: int, record: GroupRecord) -> None:
        """Write the phases of a trained ticket, from actor to actor, as nested async slices."""
        common = {"cat": "ticket", "id": record.ticket_id, "pid": 1, "tid": self._track("tickets")}
        args = {"step": step, "versions": [record.version_min, record.version_max], "reward": record.reward_mean}
        outer = {"name": f"ticket {record.ticket_id}", "args": args, **common}
        self._event({"ph": "b", "ts": self._us(record.phases[0].start), **outer})
        for phase in record.phases:
            self._event({"ph": "b", "name": phase.name, "ts": self._us(phase.start), **common})
            self._event({"ph": "e", "name": phase.name, "ts": self._us(phase.end), **common})
        self._event({"ph": "e", "ts": self._us(record.phases[-1].end), **outer})
        self._flow("s", record.ticket_id, record.generator, max(p.end for p in record.phases if p.name == "generate"))
        self._write()

    def _flow(self, phase: str, ticket: int, actor: str, at: float) -> None:
        """Write a piece of the arrow that follows a ticket: from its generator ("s") through logprob ("t") to the
        trainer ("f").
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
        """End the file with a note on how far apart the clocks of the tracks may be."""
        text = f"clocks agree within {1e6 * clock_error_s:.0f} us" if clock_error_s else "one clock"
        self._event({"name": "process_labels", "ph": "M", "pid": 1, "args": {"labels": text, "origin_s": self._origin}})
        self._new.append("\n]\n")
        self._write()
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        if self._file is not None:
            self._file.write("".join(self._new))
        self._new.clear()

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
        self._new.append(("" if self._first else ",\n") + json.dumps(event))
        self._first = False


def read_trace(run_dir: Path) -> list[tuple[str, Span]]:
    """Return each span on a host, with its actor, from a run's trace.json, up to a line that a crash cut short.

    Times are of the run's clock; in a file that was cut short, they are of the file's, which begins at 0.

    Raises:
        FileNotFoundError: the run has no trace.
    """
    found, origin = [], 0.0
    with open(run_dir / "trace.json", encoding="utf-8") as lines:
        for line in lines:
            if not (text := line.strip().rstrip(",")).startswith("{"):
                continue
            try:
                event = json.loads(text)
            except ValueError:
                break
            if event["name"] == "process_labels":
                origin = event["args"]["origin_s"]
            elif event["ph"] == "X" and "device" not in event["args"]:
                found.append(event)
    return [(event["cat"], _span(event, origin)) for event in found]


def _span(event: dict, origin: float) -> Span:
    args = dict(event["args"])
    cpu, rounds = 1e-3 * args.pop("cpu_ms", 0.0), [Rounds(*each) for each in args.pop("rounds", ())]
    start = origin + 1e-6 * event["ts"]
    return Span(event["name"], start, start + 1e-6 * event["dur"], **args, cpu=cpu, rounds=rounds)
