"""Attribution: charges sum to waits, parts sum to steps, and causes are the right ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.messages import GroupRecord, Phase, Span, Wait
from asyncspec.timing.attribution import CAUSES, attribute, break_down, covered
from asyncspec.timing.exporters import TraceFile

PHASES = [Phase("weights", 1.0, 2.0), Phase("queued", 2.0, 2.5), Phase("generate", 2.5, 6.0), Phase("reward", 6.0, 6.2),
          Phase("logprob_weights", 6.5, 6.7), Phase("logprob_queue", 6.7, 7.0), Phase("logprob", 7.0, 8.0)]


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
    expected = sum(max(0.0, min(end, p.end) - max(start, p.start)) for p in phases if CAUSES[p.name] == "exposed_generation")
    assert attribute(Wait(0, start, end), phases)["exposed_generation"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("start,end,expected", [
    (3.0, 5.0, {"exposed_generation": 2.0}),
    (7.2, 8.5, {"exposed_logprob": 0.8, "transport": 0.5}),
    (6.2, 6.5, {"transport": 0.3}),  # on its way from generator to logprob
    (0.0, 3.0, {"admission": 1.0, "prepare": 1.0, "exposed_generation": 1.0}),  # before its ticket was issued, and for its weights
    (5.0, 8.0, {"exposed_generation": 1.0, "exposed_reward": 0.2, "transport": 0.3, "prepare": 0.2, "exposed_logprob": 1.3}),
])
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


def test_the_trace_is_valid_and_cut_short_still_nearly_so(tmp_path):
    trace = TraceFile(tmp_path)
    trace.write("generator0", [Span("generate", 1.0, 2.0, version=3), Span("swap policy", 2.0, 2.1, version=4)])
    trace.write_group(5, GroupRecord(7, "generator0", 0.5, True, [3, 4], 3, 4, 4, 2, 6, 3, 0, 0, PHASES))
    trace._file.flush()
    assert json.loads((tmp_path / "trace.json").read_text() + "]")
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"generator0", "tickets"}
    slices = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in slices] == ["generate", "swap policy"] and slices[0]["dur"] == 1e6
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == 1 + len(PHASES)
