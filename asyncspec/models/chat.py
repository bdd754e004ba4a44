"""Renders messages as the text that a chat model was trained on, with the template in its directory.

A template is a Jinja program that comes with the model. It runs in Jinja's sandbox: it reads what it is given, and can
neither import nor open anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncspec.errors import first_line
from asyncspec.models import CheckpointError
from asyncspec.models.headers import read_json

FILE = "chat_template.jinja"
FILES = (FILE, "tokenizer_config.json")  # those that decide what messages become
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
GIVEN = ("messages", "add_generation_prompt", "tools", "documents", *_SPECIAL)  # variables that every template gets


class ChatTemplate:
    """The chat template of a Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            CheckpointError: the directory has no template, or Jinja cannot read it.
        """
        self.directory = directory
        settings = read_json(directory / "tokenizer_config.json") if _has(directory, "tokenizer_config.json") else {}
        text = _text(directory, settings)
        if text is None:
            raise CheckpointError(
                f"{directory}: has no chat template ({FILE}, or chat_template in tokenizer_config.json), which prompts "
                "that are messages need; expected a chat model, or prompts that are text"
            )
        others = read_json(directory / "special_tokens_map.json") if _has(directory, "special_tokens_map.json") else {}
        self._special = {}
        for name in _SPECIAL:
            token = settings.get(name) or others.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                self._special[name] = token
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(text)
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(text))
        except (TemplateError, RecursionError) as error:
            raise CheckpointError(f"{directory}: chat template: {first_line(error)}; expected Jinja") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of messages, up to where the model's answer begins.

        Args:
            messages: objects with role and content.
            variables: further variables of the template, for example enable_thinking.
            tools: JSON schemas of the tools that the model may call.

        Raises:
            ValueError: the template refuses the messages. The message is one line.
        """
        try:
            return self._template.render(
                **self._special,
                **variables,
                messages=list(messages),
                tools=tools and list(tools),
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template may divide by zero or index what is not there
            raise ValueError(
                f"the chat template of {self.directory}: {type(error).__name__}: {first_line(error)}"
            ) from None


def parse_variables(text: str) -> dict[str, Any]:
    """Return the variables in "name=value,name=value". A value that is no JSON is text.

    Raises:
        ValueError: the form is wrong, or every template gets this variable anyway; the message says which.
    """
    variables: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{item!r} is not of the form name=value")
        if name in GIVEN:
            raise ValueError(f"{name!r} is set by asyncspec")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


def _has(directory: Path, name: str) -> bool:
    return (directory / name).is_file()


def _text(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template's text; of several the one that is named default."""
    if _has(directory, FILE):
        try:
            return (directory / FILE).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory / FILE}: {first_line(error)}; expected a Jinja template") from None
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    return found if isinstance(found, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """The tag that marks what the model has said. It changes no text."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
