"""The program that runs environments, in a process of its own. pool.py starts it by its path:

    python -P environment_process.py PARENT DESCRIPTOR

Episodes run concurrently: asynchronous methods in one event loop, plain ones in a thread each. The connection is a
socket of its own, and both sides send JSON, an object or a list on each line:

    {"path": sys.path, "environment": name}  ->  {"error": what is wrong, or "", "driven": whether it has `run`}
    ["reset", episode, row, seconds]         ->  {"episode", "messages" or null, "tools", "error", "seconds", "stuck"}
    ["step", episode, message, seconds]      ->  {"episode", "messages", "done", "reward", "tool", "error", ...}
    ["run", episode, {"row", "endpoint"}, seconds]
    ["close", episode]

A call that takes longer than its seconds is given up, with an error. A plain method goes on in its thread all the same,
which "stuck" says: such a process should get no further episodes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import math
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

CLOSE_S = 5.0  # that closing an environment may take
MOST_TRACEBACKS = 3  # that a process prints
_NO_NAME, _LONGEST_NAME = re.compile(r"[^A-Za-z0-9_.-]"), 40  # of a tool, for metrics


def main() -> None:
    parent, descriptor = map(int, sys.argv[1:])
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    asyncio.run(_serve(connection, parent))


async def _serve(connection: socket.socket, parent: int) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 28)
    if not (first := await reader.readline()):  # the parent has ended already
        return
    asked = json.loads(first)
    sys.path[:] = asked["path"]

    from asyncspec.console import never_fail
    from asyncspec.environments.make import maker
    from asyncspec.parent import die_with

    die_with(parent)
    faulthandler.enable()
    never_fail()  # environments may print into a log whose disk is full

    def answer(content: object) -> None:
        writer.write(json.dumps(content).encode(errors="replace") + b"\n")

    try:
        make = maker(asked["environment"])
        driven = callable(getattr(_first(make, asked["environment"]), "run", None))
    except ValueError as error:
        answer({"error": str(error)})
        await writer.drain()
        return
    answer({"error": "", "driven": driven})
    episodes, tasks = _Episodes(make, answer), set()
    while line := await reader.readline():
        task = asyncio.ensure_future(episodes.handle(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await episodes.close()


def _first(make: Callable[[], Any], name: str) -> Any:
    """Make an environment, to see that it can be made.

    Raises:
        ValueError: it cannot.
    """
    try:
        return make()
    except ValueError:
        raise
    except BaseException as error:  # anything that the user's code raises
        raise ValueError(
            f"environment.name={name!r}: {type(error).__name__}: {_first_line(error)}; expected a factory without "
            "arguments"
        ) from None


class _Episodes:
    def __init__(self, make: Callable[[], Any], answer: Callable[[object], None]) -> None:
        self._make, self._answer = make, answer
        self._open: dict[int, Any] = {}
        self._stuck = 0  # threads whose calls were given up
        self._shown = 0  # tracebacks

    async def close(self) -> None:
        """Close the open episodes: nobody asks any more."""
        closing = [self._called(getattr(each, "close", _nothing), (), CLOSE_S) for each in self._open.values()]
        await asyncio.gather(*closing, return_exceptions=True)

    async def handle(self, request: list) -> None:
        try:
            await self._handle(request)
        except BaseException as error:  # whatever the user's objects do when they are looked at
            if isinstance(error, asyncio.CancelledError):
                error = RuntimeError("was cancelled")
            said = f"raised {type(error).__name__}: {_first_line(error)}"
            self._answer({"episode": request[1], "error": said, "seconds": 0.0, "stuck": self._stuck > 0})

    async def _handle(self, request: list) -> None:
        what, episode, *rest = request
        if what == "close":
            if (environment := self._open.pop(episode, None)) is not None:
                await self._called(getattr(environment, "close", _nothing), (), CLOSE_S)
            return
        given, seconds = rest
        start, found = time.monotonic(), {}
        if what == "run":
            reward, error = await self._run(given["row"], given["endpoint"], seconds)
            found |= {"messages": [], "done": True, "reward": reward}
        elif what == "reset":
            environment, error = await self._called(self._make, (), seconds)
            if not error:
                self._open[episode] = environment
                found["messages"], error = await self._called(environment.reset, (given,), seconds)
                found["tools"] = getattr(environment, "tools", None)
                if not error and not _are_tools(found["tools"]):
                    error = f"tools is {found['tools']!r:.60}: expected JSON schemas with a function that has a name"
        else:
            environment = self._open[episode]
            stepped, error = await self._called(environment.step, (given,), seconds)
            if (tool := getattr(environment, "tool", None)) is not None:
                found["tool"] = _NO_NAME.sub("_", str(tool))[:_LONGEST_NAME]
            if not error:
                try:
                    messages, done, reward = stepped
                    found |= {"messages": list(messages), "done": bool(done), "reward": _number(reward)}
                except (TypeError, ValueError) as wrong:
                    error = f"step returned {stepped!r:.60}: expected (messages, done, reward): {wrong}"
        if not error and (wrong := _wrong(found["messages"], what == "reset")):
            error = f"{what} returned {wrong}"
        found |= {"episode": episode, "error": error, "seconds": time.monotonic() - start, "stuck": self._stuck > 0}
        try:
            self._answer(found)
        except (TypeError, ValueError) as wrong:  # something is no JSON
            self._answer({"episode": episode, "error": f"{what}: {wrong}", "seconds": 0.0, "stuck": self._stuck > 0})

    async def _run(self, row: Any, endpoint: Any, seconds: float) -> tuple[float | None, str]:
        environment, error = await self._called(self._make, (), seconds)
        if error:
            return None, error
        reward, error = await self._called(environment.run, (row, endpoint), seconds)
        try:
            return _number(reward), error
        except (TypeError, ValueError):
            return None, f"run returned {reward!r:.60}: expected a finite number, or None"

    async def _called(self, function: Callable[..., Any], arguments: tuple, seconds: float) -> tuple[Any, str]:
        """Return what a function of the user's returns, and what went wrong in one line, or ""."""
        try:
            if inspect.iscoroutinefunction(function):
                return await asyncio.wait_for(function(*arguments), seconds), ""
            found = await asyncio.wait_for(self._in_thread(function, arguments), seconds)
            return (await asyncio.wait_for(found, seconds) if inspect.isawaitable(found) else found), ""
        except TimeoutError:
            return None, f"took more than {seconds:.3g} s"
        except Exception as error:  # anything that the user's code raises
            self._shown += 1
            if self._shown <= MOST_TRACEBACKS:
                traceback.print_exc()  # into the generator's log
            return None, f"raised {type(error).__name__}: {_first_line(error)}"

    async def _in_thread(self, function: Callable[..., Any], arguments: tuple) -> Any:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if future.done():  # given up, and now it has ended after all
                self._stuck -= 1
            elif error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def run() -> None:
            try:
                found = function(*arguments), None
            except BaseException as error:  # SystemExit too: it must not end in silence
                found = None, RuntimeError(f"{type(error).__name__}: {error}") if _ends(error) else error
            loop.call_soon_threadsafe(settle, *found)

        threading.Thread(target=run, daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            self._stuck += 1
            raise


def _nothing() -> None:
    pass


def _ends(error: BaseException) -> bool:
    return not isinstance(error, Exception) or isinstance(error, StopIteration)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _are_tools(tools: Any) -> bool:
    if tools is None:
        return True
    functions = [each.get("function") if isinstance(each, dict) else None for each in tools]
    return all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions)


def _number(reward: Any) -> float | None:
    if reward is None:
        return None
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward {number}")
    return number


def _wrong(messages: Any, may_be_none: bool) -> str:
    """Say what is wrong with messages; "" if nothing is."""
    if messages is None and may_be_none:
        return ""
    if isinstance(messages, list | tuple) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in messages
    ):
        whole = all(each["content"].isascii() or _encodes(each["content"]) for each in messages)
        return "" if whole else "half of a surrogate pair: expected text in UTF-8"
    return f"{messages!r:.60}: expected a list of messages with role and content"


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):  # nobody waits for the answer
        pass
