"""A user's reward function may raise, hang, end its process or return nonsense. Such failures affect only their own
rollout and are counted; beyond an allowed share they stop the run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rewarders import done, rewards_of
from runs import descendants, outliving

from asyncspec.config import ConfigError, load
from asyncspec.tasks.reward import Call, Reward, Rewards
from asyncspec.tasks.rewarder import LEAST_FAILURES, Rewarder, RewardError

FUNCTION = """
import ctypes, os, signal, subprocess, sys, threading, time

def reward(prompt, response, answer):
    match response:
        case "raise":
            raise KeyError("missing")
        case "raise half a pair":
            raise ValueError("\\ud800")
        case "exit":
            raise SystemExit(3)
        case "nan":
            return float("nan")
        case "text":
            return "much"
        case "lines":
            return type("Lines", (), {"__repr__": lambda self: "two\\nlines \\ud800"})()
        case "large":
            return 10**400
        case "nothing":
            return None
        case "hang":
            time.sleep(600)
        case "end":
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "close":
            os.closerange(3, 64)
        case "print":
            print("x" * 100_000)
            os.write(1, b'[7, ""]\\n' * 1000)
            subprocess.run(["echo", '[7, ""]'])
    return float(response == answer)

def alarmed(prompt, response, answer):
    def stop(signal, frame):
        raise TimeoutError("too long")
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        if response == "long":
            time.sleep(600)
        return float(threading.current_thread() is threading.main_thread())
    except TimeoutError:
        return -1.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

def parent(prompt, response, answer):
    if response == "child":
        return subprocess.Popen(["sleep", "600"]).pid
    if response == "fork":  # it inherits everything that its parent has open
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()

def slow(prompt, response, answer):
    time.sleep(0.5)
    return float(response)

def where(prompt, response, answer):
    return float(response == os.getcwd() and answer in sys.path and "torch" not in sys.modules)
"""
FORMS = """
import asyncio, time

async def trl(prompts, completions, level, **rest):
    await asyncio.sleep(0)
    if "hang" in completions[0]:
        time.sleep(600)
    if "short" in completions[0]:
        return [1.0]
    text = [each[0]["content"] if isinstance(each, list) else each for each in completions]
    assert prompts == [prompts[0]] * len(text) and sorted(rest) == ["answer"]
    return [None if each == "skip" else float(each) + of for each, of in zip(text, level)]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth) + (extra_info or {}).get("more", 0), "source": data_source}

def length(prompt, response, answer):
    return len(response)
"""
START_S = 120  # for a busy machine


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Callable(name, further arguments of Rewarder) -> a Rewarder of one of the functions above."""
    (tmp_path / "mine.py").write_text(FUNCTION + FORMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name="reward", timeout_s=60.0, most_failures=0.5, **options):
        names = ",".join(f"mine:{each}" for each in name.split(","))
        made.append(Rewarder(names, timeout_s, most_failures, START_S, **options))
        made[-1].load()
        return made[-1]

    yield make
    for rewarder in made:
        rewarder.close()


@pytest.mark.parametrize(
    "function, expected",
    [
        ("async def f(prompt, response, answer):\n    return 1.0", ""),
        ("def f(prompt, response, answer):\n    yield 1.0", "is a generator"),
        ("class C:\n    async def __call__(self, *texts):\n        return 1.0\nf = C()", ""),
        ("def f(prompts, completions, **kwargs):\n    return [1.0]", ""),
        ("def f(completions, completion_ids):\n    return [1.0]", "its parameter completion_ids is not passed"),
        ("def f(solution_str, tokens):\n    return 1.0", "its parameter tokens is not passed"),
        ("def f(prompt):\n    return 1.0", "too many positional arguments"),
        ("def f(*texts):\n    return 1.0", ""),
        ("class f:\n    def __init__(self, *texts): ...\n    def __float__(self): return 1.0", ""),
    ],
)
def test_a_function_of_no_known_form_is_refused_when_it_is_loaded(tmp_path, monkeypatch, function, expected):
    name = f"mine{abs(hash(function))}"
    (tmp_path / f"{name}.py").write_text(function)
    monkeypatch.syspath_prepend(str(tmp_path))
    if not expected:
        assert Reward(f"{name}:f", ["answer"]).of(Call("a", ["b"], "c", {})) == [(1.0, "")]
        return
    with pytest.raises(ValueError) as caught:
        Reward(f"{name}:f", ["answer"])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_trls_form_gets_all_columns_of_a_group_at_once(make):
    row = json.dumps({"prompt": [{"role": "user", "content": "1?"}], "answer": "1", "level": 2})
    rewarder = make("trl")
    assert rewards_of(rewarder, "1?", ["1", "skip", "3"], "1", row) == [3, 4, 5] and rewarder.failed == 0
    assert rewards_of(rewarder, "1?", ["skip", "skip"], "1", row) == [0, 0] and rewarder.failed == 0
    text = json.dumps({"prompt": "1?", "answer": "1", "level": 2})
    assert rewards_of(rewarder, "1?", ["1", "3"], "1", text) == [3, 5]
    assert rewards_of(rewarder, "1?", ["short", "1"], "1", text) == [0, 0] and rewarder.failed == 2
    assert rewarder.first_failure.startswith("returned 1 rewards for 2 completions")


