"""How runs begin and resume: the lock, the paths and the files that must stay the same."""

import errno
import fcntl
import json
import os

import pytest

from asyncspec.config import ConfigError, load, resolve_path
from asyncspec.errors import UserError
from asyncspec.files import LineFiles
from asyncspec.launch import fingerprints, roles
from asyncspec.launch.resume import configure
from asyncspec.ledger import checkpoint, ledger

TINY = resolve_path("asset:tiny/policy")


def jsonl(path, count):
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(count)))
    return path


def begun(tmp_path, *overrides):
    """Prepare a run's directory as a launcher does. Returns the configuration, and the lock."""
    config = load("tiny", ["deployment.device=cpu", f"run_dir={tmp_path}/run", *overrides])
    return config, roles.prepare_run_dir(config)


def test_a_second_start_in_a_directory_in_use_writes_nothing(tmp_path):
    _, lock = begun(tmp_path, "seed=1")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="another process is training in it"):
        begun(tmp_path, "seed=2")
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
    lock.release()


def test_two_runs_that_start_in_one_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roles.configuration, "default_run_dir", lambda: "runs/20261127-120000")
    locks, names = [], []
    for _ in range(3):
        config = load("tiny", ["deployment.device=cpu"])
        locks.append(roles.prepare_run_dir(config))
        names.append(os.path.relpath(config.run_dir, tmp_path))
    assert names == ["runs/20261127-120000", "runs/20261127-120000-2", "runs/20261127-120000-3"]
    for lock in locks:
        lock.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, number):
    def unsupported(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    _, lock = begun(tmp_path)
    with pytest.raises(ConfigError, match="another process is training in it"):
        begun(tmp_path)
    lock.release()
    files = LineFiles(tmp_path, print)
    written = ledger.Ledger(files)
    assert ledger.written(tmp_path)
    written.close()
    assert not ledger.written(tmp_path)


def test_a_failed_start_releases_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(roles, "_write_run_dir", lambda config: (_ for _ in ()).throw(ConfigError("no room")))
    with pytest.raises(ConfigError, match="no room"):
        begun(tmp_path)
    monkeypatch.undo()
    begun(tmp_path)[1].release()


def test_a_runs_paths_are_absolute_so_that_it_resumes_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "train.jsonl", 8)
    (tmp_path / "model").symlink_to(TINY)
    config, lock = begun(tmp_path, "data.train_file=train.jsonl", "model.path=model")
    lock.release()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    jsonl(tmp_path / "elsewhere" / "train.jsonl", 3)  # a file of the same name that is not the run's
    again = load(f"{tmp_path}/run/config.yaml")
    assert again.data.train_file == f"{tmp_path}/train.jsonl" and again.model.path == f"{tmp_path}/model"
    assert again.speculation.draft_path == "" and config.data.eval_file == ""
    assert roles.prepare_resume(again) == 0


@pytest.mark.parametrize("changed", ["train.jsonl", "eval.jsonl", "model/tokenizer.json"])
def test_a_run_whose_files_have_changed_is_not_resumed(tmp_path, changed):
    (tmp_path / "model").mkdir()
    for file in TINY.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    jsonl(tmp_path / "train.jsonl", 8), jsonl(tmp_path / "eval.jsonl", 2)
    files = [f"data.{name}_file={tmp_path}/{name}.jsonl" for name in ("train", "eval")]
    config, lock = begun(tmp_path, *files, f"model.path={tmp_path}/model")
    lock.release()
    assert roles.prepare_resume(config) == 0
    before = (tmp_path / changed).read_text()
    (tmp_path / changed).write_text(before + "\n")
    with pytest.raises(ConfigError, match=f"{changed.rpartition('/')[2]}'? has changed since the run was started"):
        roles.prepare_resume(config)
    (tmp_path / changed).write_text(before)
    assert roles.prepare_resume(config) == 0


def test_a_run_resumes_with_its_files_in_another_place(tmp_path):
    jsonl(tmp_path / "train.jsonl", 8)
    _, lock = begun(tmp_path, f"data.train_file={tmp_path}/train.jsonl")
    lock.release()
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    moved = configure(f"{tmp_path}/run", None, [f"data.train_file={tmp_path}/moved.jsonl"])
    assert roles.prepare_resume(moved) == 0
    jsonl(tmp_path / "other.jsonl", 9)
    other = configure(f"{tmp_path}/run", None, [f"data.train_file={tmp_path}/other.jsonl"])
    with pytest.raises(ConfigError, match="other.jsonl' has changed since the run was started"):
        roles.prepare_resume(other)


def test_a_path_through_a_link_stays_what_was_checked(tmp_path, monkeypatch):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "model").symlink_to(TINY)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "current").symlink_to(tmp_path / "real" / "deep")
    monkeypatch.chdir(tmp_path / "work")
    config, lock = begun(tmp_path, "model.path=current/../model")
    lock.release()
    assert os.path.samefile(config.model.path, tmp_path / "real" / "model")


def test_the_file_of_a_reward_is_found_without_importing_its_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raising").mkdir()
    (tmp_path / "raising" / "__init__.py").write_text("raise SystemExit(3)")
    (tmp_path / "raising" / "mine.py").write_text("")
    assert fingerprints._source("raising.mine:f") == tmp_path / "raising" / "mine.py"
    assert fingerprints._source("no_such_module.at_all:f") is None


def test_a_reference_with_other_weights_is_noticed(tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "model").mkdir()
    for file in TINY.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    config, lock = begun(tmp_path, f"model.path={tmp_path}/model", "rl.kl_coef=0.1")
    lock.release()
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"][3, 5] += 1
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="has changed since the run was started"):
        roles.prepare_resume(config)
    config.rl.kl_coef = 0.0  # without a KL term the checkpoint holds all weights
    fingerprints.compare(config)


def test_a_repaired_reward_is_told_and_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_starts.py").write_text("def reward(prompt, response, answer):\n    return 0.0\n")
    config, lock = begun(tmp_path, "data.reward=mine_of_starts:reward")
    lock.release()
    (tmp_path / "mine_of_starts.py").write_text("def reward(prompt, response, answer):\n    return 1.0\n")
    told = []
    roles.prepare_resume(config, told.append)
    assert len(told) == 1 and "data.reward='mine_of_starts:reward': its file has changed" in told[0]


def test_a_changed_loss_is_told_and_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_losses.py").write_text("")
    monkeypatch.setattr("asyncspec.launch.preflight.check_own_algorithms", lambda config: None)
    config, lock = begun(tmp_path, "rl.loss_type=mine_of_losses:f")
    lock.release()
    (tmp_path / "mine_of_losses.py").write_text("# repaired")
    told: list[str] = []
    fingerprints.compare(config, told.append)
    assert len(told) == 1 and told[0].startswith("rl.loss_type='mine_of_losses:f': its file has changed")


def test_the_checkpoint_of_a_missing_last_step_is_made_up_for(tmp_path, monkeypatch):
    """All steps have their rows, but the run died before it wrote its last checkpoint and its policy."""
    config, lock = begun(tmp_path, "steps=2")
    lock.release()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    monkeypatch.setattr(checkpoint, "newest", lambda *args, **options: None)
    assert configure(f"{tmp_path}/run", None, []).steps == 2
    with pytest.raises(UserError, match="2 steps are trained, and steps=1 adds none"):
        configure(f"{tmp_path}/run", None, ["steps=1"])
