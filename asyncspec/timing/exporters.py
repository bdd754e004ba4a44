"""Files that a run leaves behind: metrics.jsonl, its copy for TensorBoard, and trace.json."""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncspec.errors import first_line
from asyncspec.files import LineFile, LineFiles, replace_file
from asyncspec.timing.metrics import TABLE_ROWS, read_rows
from asyncspec.wire.messages import GroupRecord, Span, StepDone

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


class Board:
    """Writer of TensorBoard's files. It is for people: what it cannot write is dropped, and it says so once."""

    def __init__(self, folder: Path, tell: Callable[[str], None], purge_step: int | None = None) -> None:
        """
        Args:
            folder: the directory for the files.
            tell: called with one line when they cannot be written.
            purge_step: the step of a resumed run; TensorBoard shows nothing that was written for it or later ones.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._tell = folder, tell
        self._writer: SummaryWriter | None = None
        _leave_out_writer_threads()
        with self._dropping():
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        with self._dropping():
            for name, value in values.items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, step)

    def figure(self, name: str, draw: Callable[[], Figure], step: int) -> None:
        """Add what `draw` returns."""
        with self._dropping():
            if self._writer is not None:
                self._writer.add_figure(name, draw(), step)

    def close(self) -> None:
        with self._dropping():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # also from the writer's thread
            self._writer = None
            why = getattr(error, "strerror", None) or first_line(error)
            self._tell(f"{self._folder} cannot be written: {why}; the rest goes on without it")


def _leave_out_writer_threads() -> None:
    """Have no traceback printed when the thread that writes TensorBoard's files fails. `Board` says it in a line."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            before(failed)

    threading.excepthook = hook


class RunMetrics:
    """Writer of metrics.jsonl, one object per step, and of the same numbers as TensorBoard scalars."""

    def __init__(self, files: LineFiles, tell: Callable[[str], None], first_step: int = 0) -> None:
        """Open the files.

        Args:
            files: the run's files.
            tell: called with one line when TensorBoard's files cannot be written.
            first_step: the step that the run starts or resumes with. Rows of this step and later ones, which an
                earlier part of the run wrote, are removed.
        """
        path = files.folder / "metrics.jsonl"
        rows = [row for row in read_rows(path) if row["step"] < first_step] if path.exists() else []
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
        self._board = Board(files.folder / "tb", tell, first_step or None)
        self._held: dict | None = None

    def write(self, row: dict, final: bool = False) -> None:
        """Write a step's row. The final row is held back until the last version is evaluated."""
        self._held = self.last = row
        for key, column in self.columns.items():
            column.append(row[key])
        if not final:
            self.flush()

    def evaluated(self, evaluation: dict) -> None:
        """Write an evaluation's eval/ fields to TensorBoard, and into the row that was held back for them."""
        if self._held is not None and self._held["policy_version"] == evaluation["eval/policy_version"]:
            self._held |= evaluation
            self.flush()
        names = [name for name, value in evaluation.items() if value is not None and "policy_version" not in name]
        found = {f"{name}_by_version": evaluation[name] for name in names}
        self._board.scalars(found, evaluation["eval/policy_version"])

    def picture(self, steps: Sequence[StepDone]) -> None:
        """Draw what the trainer and each group did during some steps, in a thread, as a TensorBoard figure."""

        def draw() -> Figure:
            from asyncspec.timing.gantt import gantt

            return gantt(steps)

        add = partial(self._board.figure, "time/gantt", draw, steps[-1].step)
        threading.Thread(target=add, name="gantt", daemon=True).start()

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
        self._board.scalars(shown, row["step"])

    def close(self) -> None:
        self.flush()
        self._file.close()
        self._board.close()


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
