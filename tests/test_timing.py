"""Attribution: charges sum to waits, parts sum to steps, and causes are correct."""

import heapq
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec import clock
from asyncspec.files import LineFiles
from asyncspec.timing import timeline, whatif
from asyncspec.timing.attribution import CAUSES, PARTS, attribute, break_down, covered, critical_path, explain, tile
from asyncspec.timing.exporters import TraceFile
from asyncspec.timing.metrics import step_row
from asyncspec.wire.facts import TRY_IDS
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


def rounds_of_a_run(
    seed, lag, generators, slots, speed, groups=6, steps=16, lp=0.02, t=0.15, prepare=0.05, reward=lambda place: 0.0
):
    """Simulate a run round by round, as engines decode, with times that are all known; return its timeline.

    The lengths of responses follow from the seed. The speed is (fixed, each): a round with n responses takes
    fixed + each * n seconds. reward(place) is the seconds that a group's rewards take.
    """
    random = np.random.default_rng(seed)
    lengths = np.minimum(300, 1 + random.lognormal(3, 0.9, (steps, groups, 4)).astype(int))
    engines = [{"at": 0.0, "waiting": [], "live": [], "load": 0} for _ in range(generators)]
    versions, ends, ready, begun = [0.0] * (lag + 1), [], {}, {}  # versions: when each step may begin
    unsent, issued, logprob_free, done, waits, arriving = [], 0, 0.0, {}, [], []

    def next_of(engine):  # when its next round ends, or begins if it waits for something
        return engine["at"] + speed[0] + speed[1] * len(engine["live"]) if engine["live"] else float("inf")

    while len(ends) < steps:
        now = min(next_of(engine) for engine in engines)
        arrives = arriving[0][0] if arriving else float("inf")
        if issued < min(steps, len(versions)) and versions[issued] <= min(now, arrives):
            now = versions[issued]
            unsent += [(issued, place) for place in range(groups)]
            issued += 1
        elif arrives <= now:
            now, group, generated = heapq.heappop(arriving)
            logprob_free = max(logprob_free, now) + lp
            ready[group] = (generated, logprob_free)
        else:
            engine = min(engines, key=next_of)
            engine["at"] = now
            for sample in engine["live"]:
                sample[1] -= 1
            for group, _ in [sample for sample in engine["live"] if sample[1] == 0]:
                engine["load"] -= 1
                done[group] = done.get(group, 0) + 1
                if done[group] == 4:
                    heapq.heappush(arriving, (now + reward(group[1]), group, now))
            engine["live"] = [sample for sample in engine["live"] if sample[1] > 0]
        while unsent and min(e["load"] for e in engines) < 2 * slots:
            engine = min(engines, key=lambda e: e["load"])
            group = unsent.pop(0)
            begun[group] = (now, f"generator{engines.index(engine)}")
            engine["waiting"] += [[group, length] for length in lengths[group].tolist()]
            engine["load"] += 4
        for engine in engines:
            if engine["waiting"] and len(engine["live"]) < slots:
                engine["at"] = engine["at"] if engine["live"] else now
                room = slots - len(engine["live"])
                engine["live"] += engine["waiting"][:room]
                del engine["waiting"][:room]
        step = len(ends)
        if all((step, place) in ready for place in range(groups)):
            free, found = ends[-1] if ends else 0.0, []
            for place in range(groups):
                if ready[step, place][1] > free:
                    found.append(Wait(10_000 * step + place, free, ready[step, place][1]))
                free = max(free, ready[step, place][1]) + t
            ends.append(free)
            waits.append(found)
            versions.append(free + prepare)
    return [
        StepDone(
            s,
            start,
            end,
            waits[s],
            {},
            {},
            [of_group(s, p, begun, ready, lengths, lp, reward(p), versions) for p in range(groups)],
        )
        for s, (start, end) in enumerate(zip([0.0, *ends], ends))
    ]


