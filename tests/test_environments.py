"""Environments run concurrently in processes of their own; what fails or hangs is one episode's."""

import os
import signal
import time
from contextlib import closing

import pytest

from asyncspec.environments.make import adapted, maker
from asyncspec.environments.pool import MOST_TRIES, EnvironmentFailed, Environments
from asyncspec.environments.trl import ToolsByMethod

SAYS = {"role": "assistant", "content": "hello"}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


def make(name="toolbox:Scripted", **changed):
    settings = {"turn_s": 5.0, "episode_s": 60.0, "most_failures": 1.0, "start_s": 30.0, "workers": 2, **changed}
    made = Environments(name, **settings)
    made.load()
    return made


def answers(environments, count, timeout_s=30.0):
    """Return this many answers, by key."""
    found, deadline = {}, time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} answers"
        for answer in environments.poll():
            assert answer.key not in found
            found[answer.key] = answer
        time.sleep(0.002)
    return found


@pytest.mark.parametrize("name", ["toolbox:Scripted", "toolbox:Plain"])
def test_episodes_run_side_by_side(name):
    with closing(make(name)) as environments:
        for key in range(40):
            environments.begin(key, {"script": [f"sleep {0.5 if key < 39 else 0.01}"], "messages": None})
        assert all(answer.what == "reset" and not answer.error for answer in answers(environments, 40).values())
        start = time.monotonic()
        for key in range(40):
            environments.step(key, SAYS)
        found = answers(environments, 40)
        assert time.monotonic() - start < 0.5 * 40 / 4
        assert {answer.messages[0]["content"] for answer in found.values()} == {"sleep 0.5 5", "sleep 0.01 5"}
        assert found[0].reward == 0.25 and not found[0].done and found[0].answered_at - found[0].asked_at >= 0.45
        environments.step(3, SAYS)
        assert answers(environments, 1)[3].done
        for key in range(40):
            environments.end(key)
        assert environments.open == 0 == environments.failed


@pytest.mark.parametrize(
    "what, said",
    [
        ("raise", "raised RuntimeError: no tool here"),
        ("sleep 60", "took more than 0.3 s"),
        ("nonsense", "expected (messages, done, reward)"),
    ],
)
def test_a_failure_is_one_episode_s(what, said):
    with closing(make(turn_s=0.3)) as environments:
        environments.begin("bad", {"script": [what]})
        environments.begin("good", {"script": ["fine"]})
        answers(environments, 2)
        for key in ("bad", "good"):
            environments.step(key, SAYS)
        found = answers(environments, 2)
        assert said in found["bad"].error and not found["good"].error
        assert environments.failed == 1 and environments.open == 1 and said in environments.first_failure


def test_a_plain_function_that_hangs_costs_its_deadline_and_then_its_process():
    with closing(make("toolbox:Plain", turn_s=0.3)) as environments:
        (first,) = environments.pids
        for key, script in (("bad", ["hang"]), ("good", ["fine", "fine"])):
            environments.begin(key, {"script": script})
        answers(environments, 2)
        environments.step("bad", SAYS)
        environments.step("good", SAYS)
        found = answers(environments, 2)
        assert "took more" in found["bad"].error and not found["good"].error
        environments.begin("next", {"script": []})  # which the process with the stuck thread does not get
        assert not answers(environments, 1)["next"].error
        assert len(environments.pids) == 2
        environments.step("good", SAYS)
        assert not answers(environments, 1)["good"].error
        environments.end("good")
        deadline = time.monotonic() + 10
        while first in environments.pids:
            environments.poll()
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("what", ["hang", "spin"])
def test_a_process_that_does_not_answer_is_killed_and_its_other_episodes_begin_again(what):
    with closing(make(turn_s=0.3, workers=1)) as environments:
        environments.begin("bad", {"script": [what]})
        environments.begin("good", {"script": ["fine"]})
        answers(environments, 2)
        (before,) = environments.pids
        environments.step("bad", SAYS)
        found = answers(environments, 2)
        assert "did not answer" in found["bad"].error and found["good"].again
        assert not answers(environments, 1)["good"].error
        assert environments.pids != [before] and environments.failed == 1 and environments.begun_again == 1


