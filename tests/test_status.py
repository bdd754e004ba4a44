"""What `asyncspec status` says of a run, and what Prometheus is served."""

import json
import os
import re
import time
import urllib.request
from types import SimpleNamespace

import msgspec
import pytest
from crews import came, recovery_of

from asyncspec import cli
from asyncspec.actors.prometheus import Endpoint
from asyncspec.actors.status import StatusFile, lost_of
from asyncspec.ledger.status import FILE, Actor, Status
from asyncspec.lock import Lock
from asyncspec.wire import messages as m

GOING_ON = Status(
    time=0.0,
    began=0.0,
    ended="",
    failure="",
    step=30,
    steps=120,
    version=31,
    lag=1.0,
    most_lag=1,
    step_s=1.25,
    left_s=130.0,
    score=0.75,
    up={"generator": 2, "trainer": 1},
    others=[
        Actor("logprob.1", "logprob", "starting", 3.0, "OSError: no"),
        Actor("generator2", "generator", "cut off", 9.5),
    ],
    more=4,
    lost={"generator": 3, "draft_adapter": 1},
    restarts=2,
    waiting=5,
    generating=6,
    generated=7,
    waits_for="ticket 553 of step 34, in generator0",
)


def written(folder, **fields):
    """Write a run's directory with this status."""
    (folder / "config.yaml").write_text("steps: 120\n")
    made = msgspec.structs.replace(GOING_ON, **{"time": time.time(), **fields})
    (folder / FILE).write_bytes(msgspec.json.encode(made))
    return made


def told(capsys, folder, *flags):
    code = cli.main(["status", str(folder), *flags])
    return code, capsys.readouterr().out


def test_the_status_names_who_is_up_what_is_waited_for_the_lag_and_the_end(tmp_path, capsys):
    written(tmp_path)
    code, said = told(capsys, tmp_path)
    assert code == 0 and said.splitlines() == [
        f"{tmp_path}: running, written 0 s ago",
        "  step 30 of 120, the last one took 1.25 s, ends in about 2 min 10 s, held-out score 0.750",
        "  lag 1 of 1 allowed; version 31 is published",
        "  tickets: 5 waiting, 6 in generators, 7 generated",
        "  ready: 2 generator, 1 trainer",
        "  logprob.1 is starting, last heard 3.0 s before: OSError: no",
        "  generator2 is cut off, last heard 9.5 s before",
        "  4 more are not ready",
        "  lost since this start: 1 draft_adapter, 3 generator",
        "  continued from a checkpoint 2 times",
        "  waits for: ticket 553 of step 34, in generator0",
    ]
    code, said = told(capsys, tmp_path, "--json")
    found = json.loads(said)
    assert code == 0 and found["state"] == "running" and found["up"] == GOING_ON.up and found["age_s"] < 5


@pytest.mark.parametrize(
    "fields, code, said",
    [
        ({"ended": "finished"}, 0, ": finished"),
        ({"ended": "interrupted"}, 1, ": stopped early: interrupted"),
        ({"ended": "x", "failure": "trainer failed: no"}, 1, ": failed: trainer failed: no"),
        ({"ago": 4000}, 1, ": silent: its controller has written nothing for 1 h 6 min; see "),
    ],
)
def test_the_exit_code_says_whether_the_run_goes_on(tmp_path, capsys, fields, code, said):
    written(tmp_path, **({"time": time.time() - fields["ago"]} if "ago" in fields else fields))
    found, text = told(capsys, tmp_path)
    assert found == code and said in text.splitlines()[0]


def test_a_directory_without_a_status_gives_one_line(tmp_path, capsys):
    for prepare, said in (
        (lambda: None, "no config.yaml in it; expected the directory of a run"),
        (lambda: (tmp_path / "config.yaml").write_text(""), "expected a run whose controller has started"),
        (lambda: (tmp_path / FILE).write_text("{"), "expected a run of this version of asyncspec"),
    ):
        prepare()
        assert cli.main(["status", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_prometheus_is_served_the_last_row_and_who_is_up():
    row = {"lag/max": 1.0, "eval/score": None, "actors/generator0_busy": 0.5, "actors/logprob1_rank1_busy": 0.25}
    endpoint = Endpoint("127.0.0.1:0", lambda: row, lambda: GOING_ON)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        endpoint.close()
    found = dict(re.findall(r"^(asyncspec_\S+) (\S+)$", text, re.MULTILINE))
    assert found["asyncspec_lag_max"] == "1.0" and "asyncspec_eval_score" not in found
    assert found['asyncspec_actors_busy{actor="generator0"}'] == "0.5"
    assert found['asyncspec_actors_busy{actor="logprob1_rank1"}'] == "0.25"
    assert found['asyncspec_up{role="generator"}'] == "2.0" and found["asyncspec_not_ready"] == "6.0"
    assert found["asyncspec_left_seconds"] == "130.0"


def test_a_run_that_starts_again_is_not_told_to_have_ended(tmp_path, capsys):
    """Each start writes the configuration; the launcher holds the lock."""
    written(tmp_path, ended="finished")
    os.utime(tmp_path / FILE, (time.time() - 60, time.time() - 60))
    held = Lock(tmp_path / "lock")
    try:
        code, said = told(capsys, tmp_path)
    finally:
        held.release()
    assert code == 0 and "starts again; its controller has written nothing yet. Before, step 30 was reached" in said
    code, said = told(capsys, tmp_path)
    assert code == 0 and "finished" in said


@pytest.mark.parametrize("row", [None, {"lag/max": 1.0, "time/step": 2.0}])
def test_a_run_has_ended_only_when_its_controller_is_done(row):
    """Whether or not a step was trained. Until then it may be writing its last checkpoint."""
    recovery, _ = recovery_of()
    run = recovery.run
    run.stop_reason = "interrupted"
    run.records.metrics = SimpleNamespace(last=row)
    run.records.console = SimpleNamespace(left_s=lambda steps: None)
    schedule = SimpleNamespace(trained_steps=0, clock=SimpleNamespace(version=0))
    file = StatusFile(run, schedule)
    assert file.status("", False).ended == "" and file.status("", True).ended == "interrupted"


def test_actors_that_were_lost_are_counted_by_role():
    recovery, _ = recovery_of("deployment.generators=2")
    came(recovery, *(member.name for member in recovery.crew.present))
    recovery.lost(m.Lost("generator0", "its process ended", replacement="generator0.1"))
    recovery.lost(m.Lost("generator1", "its process ended", replacement="generator1.1"))
    assert lost_of(recovery.records.counters) == {"generator": 2}
    assert lost_of({"draft/adapter_lost": 1.0, "recovery/logprobs_lost": 1.0, "recovery/logprob_s": 3.0}) == {
        "draft_adapter": 1,
        "logprob": 1,
    }
