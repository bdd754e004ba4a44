"""The sections of a configuration that say how trainer and logprob compute, and how their ranks divide the work."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncspec.config.fields import knob
from asyncspec.config.learning import OptimizerConfig


@dataclass
class TrainerConfig:
    kind: str = knob(
        "torch",
        "torch: train; mock: trainer and logprob actors wait instead of computing, see the mock fields",
        choices=("torch", "mock"),
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ranks: int = knob(1, "processes of the trainer, which shard one policy with FSDP", least=1)
    tensor_parallel: int = knob(
        1, "trainer ranks that split each weight matrix and process the same groups; 1: no tensor parallelism", least=1
    )
    context_parallel: int = knob(
        1,
        "trainer ranks that share the tokens of each pass, so that each keeps a part of the activations; for long "
        "responses; 1: a rank has whole passes",
        least=1,
    )
    expert_parallel: int = knob(
        1,
        "trainer ranks that share out the experts of a mixture, to which they send their tokens; 1: each rank gathers "
        "all experts of a layer",
        least=1,
    )
    replicas: int = knob(
        1,
        "copies of the policy among the ranks, each sharded over ranks / replicas of them (HSDP); with one copy on "
        "each node, weights are gathered within nodes only",
        least=1,
    )
    tokens_per_pass: int = knob(
        32768,
        "maximum number of tokens of a pass in trainer and logprob; responses are packed, and a prompt counts once for "
        "all of its responses in a pass",
        least=1,
        most=10**9,
    )
    recompute: bool = knob(
        False, "recompute activations in the backward pass: saves memory, costs about a third more compute"
    )
    gradient_sync: str = knob(
        "pass",
        "when ranks add up their gradients: after each pass, or once a step, which needs memory for the whole gradient "
        "in each rank",
        choices=("pass", "step"),
    )
    reduce_dtype: str = knob("float32", "dtype in which ranks add up their gradients", choices=("float32", "bfloat16"))
    compile: bool = knob(
        False, "compile each layer except its attention with torch.compile; the first passes take longer"
    )
    threads: int = knob(1, "CPU threads of each trainer rank", least=1)


@dataclass
class LogprobConfig:
    ranks: int = knob(1, "processes of each logprob actor, which shard one policy with FSDP", least=1)
    tensor_parallel: int = knob(
        1, "logprob ranks that split each weight matrix and process the same groups; 1: no tensor parallelism", least=1
    )
    expert_parallel: int = knob(
        1, "logprob ranks that share out the experts of a mixture, as trainer.expert_parallel does", least=1
    )
    threads: int = knob(1, "CPU threads of each logprob rank", least=1)
