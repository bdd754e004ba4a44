"""A user's reward function may raise, hang or return nonsense. Such failures affect only their own rollout and are
counted; beyond an allowed share they stop the run.
"""

import time

import pytest

from asyncspec.tasks.rewarder import LEAST_FAILURES, Rewarder, RewardError


def reward(prompt, response, answer):
    match response:
        case "raise":
            raise KeyError("missing")
        case "exit":
            raise SystemExit(3)
        case "nan":
            return float("nan")
        case "text":
            return "much"
        case "large":
            return 10**400
        case "nothing":
            return None
        case "hang":
            time.sleep(60)
    return float(response == answer)


@pytest.mark.parametrize("bad", ["raise", "exit", "nan", "text", "large", "nothing", "hang"])
def test_a_failing_reward_teaches_nothing_and_is_counted(bad):
    rewarder = Rewarder(reward, "mine:reward", 0.2, 0.5)
    started = time.monotonic()
    assert rewarder.group("1+1=", ["2", "3", bad, "2"], "2") == pytest.approx([1, 0, 2 / 3, 1])
    assert rewarder.group("1+1=", [bad, bad], "2") == [0, 0]
    assert rewarder.group("1+1=", ["2"], "2") == [1]  # it still works
    assert (rewarder.failed, rewarder.called) == (3, 7) and time.monotonic() - started < 30  # it would hang for 60


def test_the_rewarder_calls_back_between_two_rewards():
    begun = []
    rewarder = Rewarder(reward, "mine:reward", 0.2, 1.0, lambda: begun.append(time.monotonic()))
    rewarder.group("1+1=", ["hang", "hang", "2"], "2")
    assert len(begun) == 3 and all(0.15 < b - a < 30 for a, b in zip(begun, begun[1:]))


def test_more_failures_than_allowed_stop_the_run_with_one_line():
    rewarder = Rewarder(reward, "mine:reward", 1.0, 0.1)
    for _ in range(200):
        rewarder.group("1+1=", ["2"], "2")
    with pytest.raises(
        RewardError,
        match=r"data.reward=mine:reward: failed for 2\d of 2\d\d rollouts, more than data.reward_failures=0.1 allows; "
        r"the last raised KeyError: 'missing', response 'raise'",
    ):
        for _ in range(100):
            rewarder.group("1+1=", ["raise"], "2")
    few = Rewarder(reward, "mine:reward", 1.0, 0.0)
    for _ in range(LEAST_FAILURES):
        few.group("1+1=", ["raise"], "2")
