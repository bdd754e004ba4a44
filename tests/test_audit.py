"""asyncspec audit: a ledger that keeps its promises passes, and every broken promise is found."""

import copy
import json
import shutil
import subprocess
import sys

import pytest
from runs import ledger, rows, train

from asyncspec.cli import main
from asyncspec.config import load, to_yaml
from asyncspec.ledger.audit import audit as check_run
from asyncspec.ledger.audit import violations
from asyncspec.ledger.ledger import ended, open_tickets, read, undone

LAG, GROUPS, STEPS = 1, 2, 3


def good():
    """A ledger of three steps with two tickets each, an evaluation and a dropped ticket."""
    events = []
    for ticket in range(LAG + GROUPS * STEPS):
        step = ticket // GROUPS
        events.append({"event": "issued", "ticket": ticket, "step": step, "min_version": max(0, step - LAG)})
        end = (
            {"event": "trained", "trained_in": step, "version_min": max(0, step - 1), "version_max": step}
            if step < STEPS
            else {"event": "dropped", "reason": "finished"}
        )
        events.append({"ticket": ticket, "step": step, **end})
    return [
        *events,
        {"event": "issued", "ticket": 1 << 40, "step": 0},
        {"event": "evaluated", "ticket": 1 << 40, "step": 0},
    ]


def check(events, trained=STEPS):
    return violations(events, LAG, GROUPS, trained)


def test_a_good_ledger_has_no_violation():
    assert check(good()) == []


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda e: e.pop(1), "ticket 0: no end"),
        (lambda e: e.append(copy.deepcopy(e[1])), "ticket 0: trained 2 times"),
        (
            lambda e: e.append({"event": "dropped", "ticket": 0, "step": 0, "reason": "x"}),
            "ticket 0: trained 1 times, dropped 1 times",
        ),
        (lambda e: e[9].update(version_min=0), "ticket 4: a token of version 0 trained in step 2, beyond policy lag 1"),
        (
            lambda e: e[9].update(version_max=3),
            "ticket 4: a token of version 3 trained in step 2, which made version 3",
        ),
        (lambda e: e[9].update(trained_in=1), "ticket 4: trained in step 1, issued for step 2"),
        (lambda e: e.pop(0), "ticket 0: trained before it was issued"),
        (lambda e: e[13].pop("reason"), "ticket 6: dropped without a reason"),
        (lambda e: (e.pop(2), e.pop(2)), "step 0: 1 tickets trained or left out, expected 2"),
    ],
)
def test_every_broken_promise_is_found(change, message):
    events = good()
    change(events)
    assert any(line.startswith(message) for line in check(events)), check(events)


def test_metrics_and_ledger_must_have_the_same_steps():
    assert check(good(), 2) == ["metrics.jsonl has 2 steps, but the ledger has 3"]


def test_audit_of_an_unfinished_run_reports_only_certain_violations():
    events = good()
    assert all(check(events[:end], None) == [] for end in range(len(events) + 1))
    assert check(events + events[1:2], None) == [
        "ticket 0: trained 2 times",
        "step 0: 3 tickets trained or left out, expected 2",
    ]


def long():
    """A ledger with everything that a run may write: a step that was skipped, faults, reissues and two resumes."""
    whole = good()
    skipped = [
        event
        if (event["event"], event["step"]) != ("trained", 1)
        else {"event": "dropped", "ticket": event["ticket"], "step": 1, "reason": "step skipped", "left_out_in": 1}
        for event in whole
    ]
    first, again = [e for e in whole if e["step"] == 0], [e for e in skipped if e["step"] >= 1]
    return [
        {"event": "ready"},
        *first,
        *whole[4:7],
        {"event": "lost", "actor": "generator0", "reason": "x"},
        {"event": "reissued", "ticket": 2, "step": 1, "reason": "x"},
        {"event": "resumed", "version": 1, "tickets_undone": 1, "tickets_void": 1},
        *again[:5],
        {"event": "dropped", "ticket": 4, "step": 2, "reason": "the trainer died"},
        {"event": "ended", "reason": "the trainer died", "failure": "x"},
        {"event": "resumed", "version": 1, "tickets_undone": 1, "tickets_void": 1},
        *again,
        {"event": "ended", "reason": "finished", "failure": ""},
    ]


def write(run_dir, text, steps=STEPS):
    """Write the files of a run that the audit reads."""
    (run_dir / "config.yaml").write_text(to_yaml(load("tiny", [f"policy_lag={LAG}", f"rl.groups_per_step={GROUPS}"])))
    (run_dir / "ledger.jsonl").write_bytes(text)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(steps)))


