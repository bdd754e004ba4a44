"""rollouts.jsonl and its page: what a person reads is what was sampled, and text stays text."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from groups import group_of, random_group, ticket_of
from hypothesis import given
from hypothesis import strategies as st
from runs import check_finished, train

from asyncspec.actors.tickets import TicketMaker
from asyncspec.config import Config, resolve_path
from asyncspec.models import tokenizer as tokenizers
from asyncspec.report import rollouts as pages
from asyncspec.tasks.problem import Problem
from asyncspec.timing import rollouts, timeline
from asyncspec.wire import messages as m
from asyncspec.wire.codec import decode, encode

HOSTILE = '</script><script>document.title = "broken"</script> <b>&amp;</b>\n\u2028 "quoted" | `x`'


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.load(resolve_path("asset:tiny/policy"))


def given_shown():
    """A group of two rollouts whose versions change within a response."""
    ticket = ticket_of(7, step=3)
    arrays = {
        "tokens": np.array([4, 5, 6, 4, 5], np.int32),
        "behavior": np.array([-1.0, -1.0, -1.0, -2.0, -2.0], np.float32),
        "proximal": np.array([-1.0, -1.5, -0.75, -2.0, -2.0], np.float32),
        "versions": np.array([1, 1, 2, 2, 2], np.int32),
        "lengths": np.array([3, 2], np.int32),
    }
    group = group_of(ticket, [1.0, 0.0])
    return rollouts.shown(ticket, arrays, group.rewards, [False, True], [0.5, -0.5])


def spelled(tokens, truncated):
    return "".join(f"<{token}>" for token in tokens), [f"<{token}>" for token in tokens]


def test_a_row_says_what_was_thought_of_each_token():
    shown = given_shown()
    (message, _) = decode(encode(m.StepDone(3, 0.0, 1.0, [], {}, {}, [], shown=[shown])))
    assert message.shown == [shown]
    first, second = rollouts.rows_of(shown, spelled)
    assert (first["step"], first["ticket"], first["sample"], second["sample"]) == (3, 7, 0, 1)
    assert first["versions"] == [[1, 2], [2, 1]] and (first["version_min"], first["version_max"]) == (1, 2)
    assert first["gaps"] == [0.0, -0.5, 0.25] and first["gap_max"] == 0.5 and first["gap_mean"] == 0.25
    assert (first["reward"], first["advantage"], first["truncated"]) == (1.0, 0.5, False)
    assert (second["tokens"], second["truncated"], second["gap_max"]) == (2, True, 0.0)
    assert first["response"] == "<4><5><6>" and first["pieces"] == ["<4>", "<5>", "<6>"]
    json.dumps([first, second], allow_nan=False)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 10**6))
def test_every_token_of_a_group_is_in_the_row_of_its_sample(lengths, seed):
    group, arrays = random_group(0, [2, 3], lengths, seed)
    rng = np.random.default_rng(seed)
    arrays["versions"] = np.sort(rng.integers(0, 3, sum(lengths))).astype(np.int32)
    rows = rollouts.rows_of(rollouts.shown(group.ticket, arrays, group.rewards, group.truncated), spelled)
    assert "".join(row["response"] for row in rows) == spelled(arrays["tokens"].tolist(), False)[0]
    versions = [version for row in rows for version, count in row["versions"] for _ in range(count)]
    assert versions == arrays["versions"].tolist()
    gaps = np.concatenate([row["gaps"] for row in rows])
    np.testing.assert_allclose(gaps, arrays["proximal"] - arrays["behavior"], atol=1e-4)


def test_a_long_rollout_has_all_of_its_text_and_the_first_tokens_one_by_one():
    count = 3 * rollouts.MOST_TOKENS
    group, arrays = random_group(0, [2, 3], [count], 0)
    (row,) = rollouts.rows_of(rollouts.shown(group.ticket, arrays, group.rewards, group.truncated), spelled)
    assert row["tokens"] == count and row["response"].count("<") == count
    assert len(row["pieces"]) == len(row["gaps"]) == rollouts.MOST_TOKENS
    assert len(json.dumps(row)) < 100_000


@given(st.lists(st.integers(0, 63), max_size=40), st.booleans())
def test_the_pieces_of_a_response_are_its_text(tokens, truncated):
    tokenizer = tokenizers.load(resolve_path("asset:tiny/policy"))
    tokens = [token % tokenizer.get_vocab_size() for token in tokens]
    _, pieces = tokenizers.response_pieces(tokenizer, tokens, truncated)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


def bytes_tokenizer():
    """A tokenizer with one token for each byte, as byte-level BPE has without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def test_a_character_of_several_tokens_is_added_by_the_last_of_them():
    made = bytes_tokenizer()
    tokens = made.encode("a\u20acb").ids
    assert tokenizers.response_pieces(made, tokens, True) == ("a\u20acb", ["a", "", "", "\u20ac", "b"])


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_break_nothing(tokens):
    text, pieces = tokenizers.response_pieces(bytes_tokenizer(), tokens, True)
    assert len(pieces) == len(tokens) and isinstance(text, str)


