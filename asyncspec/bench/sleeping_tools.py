"""Environments whose tools sleep, for `bench environments` and `bench chaos`."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncspec.tasks.sums import exact_match

TURNS = 3  # of an episode of `bench environments`
HANGS = 0.02  # of the episodes of its variant `hang`: their second step never returns


class Sums:
    """Gives the row's sums, `problems`, one by one, each after so many seconds."""

    tool = "sums"

    def __init__(self, seconds: float) -> None:
        self.seconds, self.turn = seconds, 0

    def reset(self, row: dict[str, Any]) -> None:
        self.row = row

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], bool, float]:
        self.turn += 1
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.row["hangs"] and self.turn == 2:
            await asyncio.Event().wait()
        if self.turn > len(self.row["problems"]):
            return [], True, 1.0
        return [{"role": "user", "content": self.row["problems"][self.turn - 1]}], False, 0.0

    async def close(self) -> None:
        pass


class AskedTwice:
    """Asks for the answer of the default job's prompt twice. Each right one gives half of the reward."""

    tool = "again"

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, row: dict[str, Any]) -> None:
        self.row = row

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], bool, float]:
        self.turn += 1
        await asyncio.sleep(0.05)
        reward = 0.5 * exact_match("", message["content"], self.row["answer"])
        return [{"role": "user", "content": self.row["prompt"]}], self.turn == 2, reward

    async def close(self) -> None:
        pass


def at_once() -> Sums:
    return Sums(0.0)


def after_0_1s() -> Sums:
    return Sums(0.1)


def after_2s() -> Sums:
    return Sums(2.0)
