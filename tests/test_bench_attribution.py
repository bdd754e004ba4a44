"""bench attribution follows each injected delay: whether it held up the trainer, and what it was charged to."""

import math

import pytest
from msgspec.structs import replace

from asyncspec.bench.attribution import DELAYS, AttributionBenchmark, Trace, follow, shares
from asyncspec.timing.attribution import PARTS
from asyncspec.timing.exporters import TraceFile, read_trace
from asyncspec.wire.messages import GroupRecord, Phase, Span, StepDone, Wait

STEP, AWAITED, OTHER = 5, 80, 81  # the step needs version 5; while the trainer waits for one group, the other is ahead


def history(*phases):
    """Phases from (name, start, end)."""
    return [Phase(*phase) for phase in phases]


def record(ticket, phases, generator="generator0"):
    return GroupRecord(ticket, generator, 0.5, True, [10], STEP, STEP, STEP, 1, 1, 1, 0, 0, phases)


# The trainer waits for AWAITED from 0 to 20, trains on it, and then on OTHER, which has arrived.
PHASES = history(
    ("queued", 0, 1),
    ("weights", 1, 4),
    ("queued", 4, 5),
    ("generate", 5, 7),
    ("swap", 7, 9),
    ("generate", 9, 10),
    ("reward", 10, 12),
    # on its way from 12 to 15
    ("logprob_weights", 15, 15),
    ("logprob_queue", 15, 17),  # behind OTHER
    ("logprob", 17, 19),
)
OTHERS = history(("queued", 0, 4), ("generate", 4, 7), ("reward", 7, 9), ("logprob", 15, 17))
WORK = [
    Span("train", 20, 22, STEP, AWAITED),
    Span("train", 22, 24, STEP, OTHER),
    Span("prepare", 24, 26, STEP),  # waits for the broadcast to end
    Span("train", 26, 28, STEP),
    Span("prepare", 28, 29, STEP),
]
SCORED = [("logprob", Span("logprob", 15, 17, STEP, OTHER)), ("logprob", Span("logprob", 17, 19, STEP, AWAITED))]


def step(phases=PHASES, generator="generator0"):
    groups = [record(AWAITED, phases, generator), record(OTHER, OTHERS)]
    return StepDone(STEP, 0.0, 30.0, [Wait(AWAITED, 0.0, 20.0)], {}, {}, groups)


def followed(place, actor, start, end, done=None, work=WORK, **about):
    """Follow one delay. Return the seconds that held up the trainer, by part; parts without any are left out."""
    spans = [*SCORED, *(("trainer", span) for span in work), (actor, Span(f"delay {place}", start, end, **about))]
    measured = follow(place, [done or step()], Trace.of(spans))
    charged = {part: measured[f"charged_{part}_s"] for part in PARTS if measured[f"charged_{part}_s"]}
    assert measured["held_up_s"] == pytest.approx(sum(charged.values())) and measured["injected_s"] == end - start
    return charged


@pytest.mark.parametrize(
    "place, actor, start, end, about",
    [
        ("generate", "generator0", 5.5, 6.5, {}),
        ("generate", "generator0", 4.25, 4.75, {}),  # the awaited group waits for a slot
        ("reward", "generator0", 10, 12, {"ticket": AWAITED}),
        ("queue", "generator0", 12, 14.5, {"ticket": AWAITED}),
        ("logprob", "logprob", 17, 18, {"ticket": AWAITED}),
        ("logprob", "logprob", 15, 16, {"ticket": OTHER}),
        ("broadcast", "trainer", 1, 3, {"version": STEP}),
        ("broadcast", "trainer", 24, 25.5, {"version": STEP}),
        ("train", "trainer", 20, 21, {"ticket": AWAITED}),
        ("train", "trainer", 22.5, 23, {"ticket": OTHER}),
    ],
)
def test_a_delay_that_held_up_the_trainer_is_counted_whole(place, actor, start, end, about):
    assert followed(place, actor, start, end, **about) == {DELAYS[place][1]: end - start}


@pytest.mark.parametrize(
    "place, actor, start, end, about",
    [
        ("generate", "generator0", 12.5, 14, {}),  # the awaited group has left
        ("generate", "generator1", 5.5, 6.5, {}),  # it is in another generator
        ("reward", "generator0", 10, 12, {"ticket": OTHER}),  # holds up its own group only
        ("queue", "generator0", 9, 14, {"ticket": OTHER}),  # holds up its own group only
        ("logprob", "logprob", 6, 8, {"ticket": OTHER}),  # the awaited group is not there yet
        ("logprob", "logprob1", 16, 18, {"ticket": OTHER}),
        ("logprob", "logprob", 19, 20, {"ticket": OTHER}),
        ("broadcast", "trainer", 1, 3, {"version": STEP + 1}),
        ("broadcast", "trainer", 20, 23, {"version": STEP}),  # the trainer has work
        ("broadcast", "trainer", 26, 28, {"version": STEP}),
    ],
)
def test_a_hidden_delay_is_not_counted(place, actor, start, end, about):
    assert followed(place, actor, start, end, **about) == {}


