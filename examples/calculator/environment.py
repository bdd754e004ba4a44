"""A calculator as an environment: the policy may have a product or a sum worked out before it answers.

    prompt        37*46=
    policy        (37*46)      a call; it costs a little
    environment   1702;
    policy        #1702        the answer

The reward is 1 for a right answer, less COST for each call. So a call pays only where the policy would often be wrong.
"""

from __future__ import annotations

import re

COST = 0.2
_CALL = re.compile(r"\((\d{1,6})([+*])(\d{1,6})\)")


class Calculator:
    tool = ""

    def reset(self, row: dict) -> None:
        self.answer, self.calls = row["answer"], 0

    async def step(self, message: dict) -> tuple[list[dict], bool, float | None]:
        text, self.tool = message["content"], ""
        if (call := _CALL.fullmatch(text)) is None:
            right = text == f"#{self.answer}"
            return [], True, float(right) - COST * self.calls
        self.tool, self.calls = "calculator", self.calls + 1
        left, sign, right = call.groups()
        found = int(left) + int(right) if sign == "+" else int(left) * int(right)
        return [{"role": "tool", "content": f"{found};"}], False, None

    async def close(self) -> None:
        pass
