"""Benchmarks of one form: interleaved variants in one run, medians with spread, a table, result.json and a plot."""

from typing import NamedTuple


class Listed(NamedTuple):
    module: str
    shows: str
    minutes: int


BENCHMARKS = {
    "async": Listed("asyncspec.bench.async_", "what asynchrony hides: the default job at policy lag 0 and 1", 5),
    "engine": Listed(
        "asyncspec.bench.engine",
        "tokens a second by live sequences and draft length, and the parts of a step; beside vLLM and transformers "
        "where ASYNCSPEC_VLLM_PYTHON and ASYNCSPEC_TRANSFORMERS_PYTHON name their interpreters "
        "(scripts/compare/make_environments.sh makes both)",
        15,
    ),
    "speculation": Listed(
        "asyncspec.bench.speculation",
        "every drafter by live sequences and draft length, the default job's rollouts, and whether the automatic draft "
        "length ever loses",
        50,
    ),
    "drafts": Listed(
        "asyncspec.bench.drafts", "acceptance and speedup by where the draft comes from and whether it is adapted", 25
    ),
    "ranks": Listed("asyncspec.bench.ranks", "whether trainers of 1, 2 and 4 ranks learn alike", 15),
    "adapter": Listed(
        "asyncspec.bench.adapter", "the trainer's step beside a draft adapter that works, is slow or dies", 10
    ),
    "attribution": Listed(
        "asyncspec.bench.attribution",
        "whether time is charged to its cause: delays of known length, found again",
        10,
    ),
    "chaos": Listed("asyncspec.bench.chaos", "a hundred actors killed or frozen at random in a default run", 15),
    "fuzz": Listed(
        "asyncspec.bench.fuzz", "what is refused of a million damaged frames and a thousand damaged configurations", 5
    ),
    "soak": Listed("asyncspec.bench.soak", "memory, file descriptors and threads of each actor in a small job", 30),
    "deployment": Listed(
        "asyncspec.bench.deployment",
        "12 generating and 4 training nodes in network namespaces, with mocked GPUs, beside published figures; needs "
        "root",
        10,
    ),
}