def test_a_call_for_a_group_that_hangs_fails_once_for_all(make):
    rewarder = make("trl", timeout_s=2)
    row = json.dumps({"prompt": "1?", "answer": "1", "level": 0})
    rewarder.load()
    begun = time.monotonic()
    assert rewards_of(rewarder, "1?", ["hang", "1", "2", "3"], "1", row) == [0] * 4 and rewarder.failed == 4
    assert time.monotonic() - begun < 2 * 2 + 3  # four deadlines would be 8 s
    assert rewards_of(rewarder, "1?", ["1"], "1", row) == [1]


def test_verls_form_gets_its_layout(make):
    row = {"data_source": "s", "reward_model": {"ground_truth": "2"}, "extra_info": {"more": 3}}
    assert rewards_of(make("verl"), "1+1=", ["2", "3"], "2", json.dumps(row)) == [4, 3]
    assert rewards_of(make("verl"), "1+1=", ["2", "3"], "2") == [1, 0]


def test_of_several_rewards_the_weighted_sum_counts(make):
    rewarder = make("verl,length", weights=[1.0, 0.5])
    assert rewards_of(rewarder, "1+1=", ["2", "33"], "2") == [1.5, 1]
    row = json.dumps({"prompt": "1?", "answer": "2", "level": 0})
    assert rewards_of(make("trl,length"), "1?", ["2", "skip"], "2", row) == [3, 4]  # what does not apply is left out
    assert Rewards("asyncspec.tasks.sums:exact_match").of_groups is False
    with pytest.raises(ConfigError, match="data.reward_weights='1': expected 2 finite numbers, one for each reward"):
        load("tiny", ["data.reward=a:f,b:g", "data.reward_weights=1"])


def test_the_first_failure_is_kept_for_the_user(make):
    rewarder = make(timeout_s=30.0)
    rewards_of(rewarder, "", ["raise", "nan"], "")
    assert rewarder.first_failure.startswith("raised KeyError") and "response 'raise'" in rewarder.first_failure


@pytest.mark.parametrize("bad", ["raise", "raise half a pair", "exit", "nan", "text", "large", "end", "crash", "close"])
def test_a_failing_reward_teaches_nothing_and_is_counted(bad, make):
    rewarder = make()
    assert rewards_of(rewarder, "1+1=", ["2", "3", bad, "2"], "2") == pytest.approx([1, 0, 2 / 3, 1])
    assert rewards_of(rewarder, "1+1=", [bad, bad], "2") == [0, 0]
    assert rewards_of(rewarder, "1+1=", ["2"], "2") == [1]  # it still works
    assert (rewarder.failed, rewarder.called) == (3, 7)


def test_a_reward_that_hangs_is_killed(make):
    before = set(descendants(os.getpid()))
    rewarder = make(timeout_s=2)
    (hung,) = set(descendants(os.getpid())) - before
    assert rewards_of(rewarder, "1+1=", ["hang", "2"], "2") == [1, 1] and rewarder.failed == 1
    assert not outliving([hung])


def test_a_slow_reward_holds_up_nobody(make):
    """Eight groups of eight rewards, half a second each: 32 seconds in one process."""
    rewarder = make("slow", workers=8)
    begun, longest = time.monotonic(), 0.0
    for group in range(8):
        rewarder.submit(group, "", [str(group)] * 8, "")
    found = {}
    while rewarder.waiting:
        polled = time.monotonic()
        found |= rewarder.poll()
        longest = max(longest, time.monotonic() - polled)
        time.sleep(0.01)
    assert found == {group: [float(group)] * 8 for group in range(8)}
    assert time.monotonic() - begun < 24 and longest < 0.4  # starting a process takes some milliseconds
    rewarder.submit("next", "", ["3"] * 8, "")  # now eight processes are idle, and share the group
    begun = time.monotonic()
    assert done(rewarder) == {"next": [3.0] * 8} and time.monotonic() - begun < 3


