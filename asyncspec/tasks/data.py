"""Load problems from data files or the built-in task.

A data file is JSONL, Parquet or CSV. Each row has a prompt, which is text or a list of messages, and mostly an answer.
Messages are rendered with the policy's chat template. All columns of the row go to the reward. A run may have a million
rows, so only those that it uses are rendered.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from asyncspec.config import Config, DataConfig, data_files, eval_sets, resolve_path, sources
from asyncspec.errors import first_line
from asyncspec.models import tokenizer as tokenizers
from asyncspec.models.chat import ChatTemplate, parse_variables
from asyncspec.tasks.order import shuffled, turns
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.sums import sums

ENCODED_AT_ONCE = 1000  # prompts, on all cores


class Row(NamedTuple):
    """A row of a data file.

    text: the row as JSON; "" if `prompt` and `answer` say it all.
    """

    where: str
    prompt: str | list[dict[str, Any]]
    answer: str
    text: str


class Problems(NamedTuple):
    """training: the problems of the places of all steps, in order; rl.tries of each place, one after the other.
    left_out: how many problems have too many tokens, of those that the run would have come to.
    """

    training: list[Problem]
    held_out: list[Problem]
    left_out: int = 0


def load_problems(config: Config) -> Problems:
    """Return a run's problems.

    Raises:
        ValueError: there are no problems, a file cannot be read, or messages cannot be rendered. The message is one
            line that names the field.
    """
    data, places, tries = config.data, config.steps * config.rl.groups_per_step, config.rl.tries
    if data.train_file:
        preparation, left_out = _Preparation(config), 0
        held_out: list[Problem] = []
        for each in eval_sets.parse(data.eval_file):
            name = f"data.eval_file={each.path!r}"
            found = preparation.problems(load_rows(name, each.path, data))
            fitting = [msgspec.structs.replace(problem, eval_set=each.name) for problem in found if problem is not None]
            left_out += len(found) - len(fitting)
            if not fitting:
                raise _too_long(config, len(found), name)
            held_out += fitting
        parts = sources(data.train_file) if data.train_weights else [data.train_file]
        source_N = turns(data.source_weights or [1.0], places).repeat(tries)  # a place has one source
        training: list[Problem] = [Problem("", "")] * (places * tries)
        for number, part in enumerate(parts):
            turn = np.flatnonzero(source_N == number).tolist()
            chosen, missing = _in_order(config, number, part, len(turn), preparation)
            left_out += missing
            for index, problem in zip(turn, chosen):
                training[index] = problem
        return Problems(training, held_out, left_out)
    held_out = sums(config.seed + 1_000_003, data.eval_prompts)
    seen = {p.prompt for p in held_out}
    problems = [p for p in sums(config.seed, data.train_prompts) if p.prompt not in seen]
    if not problems:
        raise ValueError(
            f"data.train_prompts={data.train_prompts}: all of these prompts are held out; expected a larger number"
        )
    order = shuffled(config.seed, 0, len(problems), places * tries).tolist()
    return Problems([problems[i] for i in order], held_out)


def told_left_out(config: Config, count: int) -> str:
    """Return the line that says how many prompts `load_problems` left out."""
    return f"{count} prompts are left out: more than engine.max_prompt_tokens={config.engine.max_prompt_tokens} tokens"


class _Preparation:
    """Turns rows into problems: renders them, and finds those with too many tokens if these are to be left out."""

    def __init__(self, config: Config) -> None:
        self._model, self._variables = resolve_path(config.model.path), parse_variables(config.data.template_variables)
        self._most = config.engine.max_prompt_tokens
        self._tokenizer = tokenizers.load(self._model) if config.data.filter_overlong_prompts else None

    def problems(self, rows: Sequence[Row]) -> list[Problem | None]:
        """Return the problem of each row, None in the place of those that are left out."""
        problems = rendered(rows, self._model, self._variables)
        if self._tokenizer is None:
            return list(problems)
        encoded = (
            tokenizers.encode_prompts(self._tokenizer, [p.prompt for p in problems[i : i + ENCODED_AT_ONCE]])
            for i in range(0, len(problems), ENCODED_AT_ONCE)
        )
        tokens = [len(prompt.tokens) for part in encoded for prompt in part]
        return [problem if count <= self._most else None for problem, count in zip(problems, tokens)]


def _in_order(
    config: Config, number: int, part: str, needed: int, preparation: _Preparation
) -> tuple[list[Problem], int]:
    """Return the problems that a source gives, in order, and how many were left out to get as many.

    Args:
        number: of the source.
        part: what names it in data.train_file.
        needed: how many problems.

    Raises:
        ValueError: all its prompts have too many tokens.
    """
    name = f"data.train_file={part!r}"
    rows, made, count = load_rows(name, part, config.data), dict[int, Problem | None](), needed
    while True:
        indices = shuffled(config.seed, number, len(rows), count).tolist()
        new = sorted({*indices} - {*made})
        made |= zip(new, preparation.problems([rows[i] for i in new]))
        chosen = [problem for i in indices if (problem := made[i]) is not None]
        if len(chosen) >= needed:
            return chosen[:needed], sum(problem is None for problem in made.values())
        if len(made) == len(rows) and not chosen:
            raise _too_long(config, len(rows), name)
        count *= 2


def _too_long(config: Config, count: int, name: str) -> ValueError:
    return ValueError(
        f"engine.max_prompt_tokens={config.engine.max_prompt_tokens}: none of {count} prompts of {name} has so few "
        "tokens; expected a larger number"
    )


def rendered(rows: Sequence[Row], model: Path, variables: Mapping[str, Any]) -> list[Problem]:
    """Return rows as problems, with messages rendered as text.

    Args:
        model: the policy's directory.
        variables: variables of its chat template.

    Raises:
        ValueError: the policy has no chat template, or its template refuses the messages.
    """
    template, problems = None, []
    for row in rows:
        prompt = row.prompt
        if not isinstance(prompt, str):
            template = template or ChatTemplate(model)
            try:
                prompt = template.render(prompt, variables)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}; expected messages that it renders") from None
        problems.append(Problem(prompt, row.answer, row.text))
    return problems


def columns(problems: Sequence[Problem]) -> list[str]:
    """Return the columns that the reward of each problem gets, besides the prompt: those that all have."""
    rows = [problem.row for problem in problems[:100]]
    return sorted(set.intersection(*({*json.loads(row)} if row else {"answer"} for row in rows)) - {"prompt"})


def load_rows(name: str, path: str, data: DataConfig) -> list[Row]:
    """Load the rows of data files, one after the other.

    Args:
        name: what the user calls them, for messages.
        path: see `config.data_files`.
        data: names the columns.

    Raises:
        ValueError: the file cannot be read, or has no row; or a row has no prompt or no answer. The message names the
            row.
    """
    rows = [_row(where, found, text, data) for where, found, text in _objects(name, path)]
    if not rows:
        raise ValueError(f"{name}: the file is empty; expected rows with a prompt and an answer")
    return rows


def _row(where: str, found: Any, text: str, data: DataConfig) -> Row:
    """Return an object of a data file as a row.

    Args:
        text: the object as JSON; "": not yet made.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, got {str(found)[:60]!r}")
    prompt, answer = found.get(data.prompt_column), found.get(data.answer_column) if data.answer_column else ""
    if answer is None and isinstance(model := found.get("reward_model"), dict):  # verl's layout
        answer = model.get("ground_truth")
    if not _is_text(prompt) and not _are_messages(prompt):
        raise ValueError(
            f"{where}: expected in {data.prompt_column} text, or a list of messages with role and content, got "
            f"{str(prompt)[:40]!r}; the columns are {_names(found)}; data.prompt_column names the prompt's"
        )
    if answer is None or isinstance(answer, float) and answer != answer:
        raise ValueError(
            f"{where}: expected an answer in {data.answer_column}; the columns are {_names(found)}; "
            "data.answer_column names the answer's, or is empty if there is none"
        )
    given = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    whole = _is_text(prompt) and isinstance(answer, str) and len(found) == 1 + bool(data.answer_column)
    try:
        (prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)).encode()
        given.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: expected UTF-8, without half a surrogate pair; got {error.object[error.start]!r}"
        ) from None
    if whole and data.prompt_column == "prompt" and data.answer_column in ("", "answer"):
        text = ""
    else:
        text = text or json.dumps(found, ensure_ascii=False, default=str)
    return Row(where, cast("str | list[dict[str, Any]]", prompt), given, text)


