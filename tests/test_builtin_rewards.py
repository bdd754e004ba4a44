"""The built-in rewards, and what a program in a response cannot do."""

import os
import signal
import subprocess
import sys
import time

import pytest
from rewarders import rewards_of

from asyncspec.config import ConfigError, load
from asyncspec.config.sections import REWARDS
from asyncspec.tasks import builtin, sandbox
from asyncspec.tasks.reward import Call, Rewards
from asyncspec.tasks.rewarder import Rewarder


def reward(name, response, answer="", pattern="", **row):
    (found,) = Rewards(name, pattern=pattern).of(Call("", [response], answer, row))
    assert not found.trouble, found.trouble
    return found.number


def test_the_configuration_knows_all_names():
    assert set(REWARDS) == builtin.NAMES
    with pytest.raises(ConfigError, match="data.reward='exakt': expected exact, numeric, .*; nearest .*=exact$"):
        load("tiny", ["data.reward=exakt"])
    with pytest.raises(ConfigError, match="data.reward_pattern='': expected a regular expression"):
        load("tiny", ["data.reward=format"])
    with pytest.raises(ConfigError, match=r"data.reward_pattern='\(': .*; expected a regular expression"):
        load("tiny", ["data.reward=format", "data.reward_pattern=("])


@pytest.mark.parametrize(
    "response, answer",
    [
        ("7", "7"),
        ("3 + 4 = 7. Answer: 7", "7"),
        ("The answer is 7.", "7"),
        ("<answer>6</answer> no, <answer> 7 </answer>", "7"),
        ("so \\boxed{6}, or rather \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("Answer: 6\nAnswer: 7\n", "7"),
    ],
)
def test_the_final_answer_is_the_last_one_that_is_marked(response, answer):
    assert builtin.final_answer(response) == answer
    assert reward("exact", response, answer) == 1 and reward("exact", response, answer + "0") == 0


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        ("It costs $1,234.50", "1234.5", 1),
        ("x = 3/4", "0.75", 1),
        ("-7", "7", 0),
        ("1e3", "1000", 1),
        ("no number", "1", 0),
        ("1/0", "1", 0),
        ("Answer: 5 of 6", "#### 6", 1),
    ],
)
def test_numbers_are_compared_as_numbers(response, answer, expected):
    assert reward("numeric", response, answer) == expected


def test_math_verify_compares_what_formulas_mean():
    assert reward("math_verify", "so it is $\\frac{1}{2}$", "0.5") == 1
    assert reward("math_verify", "so it is $x + 1$", "x+2") == 0
    assert reward("math_verify", "\\boxed{(1, 2)}", "\\boxed{(1,2)}") == 1


def test_a_format_is_the_whole_response():
    pattern = "<think>.*</think>\\s*<answer>.*</answer>"
    assert reward("format", "<think>a\nb</think>\n<answer>1</answer>\n", pattern=pattern) == 1
    assert reward("format", "well, <think>a</think><answer>1</answer>", pattern=pattern) == 0


def test_reasoning_gym_scores_its_own_problems():
    gym = pytest.importorskip("reasoning_gym")
    (entry,) = gym.create_dataset("chain_sum", size=1, seed=1)

    def score(response):
        (found,) = Rewards("reasoning_gym").of(Call("", [response], entry["answer"], entry))
        return found.number

    assert score(f"Answer: {entry['answer']}") == 1 and score("nothing") < 0.1


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"data.reward='reasoning_gym': .*; expected what .*asyncspec\[tasks\]"):
        Rewards("reasoning_gym")


def test_a_program_must_pass_its_tests():
    right = "I write\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    assert reward("code", right, "assert double(2) == 4") == 1
    assert reward("code", right.replace("2 *", "3 *"), "assert double(2) == 4") == 0
    cases = '{"inputs": ["2\\n", "5"], "outputs": ["4\\n", "10"]}'
    assert reward("code", "print(int(input()) * 2)", cases) == 1
    assert reward("code", "print(int(input()) * 2); exit()", cases) == 1
    assert reward("code", "print(4)", cases) == 0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "open('MARK', 'w')",
        "import os; os.open('MARK', os.O_CREAT)",
        "import os; os.unlink('MARK')",
        "import os; os.rename('MARK', 'MARK.1')",
        "import os; os.mkdir('MARK.d')",
        "import os; os.chmod('MARK', 0)",
        "import os; os.truncate('MARK', 0)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['ls'])",
        "import os; os.execv('/bin/ls', ['ls'])",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; assert ctypes.CDLL(None).system(b'touch MARK.2') == 0",
        "x = ' ' * (2 << 30)",
        "print('x' * (4 << 20))",
        "import multiprocessing; multiprocessing.Pool(1)",
        "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",  # so as not to end with its parent
    ],
)
def test_a_program_in_a_response_can_change_and_reach_nothing(program, tmp_path):
    mark = tmp_path / "mark"
    mark.write_text("mark")
    before = mark.stat()
    assert reward("code", program.replace("MARK", str(mark)), "") == 0
    assert os.listdir(tmp_path) == ["mark"] and mark.read_text() == "mark" and mark.stat().st_mode == before.st_mode


def test_a_program_may_compute_with_threads_and_read():
    program = (
        "import threading, math; t = threading.Thread(target=print); t.start(); t.join(); open('/dev/null').read()"
    )
    assert reward("code", program, "assert math.sqrt(4) == 2") == 1


def test_a_program_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(builtin, "PROGRAM_S", 1)
    for program in "while True: pass", "import time; time.sleep(60)", "import threading; threading.Event().wait()":
        begun = time.monotonic()
        assert reward("code", program) == 0 and time.monotonic() - begun < 10


def test_a_program_ends_with_its_reward_process():
    rewarder = Rewarder("code", 60, 0.5, 120)
    rewarder.load()
    rewarder.submit("it", "", ["import time; time.sleep(600)"], "")
    deadline = time.monotonic() + 20
    while not (running := _sandboxes()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(rewarder._places[0].worker._process.pid, signal.SIGKILL)
    while rewarder.waiting:
        rewarder.poll()
    while _sandboxes() & running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert rewards_of(rewarder, "", ["pass"], "") == [1]
    rewarder.close()


def test_a_sleeping_program_ends_with_a_parent_that_is_killed():
    script = "from asyncspec.tasks.builtin import run_program; run_program('import time; time.sleep(600)', '')"
    before = _sandboxes()
    parent = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 30
    while not (running := _sandboxes() - before):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    while _sandboxes() & running:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _sandboxes():
    """The processes of this test that run the sandbox."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if os.fsencode(sandbox.__file__) in file.read():
                    found.add(int(pid))
        except OSError:
            continue
    return found
