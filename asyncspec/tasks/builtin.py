"""The built-in rewards, by the names that data.reward takes.

Each compares what a response ends with, its final answer, with the answer of the data.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from asyncspec.tasks import sandbox

PROGRAM_S = 5  # of processor time, and of waiting, for one program
PROGRAM_BYTES = 1 << 30
_MARKED = (  # where a response says that its answer stands, the most certain first
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"\b[Aa]nswer(?: is)?:?\s+(.+?)\s*\.?\s*$", re.MULTILINE),
)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?(?:\s*/\s*\d+)?|-?\.\d+")
CODE_BLOCK = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


def final_answer(response: str) -> str:
    """Return the answer that a response ends with: the last one in <answer> tags, in \\boxed, or behind "Answer:"; else
    the whole response.
    """
    for pattern in _MARKED:
        if found := pattern.findall(response):
            return found[-1].strip()
    return response.strip()


def exact(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the final answer is the answer, letter by letter, else 0."""
    return float(final_answer(response) == answer.strip())


def numeric(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the last number of the final answer is the answer's last number, up to a millionth, else 0."""
    found, right = _number(final_answer(response)), _number(answer)
    if right is None:
        raise ValueError(f"the answer {answer!r:.60} has no number")
    return float(found is not None and abs(found - right) <= 1e-6 * max(1.0, abs(right)))


def _number(text: str) -> float | None:
    """Return the last number of a text, which may have commas or be a fraction; None if there is none."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    above, _, below = numbers[-1].replace(",", "").partition("/")
    return float(above) / (float(below) or float("nan")) if below else float(above)


def math_verify(prompt: str, response: str, answer: str) -> float:
    """Return 1 if math-verify takes the response for the answer, which may be a number, a formula or a set; else 0."""
    from math_verify import parse, verify

    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    return float(verify(gold, parse(response)))


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


def code(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the program in a response passes its tests, else 0. sandbox.py says what the program may do.

    The program is the last block between lines of ```, else the whole response. The answer holds the tests: Python that
    runs behind the program, or JSON {"inputs": [...], "outputs": [...]} of what it reads and must print.
    """
    program = blocks[-1] if (blocks := CODE_BLOCK.findall(response)) else response
    try:
        tests = json.loads(answer)
        cases = list(zip(tests["inputs"], tests["outputs"], strict=True))
    except (ValueError, TypeError, KeyError):
        return float(run_program(f"{program}\n{answer}\n", "").whole)
    for given, expected in cases:
        run = run_program(program, str(given))
        if run.code or _lines(run.printed) != _lines(str(expected)):
            return 0.0
    return 1.0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class Run(NamedTuple):
    """A program that has run: its exit code, whether it ran to its last line, what it printed, and its last error."""

    code: int
    whole: bool
    printed: str
    error: str = ""


def run_program(program: str, given: str) -> Run:
    """Run a program in the sandbox.

    Raises:
        RuntimeError: the sandbox cannot be used here.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryFile() as content, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        content.write(json.dumps([program, word]).encode())
        content.seek(0)
        command = [sys.executable, "-I", str(Path(sandbox.__file__)), str(os.getpid()), str(content.fileno())]
        process = subprocess.Popen(
            [*command, str(PROGRAM_S), str(PROGRAM_BYTES)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=errors,
            pass_fds=[content.fileno()],
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            cwd="/",
        )
        try:
            process.communicate(given.encode(), PROGRAM_S + 1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        printed.seek(0)
        errors.seek(0)
        said = errors.read().decode(errors="replace").splitlines()
        if said and said[-1].startswith("OSError") and ("seccomp" in said[-1] or "does not hold" in said[-1]):
            raise RuntimeError(f"the sandbox cannot be used here: {said[-1]}")
        code, text = process.returncode, printed.read().decode(errors="replace")
        return Run(code, code == 0 and said[-1:] == [word], text, "" if said[-1:] == [word] else "".join(said[-1:]))


def _formatted(pattern: str) -> Callable[..., float]:
    compiled = re.compile(pattern, re.DOTALL)

    def reward(prompt: str, response: str, answer: str) -> float:
        return float(compiled.fullmatch(response.strip()) is not None)

    return reward


_PLAIN: dict[str, Callable[..., Any]] = {
    "exact": exact,
    "numeric": numeric,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "code": code,
}
_NEEDS = {"math_verify": "math_verify", "reasoning_gym": "reasoning_gym"}
NAMES = frozenset((*_PLAIN, "format"))


def load(name: str, pattern: str) -> Callable[..., Any]:
    """Return the built-in reward of a name.

    Args:
        pattern: data.reward_pattern, the regular expression of "format".

    Raises:
        ValueError: the package that it needs is not there, or the sandbox does not know this machine.
    """
    try:
        importlib.import_module(_NEEDS.get(name, "re"))
    except ImportError as error:
        raise ValueError(
            f"data.reward={name!r}: {error}; expected what `pip install 'asyncspec[tasks]'` brings"
        ) from None
    if name == "code" and not sandbox.supported():
        raise ValueError(f"data.reward={name!r}: expected Linux on x86-64 or aarch64")
    return _formatted(pattern) if name == "format" else _PLAIN[name]
