"""The life of an actor, and what the controller decides about actors that are lost; without processes."""

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
    """Of actors that are all being started; and the lines it says. What it sends comes into `sent`."""
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


WAY = {  # how an actor comes into each state
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
def test_an_actor_goes_from_one_state_to_another_only_where_the_table_says_so(life, to):
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
def test_whoever_says_hello_and_ready_is_where_it_came_to_be_once_it_is_heard_of_again(life):
    member = Member("logprob", "logprob")
    for state in WAY[life]:
        member.transition(state)
    before = member.life
    member.said_hello(m.Hello("logprob", "tcp://127.0.0.1:1", "cpu"))
    assert member.life is (Life.UP if before is Life.STARTING else before)
    member.said_ready()
    assert member.life is (Life.READY if before in (Life.STARTING, Life.UP, Life.READY) else before)
    assert member.reached is Life.READY


def test_one_that_freezes_right_after_loading_is_not_waited_for_as_while_it_loads():
    recovery, _ = recovery_of("deployment.silent_timeout_s=2")
    vigil = recovery.crew.vigil
    recovery.arrived(m.Hello("trainer", "tcp://127.0.0.1:1", "cpu"))
    vigil._heard["trainer"] = time.monotonic() - 3
    assert vigil.overdue() == []
    recovery.joined("trainer")
    vigil._heard["trainer"] = time.monotonic() - 3
    assert [name for name, _ in vigil.overdue()] == ["trainer"]


def test_of_two_that_are_cut_off_the_first_to_come_back_frees_the_run(monkeypatch):
    recovery, lines = recovery_of("deployment.logprobs=2")
    crew, both = recovery.crew, ("logprob", "logprob1")
    came(recovery, *(member.name for member in crew.present))
    for name in both:
        crew.condemn(crew.members[name], "frozen")
        crew.members[name].condemned_at -= KILLED_S
    recovery.watch()
    recovery.watch()
    assert lines == [
        f"nobody answers for {name}: it is waited for, the run cannot go on without it" for name in both
    ] and {crew.members[name].life for name in both} == {Life.CUT_OFF}
    recovery.lost(m.Lost("logprob", "logprob died", "logprob.1"))
    came(recovery, "logprob.1")
    recovery.watch()
    assert crew.members["logprob1"].life is Life.GIVEN_UP
    assert crew.addresses["logprob1"] == crew.members["logprob.1"].hello.address == crew.addresses["logprob"]
    # Its launcher, reached again, has none to put in its place; and another node that claims its part.
    recovery.lost(m.Lost("logprob1", "logprob1 died: SIGKILL"))
    assert lines[-1] == "logprob1 died: SIGKILL; no replacement is left for it: the others go on"
    recovery.run.broadcasts = SimpleNamespace(
        devices={}, port=1, versions={}, members={"draft": []}, add=lambda hello, kinds: None
    )
    monkeypatch.setattr(recovery.run, "welcome", lambda: None)
    assert recovery.claim(["logprob1"]).names == ["logprob1.100"]
    came(recovery, "logprob1.100")
    assert crew.addresses["logprob1"] == crew.members["logprob1.100"].hello.address


@pytest.fixture
def under_way():
    """callable(*settings) -> recovery of a run whose actors have all come, the lines it says, and what it sends."""
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


def test_the_run_goes_on_without_the_draft_adapter_and_tells_who_has_to_do_with_it(under_way):
    recovery, lines, sent = under_way()
    recovery.lost(m.Lost("draft_adapter", "draft_adapter died: SIGKILL"))
    assert lines == ["the draft adapter is gone (draft_adapter died: SIGKILL): the draft stays as it is"]
    assert [name for name, message in sent if message == m.DraftEnded()] == ["draft_adapter", "generator0", "logprob"]
    assert not recovery.run.stop_reason and recovery.crew.members["draft_adapter"].life is Life.GONE
    recovery.lost(m.Lost("draft_adapter", "draft_adapter died: SIGKILL"))  # nobody is lost twice
    assert len(lines) == 1


@pytest.mark.parametrize("may_restart", [False, True])
def test_without_its_trainer_a_run_ends_or_is_started_again(may_restart, under_way):
    recovery, _, _ = under_way()
    recovery.lost(m.Lost("trainer", "trainer died: SIGKILL", may_restart=may_restart))
    run = recovery.run
    assert run.stop_reason == "trainer died: SIGKILL" and run.resuming == may_restart
    assert run.failure == ("" if may_restart else "trainer died: SIGKILL")


def test_whoever_was_given_up_is_killed_when_it_comes_back_to_life_and_one_that_is_waited_for_goes_on(under_way):
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


def test_a_replacement_that_says_hello_before_its_launcher_tells_of_it_is_taken_in(under_way):
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


def test_a_hello_is_a_sign_of_life_and_the_next_is_due_soon():
    """Also where signs of life before it came too early to count: the launcher had not told of the actor yet."""
    recovery, _ = recovery_of("deployment.silent_timeout_s=1")
    crew = recovery.crew
    recovery.arrived(m.Hello("generator0", "tcp://127.0.0.1:1", "cpu"))
    found, deadline = [], time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = crew.vigil.overdue()
    assert [name for name, _ in found] == ["generator0"]


def test_who_looks_seldom_finds_out_who_is_silent_and_nobody_else():
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
