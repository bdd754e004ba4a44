"""Errors in actors: when the run goes on, and when it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actors.failures import MOST_ALIKE, Failures


def count(failures, *errors):
    return [failures.add(error) for error in errors]


@pytest.mark.parametrize(
    "one, other",
    [
        ("RewardError: failed for 9 of 9 rollouts", "RewardError: failed for 17 of 120 rollouts"),
        ("OSError: /a/run/x.json: gone", "OSError: /b/y.json: gone"),
        ("OSError: '/a/run': gone", "OSError: '/b': gone"),
        ("RuntimeError: at 0x7f3a", "RuntimeError: at 0x10"),
        ("BroadcastError: no answer of 10.0.0.3:4567", "BroadcastError: no answer of 10.0.12.1:99"),
        ("CUDA error in generator0.1", "CUDA error in generator12"),
        (
            "RewardError: data.reward=a:b: failed for 9 of 9 rollouts, more than data.reward_failures=0.05 allows; nan",
            "RewardError: data.reward=a:b: failed for 12 of 17 rollouts, more than data.reward_failures=0.05 allows; 1",
        ),
        ("ValueError: 'it\\'s 4', expected a number", "ValueError: 'no', expected a number"),
    ],
)
def test_errors_are_alike_whatever_their_numbers_and_paths_are(one, other):
    assert count(Failures(), one, other) == [1, 2]


@pytest.mark.parametrize(
    "one, other",
    [
        ("RuntimeError: CUDA error", "RuntimeError: out of memory"),
        ("ValueError: x", "KeyError: x"),
        ("OSError: /a/x: gone", "OSError: /a/x: full"),
    ],
)
def test_errors_of_another_type_or_text_count_apart(one, other):
    assert count(Failures(), one, other, one) == [1, 1, 2]


def test_only_a_step_that_was_never_trained_before_is_progress():
    failures = Failures()
    failures.trained(7)
    assert count(failures, "E") == [1]
    for steps in (5, 6, 7):  # again, after a restart
        failures.trained(steps)
    assert count(failures, "E") == [2]
    failures.trained(8)
    assert count(failures, "E") == [1]


def lost(error):
    return {"event": "lost", "actor": "trainer", "reason": "...", "error": error}


def test_the_ledger_of_a_run_that_restarts_holds_what_was_counted():
    before = [{"event": "trained", "trained_in": 3}, lost("E"), {"event": "lost", "actor": "logprob", "reason": "E"}]
    restarted = [*before, {"event": "ended", "failure": ""}, {"event": "resumed", "version": 2}]
    again = [*restarted, {"event": "trained", "trained_in": 3}]
    assert Failures.of(again).add("E") == 2  # a death without an error does not count
    assert Failures.of([*again, {"event": "trained", "trained_in": 4}]).add("E") == 1
    # The run has ended for it, and a person has resumed it.
    assert Failures.of([*again, {"event": "ended", "failure": "trainer failed"}]).add("E") == 1


@given(st.lists(st.one_of(st.sampled_from(["A", "B", "C"]), st.integers(1, 6)), max_size=60))
def test_a_run_that_goes_on_has_fewer_alike_errors_than_the_limit_between_two_new_steps(happens):
    """Whatever happens: without MOST_ALIKE errors of one kind since the last new step the run never ends, and with
    them it does.
    """
    failures, since, furthest = Failures(), [], 0
    for what in happens:
        if isinstance(what, int):
            failures.trained(what)
            if what > furthest:
                furthest, since = what, []
        else:
            since.append(what)
            assert (failures.add(what) >= MOST_ALIKE) == (since.count(what) >= MOST_ALIKE)
