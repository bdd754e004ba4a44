"""The generator: turns tickets into groups with an Engine, under the newest weights it has.

- A ticket starts only under a version of at least its min_version. Versions only grow, so the lag bound holds for every
  token.
- Weights arrive in the background and are swapped in between two engine steps. With `eval.exact` new weights of the
  policy wait until the groups of an evaluation are generated. The controller sends these before the training tickets
  that need newer weights, so such a group waits for nothing.
- A group leaves when all its samples are generated and rewarded. Rewards are computed in other processes, while the
  engine works on other groups. Evaluation groups go to the controller, all others to a logprob actor, except those
  without signal with rl.dynamic_sampling.
- With an environment, each sample is an episode of several turns (episodes.py).
- The controller sends a generator tickets for two engines at most. Those that the engine has no room for wait here.

With engine.tensor_parallel above 1 it leads the ranks that hold the policy together, see generator_rank.py.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from asyncspec.actors.base import replacement_number
from asyncspec.actors.crew import actor_names
from asyncspec.actors.engine_holder import EngineHolder
from asyncspec.actors.episode import Ended
from asyncspec.actors.episodes import Episodes
from asyncspec.actors.generator_rank import FORGET, HOLD, LENGTH, STEP, SWAP
from asyncspec.actors.team import Team
from asyncspec.config import resolve_path
from asyncspec.engine import routes
from asyncspec.engine.protocol import Completion
from asyncspec.environments.choose import renderer_of
from asyncspec.environments.pool import Environments
from asyncspec.tasks.rewarder import Rewarder, filled
from asyncspec.timing.metrics import summed
from asyncspec.timing.rollouts import shown
from asyncspec.timing.spans import now
from asyncspec.wire import messages as m
from asyncspec.wire.facts import checksum, sampled
from asyncspec.wire.transport import Outbox
from asyncspec.wire.weights import BroadcastError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IDLE_WAIT_S = 0.005  # arriving weights wake nobody, so an idle generator checks for them this often


@dataclass
class _OpenGroup:
    """A group that is being generated or rewarded; times are seconds of the run's clock."""

    ticket: m.Ticket
    received: float
    admitted: float
    completions: list[Completion] = field(default_factory=list)
    ended: Ended | None = None  # with an environment: what its episodes have come to
    done: float = 0.0  # when its last sample was generated
    phases: list[m.Phase] = field(default_factory=list)  # until then, since it was admitted
    rewards: list[float | None] = field(default_factory=list)  # None only in an evaluation
    rewarded: float = 0.0  # when its rewards were known
    due: float = 0.0  # when it may leave; later only if deployment.delays says so


