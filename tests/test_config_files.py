"""Files and paths that a configuration names: YAML files, the home directory, names that are too long."""

import shutil

import pytest

from asyncspec.config import ConfigError, load, resolve_path, to_yaml


def test_all_paths_know_the_home_directory(tmp_path, monkeypatch):
    from asyncspec.commands.draft_settings import Training, check
    from asyncspec.engine.sglang_engine import weights_folder
    from asyncspec.launch.preflight import check_inputs
    from asyncspec.launch.roles import prepare_run_dir

    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(resolve_path("asset:tiny/policy"), tmp_path / "policy")
    shutil.copytree(resolve_path("asset:tiny/eagle3"), tmp_path / "draft")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "#2"}\n')
    (tmp_path / "mine.yaml").write_text("steps: 7\nengine: {weights_dir: ~/weights}\n")
    fields = ("model.path=~/policy", "model.reference_path=~/policy", "speculation.draft_path=~/draft")
    config = load("~/mine.yaml", [*fields, "data.train_file=~/data.jsonl", "data.eval_file=~/data.jsonl"])
    assert config.steps == 7 and weights_folder(config) == tmp_path / "weights"
    config.run_dir = "~/run"
    prepare_run_dir(config)
    assert config.run_dir == str(tmp_path / "run") and (tmp_path / "run" / "config.yaml").is_file()
    check_inputs(config)
    check(Training(policy="~/policy", init="~/draft", prompts="~/data.jsonl", out="~/out"))
    check(Training(rollouts="~/data.jsonl"))


@pytest.mark.parametrize(
    "args, expected",
    [
        (["train", "--resume", "~/run", "seed=5"], "seed=5: the run was started with 0"),
        (["train", "--join", "~/run", "--node", "0"], "--node 0: plays the controller"),
        (["report", "~/run"], "expected at least one finished step; see {home}/run/logs"),
        (["bench", "engine", "--out", "~/file/x"], "--out ~/file/x: Not a directory"),
    ],
)
def test_commands_find_runs_in_the_home_directory(args, expected, tmp_path, monkeypatch, capsys):
    from asyncspec.cli import main

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load("tiny")))
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert main(args) == 2
    assert expected.format(home=tmp_path) in capsys.readouterr().err


def test_a_run_directory_with_too_long_a_name_gives_one_line(capsys):
    from asyncspec.cli import main

    assert main(["train", "--run-dir", "x" * 5000]) == 2
    assert capsys.readouterr().err.endswith("File name too long; expected a directory to write to\n")


@pytest.mark.parametrize(
    "override", ["data.train_file={path}", "model.path={path}", "model.path=~nobody-has-this-name/policy"]
)
def test_paths_that_cannot_be_looked_up_give_one_line(override):
    override = override.format(path="x" * 5000)
    with pytest.raises(ConfigError) as caught:
        load("tiny", [override])
    assert str(caught.value).startswith(override.partition("=")[0] + "='") and "\n" not in str(caught.value)


def test_the_error_for_an_unknown_config_names_the_nearest_one():
    with pytest.raises(ConfigError, match="nearest: tiny"):
        load("tinny")


def test_the_error_for_a_wrong_key_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rl:\n  groupsize: 4\n")
    with pytest.raises(ConfigError, match="rl.groupsize in mine.yaml: .*rl.group_size"):
        load(str(path))
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load(str(path))
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not readable as YAML"):
        load(str(path))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("rl.group_size: 4", "rl.group_size in c.yaml: expected the section rl with group_size in it"),
        ("trainer:\n  optimizer.lr: 1", "optimizer.lr in c.yaml: expected the section optimizer with lr in it"),
        ("steps: 1\nsteps: 2", "line 2: found duplicate key steps"),
        ("steps: [", "not readable as YAML: line "),
    ],
)
def test_what_is_wrong_in_a_yaml_file_is_named(tmp_path, text, expected):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "c.yaml"))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_section_of_a_yaml_file_changes_nothing(tmp_path):
    (tmp_path / "c.yaml").write_text("steps: 3\nrl:\ntrainer:\n  optimizer:\n")
    (tmp_path / "without.yaml").write_text("steps: 3\n")
    assert load(str(tmp_path / "c.yaml")) == load(str(tmp_path / "without.yaml"))


def test_a_file_in_the_current_directory_does_not_hide_a_shipped_configuration(tmp_path, monkeypatch):
    (tmp_path / "tiny").write_text("hello")
    monkeypatch.chdir(tmp_path)
    assert load().steps == 120
