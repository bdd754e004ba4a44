"""rl.dynamic_sampling: groups without signal are left out or replaced; each place of a step ends once."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import SILENT, Running, check_finished, ledger, rows

from asyncspec.actors.schedule import Schedule
from asyncspec.actors.tickets import ARRIVED, TicketBook, TicketMaker
from asyncspec.config import load
from asyncspec.ledger.audit import violations
from asyncspec.tasks.data import load_problems
from asyncspec.timing import timeline
from asyncspec.wire import messages as m

GROUPS, STEPS = 3, 4
FIELDS = [f"rl.groups_per_step={GROUPS}", f"steps={STEPS}", "data.eval_prompts=0", "eval.every=0"]


class Book:
    """Stands in for the ledger's file."""

    def __init__(self):
        self.events = []

    def write(self, event, ticket, **details):
        self.events.append({"event": event, "ticket": ticket.ticket_id, "step": ticket.step, **details})


def schedule_of(*fields):
    config = load("tiny", [*FIELDS, *fields])
    sent, ledger_ = [], Book()
    run = SimpleNamespace(
        config=config,
        book=TicketBook(ledger_),
        progress=lambda: None,
        records=SimpleNamespace(run_dir=None, line=None),
        crew=SimpleNamespace(playing=lambda role: [SimpleNamespace(name=role)]),
        server=SimpleNamespace(send=lambda name, message: sent.append((name, message))),
    )
    schedule = Schedule(run, 0)
    schedule.maker = TicketMaker(config, None, *load_problems(config)[:2])
    return schedule, run.book, ledger_, sent


def record_of(ticket, reward=1.0):
    return m.GroupRecord(
        ticket_id=ticket.ticket_id,
        generator="generator0",
        reward_mean=reward,
        rewards_differ=False,
        response_tokens=[3],
        version_min=0,
        version_max=0,
        proximal_version=-1,
        verifications=1,
        proposed=1,
        accepted=1,
        truncated=0,
        draft_version=0,
        phases=[],
    )


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["filter", "replace"]), st.integers(2, 4), st.randoms())
def test_each_place_is_trained_or_left_out_once(kind, tries, random):
    schedule, book, ledger_, sent = schedule_of(f"rl.dynamic_sampling={kind}", f"rl.max_batches={tries}")
    allowed = tries if kind == "replace" else 1
    for step in range(STEPS):
        book.issue(schedule.maker.of_step(step, max(0, step - 1)))
    trained, generated = [], Counter()
    while book.pending:
        ticket = book.next_for("generator0")
        generated[ticket.place] += 1
        if random.random() < 0.5:
            book.end("trained", ticket.ticket_id, trained_in=ticket.step, version_min=ticket.step, version_max=0)
            trained.append(ticket)
        else:
            schedule.unused("generator0", m.Unused(record_of(ticket)))
    left_out = [message for _, message in sent]
    assert sorted([t.place for t in trained] + [each.place for each in left_out]) == list(range(GROUPS * STEPS))
    assert all(generated[each.place] == allowed for each in left_out) and max(generated.values()) <= allowed
    assert violations(ledger_.events, 1, GROUPS, STEPS) == [] and not book.open
    assert len({ticket.ticket_id for ticket in trained}) == len(trained)


def test_a_replacement_has_the_step_and_the_lag_of_the_first_and_another_prompt():
    schedule, *_ = schedule_of("rl.dynamic_sampling=replace", "rl.max_batches=3")
    first = schedule.maker.of_step(2, 1)[1]
    second = schedule.maker.after(first)
    third = schedule.maker.after(second)
    assert schedule.maker.after(third) is None
    assert len({first.prompt, second.prompt, third.prompt}) == len({first.seeds[0], second.seeds[0]}) + 1 == 3
    for ticket in (second, third):
        assert (ticket.place, ticket.step, ticket.min_version) == (first.place, 2, 1)
        assert ticket.asked == first.issued and ticket.issued >= ticket.asked


