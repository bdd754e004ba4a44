"""The program that calls the user's reward function, in a process of its own. reward_worker.py starts it by its path:

    python -P reward_process.py PARENT DESCRIPTOR

The function runs in the main thread, so it may use signals. It may print, hang, or end the process: the connection is a
socket of its own, and both sides send JSON, an object or a list on each line.

    {"path": sys.path, "reward": "module:function"}  ->  {"error": what is wrong, or ""}
    [prompt, responses, answer]                      ->  for each response [number or null, what went wrong]

It imports only what the function itself imports, and a few modules of the standard library.
"""

from __future__ import annotations

import faulthandler
import json
import socket
import sys

LONGEST = 500  # characters of a message; a user's exception may carry a whole response


def _called(reward, *arguments: str) -> tuple[float | None, str]:
    """Return the function's number, or None and what went wrong."""
    try:
        value = reward(*arguments)
        try:
            return float(value), ""
        except Exception:
            return None, _line(f"returned {value!r:.40}")
    except BaseException as error:  # the user's function may raise anything
        try:
            return None, _line(f"raised {type(error).__name__}: {error}")
        except Exception:  # so may its exceptions
            return None, f"raised {type(error).__name__}"


def _line(text: str) -> str:
    """Return the first line of a text, as text that can be printed and sent."""
    return text.splitlines()[0][:LONGEST].encode(errors="replace").decode()


def main() -> None:
    parent, descriptor = map(int, sys.argv[1:])
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    requests = connection.makefile("r", encoding="utf-8")
    if not (first := requests.readline()):  # the parent has ended already
        return
    asked = json.loads(first)
    sys.path[:] = asked["path"]

    from asyncspec.console import never_fail
    from asyncspec.parent import die_with
    from asyncspec.tasks.reward import load_reward

    die_with(parent)
    faulthandler.enable()
    never_fail()  # the function may print into a log whose disk is full; what it has printed outlives a kill

    def answer(content: object) -> None:
        connection.sendall(json.dumps(content).encode() + b"\n")

    try:
        reward = load_reward(asked["reward"])
    except ValueError as error:
        answer({"error": _line(str(error))})
        return
    answer({"error": ""})
    for line in requests:
        prompt, responses, right = json.loads(line)
        for response in responses:
            answer(_called(reward, prompt, response, right))


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):  # nobody waits for the answer
        pass
