"""The engine's thread. It alone touches the engine, so an engine step never holds up the event loop.

    event loop    submit(a) submit(b)      cancel(a)
    this thread   load | poll | poll | poll | poll | waits until something is submitted
    told                 b: 1 token, 4 tokens   b: done

What the loop asks for takes effect between two engine steps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from asyncspec.engine.protocol import Completion, Partial, Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.errors import first_line

Tell = Callable[[Partial | Completion | Exception], None]
_WARM_TOKENS = 4  # of the sample that compiles, and measures draft lengths, before clients come


class Worker:
    def __init__(
        self, make: Callable[[], TorchEngine], failed: Callable[[Exception], None] = lambda error: None
    ) -> None:
        """
        Args:
            make: makes the engine; called in the thread.
            failed: called in the thread when the engine has failed. All requests have been told then.
        """
        self._make, self._failed = make, failed
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tell: dict[int, Tell] = {}
        self._watched: dict[int, dict[int, int]] = {}  # request -> sample -> the tokens told
        self._left: dict[int, int] = {}  # request -> samples that have not ended
        self._engine: TorchEngine | None = None
        self._loaded = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_loaded(self) -> None:
        """Wait until the engine has made its first sample.

        Raises:
            Exception: whatever the engine raised.
        """
        while not self._loaded.wait(0.1):  # so that an interrupt comes through
            pass
        if self._error is not None:
            raise self._error

    def submit(self, request: Request, tell: Tell, watched: bool) -> None:
        """Have the engine answer a request.

        Args:
            tell: called in the thread with each completion, or once with an exception.
            watched: whether `tell` is also called with samples that have grown.
        """
        self._asked.put(lambda: self._submit(request, tell, watched))

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Drop the samples of a request, or one of them. Nothing is told of them any more."""
        self._asked.put(lambda: self._cancel(request_id, sample))

    def stop(self) -> None:
        """End the thread after the present step."""
        self._asked.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._engine = engine = self._make()
            warm = Request(-1, [0], [0], min(_WARM_TOKENS, engine.max_response_tokens))
            engine.submit(warm)
            while engine.live or engine.waiting:
                engine.poll()
            self._loaded.set()
            while self._obey():
                for completion in engine.poll():
                    self._ended(completion)
                self._report()
        except Exception as error:  # told to whoever waits
            self._error = error
            for tell in self._tell.values():
                tell(RuntimeError(f"the engine has failed: {first_line(error)}"))
            self._tell.clear()
            if self._loaded.is_set():
                self._failed(error)
            self._loaded.set()

    def _obey(self) -> bool:
        """Do what was asked for meanwhile; wait for something if there is nothing to generate. False: end."""
        engine = self._engine
        while True:
            try:
                asked = self._asked.get(block=not (engine.live or engine.waiting))
            except queue.Empty:
                return True
            if asked is None:
                return False
            asked()

    def _submit(self, request: Request, tell: Tell, watched: bool) -> None:
        try:
            self._engine.submit(request)
        except ValueError as error:
            tell(error)
            return
        self._tell[request.request_id], self._left[request.request_id] = tell, len(request.seeds)
        if watched:
            self._watched[request.request_id] = {}

    def _cancel(self, request_id: int, sample: int | None) -> None:
        dropped = self._engine.cancel(request_id, sample)
        if request_id in self._left:
            self._leave(request_id, dropped)

    def _ended(self, completion: Completion) -> None:
        if completion.request_id in self._tell:
            self._tell[completion.request_id](completion)
            self._leave(completion.request_id, 1)

    def _leave(self, request_id: int, count: int) -> None:
        self._left[request_id] -= count
        if self._left[request_id] <= 0:
            for kept in (self._tell, self._left, self._watched):
                kept.pop(request_id, None)

    def _report(self) -> None:
        for partial in self._engine.progress(self._watched):
            told = self._watched[partial.request_id]
            if told.get(partial.sample, 0) < len(partial.tokens):
                told[partial.sample] = len(partial.tokens)
                self._tell[partial.request_id](partial)
