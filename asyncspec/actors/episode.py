"""One episode as it is played, and what a ticket's episodes come to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from asyncspec.actors.driven import Next
from asyncspec.engine.protocol import Completion
from asyncspec.environments.conversation import Conversation, Turn
from asyncspec.timing.metrics import summed
from asyncspec.wire import messages as m
from asyncspec.wire.facts import ToolUse

Key = tuple[int, int]  # ticket, sample


@dataclass
class Episode:
    """One sample of a ticket, as it is played."""

    ticket: m.Ticket
    sample: int
    admitted: float
    conversation: Conversation | None = None  # None: its environment has not begun
    completions: list[Completion] = field(default_factory=list)  # of its turns
    tools: list[dict] | None = None  # JSON schemas
    request_id: int = -1  # of its newest turn
    asked_at: float = 0.0  # when that was submitted; 0: it is the environment's turn
    history: list[m.Phase] = field(default_factory=list)  # without gaps, since it was admitted
    reward: float = 0.0
    used: dict[str, ToolUse] = field(default_factory=dict)
    cut: bool = False  # a limit ended it
    failed: bool = False
    next: Next | None = None  # of a service: the turn that is being sampled for it
    last: Next | None = None  # of a service: the last turn that was
    answer: str = ""  # of a service: what it was told for that turn

    @property
    def key(self) -> Key:
        return self.ticket.ticket_id, self.sample

    def until(self, name: str, end: float) -> None:
        """Add to the history that it did this until then."""
        start = self.history[-1].end if self.history else self.admitted
        if end > start:
            self.history.append(m.Phase(name, start, end))


@dataclass
class Ended:
    """All episodes of a ticket, in the order of the samples.

    ticket: with the tokens that all its episodes begin with as its prompt.
    rewards: None for an episode that failed; all None if data.reward gives them.
    failed: whether each episode failed.
    history: of the episode that ended last.
    """

    ticket: m.Ticket
    completions: list[Completion]
    rewards: list[float | None]
    failed: list[bool]
    history: list[m.Phase]
    turns: int
    tools: dict[str, ToolUse]
    texts: list[str]


def turn_of(completion: Completion) -> Turn:
    """Return what the engine has sampled as a turn."""
    arrays = completion.tokens.numpy(), completion.logprobs.numpy(), completion.versions.numpy()
    return Turn(*arrays, completion.truncated)


def completion_of(episode: Episode, shared: int) -> Completion:
    """Return an episode as one completion.

    Args:
        shared: how many tokens of the prompt belong to the whole group; the others come first in the response.
    """
    arrays, turns = episode.conversation.arrays(shared), episode.completions
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Completion(
        request_id=episode.ticket.ticket_id,
        sample=episode.sample,
        tokens=tensors["tokens"],
        logprobs=tensors["behavior"],
        versions=tensors["versions"],
        truncated=episode.cut,
        verifications=sum(turn.verifications for turn in turns),
        proposed=sum(turn.proposed for turn in turns),
        accepted=sum(turn.accepted for turn in turns),
        started_at=turns[0].started_at,
        reached_at=summed(turn.reached_at for turn in turns),
        accepted_at=summed(turn.accepted_at for turn in turns),
        loss_mask=tensors["loss_mask"],
        experts=turns[-1].experts,  # the last turn's prompt was all that came before it
    )
