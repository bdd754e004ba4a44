"""The controller: owns the prompt order, the policy clock, the ledger and the timeline of the run.

- Waits until every actor is up and has joined its broadcast groups, each with a deadline.
- Issues tickets for step s as soon as the clock admits them, in order, to the generator with the least to do.
- Passes each published version on to its receivers.
- Writes a ledger line for each ticket's fate, and a metrics row for each step.
- Ends the run when all steps are trained and the last version is evaluated, on an interrupt, when an actor fails, or when
  nothing has moved for stall_timeout_s; then it says what was waited for.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections import deque
from pathlib import Path

import msgspec
import numpy as np

from asyncspec import messages as m
from asyncspec import transport
from asyncspec.actors.base import ActorSpec
from asyncspec.config import from_yaml, resolve_path
from asyncspec.lag import PolicyClock
from asyncspec.rl import tasks
from asyncspec.timing import clock
from asyncspec.timing.exporters import Console, Ledger, RunMetrics, TraceFile
from asyncspec.timing.metrics import step_row
from asyncspec.timing.timeline import TimelineFile

PICTURE_EVERY, PICTURE_STEPS = 40, 4  # steps between two pictures of the timeline in TensorBoard, and in each
EVALUATION_IDS = 1 << 40  # ticket ids from here on are evaluations


class RunFailed(RuntimeError):
    """The run cannot go on; the message is one line for the user."""


def actor_names(config) -> dict[str, str]:
    """name -> role of every actor but the controller."""
    names = {"trainer": "trainer", "logprob": "logprob"}
    names |= {f"generator{i}": "generator" for i in range(config.deployment.generators)}
    if config.adapting:
        names["draft_adapter"] = "draft_adapter"
    return names


def broadcast_backend(devices: list[str]) -> str:
    """NCCL if each member has a GPU of its own, which it insists on; otherwise gloo."""
    alone = len(set(devices)) == len(devices)
    return "nccl" if alone and all(device.startswith("cuda") for device in devices) else "gloo"


class Controller:
    role = "controller"

    def __init__(self, spec: ActorSpec) -> None:
        self.config = from_yaml(spec.config_yaml)
        self.run_dir = Path(spec.run_dir)
        transport.use_keys(self.run_dir)
        self.server = transport.ControlServer(self.config.deployment.host)
        self.address = self.server.address
        self.names = actor_names(self.config)
        self.generators = [name for name, role in self.names.items() if role == "generator"]
        self.clock = PolicyClock(self.config.policy_lag)
        self.pending: deque[m.Ticket] = deque()  # issued, not yet sent
        self.outstanding: dict[int, tuple[m.Ticket, str, float]] = {}  # sent, fate open: ticket, generator, when
        self.generating: dict[int, str] = {}  # of these, still in their generator
        self.next_step = 0  # whose tickets are issued next
        self.trained_steps = 0
        self.epochs = {"policy": 0, "draft": 0}  # of the broadcast groups
        self.addresses: dict[str, str] = {}  # of the actors' inboxes
        self.joining: dict[str, float] = {}  # generators that are coming up in place of others, and when those were lost
        self.evaluations: dict[int, dict] = {}  # version -> what came back so far
        self.accuracy = {"eval/accuracy": None, "eval/policy_version": -1, "eval/policy_version_max": -1}
        self.counters: dict[str, float] = {}
        self.heard: dict[str, float] = {}
        self.gone: set[str] = set()
        self.stop_reason = ""
        self.failure = ""
        self.host = clock.host()
        self.latest: deque[m.StepDone] = deque(maxlen=PICTURE_STEPS)
        self.started = False  # all actors are up: there may be something to save

    def run(self) -> int:
        """Run to the end; 0 if all steps were trained, 1 on a failure, 130 when interrupted."""
        self.console = Console(self.config, self.run_dir)
        self.ledger, self.trace = Ledger(self.run_dir), TraceFile(self.run_dir)
        self.metrics, self.timeline = RunMetrics(self.run_dir), TimelineFile(self.run_dir)
        try:
            self._load_data()
            self._start()
            while not self.stop_reason:
                self._issue()
                self._dispatch()
                self._listen(0.02)
                self._show()
                self._check_end()
        except RunFailed as error:
            self.failure = self.stop_reason = str(error)
        except Exception as error:
            (self.run_dir / "logs").mkdir(exist_ok=True)
            (self.run_dir / "logs" / "controller.log").write_text(traceback.format_exc())
            self.failure = self.stop_reason = f"controller: {type(error).__name__}: {error}"
        self._stop_all()
        self.metrics.close()
        self.ledger.close()
        self.trace.clock_error(max((v for k, v in self.counters.items() if k.startswith("clock/")), default=0.0) / 1e3)
        self.trace.close()
        self.timeline.close()
        self.console.end(self.failure, self.stop_reason, self.metrics.rows)
        return 1 if self.failure else 0 if self.stop_reason == "finished" else 130

    # Beginning and end.
    def _load_data(self) -> None:
        from asyncspec.models import tokenizer

        try:
            self.tokenizer = tokenizer.load(resolve_path(self.config.model.path))
            self.problems, self.held_out = tasks.load_problems(self.config, self.tokenizer)
        except ValueError as error:
            raise RunFailed(str(error)) from None
        if warning := tasks.lost_characters([*self.problems, *self.held_out], self.tokenizer):
            self.console.line(f"warning: {warning}")
        # The order of prompts is a function of the seed alone.
        rng = np.random.default_rng([self.config.seed, 0x7072])
        needed = self.config.steps * self.config.rl.groups_per_step
        self.order = np.concatenate(
            [rng.permutation(len(self.problems)) for _ in range(-(-needed // len(self.problems)))])

    def _start(self) -> None:
        import torch.distributed as dist

        deployment = self.config.deployment
        hellos: dict[str, m.Hello] = {}
        self._listen_until(lambda: len(hellos) == len(self.names), hellos, "to start")
        if self.stop_reason:
            return
        # A socket of ours: the store itself would listen on all interfaces.
        listener = socket.create_server((deployment.host, 0))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            deployment.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.hellos = hellos
        self.addresses = {name: hello.address for name, hello in hellos.items()}
        self.outboxes = {name: transport.Outbox(self.addresses[name]) for name in self.generators}
        self.members = {"policy": ["trainer", "logprob", *self.generators]}
        if self.config.draft_trainer:
            self.members["draft"] = [self.config.draft_trainer, *self.generators]
        for name in self.names:
            self.server.send(name, self._welcome())
        for kind in self.members:
            self._form(kind)
        ready: dict[str, m.Ready] = {}
        self._listen_until(lambda: len(ready) == len(self.names), ready, "to load and join its broadcast group")
        if self.stop_reason:
            return
        self.console.line(f"{len(self.names) + 1} actors ready: controller, {', '.join(self.names)}")
        self._evaluate(0)
        self.moved, self.started = time.monotonic(), True

    def _welcome(self) -> m.Welcome:
        return m.Welcome(self.addresses, self.config.deployment.host, self.store.port)

    def _form(self, kind: str) -> None:
        """Give a broadcast group a new epoch, with the members it has now."""
        members = self.members[kind]
        self.epochs[kind] += 1
        backend = broadcast_backend([self.hellos[name].device for name in members])
        for name in members:
            self.server.send(name, m.Membership(kind, self.epochs[kind], members, backend))

    def _listen_until(self, done, into: dict, what: str) -> None:
        deadline = time.monotonic() + self.config.deployment.start_timeout_s
        while not done():
            self._listen(0.1, into)
            if self.stop_reason:
                return
            if time.monotonic() > deadline:
                missing = sorted(set(self.names) - set(into))
                raise RunFailed(f"waited {self.config.deployment.start_timeout_s:.0f} s for {', '.join(missing)} {what}; "
                                f"see {self.run_dir}/logs, or raise deployment.start_timeout_s")

    def _check_end(self) -> None:
        steps = self.config.steps
        if self.trained_steps == steps and not self.evaluations:
            self.stop_reason = "finished"
            return
        limit = self.config.deployment.stall_timeout_s
        if time.monotonic() - self.moved > limit:
            oldest = min(self.outstanding.values(), key=lambda item: item[2], default=None)
            where = "no ticket"
            if oldest:
                ticket, generator, _ = oldest
                place = f"in {generator}" if ticket.ticket_id in self.generating else f"past {generator}, not trained"
                where = f"ticket {ticket.ticket_id} of step {ticket.step}, {place}"
            if not self.outstanding and self.joining.keys() - set(self.generators) - self.gone:
                where = f"{', '.join(self.joining.keys() - set(self.generators) - self.gone)} to take a dead generator's place"
            silent = max(set(self.names) - self.gone, key=lambda name: time.monotonic() - self.heard.get(name, 0.0))
            raise RunFailed(f"nothing moved for {limit:.0f} s: waiting for {where}; longest silent: {silent}; see "
                            f"{self.run_dir}/logs, or raise deployment.stall_timeout_s")

    def _stop_all(self) -> None:
        deployment = self.config.deployment
        # A finished run is worth waiting for its checkpoint; who interrupts one wants it to end.
        limit = deployment.stall_timeout_s if self.stop_reason == "finished" else deployment.stop_timeout_s if self.started else 0.5
        deadline = time.monotonic() + limit
        while (left := self._still_there()) and time.monotonic() < deadline:
            for name in left:  # again and again: one that is still starting connects later
                self.server.send(name, m.Stop(self.stop_reason))
            self._listen_for(0.2)
        missing = sorted(self._still_there())
        if missing and self.started and not self.failure:
            self.failure = f"not stopped within {limit:.0f} s: {', '.join(missing)}; its checkpoint may be missing"
        for ticket, generator, _ in self.outstanding.values():
            self.ledger.write("dropped", ticket, reason=self.stop_reason, generator=generator)
        for ticket in self.pending:
            self.ledger.write("dropped", ticket, reason=self.stop_reason)
        # Rows held back for an evaluation that will not come.
        self.metrics.flush()

    def _still_there(self) -> set[str]:
        """Actors that have not stopped; replacements that are not up yet are their launcher's."""
        return set(self.names) - self.gone - {name for name in self.joining if name not in self.addresses}

    # Tickets.
    def _issue(self) -> None:
        G = self.config.rl.groups_per_step
        while self.next_step < self.config.steps and self.clock.may_issue(self.next_step):
            step = self.next_step
            for ticket_id in range(step * G, (step + 1) * G):
                problem = self.problems[self.order[ticket_id]]
                self._enqueue(ticket_id, step, self.clock.min_version(step), problem, self.config.rl.group_size)
            self.next_step += 1

    def _evaluate(self, version: int) -> None:
        if not self.held_out:
            return
        self.evaluations[version] = {"rewards": [], "left": len(self.held_out), "newest": version}
        for index, problem in enumerate(self.held_out):
            ticket_id = EVALUATION_IDS + version * len(self.held_out) + index
            self._enqueue(ticket_id, version, version, problem, self.config.eval.samples, evaluation=True)

    def _enqueue(self, ticket_id, step, min_version, problem, samples, evaluation=False) -> None:
        seeds = np.random.default_rng([self.config.seed, ticket_id]).integers(0, 2**62, samples).tolist()
        ticket = m.Ticket(ticket_id, step, min_version, problem.prompt, problem.answer,
                          self.tokenizer.encode(problem.prompt).ids, seeds, time.monotonic(), evaluation)
        self.pending.append(ticket)
        self.ledger.write("issued", ticket)

    def _dispatch(self) -> None:
        """Keep each generator supplied with two engines' worth of samples, the least loaded first."""
        load = dict.fromkeys(self.generators, 0)
        for ticket_id, generator in self.generating.items():
            load[generator] += len(self.outstanding[ticket_id][0].seeds)
        while self.pending and load:
            generator = min(load, key=load.get)
            if load[generator] >= 2 * self.config.engine.slots:
                break
            ticket = self.pending.popleft()
            self.outboxes[generator].put(ticket)
            self.outstanding[ticket.ticket_id] = (ticket, generator, time.monotonic())
            self.generating[ticket.ticket_id] = generator
            load[generator] += len(ticket.seeds)
        for outbox in self.outboxes.values():
            outbox.flush()

    def _show(self) -> None:
        training = [ticket for ticket, _, _ in self.outstanding.values() if not ticket.evaluation]
        generating = sum(ticket.ticket_id in self.generating for ticket in training)
        self.console.status(self.trained_steps, generating, len(training) - generating, max(0, self.next_step - 1 - self.clock.version))

    def _ended(self, ticket_id: int) -> m.Ticket:
        """Take a ticket off the books: it may have been issued again and trained from its first issue."""
        if ticket_id in self.outstanding:
            return self.outstanding.pop(ticket_id)[0]
        ticket = next(t for t in self.pending if t.ticket_id == ticket_id)
        self.pending.remove(ticket)
        return ticket

    # Messages.
    def _listen_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.gone != set(self.names):
            self._listen(left)

    def _listen(self, timeout_s: float, into: dict | None = None) -> None:
        # Outboxes are flushed by `_dispatch`, which is not called any more once the run is ending.
        transport.wait([self.server, *(() if self.stop_reason else getattr(self, "outboxes", {}).values())], timeout_s)
        while (item := self.server.receive()) is not None:
            name, message = item
            self.heard[name] = time.monotonic()
            if isinstance(message, (m.Hello, m.Ready)) and not self.started:
                if into is not None and message.name in self.names:
                    into[message.name] = message
            else:
                self._handle(name, message)

    def _handle(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.ClockAsked):
            self.server.send(sender, m.ClockTold(message.sent, time.monotonic(), self.host))
        elif isinstance(message, m.Publish):
            self._published(message)
        elif isinstance(message, m.Hello):
            self._arrived(message)
        elif isinstance(message, m.Ready):
            self._joined(message.name)
        elif isinstance(message, m.Broken):
            if message.kind in self.members and message.epoch == self.epochs[message.kind]:
                self.counters[f"broadcast/{message.kind}_epochs"] = self.epochs[message.kind] + 1
                self._form(message.kind)
        elif isinstance(message, m.Received):
            self.moved = time.monotonic()
        elif isinstance(message, m.Generated):
            self.generating.pop(message.ticket_id, None)
            self.moved = time.monotonic()
        elif isinstance(message, m.EvalDone):
            self.generating.pop(message.ticket_id, None)
            self._evaluated(message)
        elif isinstance(message, m.StepDone):
            self._step_done(message)
        elif isinstance(message, m.Spans):
            self.trace.write(message.actor, message.spans)
            self.counters |= message.counters
        elif isinstance(message, m.Notice):
            self.console.line(f"{message.name}: {message.text}")
        elif isinstance(message, m.Failed):
            if message.name == "draft_adapter" and self.started:
                self._lost_adapter(message.error)
            elif not self.failure:
                self.failure = self.stop_reason = (
                    f"{message.name} failed: {message.error}; see {self.run_dir}/logs/{message.name}.log")
        elif isinstance(message, m.Stopped):
            self.gone.add(message.name)
        elif isinstance(message, m.Interrupt) and message.lost == "draft_adapter" and self.started:
            self._lost_adapter(message.reason)
        elif isinstance(message, m.Interrupt) and message.replacement and self.started:
            self._lost_generator(message)
        elif isinstance(message, m.Interrupt):
            self.stop_reason = self.stop_reason or message.reason
            if message.lost:
                self.gone.add(message.lost)
                self.failure = self.failure or message.reason

    def _lost_adapter(self, reason: str) -> None:
        """The run goes on with the draft it has: nobody waits for the draft adapter."""
        self.gone.add("draft_adapter")
        if self.members.pop("draft", None) is not None and not self.stop_reason:
            self.counters["draft/adapter_lost"] = 1
            self.console.line(f"the draft adapter is gone ({reason}): the draft stays as it is")
            for name in ("logprob", *self.generators):
                self.server.send(name, m.Membership("draft", 2, [], ""))

    def _lost_generator(self, message: m.Interrupt) -> None:
        """Issue again what it had, and let the others go on until its replacement is there."""
        name = message.lost
        if name in self.gone or self.names.get(name) != "generator":
            return
        now, again = time.monotonic(), []
        self.moved = now
        self.gone.add(name)
        self.joining[message.replacement] = now
        self.names[message.replacement] = "generator"
        if name in self.generators:
            self.generators.remove(name)
        if name in self.outboxes:
            self.outboxes.pop(name).close()
        # Also what has left it: whether that arrived anywhere is not known. Should a group come twice the first one counts.
        for ticket_id, (ticket, generator, _) in list(self.outstanding.items()):
            if generator == name:
                del self.outstanding[ticket_id]
                self.generating.pop(ticket_id, None)
                again.append(msgspec.structs.replace(ticket, issued=now, lost=ticket.lost or ticket.issued))
                self.ledger.write("reissued", ticket, reason=message.reason, generator=name)
        self.pending.extendleft(sorted(again, key=lambda t: t.ticket_id, reverse=True))
        self.counters["recovery/generators_lost"] = self.counters.get("recovery/generators_lost", 0) + 1
        self.counters["recovery/tickets_reissued"] = self.counters.get("recovery/tickets_reissued", 0) + len(again)
        for kind, members in self.members.items():
            if name in members:
                members.remove(name)
                self._form(kind)
        self.console.line(f"{message.reason}: {len(again)} tickets are issued again; {message.replacement} takes its place")

    def _arrived(self, hello: m.Hello) -> None:
        """A replacement is up: tell it where all are, and take it into the broadcast groups."""
        if hello.name not in self.joining or hello.name in self.addresses:
            return
        self.hellos[hello.name], self.addresses[hello.name] = hello, hello.address
        self.server.send(hello.name, self._welcome())
        for kind, members in self.members.items():
            members.append(hello.name)
            self._form(kind)

    def _joined(self, name: str) -> None:
        if name not in self.joining or name in self.generators:
            return
        self.moved = time.monotonic()
        seconds = self.moved - self.joining[name]
        self.outboxes[name] = transport.Outbox(self.addresses[name])
        self.generators.append(name)
        self.counters["recovery/generator_s"] = seconds
        self.console.line(f"{name} has joined, {seconds:.1f} s after the loss")

    def _published(self, message: m.Publish) -> None:
        if message.kind not in self.members:
            return
        if message.kind == "draft":
            self.counters["draft/policy_version"] = message.policy_version
        elif message.version > self.clock.version:
            self.clock.publish(message.version)
            every, last = self.config.eval.every, self.config.steps
            if message.version == last or (every and message.version % every == 0):
                self._evaluate(message.version)
        for name in self.members[message.kind][1:]:
            self.server.send(name, m.Receive(message.kind, message.version, message.epoch))

    def _evaluated(self, message: m.EvalDone) -> None:
        item = self.outstanding.pop(message.ticket_id, None)
        if item is None:
            return
        ticket, generator, _ = item
        self.moved = time.monotonic()
        self.ledger.write("evaluated", ticket, generator=generator, version_min=message.version_min,
                          version_max=message.version_max)
        evaluation = self.evaluations[ticket.step]
        evaluation["rewards"] += message.rewards
        evaluation["left"] -= 1
        evaluation["newest"] = max(evaluation["newest"], message.version_max)
        if not evaluation["left"]:
            del self.evaluations[ticket.step]
            # Training goes on meanwhile: later samples may be of newer versions, those of the last version are not.
            self.accuracy = {"eval/accuracy": float(np.mean(evaluation["rewards"])), "eval/policy_version": ticket.step,
                             "eval/policy_version_max": evaluation["newest"]}
            self.console.evaluated(self.accuracy, len(evaluation["rewards"]))
            self.metrics.evaluated(self.accuracy)

    def _step_done(self, message: m.StepDone) -> None:
        self.moved = time.monotonic()
        self.trained_steps = message.step + 1
        for record in message.groups:
            # The actors' channels are not ordered among each other: the trainer's word may come first.
            self.generating.pop(record.ticket_id, None)
            ticket = self._ended(record.ticket_id)
            self.ledger.write("trained", ticket, generator=record.generator, version_min=record.version_min,
                              version_max=record.version_max, trained_in=message.step)
            self.trace.write_group(ticket.step, record)
        self.timeline.write(message)
        self.latest.append(message)
        if (message.step + 1) % PICTURE_EVERY == 0:
            self.metrics.picture(list(self.latest))
        row = step_row(message, self.counters, self.accuracy)
        self.metrics.write(row, final=message.step + 1 == self.config.steps and bool(self.held_out))
        self.console.step(row)

