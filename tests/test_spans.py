"""Spans: what an actor did, and when, on the host and on a GPU; and the delays that are injected on purpose."""

import pytest
import torch

from asyncspec.timing import delays
from asyncspec.timing.spans import Recorder
from asyncspec.wire.messages import Span


def test_spans_stay_in_order_even_if_drained_while_open():
    recorder = Recorder()
    with recorder.span("outer", 3, 7, 1):
        with recorder.span("inner"):
            pass
        assert [span.name for span in recorder.drain()] == ["inner"]

    (outer,) = recorder.drain()
    assert (outer.name, outer.step, outer.ticket, outer.version) == ("outer", 3, 7, 1) and outer.start <= outer.end
    silent = Recorder(False)
    with silent.span("nothing"):
        silent.add("nothing", 0, 1)
    assert silent.drain() == []


class MockGpu:
    """A stand-in for a GPU's stream: pieces of work run one after the other, and the host does not wait."""

    def __init__(self):
        self.time = self.free_at = 100.0  # the host's clock in seconds; when all given work is done

    def work(self, seconds):
        self.free_at = max(self.free_at, self.time) + seconds

    def record(self):
        return MockEvent(self, max(self.free_at, self.time))


class MockEvent:
    def __init__(self, gpu, at):
        self.gpu, self.at = gpu, at

    def query(self):
        self.gpu.time += 1e-6  # a query takes the host 1 us
        return self.at <= self.gpu.time

    def elapsed_time(self, later):
        assert self.query() and later.query()  # torch's method would raise here
        return (later.at - self.at) * 1e3


def test_gpu_spans_show_when_the_gpu_worked_and_never_block_the_host(monkeypatch):
    gpu, recorder = MockGpu(), Recorder()
    monkeypatch.setattr("asyncspec.timing.spans.now", lambda: gpu.time)
    recorder.use("cuda:0", gpu.record)
    with recorder.span("train", 3, 7, 2):
        gpu.work(2.0)
        gpu.time += 0.1
    mark = recorder.mark()
    gpu.work(1.0)
    gpu.time += 0.1
    recorder.add("logprob", 100.1, 100.2, since=mark)
    train, logprob = recorder.drain()  # the GPU is still busy with the first
    assert (train.name, train.start, train.end, train.device) == (
        "train",
        100.0,
        pytest.approx(100.1),
        "",
    ) and logprob.device == ""
    gpu.time = 102.5
    (train,) = recorder.drain()
    assert (train.name, train.step, train.ticket, train.version, train.device) == ("train", 3, 7, 2, "cuda:0")
    assert (train.start, train.end) == (100.0, pytest.approx(102.0))
    gpu.time = 104.0
    (logprob,) = recorder.drain()
    assert (logprob.start, logprob.end) == (pytest.approx(102.0), pytest.approx(103.0))
    gpu.work(3.0)  # outside any span
    assert recorder.drain() == []
    with recorder.span("later"):
        gpu.work(0.5)
    gpu.time = 110.0
    host, later = recorder.drain()
    assert (later.device, later.start, later.end) == ("cuda:0", pytest.approx(107.0), pytest.approx(107.5))
    with recorder.span("last"):  # starts at its own event, not at the first event of the run
        gpu.work(0.5)
    gpu.time = 115.0
    assert [(span.start, span.end) for span in recorder.drain()] == [
        (pytest.approx(110.0),) * 2,
        (pytest.approx(110.0), pytest.approx(110.5)),
    ]


def test_a_failed_gpu_does_not_keep_an_actor_from_reporting():
    class Failed(MockEvent):
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu, recorder = MockGpu(), Recorder()
    recorder.use("cuda:0", lambda: Failed(gpu, 0.0))
    with recorder.span("train"):
        mark = recorder.mark()
    assert [span.name for span in recorder.drain()] == ["train"]
    with recorder.span("after"):
        recorder.add("train", 1.0, 2.0, since=mark)
    assert [span.name for span in recorder.drain()] == ["train", "after"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_spans_of_a_real_gpu_last_as_long_as_its_work():
    recorder = Recorder()
    recorder.use("cuda:0")
    with recorder.span("work"):
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    (host,) = recorder.drain()
    torch.cuda.synchronize()
    (gpu,) = recorder.drain()
    assert host.end - host.start < 0.02 < gpu.end - gpu.start < 1.0 and abs(gpu.start - host.start) < 0.02


@pytest.mark.parametrize(
    "text,message",
    [
        ("nowhere=1", "is not one of generate"),
        ("train=soon", "not a number"),
        ("train=-1", "not a duration of 0 or more"),
    ],
)
def test_a_delay_must_have_a_place_and_a_time(text, message):
    with pytest.raises(ValueError, match=message):
        delays.parse(text)
    assert delays.parse("train=0.5, queue=1") == [("", "train", 0.5), ("", "queue", 1.0)]


def test_a_delay_may_be_one_actors_only():
    text = "trainer:train=2,train=0.5,trainer_rank1:checkpoint=8"
    assert delays.of_actor(text, "trainer") == {"train": 2.0}
    assert delays.of_actor(text, "trainer_rank1") == {"train": 0.5, "checkpoint": 8.0}


def test_a_delay_is_a_span_of_what_it_held_up(monkeypatch):
    time = [10.0]
    monkeypatch.setattr(delays, "now", lambda: time[0])
    monkeypatch.setattr("time.sleep", lambda seconds: time.append(time.pop() + seconds))
    recorder = Recorder()
    delay = delays.Delays("reward=0.5,broadcast=2", recorder)
    delay("train", ticket=3)
    delay("reward", 4, ticket=3)
    delay("broadcast", version=6)
    assert recorder.drain() == [
        Span("delay reward", 10.0, 12.0, ticket=3),
        Span("delay broadcast", 12.0, 14.0, version=6),
    ]
