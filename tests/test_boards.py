"""Boards: what TensorBoard, wandb and trackio hold in the end, read back from their files; and boards that fail."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from runs import descendants, train
from wandb_file import history

from asyncspec.config import Config, ConfigError, load
from asyncspec.launch.check_boards import check_boards
from asyncspec.timing.boards import Boards, TensorBoard

OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}

WRITER = """
import json, os, sys
from pathlib import Path
from matplotlib.figure import Figure
from asyncspec.timing.boards import Boards, Place, openers

asked = json.loads(sys.stdin.read())
place = Place(Path(asked["folder"]), "project", "a run", {"rl": {"group_size": 8}}, *asked["from"])
boards = Boards(openers(asked["names"], place), lambda text: print("told:", text))
for step in range(asked["from"][0], asked["until"]):
    boards.scalars({"reward": step / 8 + asked["add"], "time/step": 1.5}, step)
    boards.table("rollouts/training", ("prompt", "response", "reward"), [["1+1=", "<b>2</b>|\\n", 1.0]], step)
    boards.figure("time/gantt", Figure, step)
boards.scalars({"eval/score_by_version": 0.5}, asked["until"])
boards.close(60)
"""


def written(folder, names, until, *, begin=(0, 0), add=0.0):
    """Write steps to boards in a process of its own; return what it printed."""
    asked = {"folder": str(folder), "names": names, "from": begin, "until": until, "add": add}
    done = subprocess.run(
        [sys.executable, "-c", WRITER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | OFFLINE | {"TRACKIO_DIR": str(folder / "trackio")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"), {"tensors": 0, "scalars": 0}).Reload()
    return events, {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


READER = """
import json, sys
import trackio
from trackio.sqlite_storage import SQLiteStorage

