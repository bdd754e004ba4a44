"""How vLLM's draft length is chosen: against an engine with known times and a known acceptance, without vLLM."""

import subprocess
import sys
from collections import deque

import numpy as np
import pytest

from asyncspec.engine import vllm_length
from asyncspec.engine.vllm_length import VllmLength
from asyncspec.speculation.draft_length import LENGTHS

ACCEPTED = 0.7  # of the proposals at each place


class PacedEngine:
    """A step verifies what the step before proposed. Its time follows from both lengths; the clock is its own."""

    def __init__(self, slots, base_s, per_token_s, in_flight):
        self.table, self.per_token_s, self.base_s = [0] * (slots + 1), per_token_s, base_s
        self.now, self.verifies, self.live, self.flight = 0.0, 0, 0, deque()
        self.in_flight, self.random = in_flight, np.random.default_rng(7)

    def step(self):
        """Schedule a step; return the one whose tokens come: (length set for it, verified, new tokens)."""
        proposes, verifies = self.table[-1], self.verifies
        self.verifies = proposes
        refused = self.random.random((self.live, verifies + 1)) > ACCEPTED
        refused[:, -1] = True  # the token after the last proposal is the policy's own
        new = (1 + refused.argmax(1)).tolist()
        self.flight.append((proposes, verifies, new))
        if len(self.flight) <= self.in_flight:
            return None
        done = self.flight.popleft()
        # the draft's passes and the verification, each a token a row
        self.now += self.base_s + self.per_token_s * self.live * (done[0] + done[1])
        return done

    def begin(self, live):
        self.live = live

    def end(self):
        self.live = 0


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("per_token_s, best", [(0.02e-3, {4, 5, 7, 10}), (8e-3, {0}), (0.4e-3, {2})])
def test_the_chosen_length_is_the_one_that_gives_most_tokens_a_second(monkeypatch, in_flight, per_token_s, best):
    live, engine = 4, PacedEngine(4, 10e-3, per_token_s, in_flight)
    monkeypatch.setattr(vllm_length.time, "perf_counter", lambda: engine.now)
    lengths = VllmLength(engine.table, 4)
    lengths.calibrate(engine.begin, engine.step, engine.end, looks_up=False)
    engine.begin(live)
    began, chosen = engine.now, []
    for _ in range(1500):
        lengths.choose(live)
        chosen.append(lengths.k)
        since = engine.now
        if (step := engine.step()) is None:
            continue
        proposes, verified, new = step
        names = [str(row) for row in range(live)]
        lengths.observe(engine.now - since, proposes, dict.fromkeys(names, verified), dict(zip(names, new)), usual=True)
    rates = {k: (1 + sum(ACCEPTED**j for j in range(1, k + 1))) / (10e-3 + per_token_s * live * 2 * k) for k in LENGTHS}
    assert max(rates, key=rates.get) in best
    late = chosen[500:]
    achieved = np.mean([rates[k] for k in late]) / max(rates.values())
    assert achieved > 0.93, (achieved, {k: late.count(k) for k in sorted(set(late))})
    assert engine.now > began


def test_a_lookup_that_finds_less_costs_less(monkeypatch):
    engine = PacedEngine(4, 10e-3, 0.2e-3, 0)
    monkeypatch.setattr(vllm_length.time, "perf_counter", lambda: engine.now)
    costs = {}
    for looks_up in (True, False):
        lengths = VllmLength(engine.table, 4)
        lengths.calibrate(engine.begin, engine.step, engine.end, looks_up)
        costs[looks_up] = lengths.chooser.calibration.at(4).seconds(np.array([15, 15]), np.array([15.0, 5.0]))
    # here a proposal costs 0.4 ms a row, as if all of it were for verifying
    assert costs[True] == pytest.approx([10e-3 + 4 * 15 * 0.4e-3, 10e-3 + 4 * 5 * 0.4e-3], rel=0.01)
    assert costs[False] == pytest.approx([10e-3 + 4 * 15 * 0.4e-3, 10e-3 + 4 * 10 * 0.4e-3], rel=0.01)


def test_a_draft_is_worth_no_more_than_what_is_left_of_a_response(monkeypatch):
    engine = PacedEngine(4, 10e-3, 0.02e-3, 0)
    monkeypatch.setattr(vllm_length.time, "perf_counter", lambda: engine.now)
    lengths = VllmLength(engine.table, 4)
    lengths.calibrate(engine.begin, engine.step, engine.end, looks_up=False)
    for _ in range(300):  # all proposals are right, and each response ends after 4 tokens
        k, names = lengths.choose(4), "abcd"
        lengths.observe(10e-3, k, dict.fromkeys(names, k), dict.fromkeys(names, min(1 + k, 4)), usual=True)
    tokens_K = lengths.chooser._tokens()
    assert 3.5 < tokens_K[3] < 4.1 and tokens_K[10] < 4.5, tokens_K


def test_each_living_process_has_a_directory_of_its_own_for_what_vllm_compiles(tmp_path):
    code = (
        "import os, sys\n"
        "from asyncspec.engine.vllm_process import use_own_caches\n"
        "use_own_caches(); use_own_caches()\n"
        "print(os.environ['VLLM_CACHE_ROOT'], flush=True); sys.stdin.read()"
    )

    def started():
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "", "TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        )
        return process, process.stdout.readline().strip()

    first, first_root = started()
    second, second_root = started()
    assert first_root.startswith(str(tmp_path)) and first_root != second_root
    first.communicate()
    third, third_root = started()
    assert third_root == first_root
    for process in (second, third):
        process.communicate()