def check_cut_at_every_line(run_dir, capsys):
    """Cut the ledger of a finished run at every line, and within each. No violation is found anywhere."""
    whole, said_since = (run_dir / "ledger.jsonl").read_bytes(), capsys.readouterr
    lines, metrics = whole.splitlines(keepends=True), (run_dir / "metrics.jsonl").read_bytes()
    assert check_run(str(run_dir)) == 0 and "unfinished: " not in said_since().out
    for count, line in enumerate(lines):
        for more in (b"", line[:-1] if count % 2 else line[: len(line) // 2]):
            (run_dir / "ledger.jsonl").write_bytes(b"".join(lines[:count]) + more)
            if ended(events := list(read(run_dir))):  # by a controller that then started again
                steps = {event.get("trained_in", event.get("left_out_in")) for event in events} - {None}
                (run_dir / "metrics.jsonl").write_text("{}\n" * len(steps))
            else:
                (run_dir / "metrics.jsonl").write_bytes(metrics)
            code, said = check_run(str(run_dir)), said_since().out
            assert code == 0 and "violated" not in said and "no violations" in said, said
            if not ended(events):
                opened = len(open_tickets(events))
                how = "ends in a torn line" if more else "has no end"
                assert f"unfinished: the run was cut short, its ledger {how}; {opened} tickets are open; to" in said
                assert f"asyncspec train --resume {run_dir}\n" in said
    (run_dir / "ledger.jsonl").write_bytes(whole)
    (run_dir / "metrics.jsonl").write_bytes(metrics)


def test_a_ledger_that_was_cut_short_anywhere_is_unfinished_and_not_violated(tmp_path, capsys):
    write(tmp_path, b"".join(json.dumps(event).encode() + b"\n" for event in long()))
    check_cut_at_every_line(tmp_path, capsys)
    (tmp_path / "metrics.jsonl").unlink()  # cut short before its first step
    (tmp_path / "ledger.jsonl").write_bytes(b'{"event": "ready"}\n')
    assert main(["audit", str(tmp_path)]) == 0 and "unfinished: " in capsys.readouterr().out


def test_violations_in_a_ledger_that_was_cut_short_are_found(tmp_path, capsys):
    events = long()[:-1]
    at = next(i for i, event in enumerate(events) if event["event"] == "trained" and event["step"] == 2)
    events[at]["version_min"] = 0
    write(tmp_path, b"".join(json.dumps(event).encode() + b"\n" for event in [*events, events[at]]) + b'{"event"')
    code, said = main(["audit", str(tmp_path)]), capsys.readouterr().out
    assert code == 1 and "beyond policy lag 1" in said and "ticket 4: trained 2 times" in said
    assert "unfinished: " in said and "ends in a torn line" in said


def audit(directory):
    return subprocess.run(
        [sys.executable, "-m", "asyncspec.cli", "audit", str(directory)], capture_output=True, text=True, timeout=120
    )


def test_tickets_undone_by_a_resume_are_trained_again():
    """A run is cut short in its second step and resumes from the checkpoint of version 1: each ticket counts once."""
    whole = good()
    cut = [e for e in whole if e["step"] <= 1 and e["ticket"] < 1 << 40][:7]  # step 0 trained, step 1 half trained
    again = [e for e in whole if e["step"] >= 1 or e["ticket"] >= 1 << 40]
    events = [*cut, {"event": "resumed", "version": 1}, *again]
    assert check(events) == []
    assert undone(cut, 1) == 1 and undone(cut, 0) == 3 and undone([*cut, {"event": "resumed", "version": 1}], 1) == 0
    assert set(open_tickets(cut)) == {3} and open_tickets([*cut, {"event": "resumed", "version": 1}]) == {}
    assert any("issued 2 times" in line for line in check([*cut, *again]))  # without the line that undoes them
    assert "resumed from version 2, which was never trained" in check(
        [*cut, {"event": "resumed", "version": 2}, *again]
    )


@pytest.mark.parametrize(
    "name,line,says",
    [
        (
            "ledger.jsonl",
            b'{"event": "trained"}',
            "ledger.jsonl, line 3: 'trained' with ticket=None: expected a whole number",
        ),
        (
            "ledger.jsonl",
            b'{"event": "resumed", "version": "2"}',
            "ledger.jsonl, line 3: 'resumed' with version='2': expected a whole number",
        ),
        ("ledger.jsonl", b'{"event": "\xff"}', "ledger.jsonl, line 3: not an event: "),
        ("metrics.jsonl", b'{"step": 0, "note": "\xff"}', "metrics.jsonl, line 3: not the row of a step"),
        ("metrics.jsonl", b"3", "metrics.jsonl, line 3: not the row of a step"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, capsys, name, line, says):
    write(tmp_path, b"".join(json.dumps(event).encode() + b"\n" for event in [*good(), {"event": "ended"}]))
    assert main(["audit", str(tmp_path)]) == 0
    lines = (tmp_path / name).read_bytes().splitlines()
    (tmp_path / name).write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    capsys.readouterr()
    code, said = main(["audit", str(tmp_path)]), capsys.readouterr()
    if name == "metrics.jsonl":
        assert code == 1 and f"violated: {says}\n" in said.out
    else:
        assert code == 2 and said.err.startswith(f"asyncspec: audit {tmp_path}: {says}") and said.err.count("\n") == 1
        assert main(["report", str(tmp_path)]) == 2 and capsys.readouterr().err.startswith(
            f"asyncspec: report {tmp_path}: {says}"
        )


@pytest.mark.slow
def test_a_real_run_passes_and_a_falsified_one_fails_loudly(tmp_path, capsys):
    assert train(tmp_path / "run", "--steps", "4").returncode == 0
    done = audit(tmp_path / "run")
    assert done.returncode == 0 and "no violations" in done.stdout, done.stdout + done.stderr
    assert len(rows(tmp_path / "run")) == 4
    check_cut_at_every_line(tmp_path / "run", capsys)
    falsified = tmp_path / "falsified"
    shutil.copytree(tmp_path / "run", falsified)
    lines = ledger(falsified)
    next(line for line in lines if line["event"] == "trained" and line["step"] == 3)["version_min"] = 0
    (falsified / "ledger.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = audit(falsified)
    assert done.returncode == 1 and "beyond policy lag 1" in done.stdout and "1 violations" in done.stdout
    done = audit(tmp_path)
    assert done.returncode == 2 and "no config.yaml in it" in done.stderr and done.stderr.count("\n") == 1
