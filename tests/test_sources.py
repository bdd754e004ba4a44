"""Several data files: in which order their problems come, in which shares, and which prompts are left out."""

import csv
import json
from collections import Counter

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from asyncspec.cli import main
from asyncspec.config import Config, ConfigError, DataConfig, hub_names, load, resolve_path
from asyncspec.launch import fingerprints
from asyncspec.launch.preflight import check_inputs
from asyncspec.tasks.data import load_problems
from asyncspec.tasks.order import shuffled, turns

TINY = resolve_path("asset:tiny/policy")


def written(path, prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return path


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=4), st.integers(1, 300), st.integers(0, 300))
def test_sources_take_turns_by_weight(weights, count, more):
    found = turns(weights, count)
    assert len(found) == count and np.array_equal(turns(weights, count + more)[:count], found)
    for number, weight in enumerate(weights):
        assert abs((found == number).sum() - count * weight / sum(weights)) <= len(weights)
    assert np.array_equal(turns([2.0**1010 * weight for weight in weights], count), found)  # exact: a power of two


@given(st.integers(1, 20), st.integers(0, 300), st.integers(0, 300))
def test_a_source_gives_each_problem_equally_often(size, count, more):
    found = shuffled(7, 1, size, count)
    assert len(found) == count and np.array_equal(shuffled(7, 1, size, count + more)[:count], found)
    times = [list(found).count(i) for i in range(size)]
    assert max(times) - min(times) <= 1


