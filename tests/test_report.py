"""asyncspec report, on a real run."""

import json
import re
import subprocess
import sys

import pytest
from runs import train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    done = train(folder / "run", "--steps", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def report(cwd, *args):
    return subprocess.run(
        [sys.executable, "-m", "asyncspec.cli", "report", *args], capture_output=True, text=True, cwd=cwd, timeout=120
    )


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.slow
def test_the_page_is_complete_and_needs_no_network(run_dir, runs):
    done = report(run_dir.parent, *["run"] * runs)
    assert done.returncode == 0, done.stderr
    page = (run_dir / "report.html").read_text()
    loaded = [
        url
        for url in re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
        if not url.startswith("#") and url != "rollouts.html"
    ]
    assert not loaded and "<script" not in page
    assert page.count("<svg") == 7 + runs and page.count("<h2>") == 6
    for text in (
        "exposed generation",
        "held-out accuracy",
        "largest lag",
        "What to change",
        "What if",
        "generator0",
        "blocked on input",
        "policy_lag: 1",
    ):
        assert text in page


@pytest.mark.slow
def test_the_text_says_where_the_time_went(run_dir):
    done = report(run_dir.parent, "run", "--text")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][2:]
    mean = sum(row["time/step"] for row in rows) / len(rows)
    assert f"{mean:.3f} s (median" in done.stdout
    tokens = sum(row["throughput/tokens_per_s"] * row["time/step"] for row in rows)
    assert f"{tokens / len(rows) / mean:.0f} tokens/s" in done.stdout
    assert re.search(r"step \d+: [\d.]+ s", done.stdout) and "generation twice as fast" in done.stdout
    assert re.search(r"trainer: busy \d+%, blocked on input \d+%", done.stdout)


@pytest.mark.slow
def test_shares_of_an_actors_time_sum_to_one_and_arrows_follow_every_ticket(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for name in ("trainer", "generator0", "logprob"):
        assert sum(
            rows[-1][f"actors/{name}_{state}"] for state in ("busy", "blocked_input", "blocked_output", "idle")
        ) == pytest.approx(1, abs=1e-3)
    events = json.loads((run_dir / "trace.json").read_text())
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert any(e["name"] == "process_labels" and e["args"]["labels"] == "one clock" for e in events)
    arrows = {}
    for e in sorted((e for e in events if e.get("cat") == "way"), key=lambda e: e["ts"]):
        arrows.setdefault(e["id"], []).append((e["ph"], e["tid"]))
    assert len(arrows) == 24
    assert all(
        way == [("s", tracks["generator0"]), ("t", tracks["logprob"]), ("f", tracks["trainer"])]
        for way in arrows.values()
    )


def test_a_directory_without_a_run_is_refused_in_one_line(tmp_path):
    done = report(tmp_path, "nowhere")
    assert done.returncode == 2 and "no config.yaml in it" in done.stderr and done.stderr.count("\n") == 1
