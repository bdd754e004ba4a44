"""The controller's decisions about lost actors, without processes."""

import math
import time
from types import SimpleNamespace

import pytest
from crews import came, recovery_of

from asyncspec.actors.crew import Life
from asyncspec.actors.failures import Failures
from asyncspec.actors.switchboard import Switchboard
from asyncspec.config import work
from asyncspec.deadlines import KILLED_S
from asyncspec.wire import messages as m
from asyncspec.wire.heartbeat import SUFFIX, Vigil


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


TWO_RANKS = ("engine.kind=vllm", "engine.tensor_parallel=2", "deployment.generators=2")


@pytest.fixture
def under_way():
    """callable(*settings) -> (recovery of a run with all actors ready, lines it prints, messages it sends)."""

    def make(*settings):
        sent = []
        recovery, lines = recovery_of("deployment.host=127.0.0.1", *settings, sent=sent)
        came(recovery, *(member.name for member in recovery.crew.present))
        recovery.run.begin_broadcasts()
        return recovery, lines, sent

    return make


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


def raises(recovery, name, error="RuntimeError: CUDA error", **of):
    recovery.failed(m.Failed(name, error, **of))


def end_of(recovery, name, replacement="", may_restart=False):
    """What a launcher reports of an actor that has raised an exception."""
    recovery.lost(m.Lost(name, f"{name} died: an exception", replacement, may_restart))


def test_an_exception_counts_as_the_death_of_an_actor_that_can_be_replaced(under_way):
    recovery, lines, _ = under_way("deployment.generators=2")
    noted = []
    recovery.records.note = lambda what, **of: noted.append((what, of))
    raises(recovery, "generator0")
    recovery.failed(m.Failed("generator0", "OSError while stopping: x"))  # of the same actor
    recovery.stopped("generator0")
    assert recovery.crew.members["generator0"].present and not lines  # its launcher reports its end
    end_of(recovery, "generator0", "generator0.1")
    told = f"generator0 failed: RuntimeError: CUDA error; see {recovery.records.run_dir}/logs/generator0.log"
    assert lines == [f"{told}: generator0.1 replaces it"]
    assert noted == [("lost", {"actor": "generator0", "reason": told, "error": "RuntimeError: CUDA error"})]
    assert recovery.records.counters["recovery/generators_lost"] == 1 and not recovery.run.stop_reason
    came(recovery, "generator0.1")
    assert "generator0.1" in recovery.run.broadcasts.members["policy"]


def test_an_exception_may_be_reported_after_the_end_of_its_actor(under_way):
    recovery, lines, _ = under_way("deployment.generators=2")
    end_of(recovery, "generator0", "generator0.1")
    assert lines == ["generator0 died: an exception: generator0.1 replaces it"]
    raises(recovery, "generator0")
    assert not recovery.run.stop_reason and recovery.run.failures.add("RuntimeError: CUDA error") == 2


def test_exceptions_that_are_alike_end_a_run_in_which_no_step_is_trained(under_way):
    recovery, _, _ = under_way("deployment.generators=4")
    for i in range(2):
        raises(recovery, f"generator{i}", f"RewardError: /of/{i}: failed for {i} of 9 rollouts")
        end_of(recovery, f"generator{i}", f"generator{i}.1")
    recovery.run.failures.trained(1)
    for i in (2, 3):
        raises(recovery, f"generator{i}", f"RewardError: /of/{i}: failed for {i} of 9 rollouts")
    raises(recovery, "logprob", "RuntimeError: another one")
    assert not recovery.run.stop_reason
    came(recovery, "generator0.1")
    raises(recovery, "generator0.1", "RewardError: /x: failed for 12 of 17 rollouts")
    assert recovery.run.failure == (
        "generator0.1 failed: RewardError: /x: failed for 12 of 17 rollouts; see RUN/logs/generator0.1.log; 3 errors "
        "were alike and no step was trained meanwhile"
    )