class Generator(EngineHolder):
    """Samples and rewards the groups of its tickets."""

    role = "generator"
    takes = (m.Received,)

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.team = Team(self, self.ranks)
        self.tickets: deque[tuple[m.Ticket, float]] = deque()  # those to begin, and when each arrived
        self.open_groups: dict[int, _OpenGroup] = {}
        self.rewarding: dict[int, _OpenGroup] = {}  # generated, and not yet sent on
        self.rewarder: Rewarder | None = None  # set by `load`; None also if the environment rewards
        self.episodes: Episodes | None = None  # set by `load`; None without an environment
        self.tokenizer: Tokenizer | None = None
        self.to_logprob: list[Outbox] = []  # set by `connect`
        # kind -> newer version -> the other ranks that have received it
        self.complete: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._draft_length = -1  # that the other ranks were last told
        self._holding = -1  # the version for which the other ranks were last told to wait
        self._busy_since = None  # when generation began, and the recorder's mark of its GPU time
        self._interruptions: deque[m.Phase] = deque()  # swaps that interrupted generation, in order

    def load(self) -> None:
        from asyncspec.models import tokenizer

        # The functions load in processes of their own, while the engine does here.
        environments = Environments.of(self.config) if self.config.environment.name else None
        if environments is None or self.config.environment.reward_from == "data.reward":
            self.rewarder = Rewarder.of(self.config)
        path = resolve_path(self.config.model.path)
        self.tokenizer = tokenizer.load(path)
        super().load()
        if self.rewarder is not None:
            self.rewarder.load()
        if environments is not None:
            environments.load()
            renderer = renderer_of(self.config, self.tokenizer)
            self.episodes = Episodes(
                self.config, renderer, environments, self._submit_turn, self._forget, self.recorder
            )
            if environments.driven:
                from asyncspec.serve.endpoint import Endpoint  # the server's libraries are an extra

                self.episodes.endpoint = endpoint = Endpoint.of(self.config, renderer)
                environments.endpoint, environments.shut = endpoint.open, endpoint.shut
                endpoint.start()

    def connect(self, welcome: m.Welcome) -> set[str]:
        self.to_logprob = [
            self.outbox(name, welcome, self.delay.seconds.get("queue", 0.0), self._held_back)
            for name, role in actor_names(self.config).items()
            if role == "logprob"
        ]
        self.team.connect(welcome)
        return super().connect(welcome)

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Ticket):
            self.tickets.append((message, now()))
        else:
            super().handle(message)

    def turn(self) -> None:
        self._swap_weights()
        self._admit()
        if self.engine.live or self.engine.waiting:
            self._busy_since = self._busy_since or (now(), time.process_time(), self.recorder.mark())
            self.delay("generate")
            self.fault("work")
            if (length := self.engine.plan()) != self._draft_length:
                self._draft_length = length
                self.team.order(LENGTH, length)
            self.team.order(STEP, self.sampled)
            for completion in self.team.together(self.poll):
                self._sampled(completion)
        else:
            self._end_busy_span()
            self.wait(IDLE_WAIT_S)
        if self.episodes is not None:
            for ended in self.episodes.tend():
                self._ended(ended)
        self._send_rewarded()

    def _sampled(self, completion: Completion) -> None:
        """Take what the engine has sampled: a sample of a group, or a turn of an episode."""
        if self.episodes is not None:
            self.episodes.sampled(completion)
            return
        group = self.open_groups[completion.request_id]
        group.completions.append(completion)
        if len(group.completions) == len(group.ticket.seeds):
            self._reward(self.open_groups.pop(completion.request_id))

    def _submit_turn(self, turn: m.Turn) -> None:
        self.team.tell(turn)
        self.submit_turn(turn)

    def _forget(self, request_id: int) -> None:
        if request_id >= 0:
            self.team.order(FORGET, request_id)
            self.engine.forget(request_id)

    def _swap_weights(self) -> None:
        self.tell_received()
        while self.team.outboxes and (item := self.inbox.take(m.Received)) is not None:
            if replacement_number(item[0].name) == replacement_number(self.name):  # else its predecessor's rank sent it
                self.complete[item[0].kind][item[0].version].add(item[0].name)
        for kind, receiver in self.receivers.items():
            if kind == "policy" and self._evaluating():
                self._hold_policy()
                continue
            try:
                receiver.check()
                arrived = self._arrived(kind)
                new = None if arrived is None else receiver.take(arrived)
            except BroadcastError:
                if kind == "policy":
                    raise
                continue  # no new epoch yet: keep generating with the present draft
            if new is not None:
                self._end_busy_span()
                self.team.order(SWAP[kind], new[0])
                start = now()
                self.swap(kind, *new)
                self._interruptions.append(m.Phase("swap", start, now()))
                for older in [version for version in self.complete[kind] if version <= new[0]]:
                    del self.complete[kind][older]

    def _arrived(self, kind: str) -> int | None:
        """Return the newest version that all ranks have received and can take; None: there is none."""
        others, have = len(self.team.outboxes), self.complete[kind]
        return max((v for v in self.receivers[kind].complete if len(have.get(v, ())) == others), default=None)

    def _hold_policy(self) -> None:
        """Keep the policy until the evaluation is done. Of newer versions that all ranks have, keep the newest."""
        self.using.pop("policy", None)  # it need not use a newer version until then
        if self.team.outboxes and (arrived := self._arrived("policy")) not in (None, self._holding):
            self.receivers["policy"].drop_before(arrived)
            self.team.order(HOLD, arrived)
            self._holding = arrived

    def _evaluating(self) -> bool:
        """Whether a group is being generated that only the present weights may sample."""
        return self.config.eval.pinned and any(group.ticket.evaluation for group in self.open_groups.values())

    def _admit(self) -> None:
        """Submit tickets in order while the engine has room. One that waits for weights holds back all behind it."""
        while self.engine.waiting < self.engine.slots and (self.episodes is None or self.episodes.has_room):
            if not self.tickets or self.tickets[0][0].min_version > self.engine.version:
                return
            ticket, arrived = self.tickets.popleft()
            self.open_groups[ticket.ticket_id] = _OpenGroup(ticket, arrived, now())
            if self.episodes is not None:
                self.episodes.begin(ticket, self.open_groups[ticket.ticket_id].admitted)
                continue
            self.team.tell(ticket)
            self.submit(ticket)

    def _ended(self, ended: Ended) -> None:
        """Take a group whose episodes are over, and have its rewards computed unless its environment gave them."""
        ticket = ended.ticket
        group = self.open_groups.pop(ticket.ticket_id)
        group.ticket, group.ended, group.completions = ticket, ended, ended.completions
        group.done = ended.history[-1].end
        for phase in ended.history:
            whole = phase.name == "environment"  # which no swap of weights holds up
            group.phases += [phase] if whole else self._cut(phase.name, phase.start, phase.end)
        self.rewarding[ticket.ticket_id] = group
        if self.rewarder is None:
            self._rewarded(ticket.ticket_id, ended.rewards)
        else:
            self.rewarder.submit(ticket.ticket_id, ticket.prompt, ended.texts, ticket.answer, ticket.row)

    def _reward(self, group: _OpenGroup) -> None:
        """Have the rewards of a generated group computed."""
        from asyncspec.models.tokenizer import response_text

        group.done, ticket = now(), group.ticket
        completions = group.completions = sorted(group.completions, key=lambda c: c.sample)
        started = min(c.started_at for c in completions)
        group.phases = [
            *self._cut("queued", group.admitted, started),
            *self._cut("generate", started, group.done),
        ]
        self.rewarding[ticket.ticket_id] = group
        special = self.config.data.reward_special_tokens
        texts = [response_text(self.tokenizer, c.tokens.tolist(), c.truncated, special) for c in completions]
        self.rewarder.submit(ticket.ticket_id, ticket.prompt, texts, ticket.answer, ticket.row)

    def _send_rewarded(self) -> None:
        """Send on the groups whose rewards are known."""
        for ticket_id, rewards in self.rewarder.found() if self.rewarder is not None else ():
            if (ended := self.rewarding[ticket_id].ended) is not None:
                rewards = [None if failed else reward for failed, reward in zip(ended.failed, rewards)]
            self._rewarded(ticket_id, rewards)
        if self.rewarder is not None:
            self._count_failures("reward", "data.reward", self.rewarder.failed, self.rewarder.first_failure)
        if self.episodes is not None:
            found = self.episodes.environments
            self._count_failures("environment", "the environment", found.failed, found.first_failure)
            self.counters[f"environment/{self.name}_open"] = self.episodes.open
            self.counters[f"environment/{self.name}_begun_again"] = found.begun_again
        for ticket_id in [ticket for ticket, group in self.rewarding.items() if group.rewards and group.due <= now()]:
            self._send(self.rewarding.pop(ticket_id))

    def _rewarded(self, ticket_id: int, rewards: Sequence[float | None]) -> None:
        group = self.rewarding[ticket_id]
        group.rewards, group.rewarded = list(rewards) if group.ticket.evaluation else filled(rewards), now()
        group.due = group.rewarded + len(rewards) * self.delay.seconds.get("reward", 0.0)

    def _count_failures(self, kind: str, what: str, failed: int, first: str) -> None:
        if failed and f"{kind}/{self.name}_failed" not in self.counters:  # say the first one; the others are counted
            self.control.send(m.Notice(self.name, f"{what} failed: {first}"))
        if failed:
            self.counters[f"{kind}/{self.name}_failed"] = failed

    def _send(self, group: _OpenGroup) -> None:
        ticket, completions, rewards, rewarded = group.ticket, group.completions, group.rewards, now()
        if group.due > group.rewarded:
            self.delay.record("reward", group.rewarded, group.due, ticket.ticket_id)
        versions = np.concatenate([c.versions.numpy() for c in completions])
        arrays = {
            "tokens": np.concatenate([c.tokens.numpy() for c in completions]),
            "behavior": np.concatenate([c.logprobs.numpy() for c in completions]),
            "versions": versions,
            "lengths": np.array([len(c.tokens) for c in completions], dtype=np.int32),
        }
        if group.ended is not None:
            arrays["loss_mask"] = np.concatenate([c.loss_mask.numpy() for c in completions])
        if completions[0].experts is not None:
            arrays |= routes.arrays_of(completions, len(ticket.prompt_tokens))
        truncated = [bool(c.truncated) for c in completions]
        if ticket.evaluation:
            read = shown(ticket, arrays, rewards, truncated) if ticket.shown else None
            own = versions[sampled(arrays)]
            self.control.send(m.EvalDone(ticket.ticket_id, rewards, int(own.min()), int(own.max()), read))
            return
        made = m.Group(
            ticket=ticket,
            generator=self.name,
            rewards=rewards,
            truncated=truncated,
            verifications=sum(c.verifications for c in completions),
            proposed=sum(c.proposed for c in completions),
            accepted=sum(c.accepted for c in completions),
            draft_version=self.engine.draft_version,
            phases=[
                *([m.Phase("resampled", ticket.asked, ticket.lost or ticket.issued)] if ticket.asked else []),
                *([m.Phase("lost", ticket.lost, ticket.issued)] if ticket.lost else []),
                m.Phase("queued", ticket.issued, group.received),
                m.Phase("weights", group.received, group.admitted),
                *group.phases,
                m.Phase("reward", group.done, rewarded),
            ],
            reached_at=summed(c.reached_at for c in completions),
            accepted_at=summed(c.accepted_at for c in completions),
            turns=group.ended.turns if group.ended is not None else 0,
            tools=group.ended.tools if group.ended is not None else {},
        )
        if self._keeps(made):
            self.control.send(m.Generated(ticket.ticket_id, checksum(arrays)))
            self.to_logprob[ticket.ticket_id % len(self.to_logprob)].put(made, arrays)
        else:
            self.control.send(m.Unused(m.GroupRecord.of(made, arrays)))
        self.fault("send")

    def _keeps(self, group: m.Group) -> bool:
        """Whether a group is trained. A ticket that was lost is trained in any case: the group that its first
        generator made may be on its way.
        """
        filtering = self.config.rl.dynamic_sampling != "none"
        return not filtering or bool(group.ticket.lost) or len(set(group.rewards)) > 1

    def _held_back(self, group: m.Group, start: float, end: float) -> None:
        self.delay.record("queue", start, end, group.ticket.ticket_id)

    def _cut(self, name: str, start: float, end: float) -> list[m.Phase]:
        """Split a phase around the interruptions within it: swaps of weights."""
        oldest = min((g.admitted for g in self.open_groups.values()), default=end)
        while self._interruptions and self._interruptions[0].end < min(oldest, start):
            self._interruptions.popleft()
        phases, at = [], start
        for other in self._interruptions:
            if other.end > at and other.start < end:
                if other.start > at:
                    phases.append(m.Phase(name, at, other.start))
                phases.append(m.Phase(other.name, max(at, other.start), min(end, other.end)))
                at = min(end, other.end)
        return [*phases, m.Phase(name, at, end)]

    def finish(self) -> None:
        if not self.team.lost:
            self.team.end()

    def _leave(self) -> None:
        if self.rewarder is not None:
            self.rewarder.close()
        if self.episodes is not None:
            self.episodes.close()
        super()._leave()

    def _end_busy_span(self) -> None:
        if self._busy_since:
            start, cpu, mark = self._busy_since
            cpu, rounds = time.process_time() - cpu, self.engine.rounds()
            self.recorder.add("generate", start, now(), version=self.engine.version, since=mark, cpu=cpu, rounds=rounds)
            self._busy_since = None
