"""All fields of a run's configuration: typed dataclasses, each field with its default, its help and its bounds.

`asyncspec train --help` prints this list. `load.py` fills it from YAML and overrides, `check.py` refuses combinations
that cannot run. This file imports no torch: reading a configuration is instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncspec.config.fields import knob, value_of

LONGEST_DRAFT = 15  # the longest draft that speculation.draft_length=auto considers


@dataclass
class ModelConfig:
    path: str = knob(
        "asset:tiny/policy", "Hugging Face directory of the policy: config.json, *.safetensors, tokenizer.json"
    )
    reference_path: str = knob("", "reference policy of the KL term; empty: the same as model.path")
    dtype: str = knob(
        "float32",
        "what policy and draft compute in; the trainer's weights, sums and optimizer stay in float32",
        choices=("float32", "bfloat16"),
    )


@dataclass
class DataConfig:
    task: str = knob("sums", "built-in task; used while data.train_file is empty", choices=("sums",))
    train_file: str = knob("", 'JSONL with "prompt" and "answer" on each line')
    eval_file: str = knob("", "JSONL of held-out prompts, for use with data.train_file; empty: no evaluation")
    train_prompts: int = knob(4096, "prompts that the built-in task makes", least=1)
    eval_prompts: int = knob(256, "held-out prompts that the built-in task makes", least=0)
    reward: str = knob("asyncspec.tasks.sums:exact_match", "module:function(prompt, response, answer) -> float")
    reward_timeout_s: float = knob(
        10.0, "seconds one reward call may take; a rollout whose reward fails gets the mean of its group", above=0
    )
    reward_failures: float = knob(0.05, "share of rollouts whose reward may fail before the run stops", least=0, most=1)


@dataclass
class SamplingConfig:
    temperature: float = knob(
        1.0,
        "temperature of rollouts, evaluations and all logprobs; 0 is not possible: rollouts are sampled",
        least=1e-3,
    )
    top_p: float = knob(1.0, "sample from the most probable tokens whose mass reaches this; 1: all", above=0, most=1)
    top_k: int = knob(0, "sample from this many most probable tokens; 0: all", least=0)
    max_response_tokens: int = knob(320, "tokens after which a rollout is cut off", least=1)


@dataclass
class EngineConfig:
    kind: str = knob(
        "torch",
        "torch: the embedded engine; vllm, sglang: see docs/engines.md; mock: waits instead of computing, see mock",
        choices=("torch", "vllm", "sglang", "mock"),
    )
    slots: int = knob(64, "sequences in flight in one generator", least=1)
    max_prompt_tokens: int = knob(
        96, "longest prompt; data with a longer one is refused before the run starts", least=1
    )
    threads: int = knob(1, "CPU threads of one generator", least=1)
    compile: bool = knob(False, "vllm: compile the policy with torch.compile")
    gpu_memory_utilization: float = knob(
        0.9, "vllm on a GPU: share of its memory that one generator takes", above=0, most=1
    )
    url: str = knob("", "sglang: the servers, http://HOST:PORT for each generator, separated by commas")
    weights_dir: str = knob(
        "",
        "sglang: directory through which generators hand weights to servers; empty: one in /dev/shm, for one host",
    )
    kv_at_swap: str = knob(
        "keep",
        "KV cache at new weights: keep goes on with the old keys and values, recompute fills them again",
        choices=("keep", "recompute"),
    )


@dataclass
class SpeculationConfig:
    method: str = knob(
        "eagle3",
        "what proposes tokens; none: autoregressive generation",
        choices=("eagle3", "mtp", "draft_model", "ngram", "suffix", "none"),
    )
    draft_length: str = knob(
        "auto", "k, tokens proposed per verification; auto: chosen at each engine step, 0 included"
    )
    draft_path: str = knob(
        "", "directory of the draft; empty: the shipped draft of the default policy; ngram and suffix need none"
    )


@dataclass
class RLConfig:
    group_size: int = knob(8, "rollouts per prompt; at least 2, since advantages compare them", least=2)
    groups_per_step: int = knob(16, "prompts per optimizer step", least=1)
    advantage: str = knob("group", "group: (r - mean) / std; mean: r - mean (Dr. GRPO)", choices=("group", "mean"))
    clip_low: float = knob(0.2, "PPO clip range below 1", above=0, below=1)
    clip_high: float = knob(0.28, "PPO clip range above 1 (DAPO's clip-higher)", above=0)
    correction: str = knob("truncated", "importance weights for the policy lag", choices=("truncated", "none"))
    correction_cap: float = knob(2.0, "C in min(pi_prox / pi_behavior, C)", least=1)
    kl_coef: float = knob(0.0, "weight of KL(policy || reference); 0 skips the reference pass", least=0)


@dataclass
class OptimizerConfig:
    lr: float = knob(2e-4, "AdamW's learning rate after warm-up", above=0, most=1)
    beta1: float = knob(0.9, "decay of AdamW's mean of gradients", least=0, below=1)
    beta2: float = knob(0.95, "decay of AdamW's mean of squared gradients", least=0, below=1)
    eps: float = knob(1e-8, "added to the root in AdamW's denominator", above=0)
    weight_decay: float = knob(0.0, "decoupled weight decay, on matrices", least=0)
    max_grad_norm: float = knob(1.0, "gradients are clipped to this norm", above=0)
    warmup_steps: int = knob(3, "steps of linear warm-up; 0: none", least=0)


@dataclass
class TrainerConfig:
    kind: str = knob(
        "torch", "mock: trainer and logprob wait instead of computing, see mock", choices=("torch", "mock")
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ranks: int = knob(1, "processes that hold and train one policy together, by FSDP", least=1)
    tensor_parallel: int = knob(1, "ranks that divide each matrix and read the same groups", least=1)
    tokens_per_pass: int = knob(
        32768,
        "tokens of one forward and backward pass, padding included; logprob's passes too; larger groups are divided",
        least=1,
        most=10**9,
    )
    recompute: bool = knob(False, "recompute activations in the backward pass: less memory, a third more work")
    threads: int = knob(1, "CPU threads of each rank", least=1)


@dataclass
class LogprobConfig:
    ranks: int = knob(1, "processes that hold the policy of one logprob actor together, by FSDP", least=1)
    tensor_parallel: int = knob(1, "ranks that divide each matrix and read the same groups", least=1)
    threads: int = knob(1, "CPU threads of each rank", least=1)


@dataclass
class DraftConfig:
    adapt: bool = knob(
        True, "train the draft on the policy's rollouts during the run: mtp in the trainer, others in the draft adapter"
    )
    lr: float = knob(3e-4, "learning rate of the draft's AdamW", above=0, most=1)
    groups_per_step: int = knob(
        4, "groups of a step that the draft adapter gets, and that may wait for it; then the oldest is dropped", least=1
    )
    bytes_per_step: int = knob(
        64_000_000, "bytes of groups of a step that the draft adapter gets", least=1, most=10**12
    )
    top_tokens: int = knob(
        512,
        "tokens kept of each target distribution, the rest of its mass as one; smaller vocabularies stay whole",
        least=0,
    )
    window: int = knob(
        0, "positions sent of each rollout, a random stretch, for long contexts; 0: all", least=0, most=10**9
    )
    publish_every: int = knob(4, "optimizer steps of the draft between two published draft versions", least=1)
    unroll: int = knob(3, "positions the draft is unrolled over in training (training-time test)", least=1)


@dataclass
class EvalConfig:
    every: int = knob(20, "steps between two evaluations; 0: only the first and the last", least=0)
    samples: int = knob(1, "rollouts per held-out prompt, at the sampling settings of training", least=1)


@dataclass
class CheckpointConfig:
    every: int = knob(20, "steps between two checkpoints, written in the background; 0: one at the end", least=0)
    keep: int = knob(2, "newest checkpoints that are kept", least=1)


@dataclass
class MockConfig:
    time_scale: float = knob(
        0.05, "seconds here for one on the mocked machines; all fields below are in theirs", above=0
    )
    gpus: int = knob(8, "GPUs that one generator stands for", least=1)
    token_s: float = knob(0.003, "seconds of a GPU's decoding step: reading the weights", above=0)
    row_s: float = knob(0.0001, "seconds that each live sequence of the GPU adds", least=0)
    acceptance: float = knob(2.77, "tokens that a verification emits", above=0)
    draft_length: int = knob(3, "k", least=0)
    draft_share: float = knob(0.266, "share of a decoding step that each proposed token adds", least=0)
    tokens_median: float = knob(6000.0, "median tokens of a response, log-normal", above=0)
    tokens_sigma: float = knob(0.6, "standard deviation of the logarithm of a response's tokens", above=0)
    tokens_max: int = knob(20480, "tokens after which a response is cut off", least=1)
    token_unit: int = knob(64, "tokens for which one is really sent", least=1)
    logprob_s: float = knob(17.9, "seconds of all groups of a step in logprob", least=0)
    train_s: float = knob(31.4, "seconds of all groups of a step in the trainer", least=0)
    prepare_s: float = knob(2.1, "seconds from a version's publication to its arrival in the generators", least=0)
    weights: int = knob(100_000, "elements really broadcast", least=1, most=10**9)


@dataclass
class DeploymentConfig:
    generators: int = knob(1, "generator actors", least=1)
    logprobs: int = knob(
        1, "logprob actors, of logprob.ranks processes each; groups are dealt to them round-robin", least=1
    )
    nodes: str = knob(
        "", "what each node plays, for example 4*trainer:4+logprob:4,12*generator:8; it also sets the counts of actors"
    )
    device: str = knob(
        "auto",
        "auto: GPUs if there are any; cpu (the default job); cuda. GPUs are dealt out to the actors in turn",
        choices=("auto", "cpu", "cuda"),
    )
    host: str = knob(
        "auto",
        "address that this host's actors bind to; auto: loopback, or the address at which other hosts reach this one",
    )
    replacements: int = knob(
        8,
        "generators, one-rank logprob actors and draft adapters started in place of dead ones, at most, between two "
        "starts of all actors",
        least=0,
    )
    restarts: int = knob(
        3,
        "times that all actors may start again from the last checkpoint because the trainer, the controller or one of "
        "several ranks died",
        least=0,
    )
    standby: int = knob(
        1,
        "with Ray: spare processes on each node with all libraries loaded, for replacements; other launchers fork",
        least=0,
    )
    encrypt: bool = knob(
        True, "encrypt the actors' sockets with keys made for the run; peers without them cannot connect"
    )
    start_timeout_s: float = knob(
        120.0,
        "seconds for an actor to come up, and again to join the broadcasts; its first heartbeat is due within it",
        above=0,
    )
    stall_timeout_s: float = knob(
        300.0, "seconds without any progress after which the run stops and says what it waited for", above=0
    )
    silent_timeout_s: float = knob(
        5.0, "seconds without a heartbeat after which a process counts as frozen, is killed and is replaced", least=1
    )
    turn_timeout_s: float = knob(
        180.0,
        "seconds that one turn of an actor's main loop may take; after that it counts as stuck and is killed",
        above=0,
    )
    stop_timeout_s: float = knob(4.0, "seconds from an interrupt to the end of every process", above=0)
    record: bool = knob(True, "record what the actors do and when, for trace.json")
    faults: str = knob(
        "", "for tests of recovery: actor:place:times:kill or freeze,...; asyncspec/faults.py lists the places"
    )
    delays: str = knob(
        "",
        "for tests of the measurement: place=seconds,...; places: generate, reward, queue, logprob, broadcast, train",
    )


@dataclass
class Config:
    steps: int = knob(120, "optimizer steps", least=1)
    policy_lag: int = knob(
        1, "versions that a rollout may be behind the policy that is trained on it; 0: synchronous", least=0
    )
    seed: int = knob(
        0,
        "random seed for the data, its order and every sample; speculation.draft_length=auto reads the clock, so runs "
        "with it are not bitwise repeatable",
        least=0,
        most=2**32 - 1,
    )
    run_dir: str = knob("", "where results go; empty: runs/<date>-<time>")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logprob: LogprobConfig = field(default_factory=LogprobConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mock: MockConfig = field(default_factory=MockConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)

    @property
    def drafting(self) -> bool:
        return self.speculation.method != "none"

    @property
    def fixed_draft_length(self) -> int | None:
        """The draft length k that every verification has: 0 without speculation, None where it is chosen (auto)."""
        if not self.drafting:
            return 0
        return None if self.speculation.draft_length == "auto" else int(self.speculation.draft_length)

    @property
    def longest_draft(self) -> int:
        """The most tokens that a verification may propose."""
        return LONGEST_DRAFT if self.fixed_draft_length is None else self.fixed_draft_length

    @property
    def adapting(self) -> bool:
        """Whether there is a draft adapter."""
        return self.draft_trainer == "draft_adapter"

    @property
    def draft_trainer(self) -> str:
        """Who trains the draft during the run: "draft_adapter", "trainer" (mtp, the policy's own module) or ""."""
        if not self.draft.adapt or self.trainer.kind == "mock":
            return ""
        trainers = {"eagle3": "draft_adapter", "draft_model": "draft_adapter", "mtp": "trainer"}
        return trainers.get(self.speculation.method, "")

    @property
    def server_urls(self) -> list[str]:
        """Addresses of the SGLang servers, one for each generator."""
        return [url.strip() for url in self.engine.url.split(",") if url.strip()]

    @property
    def draft_directory(self) -> str:
        """Where the draft's files are, as `resolve_path` reads it; "" for a method without files."""
        method = self.speculation.method
        with_files = ("eagle3", "mtp", "draft_model")
        return (self.speculation.draft_path or f"asset:tiny/{method}") if method in with_files else ""


def default_of(key: str) -> Any:
    """A configuration field's default."""
    return value_of(Config(), key)
