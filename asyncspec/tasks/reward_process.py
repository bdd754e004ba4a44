"""The program that calls the user's reward function, in a process of its own. reward_worker.py starts it by its path:

    python -P reward_process.py PARENT DESCRIPTOR

The function runs in the main thread, so it may use signals. It may print, hang, or end the process: the connection is a
socket of its own, and both sides send JSON, an object or a list on each line.

    {"path": sys.path, "reward": "module:function", ...}  ->  {"error": what is wrong, or "", "of_groups": bool}
    [prompt, responses, answer, row as JSON]              ->  for each response [number or null, what went wrong]

It imports only what the function itself imports, and a few modules of the standard library.
"""

from __future__ import annotations

import faulthandler
import json
import socket
import sys


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
    from asyncspec.tasks.reward import Call, Rewards

    die_with(parent)
    faulthandler.enable()
    never_fail()  # the function may print into a log whose disk is full; what it has printed outlives a kill

    def answer(content: object) -> None:
        connection.sendall(json.dumps(content).encode() + b"\n")

    try:
        rewards = Rewards(asked["reward"], asked["weights"], asked["columns"], asked["pattern"])
    except ValueError as error:
        answer({"error": str(error).encode(errors="replace").decode()})
        return
    answer({"error": "", "of_groups": rewards.of_groups})
    for line in requests:
        prompt, responses, right, row = json.loads(line)
        for found in rewards.of(Call(prompt, responses, right, json.loads(row) if row else {})):
            answer(found)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):  # nobody waits for the answer
        pass
