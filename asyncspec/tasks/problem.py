"""A prompt and its right answer."""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct, frozen=True, gc=False):
    prompt: str
    answer: str
