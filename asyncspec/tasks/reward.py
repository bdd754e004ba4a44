"""Load the reward functions that data.reward names, and call them in the form that each expects.

    reward(prompt, response, answer) -> float                                          three texts, by position
    compute_score(data_source, solution_str, ground_truth, extra_info) -> float        as in verl, by keyword
    reward(prompts, completions, **columns) -> list[float | None]                      as in TRL, for a whole group

A name without a colon is that of a built-in one (builtin.py). The names of a function's parameters tell which form it
has. Each may be async. None means that the reward does not
apply to a response. Of several rewards the weighted sum counts, over those that apply.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncspec.tasks import builtin
from asyncspec.tasks.importing import import_function

TEXTS, VERL, TRL = "texts", "verl", "trl"
_LONGEST = 500  # characters of a message; a user's exception may carry a whole response
_RUNNER = asyncio.Runner()


class Call(NamedTuple):
    """What the rewards of a group are computed from.

    prompt: the text that the policy got.
    answer: "" if the data has none.
    row: the columns of the data file; if it is empty, it had prompt and answer only.
    """

    prompt: str
    responses: list[str]
    answer: str
    row: Mapping[str, Any]


class Found(NamedTuple):
    """A response's reward; None with trouble if it failed, and None without if it does not apply."""

    number: float | None
    trouble: str = ""


class Reward:
    """A reward function."""

    def __init__(self, path: str, columns: Sequence[str] | None = None, pattern: str = "") -> None:
        """Import the function that `module:function` names, or take the built-in one of this name.

        Args:
            columns: the columns of the data; None: not known.
            pattern: data.reward_pattern.

        Raises:
            ValueError: the path does not have this form, the import fails, or what it names cannot be called.
        """
        self.form = TEXTS
        self._takes: set[str] | None = None  # names of parameters; None: any
        self.function: Callable[..., Any] = (
            builtin.load(path, pattern)
            if path in builtin.NAMES
            else import_function("data.reward", path, "asyncspec.tasks.sums:exact_match")
        )
        self._look(path, columns)

    def _look(self, path: str, columns: Sequence[str] | None) -> None:
        """Find out by its parameters how to call the function."""
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # a built-in function that does not tell its arguments
            return
        parameters = signature.parameters
        self.form = VERL if "solution_str" in parameters else TRL if "completions" in parameters else TEXTS
        if self.form == TEXTS:
            try:
                signature.bind("", "", "")
            except TypeError as error:
                raise ValueError(
                    f"data.reward={path!r}: cannot be called as reward(prompt, response, answer): {error}; expected a "
                    "function of these three strings, or one of verl's or TRL's form (docs/how-to/data-and-rewards.md)"
                ) from None
            return
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            self._takes = set(parameters)
        given = {"data_source", "solution_str", "ground_truth", "extra_info"}
        if self.form == TRL:
            given = {"prompts", "completions", *(columns or ())}
        needed = {
            name
            for name, each in parameters.items()
            if each.default is each.empty and each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
        }
        if (self.form == VERL or columns is not None) and (missing := sorted(needed - given)):
            raise ValueError(
                f"data.reward={path!r}: its parameter {missing[0]} is not passed; expected some of "
                f"{', '.join(sorted(given))}"
            )

    def of(self, call: Call) -> list[Found]:
        """Return the reward of each response of a group. A function of single responses is called for each."""
        if self.form == TRL:
            return self._of_group(call)
        return [self._of_one(call, response) for response in call.responses]

    def _of_one(self, call: Call, response: str) -> Found:
        if self.form == TEXTS:
            return _called(self.function, (call.prompt, response, call.answer), {})
        model = call.row.get("reward_model")
        truth = model.get("ground_truth", call.answer) if isinstance(model, dict) else call.answer
        given = {
            "data_source": call.row.get("data_source", ""),
            "solution_str": response,
            "ground_truth": truth,
            "extra_info": call.row.get("extra_info"),
        }
        return _called(self.function, (), self._only(given))

    def _of_group(self, call: Call) -> list[Found]:
        prompt, count = call.row.get("prompt", call.prompt), len(call.responses)
        chat = isinstance(prompt, list)
        completions = [[{"role": "assistant", "content": each}] if chat else each for each in call.responses]
        columns = dict(call.row) or {"answer": call.answer}
        given = {name: [value] * count for name, value in columns.items() if name != "prompt"}
        given |= {"prompts": [prompt] * count, "completions": completions}
        value, trouble = _result(self.function, (), self._only(given))
        if trouble:
            return [Found(None, trouble)] * count
        try:
            numbers = list(value)
        except Exception:
            return [Found(None, _line(f"returned {value!r:.40}; expected a list"))] * count
        if len(numbers) != count:
            return [Found(None, f"returned {len(numbers)} rewards for {count} completions")] * count
        return [_number(number) for number in numbers]

    def _only(self, given: dict[str, Any]) -> dict[str, Any]:
        return given if self._takes is None else {name: value for name, value in given.items() if name in self._takes}


class Rewards:
    """All functions of data.reward."""

    def __init__(
        self, paths: str, weights: Sequence[float] = (), columns: Sequence[str] | None = None, pattern: str = ""
    ) -> None:
        """
        Args:
            paths: as in data.reward: names, several separated by commas.
            weights: the weight of each; empty: 1.
            columns, pattern: see `Reward`.

        Raises:
            ValueError: see `Reward`.
        """
        self._rewards = [Reward(path.strip(), columns, pattern) for path in paths.split(",")]
        self._weights = list(weights) or [1.0] * len(self._rewards)
        self.of_groups = any(reward.form == TRL for reward in self._rewards)

    def of(self, call: Call) -> Iterator[Found]:
        """Yield the reward of each response of a group, as soon as it is known."""
        if self.of_groups:
            yield from map(self._sum, zip(*(reward.of(call) for reward in self._rewards)))
        else:
            for response in call.responses:
                alone = call._replace(responses=[response])
                yield self._sum([reward.of(alone)[0] for reward in self._rewards])

    def _sum(self, found: Sequence[Found]) -> Found:
        if troubles := [each.trouble for each in found if each.trouble]:
            return Found(None, troubles[0])
        parts = [weight * each.number for weight, each in zip(self._weights, found) if each.number is not None]
        return Found(sum(parts) if parts else None)


def _called(function: Callable, texts: Sequence[str], keywords: Mapping[str, Any]) -> Found:
    value, trouble = _result(function, texts, keywords)
    return Found(None, trouble) if trouble else _number(value)


def _result(function: Callable, texts: Sequence[str], keywords: Mapping[str, Any]) -> tuple[Any, str]:
    """Return what the user's function returns, and what went wrong."""
    try:
        value = function(*texts, **keywords)
        return (_RUNNER.run(_awaited(value)) if inspect.isawaitable(value) else value), ""
    except BaseException as error:  # the user's function may raise anything
        try:
            return None, _line(f"raised {type(error).__name__}: {error}")
        except Exception:  # so may its exceptions
            return None, f"raised {type(error).__name__}"


async def _awaited(value: Any) -> Any:
    return await value


def _number(value: Any) -> Found:
    try:
        if isinstance(value, Mapping):  # verl takes the score from it
            value = value["score"]
        return Found(None if value is None else float(value))
    except Exception:
        try:
            return Found(None, _line(f"returned {value!r:.40}"))
        except BaseException as error:
            return Found(None, f"returned what raised {type(error).__name__}")


def _line(text: str) -> str:
    """Return the first line of a text, as text that can be printed and sent."""
    return text.splitlines()[0][:_LONGEST].encode(errors="replace").decode()