def test_a_run_reads_several_files_of_any_kind_with_weights(tmp_path):
    first = written(tmp_path / "first.jsonl", ["1+1=", "1+2="])
    with open(tmp_path / "second.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["prompt", "answer"], ["2+1=", "3"], ["2+2=", "4"], ["2+3=", "5"], ["2+4=", "6"]])
    files = f"data.train_file={first}, {tmp_path}/second.csv"
    alike = load_problems(load("tiny", [files, "steps=6", "rl.groups_per_step=2"])).training
    assert Counter(p.prompt for p in alike) == dict.fromkeys(["1+1=", "1+2=", "2+1=", "2+2=", "2+3=", "2+4="], 2)
    config = load("tiny", [files, "data.train_weights=3,1", "steps=2", "rl.groups_per_step=4"])
    for step in range(2):  # each step has the shares
        part = load_problems(config).training[4 * step : 4 * step + 4]
        assert Counter(p.prompt[0] for p in part) == {"1": 3, "2": 1}
    check_inputs(config)


def test_overlong_prompts_are_left_out_if_asked(tmp_path, capsys):
    path = written(tmp_path / "train.jsonl", ["1+1=", "1+1+1+1+1+1+1=", "1+2="])
    kept = written(tmp_path / "eval.jsonl", ["2+2=", "2+2+2+2+2+2="])
    wanted = [f"data.train_file={path}", f"data.eval_file={kept}", "engine.max_prompt_tokens=6"]
    wanted += ["steps=4", "rl.groups_per_step=2"]
    with pytest.raises(ConfigError, match="engine.max_prompt_tokens=6: the longest prompt"):
        check_inputs(load("tiny", wanted))
    config = load("tiny", [*wanted, "data.filter_overlong_prompts=true"])
    found = load_problems(config)
    assert Counter(p.prompt for p in found.training) == {"1+1=": 4, "1+2=": 4}
    assert [p.prompt for p in found.held_out] == ["2+2="] and found.left_out == 2
    check_inputs(config)
    line = "2 prompts are left out: more than engine.max_prompt_tokens=6 tokens"
    assert line in capsys.readouterr().out
    assert main(["data", "show", *wanted, "data.filter_overlong_prompts=true"]) == 0
    assert line in capsys.readouterr().out


def test_shares_hold_whatever_is_left_out(tmp_path):
    whole, half = (tmp_path / name for name in ("whole.jsonl", "half.jsonl"))
    written(whole, [f"{i}+1=" for i in range(10)])
    written(half, [f"{i}+2=" if i % 2 else f"{i}+2+2+2+2=" for i in range(10)])
    wanted = [f"data.train_file={whole},{half}", "data.train_weights=1,3", "engine.max_prompt_tokens=6"]
    wanted += ["data.filter_overlong_prompts=true", "rl.groups_per_step=4"]
    long = load_problems(load("tiny", [*wanted, "steps=20"])).training
    assert Counter(problem.prompt[2] for problem in long) == {"1": 20, "2": 60}
    assert load_problems(load("tiny", [*wanted, "steps=1"])).training == long[:4]


def test_held_out_prompts_that_are_all_too_long_are_refused(tmp_path):
    short, long = written(tmp_path / "a.jsonl", ["1+1="]), written(tmp_path / "b.jsonl", ["1+1+1+1+1="])
    wanted = [f"data.train_file={short}", f"data.eval_file={long}", "engine.max_prompt_tokens=6"]
    with pytest.raises(ConfigError, match="none of 1 prompts of data.eval_file="):
        check_inputs(load("tiny", [*wanted, "data.filter_overlong_prompts=true"]))


def test_a_resumed_run_needs_the_same_files_in_the_same_order(tmp_path):
    first, second = (written(tmp_path / f"{n}.jsonl", [f"1+{n}="]) for n in (1, 2))
    run = [f"run_dir={tmp_path}"]
    for before, after in (("a", "a,b"), ("a,b", "b"), ("a,b", "b,a"), ("a", ""), ("", "a"), ("a,b", "a")):
        named = [
            ",".join(str({"a": first, "b": second}[n]) for n in names.split(",") if n) for names in (before, after)
        ]
        fingerprints.write(load("tiny", [*run, f"data.train_file={named[0]}"]))
        fingerprints.compare(load("tiny", [*run, f"data.train_file={named[0]}"]))
        with pytest.raises(ConfigError, match="data.train_file=.* has changed since the run was started"):
            fingerprints.compare(load("tiny", [*run, f"data.train_file={named[1]}"]))
        (tmp_path / fingerprints.FILE).unlink()


def test_a_path_with_a_comma_is_refused(tmp_path, monkeypatch):
    (folder := tmp_path / "c,d").mkdir()
    monkeypatch.chdir(folder)
    written(folder / "a.jsonl", ["1+1="])
    with pytest.raises(ConfigError, match="data.train_file='a.jsonl': its path .* has a comma, which"):
        load("tiny", ["data.train_file=a.jsonl"])


def test_files_that_python_cannot_represent_are_refused_in_one_line(tmp_path):
    days = pyarrow.array([10**9], pyarrow.int32()).cast(pyarrow.date32())
    table = pyarrow.table({"prompt": ["1+1="], "answer": ["2"], "day": days})
    parquet.write_table(table, tmp_path / "days.parquet")
    with pytest.raises(ValueError, match="behind row 0: .*; expected Parquet") as caught:
        load_problems(load("tiny", [f"data.train_file={tmp_path}/days.parquet"]))
    assert "\n" not in str(caught.value)
    (tmp_path / "long.csv").write_text(f"prompt,answer\n1+1=,{'2' * 200_000}\n")
    assert len(load_problems(load("tiny", [f"data.train_file={tmp_path}/long.csv"])).training[0].answer) == 200_000


def test_a_source_of_overlong_prompts_only_is_refused(tmp_path):
    short, long = written(tmp_path / "a.jsonl", ["1+1="]), written(tmp_path / "b.jsonl", ["1+1+1+1+1="])
    config = load(
        "tiny",
        [
            f"data.train_file={short},{long}",
            "data.train_weights=1,1",
            "engine.max_prompt_tokens=6",
            "data.filter_overlong_prompts=true",
        ],
    )
    with pytest.raises(ConfigError, match=f"none of 1 prompts of data.train_file='{long}' has so few tokens"):
        check_inputs(config)


@pytest.mark.parametrize(
    "field, expected",
    [
        ("data.train_weights=1", "expected 2 numbers above 0, one for each source of data.train_file"),
        ("data.train_weights=1,0", "expected 2 numbers above 0"),
        ("data.train_weights=1,x", "expected 2 numbers above 0"),
        ("data.train_file=a.jsonl,none.jsonl", "data.train_file='.*none.jsonl': no such file"),
    ],
)
def test_wrong_sources_are_refused(tmp_path, monkeypatch, field, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        written(tmp_path / name, ["1+1="])
    with pytest.raises(ConfigError, match=expected):
        load("tiny", ["data.train_file=a.jsonl,b.jsonl", field])


def test_a_data_set_on_a_hub_behind_a_local_file_is_seen():
    text = "a.jsonl,hf://datasets/owner/name@main/x.jsonl"
    assert hub_names(Config(data=DataConfig(train_file=text))) == {"data.train_file": text}
