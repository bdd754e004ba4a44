"""The episodes of a generator: conversations whose turns the engine samples, and environments that answer them.

Each sample of a ticket is an episode with an environment of its own. While its environment works, its slot serves
others. An episode that has ended becomes a `Completion`, as if it had been sampled at once, with a mask of what the
policy sampled:

    episode 0   reset | sampled | step ..... | sampled | step | ended
    episode 1   reset | queued | sampled | step | sampled ........... | ended
    the group                                                         | completions, rewards

An episode whose environment fails ends with what was sampled so far and without a reward, so it teaches nothing. If
nothing was sampled yet, it gets one token.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from asyncspec.actors.driven import cut, next_turn
from asyncspec.actors.episode import Ended, Episode, Key, completion_of, turn_of
from asyncspec.config import Config
from asyncspec.engine.protocol import Completion
from asyncspec.environments.conversation import Conversation, common
from asyncspec.environments.pool import Answer, Environments, row_of
from asyncspec.environments.protocol import Message
from asyncspec.environments.rendering import Renderer
from asyncspec.models.tokenizer import response_text
from asyncspec.serve.calls import Choice
from asyncspec.timing.spans import Recorder, now
from asyncspec.wire import messages as m
from asyncspec.wire.facts import UNNAMED, ToolUse, added

if TYPE_CHECKING:
    from asyncspec.serve.endpoint import Asked, Endpoint


CHARACTERS = 64  # more than a token has


class Episodes:
    def __init__(
        self,
        config: Config,
        renderer: Renderer,
        environments: Environments,
        submit: Callable[[m.Turn], None],
        forget: Callable[[int], None],
        recorder: Recorder,
    ) -> None:
        """
        Args:
            submit, forget: submit a turn, and forget one by its request, on all ranks of the engine.
        """
        self.config, self.renderer, self.environments = config, renderer, environments
        self._submit, self._forget, self._recorder = submit, forget, recorder
        self._rewards = config.environment.reward_from == "environment"
        self.endpoint: Endpoint | None = None  # where services ask for turns
        self._room = config.engine.max_prompt_tokens + config.sampling.max_response_tokens
        self._open: dict[Key, Episode] = {}
        self._left: Counter[int] = Counter()  # ticket -> its episodes that are not over
        self._over: dict[int, list[Episode]] = {}
        self._asked: dict[int, Episode] = {}  # by the request of their newest turn
        self._beginnings: dict[int, list[int]] = {}  # ticket -> the tokens that the first of its episodes began with
        self._failed: dict[int, list[Episode]] = {}  # ticket -> episodes that failed before any had begun
        self._requests = 0

    def close(self) -> None:
        """End the processes of the environments, and the endpoint."""
        self.environments.close()
        if self.endpoint is not None:
            self.endpoint.close()

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def has_room(self) -> bool:
        """Whether the episodes of another ticket may begin."""
        return self.open < self.config.episodes

    def begin(self, ticket: m.Ticket, admitted: float) -> None:
        """Begin the episodes of a ticket."""
        self._left[ticket.ticket_id], self._over[ticket.ticket_id] = len(ticket.seeds), []
        row = row_of(ticket.prompt, ticket.answer, ticket.row)
        for sample in range(len(ticket.seeds)):
            episode = Episode(ticket, sample, admitted)
            self._open[episode.key] = episode
            self.environments.begin(episode.key, row)

    def sampled(self, completion: Completion) -> None:
        """Take a turn that the engine has sampled."""
        episode = self._asked.pop(completion.request_id, None)
        if episode is None:  # it has begun again meanwhile, or was given up
            self._forget(completion.request_id)
            return
        at = now()
        episode.until("queued", min(at, completion.started_at))
        episode.until("generate", at)
        episode.asked_at = 0.0
        if episode.next is not None and not episode.failed:
            self._answer(episode, completion)
            return
        episode.completions.append(completion)
        episode.conversation.sampled(turn_of(completion))
        if episode.failed:
            self._end(episode)
        elif completion.truncated:  # what it says may be half a call
            episode.cut = True
            self._end(episode)
        else:
            self.environments.step(episode.key, {"role": "assistant", "content": self._text(completion)})

    def asked(self, asked: Asked) -> None:
        """Take what a service asks for."""
        episode = self._open.get(asked.episode)
        if asked.tell is None:  # its client has gone
            if episode is not None and episode.next and episode.next.asked.request_id == asked.request_id:
                self._give_up_turn(episode)
            return
        try:
            if episode is None or episode.failed:
                raise ValueError("the episode is over")
            if episode.asked_at:
                raise ValueError("the turn before is being sampled; expected one request at a time")
            self._ask_next(episode, asked)
        except ValueError as error:
            asked.tell(error)

    def _ask_next(self, episode: Episode, asked: Asked) -> None:
        """Submit the turn that a service asks for.

        Raises:
            ValueError: it cannot be sampled.
        """
        following = next_turn(episode.last, episode.answer, self.renderer, asked)
        tokens, most_turns = following.tokens, self.config.environment.max_turns
        room = self._room - len(tokens)
        if room < 1 or following.turns >= most_turns:
            episode.cut = bool(episode.completions)
            if episode.cut:
                self.environments.excuse(episode.key)
            raise ValueError(
                f"{following.turns} turns and {len(tokens)} tokens: expected at most environment.max_turns="
                f"{most_turns} and {self._room} tokens"
            )
        if not episode.completions:
            self._check_beginning(episode, following.conversation)
        episode.next, episode.conversation = following, following.conversation
        episode.until("environment", now())
        self._ask(episode, tokens, min(asked.most_tokens, room))

    def _answer(self, episode: Episode, completion: Completion) -> None:
        """Tell a service what was sampled for it, up to a stop string."""
        following, episode.next = episode.next, None
        asked = following.asked
        choice = Choice(self.renderer.tokenizer, asked.stops)
        choice.grow(completion)
        asked.tell(replace(completion, request_id=asked.request_id, sample=0))
        completion = cut(completion, choice.used)
        del episode.completions[following.turns :]  # of a turn whose place it takes
        episode.completions.append(completion)
        following.sampled(turn_of(completion))
        episode.last, episode.answer = following, choice.text

    def tend(self) -> Iterator[Ended]:
        """Take the answers of environments, and submit the turns that they lead to. Yield the tickets whose episodes
        are all over.

        Raises:
            EnvironmentFailed: too many failed.
        """
        for each in self.endpoint.take() if self.endpoint is not None else ():
            self.asked(each)
        for answer in self.environments.poll():
            if (episode := self._open.get(answer.key)) is not None:
                self._answered(episode, answer)
        for ticket_id in [ticket_id for ticket_id, left in self._left.items() if not left]:
            del self._left[ticket_id]
            self._beginnings.pop(ticket_id, None)
            yield self._ended(sorted(self._over.pop(ticket_id), key=lambda episode: episode.sample))

    def _answered(self, episode: Episode, answer: Answer) -> None:
        if answer.again:
            self._give_up_turn(episode)
            episode.until("environment", now())
            episode.conversation, episode.completions, episode.reward, episode.used = None, [], 0.0, {}
            episode.last, episode.cut = None, False
            return
        if not episode.asked_at:
            episode.until("environment", answer.answered_at)
        name = f"tool {answer.tool}" if answer.tool else f"environment {answer.what}"
        ticket = episode.ticket
        self._recorder.add(name, answer.asked_at, answer.answered_at, ticket.step, ticket.ticket_id)
        if answer.what == "step" and answer.tool != "":
            seconds = answer.answered_at - answer.asked_at
            use = ToolUse(1, seconds, seconds)
            episode.used = added([episode.used, {answer.tool or UNNAMED: use}])
        if answer.error and episode.cut:  # a service that was told that there is no room for more
            self._end(episode)
        elif answer.error:
            self._fail(episode)
        elif not episode.completions and answer.what == "run":
            self._fail(episode, "run has asked the policy for nothing")
        elif answer.what == "reset":
            self._begun(episode, answer)
        else:
            self._stepped(episode, answer)

    def _begun(self, episode: Episode, answer: Answer) -> None:
        """Submit the first turn of an episode."""
        ticket, given = episode.ticket, answer.messages
        row = json.loads(ticket.row) if ticket.row else {}
        if given is None and isinstance(asked := row.get(self.config.data.prompt_column), list):
            given = asked
        beginning, episode.tools = ticket.prompt if given is None else list(given), answer.tools
        try:
            if answer.messages and self._is_long(answer.messages):  # do not tokenize what cannot fit
                raise ValueError("a beginning that is too long by far")
            conversation = Conversation(beginning, self.renderer.begin(beginning, episode.tools))
            self._check_beginning(episode, conversation)
        except ValueError as error:
            self._fail(episode, str(error))
            return
        episode.conversation = conversation
        self._ask(episode)

    def _check_beginning(self, episode: Episode, conversation: Conversation) -> None:
        """Check that an episode can begin so, and let those begin that have waited for the first of their group.

        Raises:
            ValueError: it cannot. The message is one line.
        """
        prompt, most = conversation.prompt, self.config.engine.max_prompt_tokens
        if not 0 < len(prompt) <= most:
            raise ValueError(
                f"a beginning of {len(prompt)} tokens; expected at least 1, at most engine.max_prompt_tokens={most}"
            )
        first = self._beginnings.setdefault(episode.ticket.ticket_id, list(prompt))
        if prompt[0] != first[0]:
            raise ValueError("a beginning with another first token than others of its group")
        self._ask_for_failed(episode.ticket)

    def _is_long(self, messages: Sequence[Message]) -> bool:
        """Whether messages have more characters than there can be room for."""
        return sum(len(message["content"]) for message in messages) > CHARACTERS * self._room

    def _stepped(self, episode: Episode, answer: Answer) -> None:
        """Go on with an episode, or end it."""
        if answer.reward is not None:
            episode.reward += answer.reward
            if not math.isfinite(episode.reward):
                self._fail(episode, f"its rewards sum to {episode.reward}")
                return
        if answer.done:
            self._end(episode)
            return
        conversation, last = episode.conversation, episode.completions[-1]
        if self._is_long(answer.messages):
            episode.cut = True
            self._end(episode)
            return
        try:
            tokens = self.renderer.follow(conversation, answer.messages, episode.tools)
        except ValueError as error:
            self._fail(episode, str(error))
            return
        too_long = len(conversation.tokens) + len(tokens) >= self._room
        if too_long or len(conversation.turns) == self.config.environment.max_turns:
            episode.cut = True
            self._end(episode)
            return
        conversation.answered(tokens, self._text(last), answer.messages)
        self._ask(episode)

    def _ask(self, episode: Episode, tokens: Sequence[int] = (), most: int = 0) -> None:
        """Submit the next turn of an episode.

        Args:
            tokens: all that come before it; empty: those of the conversation.
            most: tokens of the turn; 0: as many as there is room for.
        """
        conversation, before = episode.conversation, episode.request_id if episode.completions else None
        tokens = list(tokens) or conversation.tokens
        most = min(most or self._room, self.config.sampling.max_response_tokens, self._room - len(tokens))
        self._requests += 1
        episode.request_id, episode.asked_at = self._requests, now()
        self._asked[self._requests] = episode
        seeds = [episode.ticket.seeds[episode.sample] + len(conversation.turns)]
        self._submit(m.Turn(self._requests, tokens, seeds, most, -1 if before is None else before))

    def _fail(self, episode: Episode, why: str = "") -> None:
        """End an episode whose environment has failed.

        Args:
            why: if it was refused here; "": the environments know it.
        """
        if why:
            self.environments.refuse(episode.key, why)
        self._give_up_turn(episode)
        episode.failed = True
        if episode.completions:
            self._end(episode)
            return
        waiting = self._failed.setdefault(episode.ticket.ticket_id, [])
        waiting.append(episode)
        if len(waiting) == self._left[episode.ticket.ticket_id]:  # no other can begin any more
            self._beginnings.setdefault(episode.ticket.ticket_id, list(episode.ticket.prompt_tokens))
        self._ask_for_failed(episode.ticket)

    def _ask_for_failed(self, ticket: m.Ticket) -> None:
        """Have a token sampled for episodes that failed before any was, with the beginning of others of their group."""
        if (first := self._beginnings.get(ticket.ticket_id)) is not None:
            for episode in self._failed.pop(ticket.ticket_id, ()):
                episode.conversation = Conversation("", first)
                self._ask(episode, most=1)

    def _give_up_turn(self, episode: Episode) -> None:
        """Forget the turn that the engine is sampling for an episode."""
        if episode.asked_at:
            self._asked.pop(episode.request_id, None)
            if episode.next is not None:
                episode.next.asked.tell(ValueError("the episode is over, or begins again"))
                episode.next = None
            episode.until("generate", now())
            episode.asked_at = 0.0
        self._forget(episode.request_id)

    def _end(self, episode: Episode) -> None:
        if self.endpoint is not None:
            self.endpoint.shut(episode.key)
        self._give_up_turn(episode)
        self.environments.end(episode.key)
        del self._open[episode.key]
        self._over[episode.ticket.ticket_id].append(episode)
        self._left[episode.ticket.ticket_id] -= 1

    def _text(self, completion: Completion) -> str:
        tokens, special = completion.tokens.tolist(), self.config.data.reward_special_tokens
        return response_text(self.renderer.tokenizer, tokens, completion.truncated, special)

    def _ended(self, episodes: list[Episode]) -> Ended:
        prompts = [episode.conversation.prompt for episode in episodes]
        shared = common(prompts)
        ticket = episodes[0].ticket
        if prompts[0] != ticket.prompt_tokens:  # the environment has begun otherwise
            text = self.renderer.tokenizer.decode(prompts[0][:shared], skip_special_tokens=False)
            ticket = msgspec.structs.replace(ticket, prompt=text, prompt_tokens=prompts[0][:shared])
        last = max(episodes, key=lambda episode: episode.history[-1].end)
        return Ended(
            ticket=msgspec.structs.replace(ticket, prompt_tokens=prompts[0][:shared]),
            completions=[completion_of(episode, shared) for episode in episodes],
            rewards=[None if episode.failed or not self._rewards else episode.reward for episode in episodes],
            failed=[episode.failed for episode in episodes],
            history=last.history,
            turns=sum(len(episode.completions) for episode in episodes),
            tools=added(episode.used for episode in episodes),
            texts=[
                self._text(episode.completions[-1]) if episode.last is None else episode.answer for episode in episodes
            ],
        )
