"""The supervisor's decisions about lost actors: which are replaced, and where. Without processes."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from asyncspec.actors.base import RAISED, ActorSpec
from asyncspec.actors.crew import actor_names
from asyncspec.config import load
from asyncspec.launch import roles, watch
from asyncspec.wire import messages as m


@pytest.fixture
def supervisor_of(monkeypatch):
    """callable(specs, elsewhere, *settings) -> (supervisor, messages that it sends, messages that it gets)."""

    def make(specs, elsewhere=lambda spec: spec.device, *settings):
        sent, coming = [], []
        client = SimpleNamespace(
            send=sent.append, receive=lambda: coming.pop(0) if coming else None, close=lambda linger: None
        )
        monkeypatch.setattr(watch, "ControlClient", lambda address, name: client)
        interrupt = SimpleNamespace(count=0, first=0.0)
        killed = []
        made = watch.Supervisor(
            load("tiny", list(settings)), "launcher", "", specs, interrupt, True, killed.append, elsewhere
        )
        made._beaten = math.inf
        return made, sent, coming

    return make


def spec(name, device="cpu"):
    return ActorSpec(actor_names(load("tiny", ["deployment.generators=8"]))[name], name, "RUN", "", device)


def test_an_actor_that_is_lost_again_on_one_gpu_is_replaced_on_a_spare_one(supervisor_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    here = [spec("trainer", "cuda:0"), spec("generator0", "cuda:1"), spec("generator1", "cuda:2")]
    supervisor, _, _ = supervisor_of(here, roles.SpareGPUs(here))
    names, devices = ["generator0"], []
    for _ in range(6):
        new = supervisor.died(names[-1], "SIGKILL")
        names.append(new.name)
        devices.append(new.device)
    assert names[1:] == [f"generator0.{i}" for i in range(1, 7)]
    assert devices == ["cuda:1", "cuda:3", "cuda:3", "cuda:3", "cuda:3", "cuda:3"]  # no other is left then
    assert [supervisor.died(name, "SIGKILL").device for name in ("generator1", "generator1.1")] == ["cuda:2"] * 2


def test_the_ranks_of_a_generator_keep_one_replacement_number(supervisor_of):
    """Also if the first rank's replacement is lost before the other rank's end is known."""
    settings = ("engine.kind=vllm", "engine.tensor_parallel=2", "deployment.generators=2", "deployment.replacements=4")
    roles_of = actor_names(load("tiny", list(settings)))
    here = [ActorSpec(role, name, "RUN", "", "cpu") for name, role in roles_of.items() if name.startswith("generator")]
    supervisor, _, _ = supervisor_of(here, lambda spec: spec.device, *settings)
    new = [supervisor.died(name, "SIGKILL").name for name in ("generator0", "generator0.1", "generator0_rank1")]
    assert new == ["generator0.1", "generator0.2", "generator0_rank1.2"]
    assert supervisor.died("generator1_rank1", "SIGKILL").name == "generator1_rank1.1"
    assert supervisor.replacements == 2  # all ranks of a generator count as one


def test_launchers_of_one_host_share_its_spare_gpus_and_a_cpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    here = [spec("trainer", "cuda:0"), spec("logprob", "cuda:1"), spec("generator0", "cuda:2")]
    spare = [roles.SpareGPUs(here, first, 2) for first in range(2)]
    taken = [[each(here[2]) for _ in range(4)] for each in spare]
    assert taken == [["cuda:3", "cuda:5", "cuda:7", "cuda:2"], ["cuda:4", "cuda:6", "cuda:2", "cuda:2"]]
    assert roles.SpareGPUs([spec("generator0")])(spec("generator0")) == "cpu"


def test_only_actors_that_can_be_replaced_are_until_no_replacement_is_left(supervisor_of):
    here = [spec("trainer"), spec("logprob"), spec("generator0")]
    supervisor, sent, _ = supervisor_of(here, lambda spec: spec.device, "deployment.replacements=1")
    assert supervisor.died("trainer", "an exception") is None
    assert supervisor.died("logprob", "an exception").name == "logprob.1"
    assert supervisor.died("generator0", "an exception") is None
    assert sent == [
        m.Lost("trainer", "trainer died: an exception", "", True),
        m.Lost("logprob", "logprob died: an exception", "logprob.1", True),
        m.Lost("generator0", "generator0 died: an exception", "", True),
    ]


def test_an_actor_that_the_run_does_without_is_not_replaced(supervisor_of):
    supervisor, sent, coming = supervisor_of([spec("draft_adapter")])
    coming.append(m.Dismiss("draft_adapter"))
    supervisor.turn()
    assert supervisor.died("draft_adapter", "an exception") is None and sent[-1].replacement == ""


def test_a_process_in_which_an_exception_was_raised_ends_and_plays_no_other_actor():
    """Monarch and Ray let a process play several actors, one after the other."""
    played = """
from types import SimpleNamespace
from asyncspec.launch import roles
print(roles.play(SimpleNamespace(run=lambda: 0)), roles.play(SimpleNamespace(run=lambda: 1)))
roles.play(SimpleNamespace(run=lambda: roles.RAISED))
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", played], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (RAISED, "0 1\n"), done.stderr
