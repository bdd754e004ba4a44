"""Several data files: in which order their problems come, in which shares, and which prompts are left out."""

import csv
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.cli import main
from asyncspec.config import ConfigError, load, resolve_path
from asyncspec.launch.preflight import check_inputs
from asyncspec.tasks.data import load_problems
from asyncspec.tasks.order import order

TINY = resolve_path("asset:tiny/policy")


def written(path, prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return path


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.05, 20)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(0, 300),
)
def test_sources_take_turns_by_weight_and_give_each_problem_equally_often(sources, count, more):
    sizes, weights = zip(*sources)
    found = order(7, sizes, weights, count)
    assert len(found) == count and np.array_equal(order(7, sizes, weights, count + more)[:count], found)
    first = 0
    for size, weight in sources:
        own = found[(found >= first) & (found < first + size)]
        assert abs(len(own) - count * weight / sum(weights)) <= len(sources)
        times = [list(own).count(i) for i in range(first, first + size)]
        assert max(times) - min(times) <= 1
        first += size


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
