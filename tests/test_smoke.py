"""The whole system in one run: the smoke test of two steps (`pytest -m smoke`, 20 seconds), and a run of ten."""

import json
import subprocess
import sys

import pytest
from runs import Running, check_finished, events, rows

from asyncspec import catalog


@pytest.mark.smoke
def test_a_run_of_two_steps_passes_its_audit_and_has_a_report(tmp_path):
    run_dir = tmp_path / "run"
    Running.new(run_dir, "--steps", "2", "eval.every=0").end()
    check_finished(run_dir, 2)
    command = [sys.executable, "-m", "asyncspec", "report", str(run_dir)]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    assert "<svg" in (run_dir / "report.html").read_text()
    told = subprocess.run([sys.executable, "-m", "asyncspec", "status", str(run_dir)], capture_output=True, text=True)
    assert told.returncode == 0 and f"{run_dir}: finished\n  step 2 of 2, " in told.stdout
    metrics = [catalog.pattern(metric.name) for metric in catalog.METRICS]
    names = {name for row in rows(run_dir) for name in row}
    assert [name for name in names if not any(one.fullmatch(name) for one in metrics)] == []
    files = [catalog.pattern(file.name.rstrip("/")) for file in catalog.RUN_FILES]
    assert [file.name for file in run_dir.iterdir() if not any(one.fullmatch(file.name) for one in files)] == []


def test_four_actors_train_ten_steps_with_speculation(tmp_path):
    """With real processes, queues and broadcasts, every ticket is trained once, within the lag, and weights change."""
    run_dir = tmp_path / "run"
    output = Running.new(run_dir, "--steps", "10", "--policy-lag", "1", "checkpoint.every=5").end()
    check_finished(run_dir, 10)
    assert "step   10/10" in output
    for row in rows(run_dir):
        assert row["spec/draft_length"] > 0 and 1 < row["spec/acceptance_length"] <= row["spec/draft_length"] + 1
    newest = [event["version_max"] for event in events(run_dir) if event["event"] in ("trained", "evaluated")]
    assert max(newest) >= 9
    tracks = {e["args"]["name"] for e in json.loads((run_dir / "trace.json").read_text()) if e["name"] == "thread_name"}
    assert {"generator0", "logprob", "trainer", "draft_adapter"} <= tracks
