"""Python as a tool: the policy writes a program, and reads what it prints. `environment.name=python`.

A program is a block between ```python and ```. It runs in the sandbox of data.reward=code: it can neither write files
nor reach the network, and has a few seconds. An answer without a program ends the episode. data.reward rewards it, so
environment.reward_from is data.reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncspec.environments.protocol import Message, Stepped
from asyncspec.tasks import sandbox
from asyncspec.tasks.builtin import CODE_BLOCK, run_program

TOLD = "You can run Python. Write a program between ```python and ```, and you get what it prints."
MOST_CHARACTERS = 400  # of what a program prints


class PythonTool:
    tool = ""

    def __init__(self) -> None:
        if not sandbox.supported():
            raise ValueError("environment.name='python': expected Linux on x86-64 or aarch64")

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        prompt = row["prompt"]
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if asked[0]["role"] == "system":
            told, asked = f"{asked[0]['content']} {TOLD}", asked[1:]
        else:
            told = TOLD
        return [{"role": "system", "content": told}, *asked]

    def step(self, message: Message) -> Stepped:
        self.tool = ""
        programs = CODE_BLOCK.findall(message["content"])
        if not programs:
            return [], True, None
        self.tool = "python"
        run = run_program(programs[-1], "")
        text = (run.printed.strip() or run.error or "nothing")[:MOST_CHARACTERS]
        return [{"role": "user", "content": f"Output: {text}"}], False, None

    def close(self) -> None:
        pass
