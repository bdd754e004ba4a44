"""What-if answers: a run that is replayed with a change takes as long as a simulated run that has the change."""

import heapq

import numpy as np
import pytest
from msgspec.structs import replace

from asyncspec.timing import whatif
from asyncspec.wire.facts import TRY_IDS
from asyncspec.wire.messages import GroupRecord, Phase, StepDone, Wait


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
