"""Wrong input is one line that names the field, the value, what was expected and the nearest valid choice."""

import subprocess
import sys

import pytest

from asyncspec.config import CONFIG_DIR, ConfigError, describe, from_yaml, load, to_yaml


@pytest.mark.parametrize("override,expected", [
    ("trainer.optimizer.lrr=1", "nearest valid choice: trainer.optimizer.lr "),
    ("optimizer.lr=1", "nearest valid choice: trainer.optimizer.lr "),
    ("polcy_lag=1", "nearest valid choice: policy_lag "),
    ("trainer=3", "names a section"),
    ("steps=many", "steps: "),
    ("steps=1.5", "steps: "),
    ("policy_lag=-1", "policy_lag=-1: expected at least 0; nearest valid choice: policy_lag=0"),
    ("rl.group_size=1", "rl.group_size=1: expected at least 2"),
    ("speculation.method=eagle", "nearest valid choice: speculation.method=eagle3"),
    ("speculation.draft_length=0", "speculation.method=none turns drafting off"),
    ("sampling.temperature=0", "sampling.temperature=0.0: expected at least 0.001"),
    ("sampling.top_p=1.5", "sampling.top_p=1.5"),
    ("rl.correction=trunc", "nearest valid choice: rl.correction=truncated"),
    ("model.path=/no/such", "model.path='/no/such': expected a directory with config.json"),
    ("data.train_file=/no/such.jsonl", "no such file"),
    ("steps", "expected field=value"),
    ("=3", "no such field"),
    ("steps=", "steps"),
])
def test_wrong_overrides_are_one_clear_line(override, expected):
    with pytest.raises(ConfigError) as caught:
        load("tiny", [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_config_names_the_known_ones():
    with pytest.raises(ConfigError, match="nearest: tiny"):
        load("tinny")


def test_a_wrong_key_in_a_file_names_the_file(tmp_path):
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


def test_defaults_file_and_overrides_are_merged_in_this_order(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 7\ntrainer:\n  optimizer:\n    lr: 0.5\n")
    config = load(str(path), ["trainer.optimizer.lr=1e-4", "run_dir=2026"])
    assert (config.steps, config.trainer.optimizer.lr, config.rl.group_size, config.run_dir) == (7, 1e-4, 8, "2026")


def test_the_resolved_configuration_reads_back(tmp_path):
    config = load("tiny", ["seed=5", "rl.kl_coef=0.25"])
    assert from_yaml(to_yaml(config)) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(str(tmp_path / "config.yaml")) == config


def test_every_shipped_config_loads():
    for path in CONFIG_DIR.glob("*.yaml"):
        load(path.stem)


def test_help_lists_flags_and_every_field_with_its_meaning():
    text = subprocess.run([sys.executable, "-m", "asyncspec.cli", "train", "--help"], capture_output=True, text=True, check=True).stdout
    for word in ("--config", "--policy-lag", "--steps", "--run-dir", "--seed"):
        assert word in text
    for name, default, comment in describe():
        assert f"{name}={default}" in text and comment in text


def test_a_typo_ends_the_command_with_one_line():
    result = subprocess.run([sys.executable, "-m", "asyncspec.cli", "train", "trainer.optimiser.lr=1"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "trainer.optimizer.lr" in result.stderr