def _names(found: Mapping[str, Any]) -> str:
    return ", ".join(found)[:200]


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) and bool(prompt)


def _are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in prompt)
    )


def _objects(name: str, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (where it stands, object, its JSON if there is one) of data files.

    Raises:
        ValueError: the file cannot be read, or a line of it.
    """
    files = data_files(path)
    for file in files:
        yield from _objects_of(name if len(files) == 1 else f"{name}: {file.name}", file)


def _objects_of(name: str, file: Path) -> Iterator[tuple[str, Any, str]]:
    kind = file.name.rpartition(".")[2].lower()
    try:
        if kind == "parquet":
            yield from _parquet(name, file)
        elif kind == "csv":
            csv.field_size_limit(2**31 - 1)  # tests of a program may be long
            with open(file, newline="", encoding="utf-8-sig") as lines:
                for number, found in enumerate(csv.DictReader(lines, strict=True), 1):
                    if None in found or None in found.values():
                        raise ValueError(f"{name}: row {number}: expected as many values as the first line has names")
                    yield f"{name}: row {number}", found, ""
        else:
            yield from _lines(name, file)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or first_line(error)}; expected a file that can be read") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {error}; expected CSV in UTF-8") from None


def _parquet(name: str, file) -> Iterator[tuple[str, Any, str]]:
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with open(file, "rb") as content:
            for batch in ParquetFile(content).iter_batches(1000):
                for found in batch.to_pylist():
                    number += 1
                    yield f"{name}: row {number}", found, ""
    except Exception as error:  # besides pyarrow's, those of dates and texts that Python cannot represent
        if isinstance(error, OSError) and error.strerror:
            raise
        raise ValueError(f"{name}: behind row {number}: {first_line(error)}; expected Parquet") from None


def _lines(name: str, file) -> Iterator[tuple[str, Any, str]]:
    decode = msgspec.json.Decoder().decode
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace():
                continue
            where = f"{name}: line {number}"
            try:
                text = line.decode()
                found = decode(line)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where}: expected UTF-8, without half a surrogate pair; got {line[error.start : error.end]!r}"
                ) from None
            except (msgspec.MsgspecError, ValueError, RecursionError):
                found = _python_json(where, text)
            yield where, found, text.strip()


def _python_json(where: str, text: str) -> Any:
    """Read a line that msgspec refuses. Python's parser takes NaN and half a surrogate pair, which Python writes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: expected an object, got {text.strip()[:60]!r}") from None
