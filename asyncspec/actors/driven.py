"""What a service asks for as the next turn of a conversation: it has to go on from what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asyncspec.engine.protocol import Completion
from asyncspec.environments.conversation import Conversation, Turn
from asyncspec.environments.protocol import Message
from asyncspec.environments.rendering import Renderer

if TYPE_CHECKING:
    from asyncspec.serve.endpoint import Asked


@dataclass
class Next:
    """The next turn of a conversation.

    conversation: as it is before; of one that begins, a new one.
    added: tokens behind its last turn.
    said: the messages that they are, if the conversation consists of messages.
    answer: what the service was told for the turn before.
    again: whether it takes the place of the conversation's last turn, whose answer was lost.
    """

    asked: Asked
    conversation: Conversation
    added: list[int] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    answer: str = ""
    again: bool = False

    @property
    def turns(self) -> int:
        """How many turns come before it."""
        return len(self.conversation.turns) - self.again

    @property
    def tokens(self) -> list[int]:
        """All tokens that the turn begins with."""
        if not self.again:
            return [*self.conversation.tokens, *self.added]
        return self.conversation.tokens[: -len(self.conversation.turns[-1].tokens)]

    def sampled(self, turn: Turn) -> None:
        """Append the turn, and what came before it; or put it in the place of the last one."""
        if self.again:
            self.conversation.turns.pop()
        elif self.conversation.turns:
            self.conversation.answered(self.added, self.answer, self.said)
        self.conversation.sampled(turn)
        self.again = False


def next_turn(before: Next | None, answer: str, renderer: Renderer, asked: Asked) -> Next:
    """Return what a request goes on with.

    Args:
        before: the turn before, which was sampled; None: there was none.
        answer: what the service was told for it.

    Raises:
        ValueError: the request does not go on from what was sampled. The message is one line.
    """
    if before is None or not before.conversation.turns:
        return Next(asked, _begun(renderer, asked))
    conversation, last = before.conversation, before.asked
    if (asked.messages is None) != (last.messages is None) or (asked.text is None) != (last.text is None):
        raise ValueError("the conversation began in another form; expected messages, text or tokens as before")
    if _same(asked, last):  # the answer was lost on its way: the turn is sampled again
        return replace(before, asked=asked, again=True)
    if asked.messages is not None:
        return _messages(conversation, answer, renderer, asked)
    if asked.text is not None:
        known = f"{last.text}{answer}"
        if not asked.text.startswith(known):
            raise ValueError("prompt: does not begin with the conversation so far, with what was answered last")
        return Next(asked, conversation, renderer.encoded(asked.text[len(known) :]), answer=answer)
    kept = conversation.tokens
    if asked.tokens[: len(kept)] != kept:
        at = next((i for i, (old, new) in enumerate(zip(kept, asked.tokens)) if old != new), len(asked.tokens))
        raise ValueError(
            f"token_ids: differ at {at} from the conversation so far, which has {len(kept)} tokens; expected what was "
            "sampled, and more"
        )
    return Next(asked, conversation, asked.tokens[len(kept) :], answer=answer)


def _begun(renderer: Renderer, asked: Asked) -> Conversation:
    if asked.messages is not None:
        messages = [_plain(each) for each in asked.messages]
        return Conversation(messages, renderer.begin(messages))
    return Conversation(asked.text or "", list(asked.tokens))


def _same(asked: Asked, last: Asked) -> bool:
    if asked.messages is not None:
        return asked.messages == last.messages
    return asked.text == last.text if asked.text is not None else asked.tokens == last.tokens


def _messages(conversation: Conversation, answer: str, renderer: Renderer, asked: Asked) -> Next:
    known, given = conversation.beginning, [_plain(each) for each in asked.messages]
    count = len(known)
    if given[:count] != known:
        at = next(i for i, each in enumerate(known) if i >= len(given) or given[i] != each)
        raise ValueError(f"messages[{at}]: differs from the conversation so far; expected it unchanged, and more")
    if (
        len(given) < count + 2
        or given[count]["role"] != "assistant"
        or given[count]["content"].strip() != answer.strip()
    ):
        raise ValueError(f"messages[{count}]: expected the last answer as it was given, and messages behind it")
    said = given[count + 1 :]
    return Next(asked, conversation, renderer.follow(conversation, said), said, given[count]["content"])


def _plain(message: dict[str, Any]) -> Message:
    """Return a message with what a conversation is compared by: role and content as text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return {"role": message["role"], "content": content}


def cut(completion: Completion, count: int) -> Completion:
    """Return a completion with its first `count` tokens."""
    experts, left = completion.experts, len(completion.tokens) - count
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        versions=completion.versions[:count],
        experts=None if experts is None else experts[: len(experts) - left],
    )
