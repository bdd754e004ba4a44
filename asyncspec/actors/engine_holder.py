"""An actor that holds an engine, or one of the ranks that hold one together, and receives new weights for it."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from asyncspec.actors.base import Actor, first_name, replacement_number
from asyncspec.config import resolve_path, work
from asyncspec.config.topology import rank_of
from asyncspec.engine.protocol import Completion, Engine, Request
from asyncspec.models.parallel import Ranks
from asyncspec.wire import messages as m
from asyncspec.wire.layout import Layout
from asyncspec.wire.weights import Receiver

if TYPE_CHECKING:
    from asyncspec.models.frozen import Base


class EngineHolder(Actor):
    """The base of a generator and of its further ranks."""

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.engine.threads
        leader, rank = rank_of(first_name(spec.name))
        size = self.config.engine.tensor_parallel
        # The replacement number is the same in all ranks: they meet under a name that their predecessors did not have.
        group = f"{leader}.{replacement_number(spec.name)}"
        self.index, self.ranks = int(leader.removeprefix("generator")), Ranks(group, rank, size, size)
        self.engine: Engine | None = None  # set by `load`, and with several ranks by `connect`
        self.base: Base | None = None  # what arriving adapters are added to; None: whole weights arrive
        self.sampled = 0  # follows from all tokens of finished samples, in order
        self.receivers: dict[str, Receiver] = {}  # by kind of weights
        self._received: deque[tuple[str, int]] = deque()  # (kind, version) of weights that have arrived

    def load(self) -> None:
        if self.ranks.size == 1:
            self.engine = self.make_engine()
            self._keep_base()
        else:  # the ranks start their engines together, so they must know each other first
            import asyncspec.engine.vllm_engine  # noqa: F401

    def make_engine(self) -> Engine:
        from asyncspec.actors.engines import make_engine

        return make_engine(self.config, self.device, self.index, self.ranks)

    def connect(self, welcome: m.Welcome) -> set[str]:
        if self.engine is None:
            self._start_together(welcome)
        for kind in ("policy", "draft") if self.config.draft_trainer else ("policy",):
            whole = self.ranks.size == 1
            arriving, keep = self.engine.parameters(kind), partial(self.engine.keep, kind) if not whole else None
            if kind == "policy" and self.base is not None:
                arriving, keep = self.base.adapters, None if whole else lambda name, tensor: tensor.clone()
            self.receivers[kind] = Receiver(
                welcome.store_host,
                welcome.store_port,
                kind,
                me=self.name,
                device=self.device,
                layout=Layout.of(arriving, self.config.model.dtype),
                received=lambda version, kind=kind: self._received.append((kind, version)),
                keep=keep,
            )
        self.using |= dict.fromkeys(self.receivers, 0)
        self.workers = list(self.receivers.values())
        return {"policy"}  # nobody waits for the draft

    def _keep_base(self) -> None:
        """Keep the frozen weights, if the versions that arrive are adapters."""
        if (lora := self.config.lora) is not None:
            from asyncspec.models.frozen import Base

            keep = partial(self.engine.keep, "policy") if self.ranks.size > 1 else None
            path, dtype = resolve_path(self.config.model.path), getattr(torch, self.config.model.dtype)
            self.base = Base(path, lora, dtype, keep)

    def _start_together(self, welcome: m.Welcome) -> None:
        from asyncspec.engine.vllm_engine import shut_down

        shut_down()  # an earlier engine of this process, which has the default group
        start_s = work.start_s(self.config)
        self.ranks.connect(welcome.store_host, welcome.store_port, self.device, start_s, start_s)
        while self.ranks.rank and self.inbox.take() is not None:
            pass  # what the first rank's predecessor sent: the first rank sends nothing before all have an engine
        self.engine = self.make_engine()
        self._keep_base()
        self.control.send(m.Connected(self.name))

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.DraftEnded):
            self.receivers.pop("draft", None)
            self.using.pop("draft", None)
        elif isinstance(message, m.Membership) and message.kind in self.receivers:
            self.join(self.receivers[message.kind], message)
        elif isinstance(message, m.Receive) and message.kind in self.receivers:
            self.receivers[message.kind].expect(message.version, message.epoch, message.catch_up)
            self.fault("receive")

    def tell_received(self) -> list[m.Received]:
        """Report to the controller the versions that arrived since the last call. Return these messages."""
        told = [m.Received(self.name, *self._received.popleft()) for _ in range(len(self._received))]
        for message in told:
            self.control.send(message)
        return told

    def swap(self, kind: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take received weights into use."""
        self.fault("swap")
        with self.recorder.span(f"swap {kind}", version=version):
            if kind == "policy" and self.base is not None:
                tensors = self.base.merged(tensors)
            (self.engine.load_policy if kind == "policy" else self.engine.load_draft)(tensors, version)
        self.using[kind] = version

    def submit(self, ticket: m.Ticket) -> None:
        """Have the engine generate a ticket's samples."""
        length = self.config.sampling.max_response_tokens
        self.engine.submit(Request(ticket.ticket_id, ticket.prompt_tokens, ticket.seeds, length))

    def submit_turn(self, turn: m.Turn) -> None:
        """Have the engine generate a turn of an episode."""
        self.engine.submit(request_of(turn))

    def poll(self) -> list[Completion]:
        """Have the engine do one step. Collective with several ranks."""
        done = self.engine.poll()
        if self.ranks.size > 1:
            for completion in done:
                self.sampled = zlib.crc32(completion.tokens.numpy().tobytes(), self.sampled)
        return done


def request_of(turn: m.Turn) -> Request:
    """Return a turn of an episode as a request."""
    follows = None if turn.follows < 0 else turn.follows
    most = turn.max_response_tokens
    return Request(turn.request_id, turn.prompt_tokens, turn.seeds, most, keeps=True, follows=follows)
