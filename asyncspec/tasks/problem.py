"""A prompt, its right answer, and the row of the data file that both come from."""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct, frozen=True, gc=False):
    prompt: str  # the text that the policy gets
    answer: str  # "" if the data has none
    row: str = ""  # the row as JSON; "" if it has a prompt that is text, an answer, and nothing else
    eval_set: str = ""  # of a held-out prompt: the name of its set; "": the built-in task's
