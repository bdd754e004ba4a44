"""Benchmarks of one form: variants interleaved in one run, medians with spread, a table, result.json and a plot."""

from typing import NamedTuple


class Listed(NamedTuple):
    """How `asyncspec bench --help` lists a benchmark: its module, what it shows, and the minutes it takes."""

    module: str
    shows: str
    minutes: int


BENCHMARKS = {
    "async": Listed(
        "asyncspec.bench.async_", "how much generation time asynchrony hides: the default job at policy lag 0 and 1", 5
    ),
    "engine": Listed(
        "asyncspec.bench.engine",
        "tokens per second by live sequences and draft length, and the parts of a step; compared with vLLM and "
        "transformers if ASYNCSPEC_VLLM_PYTHON and ASYNCSPEC_TRANSFORMERS_PYTHON name their interpreters "
        "(scripts/compare/make_environments.sh makes both)",
        15,
    ),
    "vllm": Listed(
        "asyncspec.bench.vllm",
        "vLLM's generation with draft lengths that are fixed, chosen or none; its environment is made unless "
        "ASYNCSPEC_VLLM_PYTHON names its interpreter",
        40,
    ),
    "speculation": Listed(
        "asyncspec.bench.speculation",
        "every drafter by live sequences and draft length, the default job's rollouts, and whether the automatic draft "
        "length ever loses to a fixed one or to no speculation",
        50,
    ),
    "drafts": Listed(
        "asyncspec.bench.drafts",
        "acceptance and speedup by what the draft was trained on and whether it is adapted online",
        25,
    ),
    "ranks": Listed("asyncspec.bench.ranks", "whether trainers of 1, 2 and 4 ranks learn equally well", 15),
    "learning": Listed(
        "asyncspec.bench.learning",
        "whether speculation and the policy lag change what is learned: curves, the difference and its interval",
        60,
    ),
    "end_to_end": Listed(
        "asyncspec.bench.end_to_end",
        "the time to a held-out accuracy: synchronous and asynchronous, with and without speculation, in two settings",
        45,
    ),
    "peers": Listed(
        "asyncspec.bench.peers",
        "the default job beside TRL's GRPOTrainer: seconds a step, and to a held-out accuracy; TRL's environment is "
        "made unless ASYNCSPEC_TRL_PYTHON names its interpreter",
        40,
    ),
    "what_if": Listed(
        "asyncspec.bench.what_if", "whether a run that is replayed with a change tells what the change gives", 20
    ),
    "published": Listed(
        "asyncspec.bench.published",
        "the simulator's predictions and their ranges, beside published results; --cells FILE compares more",
        5,
    ),
    "calibration": Listed(
        "asyncspec.bench.calibration",
        "whether the simulator, fitted to one run on this machine, predicts runs with other settings",
        10,
    ),
    "algorithms": Listed(
        "asyncspec.bench.algorithms",
        "whether each loss, off-policy correction and way to take a step learns the default job",
        75,
    ),
    "publish": Listed(
        "asyncspec.bench.publish", "whether weights arrive while the trainer computes, and do not slow it", 3
    ),
    "trainer": Listed("asyncspec.bench.trainer", "packed passes with shared prompts, against padded passes", 5),
    "context": Listed(
        "asyncspec.bench.context", "the memory of trainer ranks that share a sequence of up to 65,536 tokens", 15
    ),
    "deal": Listed(
        "asyncspec.bench.deal", "what the trainer's first rank does with a step's groups, on 16 and 128 nodes", 2
    ),
    "memory": Listed(
        "asyncspec.bench.memory", "what doctor says that an actor needs, against what its process held", 8
    ),
    "controller": Listed(
        "asyncspec.bench.controller", "what the controller does for 130, 1,000 and 8,000 actors, played by stubs", 5
    ),
    "adapter": Listed(
        "asyncspec.bench.adapter", "the trainer's step with a draft adapter that works, is slow or dies", 10
    ),
    "rewards": Listed("asyncspec.bench.rewards", "generation beside a slow reward, against one that costs nothing", 3),
    "environments": Listed(
        "asyncspec.bench.environments",
        "generation beside tools that take their time, or never return, against the same episodes without tools",
        7,
    ),
    "attribution": Listed(
        "asyncspec.bench.attribution",
        "whether time is charged to its cause: known delays are injected and looked for",
        10,
    ),
    "chaos": Listed(
        "asyncspec.bench.chaos",
        "a default run in which actors are killed, freeze or raise at random, a hundred times",
        15,
    ),
    "fuzz": Listed(
        "asyncspec.bench.fuzz", "whether a million damaged frames and a thousand damaged configurations are refused", 5
    ),
    "soak": Listed(
        "asyncspec.bench.soak", "growth of memory, file descriptors and threads of each actor in a small job", 30
    ),
    "deployment": Listed(
        "asyncspec.bench.deployment",
        "12 generating and 4 training nodes in network namespaces, with mocked GPUs, compared with published figures; "
        "needs root",
        10,
    ),
}
