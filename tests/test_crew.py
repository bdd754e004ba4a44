"""An actor's states, and the controller's decisions about lost actors, without processes."""

import math
import time
from types import SimpleNamespace

import pytest

from asyncspec.actors.crew import NEXT, ImpossibleTransition, Life, Member
from asyncspec.actors.recovery import Recovery
from asyncspec.actors.run import Run
from asyncspec.config import load
from asyncspec.deadlines import KILLED_S
from asyncspec.wire import messages as m
from asyncspec.wire.heartbeat import SUFFIX, Vigil


def recovery_of(*settings, sent=None):
    """Return a Recovery whose actors are all starting, and the list of the lines it prints.

    Messages that it sends are appended to `sent`.
    """
    lines, sent = [], [] if sent is None else sent
    ledger = SimpleNamespace(write=lambda event, ticket, **of: None)
    records = SimpleNamespace(note=lambda what, **of: None, line=lines.append, counters={}, ledger=ledger)
    run = Run(load("tiny", settings), records, SimpleNamespace(send=lambda name, message: sent.append((name, message))))
    for member in run.crew.present:
        run.crew.expect(member)
    return Recovery(run), lines


def came(recovery, *names):
    for name in names:
        recovery.arrived(m.Hello(name, f"tcp://127.0.0.1:{1 + len(recovery.crew.addresses)}", "cpu"))
        recovery.crew.members[name].said_ready()


WAY = {  # the transitions that bring an actor into each state
    Life.STARTING: [],
    Life.UP: [Life.UP],
    Life.READY: [Life.UP, Life.READY],
    Life.CONDEMNED: [Life.CONDEMNED],
    Life.CUT_OFF: [Life.CONDEMNED, Life.CUT_OFF],
    Life.GIVEN_UP: [Life.CONDEMNED, Life.GIVEN_UP],
    Life.GONE: [Life.GONE],
}
LEGAL = {
    "starting": "up, condemned, gone",
    "up": "ready, condemned, gone",
    "ready": "condemned, gone",
    "condemned": "cut off, given up, gone",
    "cut off": "starting, up, ready, given up, gone",
    "given up": "",
    "gone": "",
}


@pytest.mark.parametrize("to", Life)
@pytest.mark.parametrize("life", Life)
def test_an_actor_makes_only_the_transitions_in_the_table(life, to):
    member = Member("generator0", "generator")
    for state in WAY[life]:
        member.transition(state)
    assert member.life is life
    if to.value in LEGAL[life.value].split(", "):
        member.transition(to)
        assert member.life is to and to in NEXT[life]
    else:
        with pytest.raises(ImpossibleTransition, match=f"generator0 is {life.value}: it cannot become {to.value}"):
            member.transition(to)
        assert member.life is life


@pytest.mark.parametrize("life", Life)
def test_hello_and_ready_are_recorded_in_every_state_of_an_actor(life):
    member = Member("logprob", "logprob")
    for state in WAY[life]:
        member.transition(state)
    before = member.life
    member.said_hello(m.Hello("logprob", "tcp://127.0.0.1:1", "cpu"))
    assert member.life is (Life.UP if before is Life.STARTING else before)
    member.said_ready()
    assert member.life is (Life.READY if before in (Life.STARTING, Life.UP, Life.READY) else before)
    assert member.reached is Life.READY


def test_an_actor_that_freezes_right_after_loading_gets_no_loading_patience():
    recovery, _ = recovery_of("deployment.silent_timeout_s=2")
    vigil = recovery.crew.vigil
    recovery.arrived(m.Hello("trainer", "tcp://127.0.0.1:1", "cpu"))
    vigil._heard["trainer"] = time.monotonic() - 3
    assert vigil.overdue() == []
    recovery.joined("trainer")
    vigil._heard["trainer"] = time.monotonic() - 3
    assert [name for name, _ in vigil.overdue()] == ["trainer"]


def test_the_first_of_two_cut_off_logprob_actors_to_be_replaced_frees_the_run(monkeypatch):
    recovery, lines = recovery_of("deployment.logprobs=2")
    crew, both = recovery.crew, ("logprob", "logprob1")
    came(recovery, *(member.name for member in crew.present))
    for name in both:
        crew.condemn(crew.members[name], "frozen")
        crew.members[name].condemned_at -= KILLED_S
    recovery.watch()
    recovery.watch()
    assert lines == [f"nobody answers for {name}: the run cannot continue without it and waits" for name in both] and {
        crew.members[name].life for name in both
    } == {Life.CUT_OFF}
    recovery.lost(m.Lost("logprob", "logprob died", "logprob.1"))
    came(recovery, "logprob.1")
    recovery.watch()
    assert crew.members["logprob1"].life is Life.GIVEN_UP
    assert crew.addresses["logprob1"] == crew.members["logprob.1"].hello.address == crew.addresses["logprob"]
    # Its launcher can be reached again but has no replacement. Then another node claims its part.
    recovery.lost(m.Lost("logprob1", "logprob1 died: SIGKILL"))
    assert lines[-1] == "logprob1 died: SIGKILL; no replacement is left, so the others continue"
    recovery.run.broadcasts = SimpleNamespace(
        devices={}, port=1, versions={}, members={"draft": []}, add=lambda hello, kinds: None
    )
    monkeypatch.setattr(recovery.run, "welcome", lambda: None)
    assert recovery.claim(["logprob1"]).names == ["logprob1.100"]
    came(recovery, "logprob1.100")
    assert crew.addresses["logprob1"] == crew.members["logprob1.100"].hello.address


