"""Faults: any actor killed or frozen at any moment; runs cut short and resumed. The audit has the last word."""

import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from asyncspec.audit import audit
from runs import SCRIPT, TORCHRUN, Running, descendants, events, rows

QUICK = ("checkpoint.every=3", "deployment.silent_timeout_s=2")


def check(run_dir, steps, lag=1):
    """Whatever happened: every step once, within the lag, every ticket accounted for."""
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == list(range(steps)) and max(row["lag/max"] for row in metrics) <= lag
    assert audit(str(run_dir)) == 0


def faults(actor, kind, **places):
    """An actor that comes back under a new name (generator0, generator0.1, ...) meets one fault after the other."""
    return ",".join(f"{actor}{f'.{i}' if i else ''}:{place}:{times}:{kind}" for i, (place, times) in enumerate(places.items()))


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_generator_logprob_and_draft_adapter_may_be_lost_in_any_state(tmp_path, kind):
    planned = ",".join([faults("generator0", kind, work=9, swap=2, receive=2, send=3, join=1),
                        faults("logprob", kind, work=6, swap=2, receive=2, send=3, join=1),
                        faults("draft_adapter", kind, work=5, send=1, checkpoint=1, join=1)])
    run_dir, steps = tmp_path / "run", 60
    run = Running.new(run_dir, "--steps", str(steps), *QUICK, "deployment.replacements=40", "deployment.standby=1", "draft.publish_every=1",
                      f"deployment.faults={planned}", seconds=280)
    output = run.end()
    check(run_dir, steps)
    happened = sorted(path.name for path in (run_dir / "faults").iterdir())
    # The last ones of the adapter may come too late; and where processors are scarce it may seem frozen by itself, it runs at low priority.
    assert sum(name.startswith(("generator0", "logprob")) for name in happened) == 10, (happened, output)
    named = {what: {event["actor"] for event in events(run_dir) if event["event"] == what} for what in ("frozen", "lost", "joined")}
    victims = {f"{first}{number}" for first in ("generator0", "logprob") for number in ("", ".1", ".2", ".3", ".4")}
    assert victims <= named["lost"] and "draft_adapter" in named["lost"] and {"generator0.5", "logprob.5"} <= named["joined"]
    assert kind == "kill" or victims <= named["frozen"], output


def test_trainer_and_controller_may_be_lost_in_any_state(tmp_path):
    # Each start counts anew; the first one that is met ends it.
    planned = "trainer:join:1:freeze,trainer:work:10:kill,trainer:send:5:freeze,trainer:checkpoint:2:kill,controller:work:90:freeze"
    run_dir, steps = tmp_path / "run", 24
    run = Running.new(run_dir, "--steps", str(steps), *QUICK, "deployment.restarts=8", f"deployment.faults={planned}", seconds=280)
    output = run.end()
    assert len(list((run_dir / "faults").iterdir())) == 5, output
    check(run_dir, steps)
    # Both may be frozen at once, which is one restart.
    assert output.count("all is started again from the last checkpoint") >= 4, output


def test_actors_may_be_lost_while_starting(tmp_path):
    run_dir = tmp_path / "run"
    planned = "generator0:boot:1:kill,logprob:join:1:kill,draft_adapter:boot:1:freeze,trainer:boot:1:kill"
    output = Running.new(run_dir, "--steps", "3", *QUICK, f"deployment.faults={planned}").end()
    check(run_dir, 3)
    assert len(list((run_dir / "faults").iterdir())) >= 3, output
    assert output.count("all is started again from the last checkpoint") == 1, output


@pytest.mark.parametrize("actor", ["controller", "logprob"])
def test_who_never_gives_a_sign_of_life_is_found_out_and_replaced(tmp_path, actor):
    run_dir = tmp_path / "run"
    output = Running.new(run_dir, "--steps", "3", "deployment.start_timeout_s=25", f"deployment.faults={actor}:start:1:freeze").end()
    check(run_dir, 3)
    assert f"{actor} is frozen: no sign of life for 25" in output and f"{actor} died: " in output, output


def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path):
    """As by Ctrl-Z and fg, or a laptop that sleeps: for longer than any deadline of the run."""
    run_dir = tmp_path / "run"
    run = Running.new(run_dir, "--steps", "30", "deployment.silent_timeout_s=2", "deployment.stall_timeout_s=4")
    run.wait_for_steps(3)
    everyone = [run.process.pid, *descendants(run.process.pid)]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    run.end()
    check(run_dir, 30)
    assert not [event for event in events(run_dir) if event["event"] == "lost"]


def policy_of(run_dir):
    return load_file(run_dir / "checkpoint" / "policy" / "model.safetensors")


@pytest.mark.parametrize("speculation", [("speculation.method=none",), ("speculation.draft_length=3", "draft.adapt=false")], ids=["plain", "eagle3"])
def test_at_lag_0_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, speculation):
    # Behaviour logprobs are rounded by what shares a batch, which nobody repeats; without the correction they reach no gradient.
    settings = ("--policy-lag", "0", "checkpoint.every=2", "rl.correction=none", *speculation)
    Running.new(tmp_path / "whole", "--steps", "6", *settings).end()
    cut = Running.new(tmp_path / "cut", "--steps", "6", *settings)
    cut.wait_for_steps(3)
    cut.kill()  # the launcher and everything else at once
    output = Running.resumed(tmp_path / "cut").end()
    assert "going on from version 2" in output or "going on from version 4" in output, output
    check(tmp_path / "cut", 6, lag=0)
    whole, resumed = policy_of(tmp_path / "whole"), policy_of(tmp_path / "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for a, b in zip(rows(tmp_path / "whole"), rows(tmp_path / "cut")):
        assert a["reward/mean"] == b["reward/mean"] and a["grad/norm"] == b["grad/norm"] and a["optimizer/lr"] == b["optimizer/lr"]


def test_torchrun_restarts_its_ranks_from_the_last_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    launcher = (*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2", SCRIPT)
    # Just before version 6, and slowly: the checkpoint of version 3, which is written in the background, is then whole.
    run = Running.new(run_dir, "--steps", "10", *QUICK, "deployment.faults=trainer:work:24:kill", "deployment.delays=train=0.2", launcher=launcher)
    output = run.end()
    check(run_dir, 10)
    assert "trainer died: SIGKILL: all is started again from the last checkpoint" in output and "going on from version 3" in output, output


def test_of_two_processes_only_one_trains_in_a_directory(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run = Running.new(run_dir, "--steps", "10000")
    run.wait_for_steps(1)
    assert "another process is training in it" in Running.resumed(run_dir).end(2)
    assert audit(str(run_dir)) == 0 and "still running; " in capsys.readouterr().out
    os.kill(run.process.pid, signal.SIGINT)
    assert f"to go on: asyncspec train --resume {run_dir}" in run.end(130)
    trained = len(rows(run_dir))
    assert f"{trained} steps are trained, and 1 wanted; steps={2 * trained}, for example" in Running.resumed(run_dir, "steps=1").end(2)
    assert "rl.group_size=8: the run was begun with 4, and this may not change" in Running.resumed(run_dir, "rl.group_size=8").end(2)
    assert "no config.yaml in it; expected the directory of a run; nearest: " in Running.resumed(tmp_path / "rum").end(2)
