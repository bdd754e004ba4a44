"""Tasks, rewards and data files."""

import csv
import gzip
import json

import numpy as np
import pyarrow.parquet
import pytest
from directories import chat_model
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.config import load, resolve_path
from asyncspec.tasks.data import columns, load_rows, rendered
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.reward import Reward
from asyncspec.tasks.sums import MAX_TERMS, exact_match, sums


def problems(path, *overrides):
    config = load("tiny", list(overrides))
    rows = load_rows(f"data.train_file='{path}'", str(path), config.data)
    return rendered(rows, resolve_path(config.model.path), {})


@given(st.lists(st.integers(1, 9), min_size=2, max_size=MAX_TERMS))
def test_a_worked_response_without_slips_is_right(terms):
    prompt = "+".join(map(str, terms)) + "="
    totals = np.cumsum(terms)
    steps = [f"{a}+{b}={a + b}," for a, b in zip(totals, terms[1:])]
    response = "".join(steps) + f"#{totals[-1]}"
    assert exact_match(prompt, response, str(sum(terms))) == 1.0


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(0, 1000))
def test_only_the_text_after_the_last_mark_counts(terms, seed):
    answer = str(sum(terms))
    assert exact_match("", f"#1,#{answer}", answer) == 1.0
    assert exact_match("", answer, answer) == 0.0
    assert exact_match("", f"#{answer}#", answer) == 0.0


def test_problems_are_a_function_of_the_seed_and_long_tailed():
    found = sums(3, 4000)
    assert found == sums(3, 4000) and found != sums(4, 4000)
    terms = np.array([p.prompt.count("+") + 1 for p in found])
    assert terms.min() == 2 and terms.max() > 20 and np.median(terms) <= 5
    for p in found[:200]:
        assert sum(map(int, p.prompt[:-1].split("+"))) == int(p.answer)


def test_the_error_for_a_data_file_names_the_wrong_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+2=", "answer": "3"}\n')
    assert problems(path) == [Problem("1+1=", "2"), Problem("1+2=", "3")]
    for bad in ("{", '{"prompt": "x"}', '{"prompt": 3, "answer": "3"}', "[1]", '{"prompt": "", "answer": "1"}'):
        path.write_text('{"prompt": "1+1=", "answer": "2"}\n' + bad + "\n")
        with pytest.raises(ValueError, match="line 2: .*expected"):
            problems(path)
    half, deep = '{"prompt": "1+1=", "answer": "\\ud800"}', "[" * 100_000
    for bad in (
        b'{"prompt": "1+1=\xff", "answer": "2"}',
        b'{"prompt": "1+1=", "answer": "2", "note": "\xe9t\xe9"}',
        half.encode(),
        deep.encode(),
        gzip.compress(b'{"prompt": "1", "answer": "1"}'),
    ):
        path.write_bytes(b'{"prompt": "1+1=\xc3\xa9", "answer": "\\ud83d\\ude00"}\n' + bad + b"\n")
        with pytest.raises(ValueError, match="^data.train_file='.*/data.jsonl': line 2: expected ") as caught:
            problems(path)
        assert ("UTF-8" in str(caught.value)) == (bad != deep.encode()) and str(caught.value).isascii()
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        problems(path)


def test_what_other_programs_write_into_jsonl_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1+1=", "answer": "2"}\r\n'
        b'{"prompt": "1+2=", "answer": "3", "score": NaN, "note": "\\ud83d"}\n'
        b'{"answer": "4\xc3\xa9", "prompt": "1+3=", "more": [{"prompt": 5}]}'
    )
    assert problems(path) == [
        Problem("1+1=", "2"),
        Problem("1+2=", "3", r'{"prompt": "1+2=", "answer": "3", "score": NaN, "note": "\ud83d"}'),
        Problem("1+3=", "4\xe9", '{"answer": "4\xe9", "prompt": "1+3=", "more": [{"prompt": 5}]}'),
    ]


def test_a_file_that_cannot_be_read_gives_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "gone.jsonl", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match="^data.train_file='.*': .*; expected a file that can be read$"):
            problems(path)


def test_json_lines_parquet_and_csv_say_the_same(tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    expected = problems(tmp_path / "a.jsonl")
    assert [json.loads(problem.row) for problem in expected] == rows
    assert problems(tmp_path / "a.parquet") == expected
    texts = [{name: str(value) for name, value in row.items()} for row in rows]  # CSV has text only
    assert [(p.prompt, p.answer, json.loads(p.row)) for p in problems(tmp_path / "a.csv")] == [
        (row["prompt"], row["answer"], row) for row in texts
    ]
    for name, content in (
        ("b.parquet", b"PAR1"),
        ("b.csv", b"prompt,answer\n1"),
        ("c.csv", b"prompt,answer\n\xff,1\n"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="^data.train_file='.*/[bc].(parquet|csv)': .*expected "):
            problems(tmp_path / name)


def test_columns_have_the_names_that_the_user_gives(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1+1=", "solution": 2, "prompt": "other"}\n')
    named = "data.prompt_column=question", "data.answer_column=solution"
    (problem,) = problems(path, *named)
    assert (problem.prompt, problem.answer) == ("1+1=", "2") and columns([problem]) == ["question", "solution"]
    assert problems(path, named[0], "data.answer_column=")[0].answer == ""
    with pytest.raises(ValueError, match="the columns are question, solution, prompt; data.answer_column names"):
        problems(path, named[0])


def test_verls_layout_is_read_as_it_is(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 3},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    model = chat_model(tmp_path / "model", "{{ messages[0].content }}!")
    (problem,) = problems(tmp_path / "a.parquet", f"model.path={model}")
    assert (problem.prompt, problem.answer, json.loads(problem.row)) == ("1+1?!", "2", row)


def test_rewards_load_by_import_path():
    assert Reward("asyncspec.tasks.sums:exact_match").function is exact_match
    for bad in (
        "asyncspec.tasks.sums",
        "asyncspec.tasks.sums:nothing",
        "no.such:thing",
        "asyncspec.tasks.sums:MAX_TERMS",
    ):
        with pytest.raises(ValueError, match="data.reward"):
            Reward(bad)
