r"""The tokens of a conversation: those of its beginning, and those that an environment's messages add to it.

What the policy has sampled is never tokenized again. To go on, a renderer looks up what the chat template writes behind
a turn of the policy: it renders the conversation with a placeholder in the place of that turn, and takes what follows.

    rendered with a placeholder   <|im_start|>assistant\nPLACE<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n ...
    kept, as it was sampled       ...................... (6*7)<|im_end|>
    added                                                             \n<|im_start|>tool\n42<|im_end|>\n ...

This is right only for a template that renders a conversation's beginning the same, however it goes on. `faults` says
where a template does not: it may leave out the reasoning of earlier turns, for example. The policy would then be
trained on contexts that nobody who uses the template will give it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from asyncspec.environments.conversation import Conversation
from asyncspec.environments.protocol import Message
from asyncspec.models.chat import ChatTemplate
from asyncspec.models.tokenizer import encode_prompt, encode_responses

_PLACE = "Here-stands-what-was-sampled"
_ANSWERS = ("so be it", "<think>\nlet me see\n</think>\n\nso be it")


class Renderer:
    """Renders conversations for one policy."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, variables: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            template: the policy's chat template; None: it has none, so messages cannot be rendered.
            variables: further variables of the template.
        """
        self.tokenizer, self.template, self.variables = tokenizer, template, variables or {}

    def begin(self, beginning: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the tokens of a beginning, up to where the policy's answer begins.

        Args:
            beginning: text, or messages.
            tools: JSON schemas.

        Raises:
            ValueError: the messages cannot be rendered. The message is one line.
        """
        text = beginning if isinstance(beginning, str) else self._render(self.with_tools(beginning, tools), tools)
        return encode_prompt(self.tokenizer, text)

    def with_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Message]:
        """Return messages that tell the policy which tools there are, if its template does not."""
        if not tools or self.template is None or self.template.knows_tools:
            return messages
        told = (
            "You may call these tools:\n"
            + "\n".join(json.dumps(each["function"]) for each in tools)
            + '\nTo call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
        )
        if messages and messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
        return [{"role": "system", "content": told}, *messages]

    def follow(
        self, conversation: Conversation, said: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the tokens behind the last turn of a conversation, up to where the policy's next one begins.

        Args:
            said: the environment's messages.
            tools: as for `begin`.

        Raises:
            ValueError: the messages cannot be rendered. The message is one line.
        """
        beginning = conversation.beginning
        if isinstance(beginning, str):
            return self.encoded("".join(message["content"] for message in said))
        place = _PLACE
        while any(place in message["content"] for message in said):
            place += "-"
        messages = [*self.with_tools(beginning, tools), {"role": "assistant", "content": place}, *said]
        _, found, behind = self._render(messages, tools).rpartition(place)
        if not found:
            raise ValueError("the chat template does not write what the policy said; expected one that does")
        tokens = self.encoded(behind)
        # The stop token that ended the turn stands among what was sampled.
        return tokens[1:] if tokens[:1] == [int(conversation.turns[-1].tokens[-1])] else tokens

    def faults(self) -> list[str]:
        """Return in which conversations the template writes a beginning otherwise once the conversation goes on, each
        as a few words; empty: in none that were tried.
        """
        asked, found = {"role": "user", "content": "What is it?"}, []
        for role in ("user", "tool"):
            for answer in _ANSWERS:
                begun = [asked]
                for turns in ("one turn", "two turns"):
                    try:
                        before = self._render(begun, None)
                        begun = [
                            *begun,
                            {"role": "assistant", "content": answer},
                            {"role": role, "content": "42"},
                        ]
                        after = self._render(begun, None)
                    except ValueError:  # it does not know the role
                        break
                    if not after.startswith(before + answer):
                        what = "reasoning" if answer != _ANSWERS[0] else "text"
                        found.append(f"{what} before a message of the role {role}, after {turns}")
                        break
        return found

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        if self.template is None:
            raise ValueError(
                "the policy has no chat template, so an environment's messages cannot begin a conversation"
            )
        return self.template.render(messages, self.variables, tools if self.template.knows_tools else None)

    def encoded(self, text: str) -> list[int]:
        return encode_responses(self.tokenizer, [text])[0]