project = sys.argv[1]
runs = trackio.Api().runs(project)
print(json.dumps({run.name: SQLiteStorage.get_logs(project, run.name, run_id=run.id) for run in runs}))
"""


def of_trackio(folder, project):
    """Return {run: rows}, from trackio's own reader."""
    environment = os.environ | {"TRACKIO_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", READER, project], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_wandb(folder):
    """Return what `history` returns for each offline run, in the order of their beginnings."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    return [history(file) for file in files]


# What the boards hold.
def test_tensorboard_has_the_numbers_and_shows_text_as_text(tmp_path):
    assert written(tmp_path, ["tensorboard"], 3) == ""
    events, scalars = of_tensorboard(tmp_path)
    assert scalars["reward"] == {0: 0.0, 1: 0.125, 2: 0.25} and scalars["eval/score_by_version"] == {3: 0.5}
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("rollouts/training")]
    text = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert "| 1+1= | &lt;b&gt;2&lt;/b&gt;&#124;<br> | 1 |" in text
    assert events.Tags()["images"] == ["time/gantt"]


def test_wandb_has_the_numbers_offline_and_a_resumed_run_goes_on_in_the_same_run(tmp_path):
    assert written(tmp_path, ["wandb"], 4) == ""
    # A resumed run trains steps 2 and 3 again; they were shown.
    assert written(tmp_path, ["wandb"], 6, begin=(2, 4), add=0.5) == ""
    (first, name, project, rows), (second, _, _, more) = of_wandb(tmp_path)
    assert first == second == (tmp_path / "wandb" / "run-id").read_text().strip()
    assert (name, project) == ("a run", "project")
    assert {step: row["reward"] for step, row in rows.items()} == {0: 0.0, 1: 0.125, 2: 0.25, 3: 0.375}
    assert {step: row["reward"] for step, row in more.items()} == {4: 1.0, 5: 1.125}
    assert rows[3]["eval/score_by_version"] == 0.5 and rows[3]["version"] == 4  # it joins the newest row
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts/*.json"))
    assert len(tables) == 6
    assert all(json.loads(file.read_text())["data"] == [["1+1=", "<b>2</b>|\n", 1.0]] for file in tables)
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/time/*.png"))) == 6


def test_trackio_has_the_numbers_and_a_resumed_run_goes_on_in_the_same_run(tmp_path):
    assert written(tmp_path, ["trackio"], 4) == ""
    assert written(tmp_path, ["trackio"], 6, begin=(2, 4), add=0.5) == ""
    found = of_trackio(tmp_path / "trackio", "project")
    assert list(found) == ["a run"]
    rewards = [(row["step"], row["reward"]) for row in found["a run"] if "reward" in row]
    assert sorted(rewards) == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375), (4, 1.0), (5, 1.125)]
    versions = [(row["step"], row["eval/score_by_version"]) for row in found["a run"] if "eval/score_by_version" in row]
    assert sorted(versions) == [(4, 0.5), (6, 0.5)]
    shown = next(row["rollouts/training"] for row in found["a run"] if "rollouts/training" in row)
    assert shown["_value"] == [{"prompt": "1+1=", "response": "<b>2</b>|\n", "reward": 1.0}]


@pytest.mark.slow
def test_a_run_shows_the_same_numbers_everywhere(tmp_path):
    boards = "logging.backends=tensorboard,wandb,trackio"
    environment = os.environ | OFFLINE | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    more = ["logging.rollouts_every=1", "logging.run_name=named"]
    done = train(tmp_path / "run", boards, "steps=3", *more, env=environment)
    assert done.returncode == 0 and "cannot be written" not in done.stdout, done.stdout + done.stderr
    assert "Trackio" not in done.stdout and "wandb" not in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    _, scalars = of_tensorboard(tmp_path / "run")
    ((_, name, project, of_steps),) = of_wandb(tmp_path / "run")
    found = of_trackio(tmp_path / "trackio", "asyncspec")["named"]
    trackio = {row["step"]: row for row in found if "reward" in row}
    assert (name, project) == ("named", "asyncspec") and len(rows) == len(trackio) == 3
    for row in rows:
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k not in ("step", "policy_version")}
        assert {"reward", "entropy", "reward_std", "sampling/sampling_logp_difference/max"} <= set(numbers)
        for key, value in numbers.items():
            assert of_steps[row["step"]][key] == value == trackio[row["step"]][key], key
            assert scalars[key][row["step"]] == pytest.approx(value, rel=1e-6), key


# Boards that fail.
def test_tensorboard_files_that_cannot_be_written_are_dropped_and_named_once(tmp_path, capfd):
    said = []
    (tmp_path / "a file").touch()
    board = Boards({"a/tb": partial(TensorBoard, tmp_path / "a file")}, said.append)
    board.scalars({"loss": 1.0}, 1)
    board.close()
    assert said == ["a/tb cannot be written: File exists; the rest goes on without it"]
    there = threading.Event()

    def remove(tensorboard=None):
        shutil.rmtree(tmp_path / "tb")
        there.set()

    gone = Boards({"b/tb": partial(TensorBoard, tmp_path / "tb")}, said.append)
    gone.scalars({"loss": 1.0}, 1)
    gone._each(remove)
    assert there.wait(30)
    gone.scalars({"loss": 2.0}, 2)
    gone.close()
    gone.scalars({"loss": 3.0}, 3)
    gone.figure("time/gantt", lambda: pytest.fail("nobody would see it"), 3)
    assert said[1:] == ["b/tb cannot be written: No such file or directory; the rest goes on without it"]
    assert capfd.readouterr() == ("", "")  # no traceback of the thread that writes


def test_a_picture_that_cannot_be_drawn_is_dropped(tmp_path):
    said = []
    board = Boards({"tb": partial(TensorBoard, tmp_path / "tb")}, said.append)
    board.figure("time/gantt", lambda: [][0], 1)
    board.close()
    assert len(said) == 1 and "list index out of range" in said[0]


class Stuck:
    """A board that hangs at the first number."""

    def __init__(self):
        self.free = threading.Event()

    def scalars(self, values, step):
        self.free.wait(60)

    def close(self):
        pass


class Kept:
    """A board that keeps its numbers."""

    def __init__(self):
        self.found = []

    def scalars(self, values, step):
        self.found.append(step)

    def close(self):
        self.found.append("closed")


def test_a_board_that_hangs_holds_nobody_up_and_is_dropped():
    said, stuck, kept = [], Stuck(), Kept()
    boards = Boards({"stuck": lambda: stuck, "kept": lambda: kept}, said.append)
    began = time.monotonic()
    for step in range(990):
        boards.scalars({"loss": 1.0}, step)
    assert time.monotonic() - began < 30  # not the 60 s of the board
    boards.close(0.5)
    assert kept.found == [*range(990), "closed"]
    assert said == ["stuck cannot be written: it did not end within 0.5 s; the rest goes on without it"]
    stuck.free.set()


def test_a_board_that_falls_far_behind_is_dropped():
    said, stuck = [], Stuck()
    boards = Boards({"stuck": lambda: stuck}, said.append)
    for step in range(1100):
        boards.scalars({"loss": 1.0}, step)
    assert said == ["stuck cannot be written: 1000 calls wait for it; the rest goes on without it"]
    stuck.free.set()


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from runs import descendants
from asyncspec.timing.boards import Boards, Place, openers

said = []
boards = Boards(openers(["wandb"], Place(Path(sys.argv[1]), "p", "n", {})), said.append)
boards.scalars({"loss": 1.0}, 0)
while not (children := descendants(os.getpid())) or boards._workers[0]._queue.qsize():
    time.sleep(0.05)
for pid in children:
    os.kill(pid, signal.SIGKILL)
for step in range(1, 200):
    boards.scalars({"loss": 1.0}, step)
    time.sleep(0.01)
boards.close()
print(len(said), said[0].startswith("wandb cannot be written: "), "\\n" in said[0])
"""


