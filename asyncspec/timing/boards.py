"""Boards: where people look at a run while it trains. TensorBoard, Weights & Biases, trackio.

A board is for people. What it cannot write is dropped, it says so once, and the run goes on. Each board works on a
thread of its own, so that a slow disk, a network or an import holds nobody up.

    a row of metrics -> Boards.scalars -> a queue for each board -> Board.scalars, on the board's thread
"""

from __future__ import annotations

import html
import queue
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from asyncspec.deadlines import BOARDS_S
from asyncspec.errors import first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY_VERSION = "_by_version"  # ends the names of values whose step is a version, not an optimizer step
WAITING = 1000  # calls that may wait for a board; one that is further behind has stopped working
Cell = str | float | int | None


class Board(Protocol):
    """One place that shows a run. Its methods may block and may raise anything; what it is given is never used again.
    `step` may fall for what belongs to an evaluation, which ends while training goes on.
    """

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def figure(self, name: str, figure: Figure, step: int) -> None: ...

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None: ...

    def close(self) -> None:
        """Write what is still held."""


class Place(NamedTuple):
    """Which run a board shows.

    first_step: the step that the run starts or resumes with.
    shown: steps before this one were shown before the run was resumed, even if they are trained again now.
    """

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    first_step: int = 0
    shown: int = 0


class TensorBoard:
    """Writes TensorBoard's files."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """
        Args:
            folder: the directory for the files.
            purge_step: the step of a resumed run; TensorBoard shows nothing that was written for it or later ones.
        """
        from torch.utils.tensorboard import SummaryWriter

        _leave_out_writer_threads()
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def figure(self, name: str, figure: Figure, step: int) -> None:
        self._writer.add_figure(name, figure, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(map(_markdown, line)) + " |" for line in lines)
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


def _markdown(cell: Cell) -> str:
    """Return a cell of a Markdown table. Text may hold anything."""
    text = f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else str(cell)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


def _leave_out_writer_threads() -> None:
    """Have no traceback printed when the thread that writes TensorBoard's files fails. `Boards` says it in a line."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            before(failed)

    threading.excepthook = hook