def test_only_the_exposed_piece_of_a_delay_is_counted():
    assert followed("generate", "generator0", 9, 15) == {"exposed_generation": 1.0}
    assert followed("reward", "generator0", 9, 11, ticket=AWAITED) == {"exposed_generation": 1.0, "exposed_reward": 1.0}
    assert followed("broadcast", "trainer", 19, 25, version=STEP) == {"transport": 1.0, "prepare": 1.0}
    assert followed("train", "trainer", 19, 20.5, ticket=AWAITED) == {"transport": 1.0, "train": 0.5}


def faulty(index, name):
    """The step as a measurement would tell it that takes a phase of the awaited group for another."""
    return step([*PHASES[:index], replace(PHASES[index], name=name), *PHASES[index + 1 :]])


@pytest.mark.parametrize(
    "place, actor, start, end, about, fault, charged",
    [
        ("generate", "generator0", 5, 6, {}, {"done": faulty(3, "swap")}, "prepare"),
        ("reward", "generator0", 10, 11, {"ticket": AWAITED}, {"done": faulty(6, "generate")}, "exposed_generation"),
        ("queue", "generator0", 15, 16, {"ticket": AWAITED}, {}, "exposed_logprob"),  # arrival noted too early
        ("logprob", "logprob", 15, 16, {"ticket": OTHER}, {"done": faulty(8, "logprob_weights")}, "prepare"),
        ("broadcast", "trainer", 2, 3, {"version": STEP}, {"done": faulty(1, "queued")}, "exposed_generation"),
        ("broadcast", "trainer", 24, 25, {"version": STEP}, {"work": [*WORK[:2], *WORK[3:]]}, "other"),
        ("train", "trainer", 20, 21, {"ticket": AWAITED}, {"work": WORK[1:]}, "other"),
    ],
)
def test_a_wrong_charge_is_found(place, actor, start, end, about, fault, charged):
    assert followed(place, actor, start, end, **fault, **about) == {charged: 1.0}


def sample(held_up_s, **charged):
    return {
        "step_s": 4.0,
        "spans_per_s": 10.0,
        "predicted_s": 4.0,
        "sum_error": 0.0,
        "other_share": 0.0,
        "held_up_s": held_up_s,
        **{f"charged_{part}_s": charged.get(part, 0.0) for part in PARTS},
    }


def headline(**changed):
    right = {place: [sample(1.0, **{part: 0.98, "other": 0.02})] for place, (_, part) in DELAYS.items()}
    others = {name: [sample(0.0)] for name in ("none", "unrecorded", "faster")}
    return AttributionBenchmark([], None).headline(right | others | changed)


def test_the_headline_is_that_of_the_worst_place():
    assert headline()["injected_found_min"] == 0.98 and headline()["charged_wrongly_max"] == 0.02
    found = headline(queue=[sample(1.0, transport=0.5, exposed_logprob=0.3, prepare=0.2)])
    assert found["injected_found_min"] == found["found_queue"] == 0.5
    assert found["charged_wrongly_max"] == found["wrongly_queue"] == 0.3


def test_a_place_whose_delays_stayed_hidden_fails_the_headline():
    hidden = headline(logprob=[sample(0.05, exposed_logprob=0.05)])
    assert math.isnan(hidden["injected_found_min"]) and math.isnan(hidden["charged_wrongly_max"])
    assert math.isnan(hidden["found_logprob"]) and hidden["held_up_logprob_s"] == 0.05 and hidden["found_train"] == 0.98
    assert all(math.isnan(share) for share in shares([sample(0.0)]).values())


def test_a_traces_spans_are_read_back_with_actor_ticket_and_version(tmp_path):
    trace = TraceFile(tmp_path, print)
    spans = [Span("delay queue", 7.0, 8.5, ticket=3), Span("delay broadcast", 8.0, 9.0, version=4)]
    trace.write("generator0", [*spans, Span("generate", 1.0, 2.0, device="cuda:0")])
    trace.close()
    assert [(actor, span.name, span.ticket, span.version) for actor, span in read_trace(tmp_path)] == [
        ("generator0", "delay queue", 3, -1),
        ("generator0", "delay broadcast", -1, 4),
    ]
    held = read_trace(tmp_path)[0][1]
    assert (held.start, held.end) == pytest.approx((7.0, 8.5), abs=1e-6)