def test_a_mistake_of_the_user_ends_the_run_at_once(under_way):
    recovery, _, _ = under_way()
    raises(recovery, "generator0", "ConfigError: engine.url: serves another model", mistake=True)
    assert recovery.run.failure == (
        "generator0 failed: ConfigError: engine.url: serves another model; see RUN/logs/generator0.log"
    )


@pytest.mark.parametrize("first, second", [("generator0", "generator0_rank1"), ("generator0_rank1", "generator0")])
def test_the_ranks_of_a_generator_are_replaced_together(first, second, under_way):
    recovery, lines, sent = under_way(*TWO_RANKS)
    recovery.crew.tell_launchers = lambda message: sent.append(("launchers", message))
    broadcasts = recovery.run.broadcasts
    for lost, new in ("", ".1"), (".1", ".2"):
        end_of(recovery, first + lost, first + new)
        end_of(recovery, second + lost, second + new)
        kills = [message for _, message in sent if isinstance(message, m.Kill)]
        assert kills[-1] == m.Kill(second + lost, f"without {first}{lost}")
        assert not recovery.run.stop_reason
        came(recovery, "generator0" + new, "generator0_rank1" + new)
        ranks = {"generator0" + new, "generator0_rank1" + new}
        assert not ranks & {*broadcasts.devices}  # they start their engine with each other first
        for name in ranks:
            recovery.connected(name)
        assert ranks <= {*broadcasts.members["policy"]}
    assert len(kills) == 2 and len(lines) == 4


def test_a_rank_that_is_cut_off_ends_its_mates_and_all_return_together(under_way):
    recovery, _, sent = under_way(*TWO_RANKS)
    crew, members = recovery.crew, recovery.crew.members
    crew.heard("launcher", m.Beat("launcher"))
    crew.condemn(members["generator0_rank1"], "frozen")
    members["generator0_rank1"].condemned_at -= KILLED_S
    recovery.watch()
    assert members["generator0_rank1"].life is Life.GIVEN_UP and members["generator0"].life is Life.CONDEMNED
    members["generator0"].condemned_at -= KILLED_S
    recovery.watch()
    assert members["generator0"].life is Life.GIVEN_UP and members["generator1"].life is Life.READY
    assert recovery.claim(["generator0", "generator0_rank1"]).names == ["generator0.100", "generator0_rank1.100"]


def test_a_generator_is_not_spared_for_its_own_rank(under_way):
    recovery, _, _ = under_way(*TWO_RANKS)
    crew = recovery.crew
    for name in "generator1", "generator1_rank1", "generator0_rank1":
        crew.condemn(crew.members[name], "frozen")
        crew.members[name].condemned_at -= KILLED_S
    recovery.watch()
    assert crew.members["generator0_rank1"].life is Life.CUT_OFF and crew.members["generator0"].life is Life.READY


def test_a_rank_that_answers_again_after_its_mate_has_gone_is_killed(under_way):
    recovery, _, sent = under_way(*TWO_RANKS)
    crew = recovery.crew
    crew.heard("launcher", m.Beat("launcher"))
    end_of(recovery, "generator0", "generator0.1")
    rank = crew.members["generator0_rank1"]
    rank.transition(Life.CUT_OFF)
    crew.heard(rank.name + SUFFIX, m.Beat(rank.name))
    assert sent[-1] == ("launcher", m.Kill(rank.name, "without the other ranks")) and rank.life is Life.CUT_OFF


def test_a_node_that_restarts_while_one_of_its_ranks_starts_gets_one_number_for_all(monkeypatch):
    recovery, _ = recovery_of(*TWO_RANKS)
    came(recovery, "generator0")
    claimed = recovery.claim(["generator0", "generator0_rank1", "generator1", "generator1_rank1"])
    assert claimed.names == ["generator0.100", "generator0_rank1.100", "generator1", "generator1_rank1"]