class Wandb:
    """A run of Weights & Biases, online or offline as WANDB_MODE says. Its id is kept in the run's directory, so a
    resumed run goes on in it. The history there only grows: a step that was shown keeps its first numbers.
    """

    def __init__(self, place: Place) -> None:
        import wandb

        self._wandb, self._shown, self._step = wandb, place.shown, place.shown
        kept = place.folder / "wandb" / "run-id"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(secrets.token_hex(4) + "\n")
        self._run = wandb.init(
            project=place.project,
            name=place.name,
            id=kept.read_text().strip(),
            resume="allow",
            dir=str(place.folder),
            config=dict(place.config),
            settings=wandb.Settings(console="off", silent=True),  # the console is ours
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if not any(name.endswith(BY_VERSION) for name in values):
            self._step = max(self._step, step)
            self._log(values, step)
            return
        for name in values:
            self._run.define_metric(name, step_metric="version")
        self._log({**values, "version": step}, step)

    def figure(self, name: str, figure: Figure, step: int) -> None:
        self._log({name: self._wandb.Image(_pixels(figure))}, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._log({name: table}, step)

    def close(self) -> None:
        self._run.finish()

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        if step >= self._shown:  # only rows move wandb's step, which cannot fall; all else joins the newest row
            self._run.log(dict(values), step=self._step)


class Trackio:
    """A run of trackio, in the directory of its databases or where TRACKIO_SPACE_ID and TRACKIO_SERVER_URL say. A
    resumed run goes on in the run of the same name. A step that was shown keeps its first numbers.
    """

    def __init__(self, place: Place) -> None:
        import trackio

        self._trackio, self._shown, self._failures = trackio, place.shown, _warnings_of("trackio")
        for module in (trackio, trackio.run, trackio.utils):
            module.print = lambda *_, **__: None  # type: ignore[attr-defined]  # the console is ours
        self._run = trackio.init(
            project=place.project,
            name=place.name,
            config=dict(place.config),
            resume="allow" if place.first_step or place.shown else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._log(dict(values), step)

    def figure(self, name: str, figure: Figure, step: int) -> None:
        self._log({name: self._trackio.Image(_pixels(figure))}, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        self._log({name: self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])}, step)

    def close(self) -> None:
        self._run.finish()
        self._check()

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        if step >= self._shown:
            self._run.log(dict(values), step=step)
        self._check()

    def _check(self) -> None:
        """Raise what trackio has only warned of, from its own thread."""
        if self._failures:
            raise OSError(self._failures[0])


def _pixels(figure: Figure) -> np.ndarray:
    """Draw a figure. Return its pixels, uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def _warnings_of(package: str) -> list[str]:
    """Return a list to which each warning of a package is added from now on, instead of being printed."""
    found: list[str] = []
    before = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        if package in Path(filename).parts:
            found.append(first_line(message))
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    return found


def openers(names: Sequence[str], place: Place) -> dict[str, Callable[[], Board]]:
    """Return the boards of these names, by what messages call them."""
    found: dict[str, tuple[str, Callable[[], Board]]] = {
        "tensorboard": (str(place.folder / "tb"), lambda: TensorBoard(place.folder / "tb", place.first_step or None)),
        "wandb": ("wandb", lambda: Wandb(place)),
        "trackio": ("trackio", lambda: Trackio(place)),
    }
    return dict(found[name] for name in names)


class Boards:
    """Several boards. No call blocks, except `close`."""

    def __init__(self, boards: Mapping[str, Callable[[], Board]], tell: Callable[[str], None]) -> None:
        """
        Args:
            boards: name for messages -> a callable that opens the board; it is called on the board's thread.
            tell: called from any thread, with one line when a board is dropped.
        """
        self._workers = [_Worker(name, open_board, tell) for name, open_board in boards.items()]
        self._drawing = threading.Lock()  # matplotlib draws one figure at a time

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._each(lambda board: board.scalars(values, step))

    def figure(self, name: str, draw: Callable[[], Figure], step: int) -> None:
        """Add what `draw` returns."""

        def add(board: Board) -> None:
            with self._drawing:
                board.figure(name, draw(), step)

        self._each(add)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        self._each(lambda board: board.table(name, columns, rows, step))

    def close(self, limit_s: float = BOARDS_S) -> None:
        """Have all boards write what they still hold. One that takes too long is dropped."""
        until = time.monotonic() + limit_s
        for worker in self._workers:
            worker.put(None)
        for worker in self._workers:
            worker.end(until, limit_s)

    def _each(self, act: Callable[[Board], None]) -> None:
        for worker in self._workers:
            worker.put(act)


class _Worker:
    """The thread of one board."""

    def __init__(self, name: str, open_board: Callable[[], Board], tell: Callable[[str], None]) -> None:
        self._name, self._tell, self._dropped = name, tell, False
        self._queue: queue.Queue[Callable[[Board], None] | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=partial(self._work, open_board), name=f"board {name}", daemon=True)
        self._thread.start()

    def put(self, act: Callable[[Board], None] | None) -> None:
        if self._dropped:
            return
        try:
            self._queue.put_nowait(act)
        except queue.Full:
            self._drop(f"{WAITING} calls wait for it")

    def end(self, until: float, limit_s: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._drop(f"it did not end within {limit_s:g} s")

    def _work(self, open_board: Callable[[], Board]) -> None:
        try:
            board = open_board()
            while (act := self._queue.get()) is not None and not self._dropped:
                act(board)
            board.close()
        except BaseException as error:  # a library may call sys.exit
            self._drop(getattr(error, "strerror", None) or first_line(error))

    def _drop(self, why: str) -> None:
        """Write nothing more. Say so the first time."""
        with self._lock:
            told, self._dropped = self._dropped, True
        if not told:
            with suppress(Exception):  # the console may be gone
                self._tell(f"{self._name} cannot be written: {why}; the rest goes on without it")
