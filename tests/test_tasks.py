"""Tasks, rewards and data files."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.tasks.data import load_jsonl
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.reward import load_reward
from asyncspec.tasks.sums import MAX_TERMS, exact_match, sums


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
    problems = sums(3, 4000)
    assert problems == sums(3, 4000) and problems != sums(4, 4000)
    terms = np.array([p.prompt.count("+") + 1 for p in problems])
    assert terms.min() == 2 and terms.max() > 20 and np.median(terms) <= 5
    for p in problems[:200]:
        assert sum(map(int, p.prompt[:-1].split("+"))) == int(p.answer)


def test_the_error_for_a_data_file_names_the_wrong_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+2=", "answer": "3"}\n')
    assert load_jsonl("data.train_file", str(path)) == [Problem("1+1=", "2"), Problem("1+2=", "3")]
    for bad in ("{", '{"prompt": "x"}', '{"prompt": "x", "answer": 3}', "[1]", '{"prompt": "", "answer": "1"}'):
        path.write_text('{"prompt": "1+1=", "answer": "2"}\n' + bad + "\n")
        with pytest.raises(ValueError, match="line 2: expected"):
            load_jsonl("data.train_file", str(path))
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
            load_jsonl("data.train_file", str(path))
        assert ("UTF-8" in str(caught.value)) == (bad != deep.encode()) and str(caught.value).isascii()
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        load_jsonl("data.train_file", str(path))


def test_what_other_programs_write_into_jsonl_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1+1=", "answer": "2"}\r\n'
        b'{"prompt": "1+2=", "answer": "3", "score": NaN, "note": "\\ud83d"}\n'
        b'{"answer": "4\xc3\xa9", "prompt": "1+3=", "more": [{"prompt": 5}]}'
    )
    assert load_jsonl("data.train_file", str(path)) == [
        Problem("1+1=", "2"),
        Problem("1+2=", "3"),
        Problem("1+3=", "4\xe9"),
    ]


def test_a_file_that_cannot_be_read_gives_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "gone.jsonl", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match="^data.train_file='.*': .*; expected a JSONL file that can be read$"):
            load_jsonl("data.train_file", str(path))


def test_rewards_load_by_import_path():
    assert load_reward("asyncspec.tasks.sums:exact_match") is exact_match
    for bad in (
        "asyncspec.tasks.sums",
        "asyncspec.tasks.sums:nothing",
        "no.such:thing",
        "asyncspec.tasks.sums:MAX_TERMS",
    ):
        with pytest.raises(ValueError, match="data.reward"):
            load_reward(bad)