@pytest.fixture
def under_way():
    """callable(*settings) -> (recovery of a run with all actors ready, lines it prints, messages it sends)."""
    made = []

    def make(*settings):
        sent = []
        recovery, lines = recovery_of("deployment.host=127.0.0.1", *settings, sent=sent)
        came(recovery, *(member.name for member in recovery.crew.present))
        recovery.run.begin_broadcasts()
        made.append(recovery.run)
        return recovery, lines, sent

    yield make
    for run in made:
        for outbox in run.outboxes.values():
            outbox.close(0)


def test_a_run_continues_without_its_draft_adapter_and_tells_the_actors_concerned(under_way):
    recovery, lines, sent = under_way()
    recovery.lost(m.Lost("draft_adapter", "draft_adapter died: SIGKILL"))
    assert lines == ["the draft adapter is gone (draft_adapter died: SIGKILL): the draft no longer changes"]
    assert [name for name, message in sent if message == m.DraftEnded()] == ["draft_adapter", "generator0", "logprob"]
    assert not recovery.run.stop_reason and recovery.crew.members["draft_adapter"].life is Life.GONE
    recovery.lost(m.Lost("draft_adapter", "draft_adapter died: SIGKILL"))  # a second report changes nothing
    assert len(lines) == 1


@pytest.mark.parametrize("may_restart", [False, True])
def test_a_run_that_loses_its_trainer_ends_or_restarts(may_restart, under_way):
    recovery, _, _ = under_way()
    recovery.lost(m.Lost("trainer", "trainer died: SIGKILL", may_restart=may_restart))
    run = recovery.run
    assert run.stop_reason == "trainer died: SIGKILL" and run.resuming == may_restart
    assert run.failure == ("" if may_restart else "trainer died: SIGKILL")


def test_a_given_up_actor_that_returns_is_killed_and_a_cut_off_one_continues(under_way):
    recovery, _, sent = under_way("deployment.generators=2")
    crew = recovery.crew
    crew.heard("launcher", m.Beat("launcher"))
    for name in ("generator1", "trainer"):
        crew.condemn(crew.members[name], "frozen")
        crew.members[name].condemned_at -= KILLED_S
    recovery.watch()
    lives = {name: crew.members[name].life for name in ("generator1", "trainer")}
    assert lives == {"generator1": Life.GIVEN_UP, "trainer": Life.CUT_OFF}
    sent.clear()
    crew.members["generator1"].condemned_at -= KILLED_S
    for name in lives:
        crew.heard(name + SUFFIX, m.Beat(name))
    assert sent == [("launcher", m.Kill("generator1", "was cut off"))]
    assert crew.members["trainer"].life is Life.READY


def test_a_replacement_may_say_hello_before_its_launcher_reports_it(under_way):
    recovery, lines, _ = under_way()
    hello = m.Hello("generator0.1", "tcp://127.0.0.1:9", "cpu")
    recovery.arrived(hello)
    assert "generator0.1" not in recovery.crew.members
    recovery.lost(m.Lost("generator0", "generator0 died: SIGKILL", "generator0.1"))
    assert recovery.crew.members["generator0.1"].life is Life.UP
    assert recovery.run.broadcasts.members["policy"] == ["trainer", "logprob", "generator0.1"]
    assert recovery.crew.addresses["generator0"] == hello.address and recovery.crew.generators == []
    recovery.joined("generator0.1")
    assert recovery.crew.generators == ["generator0.1"] and "generator0.1 has joined" in lines[-1]


def test_a_hello_counts_as_a_sign_of_life_and_the_next_one_is_due_soon():
    """This holds even if earlier signs of life did not count, because the launcher had not reported the actor yet."""
    recovery, _ = recovery_of("deployment.silent_timeout_s=1")
    crew = recovery.crew
    recovery.arrived(m.Hello("generator0", "tcp://127.0.0.1:1", "cpu"))
    found, deadline = [], time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = crew.vigil.overdue()
    assert [name for name, _ in found] == ["generator0"]


def test_a_vigil_that_looks_rarely_finds_the_silent_actor_and_no_other():
    vigil, looks, found = Vigil(silent_s=0.2, turn_s=math.inf), 0, []
    vigil.heard("silent")
    while not found and looks < 20:
        time.sleep(0.15)
        vigil.heard("alive")
        found, looks = vigil.overdue(), looks + 1
    assert [name for name, _ in found] == ["silent"]
    vigil.heard("alive")
    time.sleep(1.0)  # this process did not run
    assert vigil.overdue() == [] and 0.9 < vigil.slept