def test_the_places_of_a_step_have_the_source_that_its_weight_gives(tmp_path):
    """A place keeps its source whatever is replaced, so the shares hold for what is trained."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{name}{i}=", "answer": "1"}) + "\n" for i in range(20))
        )
    config = load(
        "tiny",
        [
            "steps=4",
            "rl.groups_per_step=4",
            f"data.train_file={tmp_path}/a.jsonl,{tmp_path}/b.jsonl",
            "data.train_weights=3,1",
            "rl.dynamic_sampling=replace",
            "rl.max_batches=5",
        ],
    )
    training = load_problems(config).training
    assert len(training) == 4 * 4 * 5
    sources = [{problem.prompt[0] for problem in training[i : i + 5]} for i in range(0, len(training), 5)]
    assert all(len(each) == 1 for each in sources) and sources.count({"a"}) == 12


def test_only_the_generator_that_has_a_ticket_may_report_it_without_signal():
    """A ticket that was issued again may have a group on its way, so it is trained in any case."""
    schedule, book, ledger_, _ = schedule_of("rl.dynamic_sampling=replace")

    def report(ticket, generator="generator0"):
        before = len(ledger_.events)
        schedule.unused(generator, m.Unused(record_of(ticket)))
        return len(ledger_.events) > before

    book.issue(schedule.maker.of_step(0, 0))
    tickets = [book.next_for("generator0") for _ in range(GROUPS)]
    assert not report(tickets[0], "generator1")
    book.moved(tickets[0].ticket_id, ARRIVED)
    assert not report(tickets[0])
    assert book.reissue(lambda generator, stage, since: stage != ARRIVED, "its generator died") == 2
    again = book.next_for("generator0")
    assert again.ticket_id == tickets[1].ticket_id and again.lost and not report(again)
    book.end("trained", again.ticket_id, trained_in=0, version_min=0, version_max=0)
    assert not report(again)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda e: e[1].pop("empty_in"), "step 0: 0 tickets trained or left out, expected 1"),
        (lambda e: e[1].update(replaced_by=7), "ticket 0: replaced by ticket 7, which was not issued for step 0"),
        (lambda e: e[1].pop("reason"), "ticket 0: dropped without a reason"),
    ],
)
def test_a_ledger_that_hides_a_group_is_found(change, message):
    events = [
        {"event": "issued", "ticket": 0, "step": 0},
        {"event": "dropped", "ticket": 0, "step": 0, "reason": "x", "empty_in": 0},
        {"event": "issued", "ticket": 1, "step": 1},
        {"event": "trained", "ticket": 1, "step": 1, "trained_in": 1, "version_min": 1, "version_max": 1},
    ]
    assert violations(events, 1, 1, 2) == []
    change(events)
    assert message in violations(events, 1, 1, 2)


def test_a_place_that_is_empty_before_its_step_is_trained_is_no_violation():
    """At lag 1 groups of step 1 are dropped while step 0 is incomplete, and a run may be interrupted then."""
    start = [{"event": "issued", "ticket": ticket, "step": ticket // 2} for ticket in range(4)]
    dropped = {"event": "dropped", "ticket": 2, "step": 1, "reason": "x", "empty_in": 1}
    trained = [
        {"event": "trained", "ticket": i, "step": 0, "trained_in": 0, "version_min": 0, "version_max": 0}
        for i in range(2)
    ]
    for end in range(1 + len(trained)):
        assert violations([*start, dropped, *trained[:end]], 1, 2, None) == []
    ended = {"event": "dropped", "ticket": 3, "step": 1, "reason": "interrupted"}
    assert violations([*start, dropped, *trained, ended], 1, 2, 1) == []
    assert violations([*start, dropped, *trained, ended], 1, 2, 2) != []


REWARDS = """
def by_prompt(prompt, response, answer):  # equal in the groups of half of the prompts
    return 1.0 if prompt.startswith(("1", "2", "3", "4")) else float(len(response) % 3)


def equal(prompt, response, answer):
    return 1.0
"""


@pytest.mark.slow
def test_a_run_trains_groups_with_signal_only_though_actors_are_lost(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    run_dir = tmp_path / "run"
    Running.new(
        run_dir,
        "--steps",
        "8",
        "data.reward=mine:by_prompt",
        "rl.dynamic_sampling=replace",
        "rl.max_batches=3",
        "checkpoint.every=2",
        SILENT,
        "deployment.faults=generator0:work:20:kill,logprob:work:12:kill,trainer:work:14:kill",
    ).end()
    check_finished(run_dir, 8)
    found, events = rows(run_dir), ledger(run_dir)
    assert sum(row["groups/unused"] for row in found) and min(row["groups/trained"] for row in found) >= 0
    lost = {event["ticket"] for event in events if event["event"] == "reissued"}
    for step, row in zip(timeline.read(run_dir), found):
        assert all(group.rewards_differ or group.ticket_id in lost for group in step.groups)
        assert not any(group.rewards_differ for group in step.unused) and len(step.unused) == row["groups/unused"]
        parts = sum(value for name, value in row.items() if name in PARTS)
        assert parts == pytest.approx(row["time/step"], abs=1e-6)
    assert any("replaced_by" in event for event in events)


PARTS = [
    f"time/{part}"
    for part in (
        "data",
        "transport",
        "prepare",
        "admission",
        "exposed_generation",
        "exposed_reward",
        "exposed_logprob",
        "recovery",
        "train",
        "other",
    )
]


@pytest.mark.slow
def test_a_run_without_any_signal_ends_with_the_policy_as_it_was(tmp_path):
    from asyncspec.report.write import report

    (tmp_path / "mine.py").write_text(REWARDS)
    run_dir = tmp_path / "run"
    fields = ("data.reward=mine:equal", "rl.dynamic_sampling=filter", "trainer.ranks=2")
    Running.new(run_dir, "--steps", "3", *fields).end()
    check_finished(run_dir, 3)
    for row in rows(run_dir):
        assert (row["groups/trained"], row["groups/unused"], row["groups/without_signal"]) == (0, 4, 1.0)
        assert row["reward/mean"] == 1.0 and row["grad/norm"] == 0
    assert report([str(run_dir)], "", False) == 0