# Which rollouts are written, and what a resumed run keeps.
def test_the_first_groups_of_some_steps_and_of_evaluations_are_shown(tokenizer):
    config = Config()
    config.rl.groups_per_step, config.logging.rollouts, config.logging.rollouts_every = 4, 2, 3
    problem = Problem("1+1=", "2")
    maker = TicketMaker(config, tokenizer, [problem] * 40, [problem] * 5)
    shown = {step: [ticket.shown for ticket in maker.of_step(step, 0)] for step in range(7)}
    assert {step for step, each in shown.items() if any(each)} == {0, 3, 6}
    assert shown[3] == [True, True, False, False]
    assert [ticket.shown for ticket in maker.of_evaluation(2)] == [True, True, False, False, False]
    config.trainer.kind = "mock"
    assert not any(ticket.shown for ticket in TicketMaker(config, tokenizer, [problem] * 4, []).of_step(0, 0))


def test_a_resumed_run_loses_the_rollouts_of_void_steps_and_a_torn_line(tmp_path):
    file = rollouts.RolloutFile(tmp_path, pytest.fail)
    for step in range(4):
        file.write([{"step": step, "response": HOSTILE}])
    file.close()
    with open(tmp_path / rollouts.FILE, "a") as torn:
        torn.write('{"step": 4, "resp')
    assert [row["step"] for row in rollouts.read(tmp_path)] == [0, 1, 2, 3]
    rollouts.RolloutFile(tmp_path, pytest.fail, first_step=2).close()
    assert list(rollouts.read(tmp_path)) == [{"step": step, "response": HOSTILE} for step in (0, 1)]


def test_a_file_that_cannot_be_written_is_dropped_and_named_once(tmp_path):
    said = []
    (tmp_path / rollouts.FILE).mkdir()
    file = rollouts.RolloutFile(tmp_path, said.append)
    file.write([{"step": 0}])
    file.close()
    assert said == [f"{tmp_path}/rollouts.jsonl cannot be written: Is a directory; the rest goes on without it"]


def test_the_timeline_has_no_rollouts(tmp_path):
    from asyncspec.files import LineFiles

    file = timeline.TimelineFile(LineFiles(tmp_path, pytest.fail))
    file.write(m.StepDone(3, 0.0, 1.0, [], {}, {}, [], shown=[given_shown()]))
    file.close()
    assert [step.shown for step in timeline.read(tmp_path)] == [[]]


# The page.
def written(folder, rows):
    file = rollouts.RolloutFile(folder, pytest.fail)
    file.write(rows)
    file.close()
    return folder


def hostile_rows():
    return [
        row | {"prompt": HOSTILE, "response": HOSTILE, "pieces": [HOSTILE, "b", "c"][: row["tokens"]]}
        for row in rollouts.rows_of(given_shown(), spelled)
    ]


def test_text_on_the_page_never_becomes_html(tmp_path):
    page = pages.page([written(tmp_path, hostile_rows())])
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)[0]["prompt"] == HOSTILE  # whole: nothing in it ended the element
    assert page.count("<script") == page.count("</script>") == 2 and "<b>" not in page
    assert "http" not in page and "src=" not in page  # it needs no network


def test_a_run_without_rollouts_has_no_page_and_a_long_one_keeps_whole_groups(tmp_path):
    assert pages.page([tmp_path]) == ""
    rows = [{"run": "", "ticket": number // 8, "sample": number % 8} for number in range(8 * 200)]
    kept = pages.chosen(rows)
    assert len(kept) == pages.MOST and {row["ticket"] for row in kept} == set(range(0, 200, 4))
    assert pages.chosen(rows[:80]) == rows[:80]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_tokens_with_colors_and_runs_nothing_of_the_text(tmp_path):
    (written(tmp_path, hostile_rows()) / "page.html").write_text(pages.page([tmp_path]))
    found = {}
    for color in ("gap", "version"):
        url = f"file://{tmp_path}/page.html#color={color}&least=0.5"
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
        done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120)
        found[color] = done.stdout
        assert "<title>Rollouts of" in done.stdout and done.stdout.count("<article") == 1  # reward 1, not 0
        assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in done.stdout
    assert 'title="version 1, gap -0.5" style="background: rgba(214, 69, 50' in found["gap"]
    assert 'title="version 2, gap 0.25" style="background: rgb(201, 228, 197)' in found["version"]


@pytest.mark.slow
def test_a_run_writes_rollouts_that_agree_with_its_metrics_and_a_report_shows_them(tmp_path):
    more = ["steps=4", "logging.rollouts=4", "logging.rollouts_every=2", "eval.every=2"]
    done = train(tmp_path / "run", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    check_finished(tmp_path / "run", 4)
    metrics = {row["step"]: row for row in map(json.loads, open(tmp_path / "run" / "metrics.jsonl"))}
    rows = list(rollouts.read(tmp_path / "run"))
    training = [row for row in rows if not row["evaluation"]]
    assert {row["step"] for row in training} == {0, 2} and len(training) == 2 * 4 * 4  # all groups of these steps
    for step in (0, 2):
        of_step = [row for row in training if row["step"] == step]
        assert np.mean([row["reward"] for row in of_step]) == pytest.approx(metrics[step]["reward"])
        assert max(row["gap_max"] for row in of_step) == pytest.approx(
            metrics[step]["sampling/sampling_logp_difference/max"], rel=1e-5
        )
        assert max(step - row["version_min"] for row in of_step) == metrics[step]["lag/max"]
        assert min(row["tokens"] for row in of_step) == metrics[step]["completions/min_length"]
        assert sum(row["advantage"] for row in of_step) == pytest.approx(0, abs=1e-3)
    assert {row["step"] for row in rows if row["evaluation"]} == {0, 2, 4}
    assert all(row["prompt"].endswith("=") and row["answer"] for row in rows)
    assert pages.page([tmp_path / "run"]).count('"ticket"') == len(rows)