def test_episodes_of_a_killed_process_begin_again_but_not_for_ever():
    with closing(make(workers=1)) as environments:
        environments.begin("one", {"script": ["fine"]})
        answers(environments, 1)
        for time_ in range(MOST_TRIES):
            os.kill(environments.pids[0], signal.SIGKILL)
            found = answers(environments, 1)["one"]
            if time_ < MOST_TRIES - 1:
                assert found.again
                assert answers(environments, 1)["one"].what == "reset"
        assert "SIGKILL, 3 times" in found.error and environments.failed == 1


def test_a_process_that_is_killed_while_it_loads_is_replaced():
    made = Environments("toolbox:Scripted", turn_s=5, episode_s=60, most_failures=0, start_s=30)
    with closing(made):
        for _ in range(MOST_TRIES - 1):
            os.kill(made.pids[0], signal.SIGKILL)
            made.poll()
        made.load()
        made.begin("one", {"script": []})
        assert not answers(made, 1)["one"].error


def test_an_episode_has_a_deadline_too():
    with closing(make(episode_s=0.6)) as environments:
        environments.begin("long", {"script": ["fine", "sleep 30"]})
        answers(environments, 1)
        environments.step("long", SAYS)
        answers(environments, 1)
        time.sleep(0.3)
        environments.step("long", SAYS)
        found = answers(environments, 1)["long"]
        assert "took more" in found.error and found.answered_at - found.asked_at < 0.6


def test_too_many_failures_end_the_run():
    with closing(make(most_failures=0.05)) as environments:
        for key in range(20):
            environments.begin(key, {"at_reset": "raise"})
        with pytest.raises(EnvironmentFailed, match="more than environment.failures=0.05 allows; the last raised Runt"):
            answers(environments, 20)
        assert environments.failed == 8  # 7 are always allowed


@pytest.mark.parametrize(
    "name, said",
    [("toolbox:Missing", "AttributeError"), ("no_module:Environment", "ModuleNotFoundError")],
)
def test_an_environment_that_cannot_be_imported(name, said):
    with pytest.raises(EnvironmentFailed, match=f"environment.name='{name}': {said}"):
        make(name)


def test_an_object_without_step_and_without_tools_is_no_environment():
    class Forgetful:
        def reset(self, row):
            pass

    with pytest.raises(ValueError, match="has no method step, and no other public method"):
        adapted(Forgetful(), "x:y")


def test_an_object_that_is_no_environment():
    with pytest.raises(ValueError, match="environment.name='x:y': int has neither reset nor run"):
        adapted(3, "x:y")


async def _played(environment, row, *texts):
    begun = await environment.reset(row)
    return begun, [await environment.step({"role": "assistant", "content": text}) for text in texts]


def test_tools_by_method():
    import asyncio

    environment = maker("toolbox:Adder")()
    assert isinstance(environment, ToolsByMethod)
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "remember"]
    assert environment.tools[0]["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "left": {"type": "integer", "description": "the first one."},
                "right": {"type": "integer", "description": "the second one."},
            },
            "required": ["left"],
        },
    }
    call = '<tool_call>{"name": "add", "arguments": {"left": 2, "right": 40}}</tool_call>'
    texts = [call, call.replace("add", "gone"), call.replace("2", '"a"'), "<tool_call>{</tool_call>"]
    texts += ['<tool_call>{"name": "remember", "arguments": {"what": "42"}}</tool_call>', "It is 42."]
    begun, steps = asyncio.run(_played(environment, {"prompt": "What is 2+40?", "answer": "42"}, *texts))
    assert begun == [{"role": "user", "content": "What is 2+40? Use the tools."}]
    assert steps[0] == ([{"role": "tool", "content": "42"}], False, None)
    assert all(said[0]["content"].startswith("error: ") for said, *_ in steps[1:4])
    assert steps[4][0][0]["content"] == "ok" and steps[5] == ([], True, 1.0)