def test_wandb_is_dropped_with_one_line_when_its_process_dies(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | OFFLINE,
    )
    assert done.stdout.splitlines()[-1:] == ["1 True False"], done.stdout + done.stderr


def test_trackio_is_dropped_with_one_line_when_its_database_is_gone(tmp_path):
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio" / "project.db").mkdir()  # no file can be there
    said = written(tmp_path, ["trackio"], 2)
    assert said.startswith("told: trackio cannot be written: ") and said.count("\n") == 1


# What is refused before anything starts.
@pytest.mark.parametrize(
    "override, said",
    [
        ("logging.backends=tensorbord", "nearest valid choice: logging.backends=tensorboard"),
        ("logging.backends=wandb,wandb", "each once; or none; nearest valid choice: logging.backends=wandb"),
        ("logging.backends=wandb,", "logging.backends='wandb,': expected tensorboard, wandb, trackio"),
        ("logging.project=a/b", "logging.project='a/b': expected at most 100 letters"),
        ("logging.run_name=a/b", "nearest valid choice: logging.run_name=a-b"),
        ("logging.rollouts=-1", "logging.rollouts=-1: expected at least 0"),
        ("logging.rollouts_every=0", "logging.rollouts_every=0: expected at least 1"),
    ],
)
def test_a_field_with_a_wrong_value_is_refused(override, said):
    with pytest.raises(ConfigError) as caught:
        load("tiny", [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text, names", [("", []), ("none", []), ("tensorboard, trackio", ["tensorboard", "trackio"])])
def test_backends_are_a_list(text, names):
    assert load("tiny", [f"logging.backends={text}"]).logging.boards == names


def test_a_package_that_is_missing_is_refused(monkeypatch):
    before = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else before(name))
    config = Config()
    config.logging.backends = "tensorboard,trackio"
    with pytest.raises(ConfigError) as caught:
        check_boards(config)
    assert str(caught.value) == (
        "logging.backends='tensorboard,trackio': trackio is not installed; expected pip install 'asyncspec[trackio]'; "
        "nearest valid choice: logging.backends=tensorboard"
    )


def test_wandb_without_a_key_is_refused_unless_it_is_offline(monkeypatch, tmp_path):
    config = Config()
    config.logging.backends = "wandb"
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="wandb has no key"):
        check_boards(config)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_boards(config)
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_boards(config)


def test_no_board_leaves_a_process_behind(tmp_path):
    assert written(tmp_path, ["wandb"], 1) == ""
    assert not [pid for pid in descendants(os.getpid()) if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
