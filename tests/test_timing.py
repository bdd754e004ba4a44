"""Attribution: charges sum to waits, parts sum to steps, and causes are correct."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec import clock
from asyncspec.files import LineFiles
from asyncspec.timing import timeline
from asyncspec.timing.attribution import CAUSES, PARTS, attribute, break_down, covered, critical_path, explain, tile
from asyncspec.timing.exporters import TraceFile, read_trace
from asyncspec.timing.metrics import step_row
from asyncspec.wire.facts import Rounds
from asyncspec.wire.messages import GroupRecord, Phase, Span, StepDone, Wait

PHASES = [
    Phase("weights", 1.0, 2.0),
    Phase("queued", 2.0, 2.5),
    Phase("generate", 2.5, 6.0),
    Phase("reward", 6.0, 6.2),
    Phase("logprob_weights", 6.5, 6.7),
    Phase("logprob_queue", 6.7, 7.0),
    Phase("logprob", 7.0, 8.0),
]


@st.composite
def histories(draw):
    times = sorted(draw(st.lists(st.floats(0, 100), min_size=2 * len(CAUSES), max_size=2 * len(CAUSES))))
    return [Phase(name, times[2 * i], times[2 * i + 1]) for i, name in enumerate(CAUSES)]


@given(histories(), st.floats(0, 100), st.floats(0, 100))
def test_charges_sum_to_the_wait(phases, a, b):
    wait = Wait(0, min(a, b), max(a, b))
    charged = attribute(wait, phases)
    assert sum(charged.values()) == pytest.approx(wait.end - wait.start, abs=1e-9)
    assert min(charged.values()) >= 0


@given(histories(), st.floats(0, 100), st.floats(0, 100))
def test_generation_is_charged_exactly_where_the_group_was_generating(phases, a, b):
    start, end = min(a, b), max(a, b)
    expected = sum(
        max(0.0, min(end, p.end) - max(start, p.start)) for p in phases if CAUSES[p.name] == "exposed_generation"
    )
    assert attribute(Wait(0, start, end), phases)["exposed_generation"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "start,end,expected",
    [
        (3.0, 5.0, {"exposed_generation": 2.0}),
        (7.2, 8.5, {"exposed_logprob": 0.8, "transport": 0.5}),
        (6.2, 6.5, {"transport": 0.3}),  # on its way from generator to logprob
        # waits for its ticket, then for weights, then for generation
        (0.0, 3.0, {"admission": 1.0, "prepare": 1.0, "exposed_generation": 1.0}),
        (
            5.0,
            8.0,
            {
                "exposed_generation": 1.0,
                "exposed_reward": 0.2,
                "transport": 0.3,
                "prepare": 0.2,
                "exposed_logprob": 1.3,
            },
        ),
    ],
)
def test_a_wait_is_charged_to_what_its_group_was_doing(start, end, expected):
    charged = attribute(Wait(0, start, end), PHASES)
    for cause, seconds in charged.items():
        assert seconds == pytest.approx(expected.get(cause, 0.0)), cause


@given(histories(), st.lists(st.floats(0, 100), min_size=4, max_size=4), st.floats(0, 5), st.floats(0, 5))
def test_the_parts_of_a_step_sum_to_its_wall_time(phases, times, train, prepare):
    start, a, b, end = sorted(times)
    parts = break_down(start, end, [Wait(3, a, b)], {"train": train, "prepare": prepare}, {3: phases})
    assert sum(parts.values()) == pytest.approx(end - start, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_covered_counts_each_instant_once(items):
    intervals = [(a, a + n) for a, n in items]
    assert covered(intervals) == len({t for a, b in intervals for t in range(a, b)})


def test_a_trace_that_is_cut_short_lacks_only_its_closing_bracket(tmp_path):
    trace = TraceFile(tmp_path, pytest.fail)
    trace.write("generator0", [Span("generate", 1.0, 2.0, version=3), Span("swap policy", 2.0, 2.1, version=4)])
    trace.write_group(5, GroupRecord(7, "generator0", 0.5, True, [3, 4], 3, 4, 4, 2, 6, 3, 0, 0, PHASES))
    assert json.loads((tmp_path / "trace.json").read_text() + "]")
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"generator0", "tickets"}
    slices = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in slices] == ["generate", "swap policy"] and slices[0]["dur"] == 1e6
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == 1 + len(PHASES)


@given(histories(), st.floats(0, 100), st.floats(0, 100))
def test_a_wait_is_tiled_without_gap_or_overlap(phases, a, b):
    wait = Wait(5, min(a, b), max(a, b))
    at = wait.start
    for segment in tile(wait, phases):
        assert segment.start == at and segment.end >= at and segment.ticket_id == 5 and segment.part in PARTS
        at = segment.end
    assert at == wait.end


def pipeline(generate, logprob, train, lag, transport=0.01):
    """Simulate a pipeline in which every time is known; return its steps.

    Groups of a step are generated together. Logprob and trainer take one group after the other.

    Args:
        generate, logprob, train: seconds of each group of each step, [steps][groups].
    """
    steps, published = [], [0.0]
    generator_free = logprob_free = trainer_free = 0.0
    for s, (g, lp, t) in enumerate(zip(generate, logprob, train)):
        issued = published[max(0, s - lag)] if s > lag else 0.0
        begun = max(issued, generator_free)
        done, phases = {}, {}
        for i in sorted(range(len(g)), key=lambda i: g[i]):
            end = begun + g[i]
            start = max(end + transport, logprob_free)
            logprob_free = done[i] = start + lp[i]
            phases[i] = [
                Phase("queued", issued, begun),
                Phase("weights", begun, begun),
                Phase("generate", begun, end),
                Phase("reward", end, end),
                Phase("logprob_weights", end + transport, end + transport),
                Phase("logprob_queue", end + transport, start),
                Phase("logprob", start, done[i]),
            ]
        generator_free = begun + max(g)
        start, waits = trainer_free, []
        for i in range(len(g)):
            if done[i] > trainer_free:
                waits.append(Wait(100 * s + i, trainer_free, done[i]))
                trainer_free = done[i]
            trainer_free += t[i]
        groups = [
            GroupRecord(100 * s + i, "generator0", 0.5, True, [10], s, s, s, 1, 1, 1, 0, 0, phases[i])
            for i in range(len(g))
        ]
        steps.append(StepDone(s, start, trainer_free, waits, {"train": sum(t)}, {}, groups))
        published.append(trainer_free)
    return steps


def test_acceptance_at_a_position_counts_only_verifications_that_reached_it():
    record = GroupRecord(0, "generator0", 0.5, True, [10, 8], 0, 0, 0, 8, 16, 6, 0, 0, [])
    two, one, none = (
        replace(record, ticket_id=i, reached_at=reached, accepted_at=accepted)
        for i, (reached, accepted) in enumerate([([8, 5], [5, 1]), ([4], []), ([], [])])
    )

    def row(*groups):
        return {
            key: value
            for key, value in step_row(StepDone(0, 0.0, 1.0, [], {}, {}, list(groups)), {}, {}).items()
            if key.startswith("spec/acceptance_")
        }

    whole = {"spec/acceptance_length": 2.0, "spec/acceptance_rate": 0.375}
    assert (
        row(two, one, none) == whole | {"spec/acceptance_1": 5 / 12, "spec/acceptance_2": 1 / 5} and row(none) == whole
    )
    assert row(replace(record, reached_at=[4, 0], accepted_at=[0, 0])) == whole | {"spec/acceptance_1": 0.0}


@st.composite
def workloads(draw):
    """Seconds on a grid: of times closer than rounding, a replay cannot know which came first."""
    steps, groups = 6, draw(st.integers(1, 3))
    seconds = st.lists(
        st.lists(st.integers(7, 192).map(lambda n: n / 64), min_size=groups, max_size=groups),
        min_size=steps,
        max_size=steps,
    )
    train = draw(st.floats(0.1, 2))
    return draw(seconds), draw(seconds), [[train] * groups] * steps, draw(st.integers(0, 2))


@given(workloads())
def test_the_critical_path_of_a_known_pipeline_adds_up_to_its_steps(work):
    for step in pipeline(*work):
        path = critical_path(step)
        assert sum(segment.seconds for segment in path) == pytest.approx(step.end - step.start)
        assert sum(segment.seconds for segment in path if segment.part == "train") == pytest.approx(step.busy["train"])
        parts = break_down(step.start, step.end, step.waits, step.busy, {g.ticket_id: g.phases for g in step.groups})
        assert parts["other"] == pytest.approx(0, abs=1e-9)
        for part in ("exposed_generation", "exposed_logprob", "transport", "admission"):
            assert sum(segment.seconds for segment in path if segment.part == part) == pytest.approx(
                parts[part], abs=1e-9
            )


def test_a_slow_stage_is_charged_what_the_closed_form_gives():
    """With lag 1 and one group per step, a step takes as long as the slowest stage. The time beyond training is charged
    to that stage.
    """
    for generate, logprob, part in ((2.0, 0.3, "exposed_generation"), (0.3, 2.0, "exposed_logprob")):
        step = pipeline([[generate]] * 12, [[logprob]] * 12, [[0.5]] * 12, 1)[-1]
        parts = break_down(step.start, step.end, step.waits, step.busy, {g.ticket_id: g.phases for g in step.groups})
        assert step.end - step.start == pytest.approx(2.0, abs=0.6)
        assert parts[part] > 0.7 * (step.end - step.start - 0.5)
    step = pipeline([[0.3]] * 12, [[0.3]] * 12, [[2.0]] * 12, 1)[-1]
    assert step.end - step.start == pytest.approx(2.0) and not step.waits
    assert explain(step) == ["step 11: 2.00 s, all of it training"]


def test_a_step_is_explained_by_what_it_waited_for():
    step = pipeline([[3.0, 1.0]], [[0.2, 0.2]], [[0.5, 0.5]], 0)[0]
    assert explain(step, 1) == [
        "step 0: 3.00 s of 4.21 s spent waiting for ticket 0, "
        "generating on generator0 (longest response 10 tokens, 1 version)"
    ]


def test_a_timeline_reads_back_up_to_a_torn_line(tmp_path):
    steps = pipeline([[1.0], [2.0]], [[0.1], [0.1]], [[0.5], [0.5]], 1)
    file = timeline.TimelineFile(LineFiles(tmp_path, pytest.fail))
    for step in steps:
        file.write(step)
    file.close()
    with open(tmp_path / timeline.FILE, "ab") as torn:
        torn.write(b'{"type":"StepDone","st')
    assert list(timeline.read(tmp_path)) == steps


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_the_clock_of_another_host_is_known_within_the_stated_error(ahead, trips):
    estimate, own = clock.Estimate(), 100.0
    for there, back in trips:  # seconds that each message travels
        estimate.add(own, own + there + ahead, own + there + back)
        own += there + back + 1.0
    assert abs(estimate.offset - ahead) <= estimate.error + 1e-9
    assert estimate.error == pytest.approx(min(a + b for a, b in trips) / 2)


def test_a_trace_is_read_as_it_was_written_and_up_to_where_a_crash_cut_it(tmp_path):
    rounds = [Rounds(8, 3, 10, 0.5, 240.0, 900.0)]
    spans = [Span("generate", 1.0, 2.5, version=4, cpu=1.25, rounds=rounds), Span("train", 3.0, 4.0, 2, 7)]
    trace = TraceFile(tmp_path, print)
    trace.write("generator0", [*spans, Span("generate", 1.0, 2.0, device="cuda:0")])
    trace.close()
    found = [span for _, span in read_trace(tmp_path)]
    assert [(span.start, span.end) for span in found] == [pytest.approx((s.start, s.end), abs=1e-5) for s in spans]
    same = [replace(span, start=s.start, end=s.end) for span, s in zip(found, spans)]
    assert same == spans
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text[: text.index('"train"')])
    assert [span.name for _, span in read_trace(tmp_path)] == ["generate"]