def test_what_a_tool_raises_is_read_by_the_policy_and_a_slow_one_holds_no_other_up():
    call = {
        "role": "assistant",
        "content": '<tool_call>{"name": "divide", "arguments": {"left": 1, "right": 0}}</tool_call>',
    }
    with closing(make("toolbox:Divider", turn_s=3.0)) as environments:
        for key in range(16):
            environments.begin(key, {"prompt": "divide", "answer": ""})
        answers(environments, 16)
        for key in range(16):
            environments.step(key, call)
        found = answers(environments, 16)
        assert {answer.messages[0]["content"] for answer in found.values()} == {
            "error: ZeroDivisionError: division by zero"
        }


class Unlookable:
    """What a user's object may do when it is looked at."""

    def reset(self, row):
        self.how = row["how"]

    @property
    def tool(self):
        if self.how == "tool":
            raise RuntimeError("no")
        return "x"

    @property
    def tools(self):
        return {"tools": [{"name": "add"}], "none": None}.get(getattr(self, "how", "none"))

    def step(self, message):
        class Odd:
            def __float__(self):
                raise RuntimeError("no number")

        reward = {"odd": Odd(), "huge": 10**400, "nan": float("nan")}.get(self.how, 0.0)
        said = "half \ud800" if self.how == "surrogate" else "fine"
        if self.how == "escape":
            raise RuntimeError("\x1b[31mred\ud800" + "x" * 1000)
        return [{"role": "user", "content": said}], False, reward

    def close(self):
        pass


@pytest.mark.parametrize("how", ["tool", "tools", "odd", "huge", "nan", "surrogate", "escape"])
def test_whatever_an_environment_returns_costs_its_episode_only(how):
    with closing(make("test_environments:Unlookable", turn_s=20)) as environments:
        for key, what in (("bad", how), ("good", "none")):
            environments.begin(key, {"how": what})
        found = answers(environments, 2)
        if not found["bad"].error:
            environments.step("bad", SAYS)
            found = answers(environments, 1)
        environments.step("good", SAYS)
        assert not answers(environments, 1)["good"].error and environments.begun_again == 0
        said = found["bad"].error
        assert said and said.isprintable() and len(said) <= 300 and environments.failed == 1
        said.encode()


def test_a_process_that_does_not_read_holds_nobody_up():
    with closing(make(turn_s=2.0, workers=1)) as environments:
        environments.begin("bad", {"at_reset": "spin"})
        start = time.monotonic()
        for key in range(8):
            environments.begin(key, {"script": ["x" * 300_000]})
        assert time.monotonic() - start < 2
        found, again = {}, set()
        while len(found) < 9:
            assert time.monotonic() < start + 60
            for answer in environments.poll():
                again |= {answer.key} if answer.again else set()
                found |= {} if answer.again else {answer.key: answer}
            time.sleep(0.005)
        assert found["bad"].error and not any(found[key].error for key in range(8))


def test_reasoning_gym_s_tasks():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", seed=1, size=1)[0]
    environment = maker("reasoning_gym")()
    assert environment.reset({**entry, "prompt": entry["question"]}) is None
    assert environment.step({"role": "assistant", "content": f"Answer: {entry['answer']}"}) == ([], True, 1.0)


def test_skyrl_gym_s_environments():
    pytest.importorskip("skyrl_gym")
    environment = maker("skyrl_gym:gsm8k")()
    assert environment.reset({"prompt": "how many?", "answer": "72"}) == [{"role": "user", "content": "how many?"}]
    assert environment.step({"role": "assistant", "content": "#### 72"}) == ([], True, 1.0)
    environment.close()
    with pytest.raises(ValueError, match="expected skyrl_gym:NAME with one of"):
        maker("skyrl_gym:none")