@pytest.mark.parametrize("may_restart", [False, True])
@pytest.mark.parametrize("name", ["trainer", "controller", "logprob_rank1"])
def test_an_exception_in_an_actor_that_cannot_be_replaced_restarts_all(name, may_restart, under_way):
    recovery, lines, _ = under_way("logprob.ranks=2")
    run = recovery.run
    run.may_restart = may_restart
    noted = []
    recovery.records.note = lambda what, **of: noted.append((what, of.get("actor"), of.get("error")))
    if name == "controller":
        recovery.cannot_go_on(name, "OSError: gone", False)
    else:
        raises(recovery, name, "OSError: gone")
        recovery.stopped(name)
        end_of(recovery, name, may_restart=True)
    told = f"{name} failed: OSError: gone; see RUN/logs/{name}.log"
    assert (run.stop_reason, run.resuming, run.failure) == (told, may_restart, "" if may_restart else told)
    assert noted == [("lost", name, "OSError: gone")] and not lines


def test_a_trainer_that_always_raises_at_the_same_place_ends_the_run_although_it_may_restart(under_way):
    recovery, _, _ = under_way()
    recovery.run.may_restart = True
    error = "FloatingPointError: 3 steps in a row"
    recovery.run.failures = Failures.of([{"event": "lost", "error": error}] * 2)  # before the restarts
    raises(recovery, "trainer", error)
    assert not recovery.run.resuming and recovery.run.failure.startswith(f"trainer failed: {error}; see ")


def test_a_draft_adapter_that_always_raises_is_given_up_and_the_run_continues(under_way):
    recovery, lines, sent = under_way()
    recovery.crew.heard("launcher", m.Beat("launcher"))
    name = "draft_adapter"
    for i in range(1, 3):
        raises(recovery, name, "ValueError: x")
        end_of(recovery, name, name := f"draft_adapter.{i}")
        came(recovery, name)
    sent.clear()
    raises(recovery, name, "ValueError: x")
    assert ("launcher", m.Dismiss(name)) in sent and not recovery.run.stop_reason
    assert lines[-1].startswith("the draft adapter is gone (draft_adapter.2 failed: ValueError: x; see ")
    # Its launcher has heard that too late.
    end_of(recovery, name, "draft_adapter.3")
    assert ("launcher", m.Kill("draft_adapter.3", "the run continues without it")) in sent
    assert "draft_adapter.3" not in recovery.crew.members and not recovery.run.stop_reason


def test_an_actor_that_fails_and_does_not_end_is_killed(under_way):
    recovery, _, sent = under_way("deployment.generators=2")
    recovery.crew.heard("launcher", m.Beat("launcher"))
    raises(recovery, "generator0")
    recovery.watch()
    assert not recovery.crew.members["generator0"].condemned
    recovery.crew.members["generator0"].failed_at -= work.stop_s(recovery.config) + 1
    recovery.watch()
    assert ("launcher", m.Kill("generator0", "failed, and has not ended since")) in sent


def test_a_failure_while_a_run_ends_counts_only_in_an_actor_that_is_needed_then(under_way):
    recovery, lines, _ = under_way()
    recovery.run.stop_reason = "finished"
    raises(recovery, "generator0")
    assert len(lines) == 1 and not recovery.run.failure
    raises(recovery, "trainer", "OSError while stopping: full")
    assert recovery.run.failure == "trainer failed: OSError while stopping: full; see RUN/logs/trainer.log"


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


def test_an_exception_is_known_before_the_end_of_its_process_whichever_message_is_read_first():
    recovery, lines = recovery_of()
    came(recovery, *(member.name for member in recovery.crew.present))
    noted = []
    recovery.records.note = lambda what, **of: noted.append((what, of))
    failed, lost = m.Failed("logprob", "ValueError: 3"), m.Lost("logprob", "logprob died: an exception", "logprob.1")
    waiting = [("launcher", lost), ("logprob", failed), ("logprob", m.Stopped("logprob"))]
    recovery.run.server = SimpleNamespace(receive=lambda: waiting.pop(0) if waiting else None, rejected=0)
    Switchboard(recovery.run, recovery, None).receive()
    told = "logprob failed: ValueError: 3; see RUN/logs/logprob.log"
    assert noted == [("lost", {"actor": "logprob", "reason": told, "error": "ValueError: 3"})], lines
