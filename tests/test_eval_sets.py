"""Sets of held-out prompts: their names, what is refused, and which set each ticket of an evaluation is of."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actors.tickets import TicketMaker
from asyncspec.commands.data_show import show
from asyncspec.config import ConfigError, eval_sets, load, make_paths_absolute
from asyncspec.launch import fingerprints
from asyncspec.tasks.data import load_problems

COMMIT = "0" * 40


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", []),
        ("sums/easy.jsonl", [("easy", "sums/easy.jsonl")]),
        ("a=x.jsonl, b = y.csv", [("a", "x.jsonl"), ("b", "y.csv")]),
        ("x.jsonl,hard=y.jsonl", [("x", "x.jsonl"), ("hard", "y.jsonl")]),
        ("./a=b.jsonl", [("a-b", "./a=b.jsonl")]),
        ("/data/run=3/test set.v2.parquet", [("test-set-v2", "/data/run=3/test set.v2.parquet")]),
        (
            f"hf://datasets/o/n@{COMMIT}/main/test-*.parquet",
            [("test", f"hf://datasets/o/n@{COMMIT}/main/test-*.parquet")],
        ),
        ("gsm8k=hf://datasets/o/n/a=b.csv", [("gsm8k", "hf://datasets/o/n/a=b.csv")]),
        ("~/*.jsonl", [("held-out", "~/*.jsonl")]),
    ],
)
def test_a_set_has_the_name_that_it_is_given_or_that_of_its_file(text, expected):
    assert eval_sets.parse(text) == expected
    assert eval_sets.paths(text) == ",".join(path for _, path in expected)


@given(st.lists(st.sampled_from(["a", "b", "a2", "a b", "a/b", "ä"]), min_size=1, max_size=5))
def test_the_nearest_names_can_be_used(given_names):
    text = ",".join(f"{name}={number}.jsonl" for number, name in enumerate(given_names))
    while (found := eval_sets.fault(text)) is not None:
        assert found[1] != text
        text = found[1]
    names = [each.name for each in eval_sets.parse(text)]
    assert len(set(names)) == len(names) and len(names) == len(given_names)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            ["data.eval_file=a=x.jsonl,a=y.jsonl"],
            "data.eval_file='a=x.jsonl,a=y.jsonl': expected another name for each set, not 'a' twice; nearest valid "
            "choice: data.eval_file=a=x.jsonl,a2=y.jsonl",
        ),
        (["data.eval_file=my set=x.jsonl"], "not 'my set'; nearest valid choice: data.eval_file=my-set=x.jsonl"),
        (["data.train_file=README.md", "data.eval_file==x.jsonl"], "data.eval_file='=x.jsonl': no such file"),
        (["data.eval_file=a=,b=x.csv,"], "expected a file for each set; nearest valid choice: data.eval_file=b=x.csv"),
        (["data.train_file=README.md", "data.eval_file=a=no.jsonl"], "data.eval_file='no.jsonl': no such file"),
        (
            ["eval.pass_at=one"],
            "eval.pass_at='one': expected whole numbers, separated by commas; nearest valid choice: eval.pass_at=1",
        ),
        (
            ["eval.pass_at=1,16", "eval.samples=8"],
            "from 1 to eval.samples=8: fewer rollouts cannot tell pass@k; nearest",
        ),
        (["eval.pass_at=0"], "nearest valid choice: eval.pass_at=1"),
        (["eval.best_set=easy"], "eval.best_set='easy': expected nothing without data.eval_file"),
        (
            ["data.train_file=README.md", "data.eval_file=easy=README.md", "eval.best_set=eazy", "eval.keep_best=true"],
            "expected one of the sets of data.eval_file, easy; nearest valid choice: eval.best_set=easy",
        ),
        (["eval.keep_best=true", "data.eval_prompts=0"], "eval.keep_best=True: expected held-out prompts"),
    ],
)
def test_wrong_evaluations_are_refused_in_one_line(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        load("tiny", overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_k_of_pass_at_k_are_in_order_and_by_default_1_and_n():
    assert load("tiny", ["eval.samples=8"]).eval.ks == [1, 8] and load("tiny").eval.ks == [1]
    assert load("tiny", ["eval.samples=8", "eval.pass_at=8, 1,4"]).eval.ks == [1, 4, 8]


@pytest.fixture
def files(tmp_path):
    for name, prompts in (("train", ["1+1=", "2+2="]), ("easy", ["3+1="]), ("hard", ["9+9=", "8+8="])):
        lines = [json.dumps({"prompt": prompt, "answer": "0"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [f"data.train_file={tmp_path}/train.jsonl", "steps=1", "rl.groups_per_step=2"]


def test_each_ticket_of_an_evaluation_knows_its_set(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("tiny", [*files, "data.eval_file=first=easy.jsonl,hard.jsonl"])
    make_paths_absolute(config)
    assert config.data.eval_file == f"first={tmp_path}/easy.jsonl,{tmp_path}/hard.jsonl"
    problems = load_problems(config)
    maker = TicketMaker(config, None, problems.training, problems.held_out)
    assert [(t.prompt, t.eval_set) for t in maker.of_evaluation(3)] == [
        ("3+1=", "first"),
        ("9+9=", "hard"),
        ("8+8=", "hard"),
    ]
    assert {t.eval_set for t in maker.of_step(0, 0)} == {""}
    said = []
    show(config, 0, 0, True, said.append)
    assert said == [f"{tmp_path}/train.jsonl: 2 prompts in 1 steps, 3 held out (first 1, hard 2)"]


def test_a_digest_is_of_the_files_whatever_the_sets_are_called(files, tmp_path):
    def digest(text):
        return fingerprints.digests(load("tiny", [*files, f"data.eval_file={text}"]))["data.eval_file"]

    easy, hard = tmp_path / "easy.jsonl", tmp_path / "hard.jsonl"
    assert digest(f"a={easy},b={hard}") == digest(f"{easy},{hard}") != digest(f"{hard},{easy}")
