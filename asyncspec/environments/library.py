"""Renders conversations with the package `renderers`, for the models whose templates it knows.

Unlike a chat template, it says by itself what follows a turn, without rendering the conversation anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from renderers import RendererConfig, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from tokenizers import Tokenizer

from asyncspec.environments.conversation import Conversation
from asyncspec.environments.protocol import Message
from asyncspec.environments.rendering import Renderer
from asyncspec.errors import first_line
from asyncspec.models.chat import ChatTemplate


def name_of(repository: str) -> str | None:
    """Return the package's name for what renders a model of the hub; None: it does not know the model."""
    return MODEL_RENDERER_MAP.get(repository)


class _Tokenizer:
    """What the package asks of a tokenizer."""

    name_or_path, unk_token_id, eos_token_id = "", None, None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *_, add_special_tokens: bool = False, **__) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens, *_, skip_special_tokens: bool = False, **__) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens):
        return (
            self._tokenizer.token_to_id(tokens)
            if isinstance(tokens, str)
            else [*map(self.convert_tokens_to_ids, tokens)]
        )


class LibraryRenderer(Renderer):
    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        variables: Mapping[str, Any],
        keeps: bool,
    ) -> None:
        """
        Args:
            name: the package's name for what renders the model, such as qwen3.
            variables: its options, such as enable_thinking.
            keeps: whether to keep the reasoning of earlier turns although the model's template leaves it out.

        Raises:
            ValueError: the package has nothing of this name, or not these options, or the tokenizer lacks a token.
        """
        super().__init__(tokenizer, template, variables)
        kept = {"thinking_retention": "all"} if keeps else {}
        try:
            config = TypeAdapter(RendererConfig).validate_python({"name": name, **variables, **kept})
            self._made = create_renderer(_Tokenizer(tokenizer), config)
        except (ValidationError, ValueError, AssertionError) as error:
            raise ValueError(
                f"environment.renderer={name!r}: {first_line(error)}; expected a name that the package renderers knows "
                "and that fits the model; nearest valid choice: environment.renderer=template"
            ) from None

    def begin(self, beginning: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        if isinstance(beginning, str):
            return super().begin(beginning, tools)
        known = [each["function"] for each in tools] if tools else None
        return self._made.render_ids(list(beginning), tools=known, add_generation_prompt=True)

    def follow(
        self, conversation: Conversation, said: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        if isinstance(conversation.beginning, str):
            return super().follow(conversation, said, tools)
        answer = conversation.turns[-1].tokens.tolist()
        before = conversation.tokens
        prompt = before[: len(before) - len(answer)]
        known = [each["function"] for each in tools] if tools else None
        found = self._made.bridge_to_next_turn(prompt, answer, list(said), tools=known)
        if found is None or found.token_ids[: len(before)] != before:
            raise ValueError(
                "the package renderers would render this conversation anew; expected one that only goes on"
            )
        return found.token_ids[len(before) :]

    def faults(self) -> list[str]:
        if getattr(self._made, "effective_thinking_retention", "all") == "all":
            return []
        return ["reasoning before a message of the role user"]
