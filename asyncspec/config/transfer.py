"""Shows how far a download is, and has Ctrl-C end it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asyncspec.console import LINE_EVERY_S, QUIET_S, terminal


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if SIGINT has come. Call it often.

    Python raises KeyboardInterrupt itself, but drops it if a destructor or the callback of a weak reference is running.
    Such callbacks often run during imports.
    """
    came = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        came.set()
        raise KeyboardInterrupt

    def check() -> None:
        if came.is_set():
            raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Counter:
    """Counts the bytes that huggingface_hub has written, and shows them."""

    def __init__(self) -> None:
        self.stopped, self._done = False, 0.0

    def bar(self) -> type:
        """Return a class of progress bars for huggingface_hub, which show nothing themselves."""
        from huggingface_hub.utils import tqdm

        counter = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options | {"disable": True})
                counter._done += options.get("initial") or 0

            def update(self, n: float | None = 1) -> None:
                if counter.stopped:
                    raise RuntimeError("interrupted")
                counter._done += n or 0

            # With these, what comes from the network is told apart from what is on the disk.
            def update_transfer(self, n: float | None = 1) -> None:
                pass

            def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None:
                pass

        return Bar

    def show(self, working: Callable[[], bool], name: str, size: int) -> None:
        """Wait for the end of the work. Show a bar, or without a terminal a line every few seconds."""
        began = time.monotonic()
        while working() and time.monotonic() < began + QUIET_S:
            time.sleep(0.02)
        if not working():
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console, told = terminal(stderr=True), time.monotonic()
        columns = (TextColumn(f"downloading {name}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task("", total=size or None)
            while working():
                time.sleep(0.1)
                bars.update(bar, completed=self._done)
                if not console.is_terminal and time.monotonic() - told > LINE_EVERY_S:
                    told = time.monotonic()
                    console.print(
                        f"downloading {name}: {self._done / 1e6:,.0f} of {size / 1e6:,.0f} MB", soft_wrap=True
                    )
