"""bench deal: what the trainer's first rank does with a step's groups, which all come to it and leave it as passes.

It takes each group from its inbox, deals the responses over the ranks, and sends every other rank its passes. The parts
are the real ones; groups of random tokens come from another process, and a third one takes the passes. Nothing is
trained. Lengths are log-normal, with a median of 5,000 tokens, sigma 0.6, and 16,384 at most.

- gb_s: bytes of groups that the first rank handles in a second of its main thread's time.
- step_s: those seconds for a step of 12 + 4 nodes of 8 GPUs, 96 groups of 16 responses, over 20 ranks.
- step_128_s: the same for 128 nodes, 768 groups over 160 ranks.
- fullest: tokens of the fullest of 20 ranks over their mean, if each group went straight to one of them, in turn. Drawn
  for responses whose lengths are independent, and with half of the logarithm's variance shared by a prompt's responses.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyncspec.bench.harness import Benchmark, Samples, median
from asyncspec.bench.trainer import group_of
from asyncspec.rl.batch import Part, Pool, to_message
from asyncspec.wire import messages as m
from asyncspec.wire import transport, waiting

SIZES = {"16 nodes": (96, 20), "128 nodes": (768, 160)}  # groups of a step, ranks
RESPONSES, MEDIAN, SIGMA, LONGEST, PROMPT, PASS, VOCABULARY = 16, 5000, 0.6, 16384, 200, 18432, 150_000
IN_TURN, DRAWS = {"independent": 0.0, "shared": 0.5}, 200  # see `fullest`
KINDS = 8  # groups that are made; they are sent again and again


def produce(address: str, count: int) -> None:
    """Send groups to an inbox."""
    outbox, rng, groups = transport.Outbox(address), np.random.default_rng(0), []
    for ticket in range(KINDS):
        lengths = np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, RESPONSES), 4, LONGEST).astype(int)
        group, arrays = group_of(rng, ticket, PROMPT, lengths, VOCABULARY)
        groups.append((group, arrays | {"versions": np.zeros(int(lengths.sum()), np.int32)}))
    for number in range(count):
        outbox.put(*groups[number % KINDS])
        while outbox.backlog > KINDS:
            waiting.wait([outbox], 0.01)
            outbox.flush()
    while outbox.backlog or outbox.unacknowledged:
        waiting.wait([outbox], 0.01)
        outbox.flush()


def consume(count: int, tell) -> None:
    """Take what is sent to inboxes, one for each of the other ranks."""
    inboxes = [transport.Inbox("127.0.0.1", 64, (m.Pass,)) for _ in range(count)]
    tell.put([inbox.address for inbox in inboxes])
    while True:
        waiting.wait(inboxes, 1.0)
        for inbox in inboxes:
            while inbox.take() is not None:
                pass


def dealt(groups: int, ranks: int) -> tuple[float, int]:
    """Deal a step's groups. Return the seconds of this thread that it takes, and the groups' bytes."""
    context = multiprocessing.get_context("spawn")
    inbox, tell = transport.Inbox("127.0.0.1", 64, (m.Group,)), context.SimpleQueue()
    children = [context.Process(target=consume, args=(ranks - 1, tell), daemon=True)]
    children.append(context.Process(target=produce, args=(inbox.address, groups), daemon=True))
    for child in children:
        child.start()
    outboxes = [transport.Outbox(address) for address in tell.get()]
    pool, taken, size, seconds = Pool(ranks, PASS), 0, 0, 0.0
    try:
        while taken < groups:
            waiting.wait([inbox, *outboxes], 0.05)
            began = time.thread_time()
            for outbox in outboxes:
                outbox.flush()
            while (item := inbox.take()) is not None:
                group, arrays = item[0], item[1]
                taken, size = taken + 1, size + sum(array.nbytes for array in arrays.values())
                kept = {name: array for name, array in arrays.items() if name != "versions"}
                part = Part(group.ticket.prompt_tokens, kept | {"advantages": np.ones(RESPONSES, np.float32)})
                rounds = pool.add(part)
                for passes in rounds if taken < groups else [*rounds, *pool.flush()]:
                    for rank, outbox in enumerate(outboxes, start=1):
                        outbox.put(*to_message(0, passes[rank]))
            seconds += time.thread_time() - began
    finally:
        for child in children:
            child.kill()
        for end in (inbox, *outboxes):
            end.close() if end is inbox else end.close(0)
    return seconds, size


def fullest(shared: float, seed: int) -> float:
    """Return the tokens of the fullest rank over their mean, with whole groups.

    Args:
        shared: the share of the variance that the responses to a prompt have in common.
    """
    groups, ranks = SIZES["16 nodes"]
    rng, found = np.random.default_rng(seed), []
    for _ in range(DRAWS):
        normal = np.sqrt(shared) * rng.standard_normal((groups, 1))
        normal = normal + np.sqrt(1 - shared) * rng.standard_normal((groups, RESPONSES))
        tokens = np.minimum(MEDIAN * np.exp(SIGMA * normal), LONGEST).sum(1)
        of_ranks = [tokens[rank::ranks].sum() for rank in range(ranks)]
        found.append(max(of_ranks) / (tokens.sum() / ranks))
    return float(np.mean(found))


class DealBenchmark(Benchmark):
    name = "deal"
    repeats = 5
    variants = (*SIZES, *IN_TURN)
    columns = ("gb_s", "step_s", "fullest")

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        if variant in IN_TURN:
            return {"fullest": fullest(IN_TURN[variant], repetition)}
        seconds, size = dealt(*SIZES[variant])
        return {"gb_s": size / 1e9 / seconds, "step_s": seconds}

    def headline(self, samples: Samples) -> dict[str, float]:
        first, last = SIZES
        return {
            "gb_s": median(samples, first, "gb_s"),
            "step_s": median(samples, first, "step_s"),
            "step_128_s": median(samples, last, "step_s"),
            **{f"fullest_{name}": median(samples, name, "fullest") for name in IN_TURN},
        }

    def plot(self, axes, samples: Samples) -> None:
        axes.bar(range(len(SIZES)), [median(samples, name, "step_s") for name in SIZES], tick_label=list(SIZES))
        axes.set_ylabel("seconds of the first rank's thread for a step")


def make(overrides: Sequence[str], out: Path) -> DealBenchmark:
    return DealBenchmark()