def of_group(step, place, begun, ready, lengths, lp, reward, versions):
    (start, generator), (generated, scored) = begun[step, place], ready[step, place]
    rewarded = generated + reward
    phases = [
        Phase("queued", start, start),
        Phase("weights", start, start),
        Phase("generate", start, generated),
        *(Phase("swap", at, at) for at in versions if start < at < generated),
        Phase("reward", generated, rewarded),
        Phase("logprob_weights", rewarded, rewarded),
        Phase("logprob", scored - lp, scored),
    ]
    tokens = lengths[step, place].tolist()
    return GroupRecord(10_000 * step + place, generator, 0.5, True, tokens, 0, 0, 0, sum(tokens), 0, 0, 0, 0, phases)


CHANGED = {
    "lag": (whatif.Change(lag=1), {"lag": 2}),
    "generators": (whatif.Change(generators=1), {"generators": 2}),
    "generation": (whatif.Change(generation=2), {"speed": (0.005, 0.0005)}),
    "train": (whatif.Change(train=2), {"t": 0.075}),
    "logprob": (whatif.Change(logprob=2), {"lp": 0.01}),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("slots, t", [(8, 0.02), (8, 0.15), (64, 0.15), (64, 0.02)])
def test_a_what_if_answer_is_the_step_of_a_run_with_that_change(name, slots, t):
    known = {"seed": 3, "lag": 1, "generators": 1, "slots": slots, "speed": (0.01, 0.001), "t": t}
    change, changed = CHANGED[name]
    if "t" in changed:
        changed = {"t": t / 2}
    expected, real = answer(change, changed, steps=40, **known)
    assert expected == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("lag, slots", [(0, 8), (1, 64), (2, 8)])
def test_a_replay_without_a_change_takes_as_long_as_the_run(lag, slots):
    steps = rounds_of_a_run(4, lag, 2, slots, (0.01, 0.001))
    speed = whatif.fitted(steps, slots)
    replayed = whatif.step_times(steps, lag, slots, speed)
    measured = [step.end - step.start for step in steps]
    assert sum(replayed) == pytest.approx(sum(measured), rel=0.02)
    assert replayed == pytest.approx(measured, abs=0.1 * np.mean(measured))


def answer(change, changed, **known):
    """Return (predicted, real) step of a run with a change, over the step before it."""
    before, after = rounds_of_a_run(**known), rounds_of_a_run(**known | changed)
    now, later = (np.mean([step.end - step.start for step in run[6:]]) for run in (before, after))
    (expected,) = whatif.predicted(before, known["lag"], known["slots"], [change])
    measured = np.mean([step.end - step.start for step in before[whatif.SKIP :]])
    return expected / measured, later / now


@pytest.mark.parametrize(
    "change, changed, known",
    [
        # slots that are always full: only a full round's time shows
        (whatif.Change(generators=1), {"generators": 2}, {"groups": 60, "slots": 32, "t": 0.02, "steps": 24}),
        # one slow reward does not hold up the groups behind it
        (whatif.Change(logprob=2), {"lp": 0.15}, {"lag": 0, "lp": 0.3, "reward": lambda place: 5.0 * (place == 0)}),
        # weights that take long to arrive
        (whatif.Change(lag=1), {"lag": 2}, {"prepare": 1.0, "groups": 12}),
    ],
)
def test_what_if_answers_hold_for_runs_of_other_kinds(change, changed, known):
    known = {"seed": 3, "lag": 1, "generators": 1, "slots": 8, "speed": (0.01, 0.001)} | known
    expected, real = answer(change, changed, **known)
    assert expected == pytest.approx(real, rel=0.05)


def test_of_many_responses_enough_steps_are_replayed_to_tell(monkeypatch):
    monkeypatch.setattr(whatif, "MOST_RESPONSES", 10)  # fewer than a step has
    monkeypatch.setattr(whatif, "FITTED_RESPONSES", 10)
    known = {"seed": 3, "lag": 1, "generators": 2, "slots": 8, "speed": (0.01, 0.001), "steps": 40, "t": 0.02}
    expected, real = answer(whatif.Change(generation=2), {"speed": (0.005, 0.0005)}, **known)
    assert real < 0.6 and expected == pytest.approx(real, rel=0.05)


def scaled(steps, factor, offset=0.0):
    """Return the steps with all times multiplied."""

    def at(seconds):
        return seconds * factor + offset

    def of(group):
        phases = [Phase(p.name, at(p.start), at(p.end)) for p in group.phases]
        return replace(group, phases=phases)

    return [
        replace(
            step,
            start=at(step.start),
            end=at(step.end),
            waits=[Wait(w.ticket_id, at(w.start), at(w.end)) for w in step.waits],
            groups=[of(group) for group in step.groups],
        )
        for step in steps
    ]


@pytest.mark.parametrize("factor", [0.01, 100, 2000])
def test_what_if_answers_do_not_depend_on_the_unit_of_time(factor):
    steps, changes = rounds_of_a_run(3, 1, 1, 8, (0.01, 0.001)), [change for change, _ in CHANGED.values()]
    expected = np.array(whatif.predicted(steps, 1, 8, changes))
    assert whatif.predicted(scaled(steps, factor), 1, 8, changes) == pytest.approx(expected * factor, rel=0.005)


def test_what_if_answers_of_a_run_on_two_clocks_are_those_of_its_last_part():
    steps, change = rounds_of_a_run(3, 1, 1, 8, (0.01, 0.001), steps=32), whatif.Change(generators=1)
    both = scaled(steps[:16], 1, offset=1000.0) + steps[16:]
    assert whatif.predicted(both, 1, 8, [change]) == pytest.approx(whatif.predicted(steps, 1, 8, [change]), rel=0.05)


def test_what_if_answers_are_left_out_where_they_cannot_be_known():
    steps = rounds_of_a_run(3, 1, 1, 8, (0.01, 0.001))
    assert whatif.predicted(steps[:2], 1, 8, [whatif.Change(lag=1)]) == []
    bare = replace(steps[5].groups[0], phases=[])
    steps[5] = replace(steps[5], groups=[bare, *steps[5].groups[1:]])
    assert whatif.predicted(steps, 1, 8, [whatif.Change(lag=1)]) == []


def test_a_wait_for_a_group_that_is_left_out_is_no_work():
    """One group is left out; the group that replaces it takes 3 s more. Training takes 0.5 s."""

    def group(ticket, start, generated):
        rounds = round((generated - start) / 0.2)
        phases = [Phase("queued", start, start), Phase("weights", start, start), Phase("generate", start, generated)]
        phases += [Phase(name, generated, generated) for name in ("reward", "logprob_weights", "logprob")]
        return GroupRecord(ticket, "generator0", 0.5, True, [rounds], 0, 0, 0, rounds, 0, 0, 0, 0, phases)

    steps = []
    for s in range(8):
        begun, place = 4.5 * s, s
        lost, found = group(place, begun, begun + 1), group(place + TRY_IDS, begun + 1, begun + 4)
        waits = [Wait(lost.ticket_id, begun, begun + 1), Wait(found.ticket_id, begun + 1, begun + 4)]
        steps.append(StepDone(s, begun, begun + 4.5, waits, {"train": 0.5}, {}, [found], unused=[lost]))
    works = whatif._works(steps)
    assert whatif._training(steps[3], works[3][:1]) == pytest.approx([0.5])
    speed = whatif.Speed(0.2, 0.0)
    assert whatif.step_times(steps, 0, 8, speed)[2:] == pytest.approx([4.5] * 6)  # one after the other
    assert whatif.step_times(steps, 0, 8, speed, whatif.Change(train=2))[2:] == pytest.approx([4.25] * 6)


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