def test_a_hanging_reward_delays_no_other_group(make):
    rewarder = make(timeout_s=4, workers=2)
    rewarder.submit("hangs", "1+1=", ["hang", "2"], "2")
    rewarder.submit("works", "1+1=", ["2", "3"], "2")
    begun = time.monotonic()
    while (found := rewarder.poll()) == []:
        time.sleep(0.01)
    assert found == [("works", [1, 0])] and time.monotonic() - begun < 4
    assert done(rewarder) == {"hangs": [1, 1]} and rewarder.failed == 1


def test_a_process_that_ends_while_it_has_nothing_to_do_is_replaced(make):
    rewarder = make("parent")
    (before,) = rewards_of(rewarder, "", ["self"], "")
    os.kill(int(before), signal.SIGKILL)
    time.sleep(0.2)
    rewarder.poll()
    (after,) = rewards_of(rewarder, "", ["self"], "")
    assert after != before and rewarder.failed == 0


def test_a_reward_may_use_signals_because_it_runs_in_the_main_thread_of_its_process(make):
    rewarder = make("alarmed")
    assert rewards_of(rewarder, "", ["short", "long", "short"], "") == [1, -1, 1] and rewarder.failed == 0


def test_what_a_reward_prints_cannot_be_taken_for_an_answer(make, capfd):
    rewarder = make()
    assert rewards_of(rewarder, "1+1=", ["print", "2", "print"], "2") == [0, 1, 0] and rewarder.failed == 0
    rewarder.close()
    assert capfd.readouterr().out.count('[7, ""]') == 2002


def test_a_reward_sees_this_directory_and_this_module_path_and_no_torch(make, tmp_path):
    assert rewards_of(make("where"), "", [os.getcwd()], str(tmp_path)) == [1]


def test_the_process_and_its_children_end_with_the_rewarder(make):
    rewarder = make("parent")
    pids = [int(pid) for pid in rewards_of(rewarder, "", ["self", "child"], "")]
    assert len(set(pids)) == 2 and os.getpid() not in pids
    rewarder.close()
    assert not outliving(pids)


def test_a_death_is_noticed_though_a_child_holds_the_connection_open(make):
    rewarder = make("parent")
    (before,) = rewards_of(rewarder, "", ["self"], "")
    assert rewards_of(rewarder, "", ["fork"], "") == [0] and rewarder.failed == 1
    (after,) = rewards_of(rewarder, "", ["self"], "")
    assert after != before


def test_the_process_ends_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    program = (
        "import time\n"
        "from asyncspec.tasks.reward_worker import RewardWorker\n"
        "worker = RewardWorker('mine:reward')\n"
        f"worker.wait_until_loaded({START_S})\n"
        "print(worker._process.pid, flush=True)\n"
        "worker.ask('', ['hang'], '')\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"},
    )
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert not outliving([pid])


def test_more_failures_than_allowed_stop_the_run_with_one_line(make):
    rewarder = make(most_failures=0.1)
    for _ in range(200):
        rewards_of(rewarder, "1+1=", ["2"], "2")
    with pytest.raises(
        RewardError,
        match=r"data.reward=mine:reward: failed for 2\d of 2\d\d rollouts, more than data.reward_failures=0.1 allows; "
        r"the last raised KeyError: 'missing', response 'raise'",
    ):
        for _ in range(100):
            rewards_of(rewarder, "1+1=", ["raise"], "2")
    for bad, trouble in ("end", "ended its process with exit code 3"), ("lines", "returned two"):
        few = make(most_failures=0.0)
        for _ in range(LEAST_FAILURES):
            rewards_of(few, "1+1=", ["raise"], "2")
        with pytest.raises(RewardError, match=f"the last {trouble}, response '{bad}'; "):
            rewards_of(few, "1+1=", [bad], "2")


@pytest.mark.parametrize(
    "content,expected",
    [
        ("import nothing.there", "ModuleNotFoundError: No module named 'nothing'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os\nos._exit(0)", "ended its process with exit code 0 while it was imported"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended its process with SIGSEGV while it was"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise ValueError('two\\nlines \\ud800')", "ValueError: two"),
        ("def other(): ...", "has no attribute 'reward'"),
        ("reward = 3", "naming something that can be called"),
    ],
)
def test_a_function_that_cannot_be_loaded_gives_one_line(content, expected, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    rewarder = Rewarder("broken:reward", 60, 0.5, START_S)
    with pytest.raises(RewardError, match="^data.reward='broken:reward': ") as caught:
        rewarder.load()
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    rewarder.close()


def test_a_function_that_loads_for_too_long_is_refused(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    rewarder = Rewarder("slow:reward", 60, 0.5, 1.0)
    with pytest.raises(RewardError, match="took more than 1 s while it was imported; .*deployment.start_timeout_s=1"):
        rewarder.load()
    rewarder.close()
