"""The built-in rewards."""

from __future__ import annotations

import json
import re

_MARKED = (  # where a response says that its answer stands, the most certain first
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"[Aa]nswer(?: is)?:?\s*(.+?)\s*\.?\s*$", re.MULTILINE),
)


def final_answer(response: str) -> str:
    """Return the answer that a response ends with: the last one in <answer> tags, in \\boxed, or behind "Answer:"; else
    the whole response.
    """
    for pattern in _MARKED:
        if found := pattern.findall(response):
            return found[-1].strip()
    return response.strip()


def reasoning_gym(completions, question, answer, metadata, **_) -> list[float]:
    """Return reasoning-gym's `score_answer` of the final answers, from the columns that it gives its problems."""
    from reasoning_gym import get_score_answer_fn

    found = []
    for text, asked, right, about in zip(completions, question, answer, metadata):
        about = json.loads(about) if isinstance(about, str) else about
        entry = {"question": asked, "answer": right, "metadata": about}
        text = text if isinstance(text, str) else text[-1]["content"]
        found.append(get_score_answer_fn(about["source_dataset"])(final_answer(text), entry))
    return found
