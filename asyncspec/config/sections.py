"""The sections of a configuration: typed dataclasses whose fields carry their default, help text and bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncspec.config.fields import knob


@dataclass
class LoraConfig:
    rank: int = knob(
        0,
        "rank of the low-rank adapters (LoRA) that are trained, and published, in the place of the policy's weights; "
        "0: the weights themselves",
        least=0,
    )
    alpha: float = knob(32.0, "scale of the adapters: what they add counts alpha / rank times", above=0)
    target_modules: str = knob(
        "all-linear",
        "the matrices that have adapters: all of each layer; or only those of attention, or of the feed-forward "
        "network; the experts of a mixture have none",
        choices=("all-linear", "attention", "mlp"),
    )


@dataclass
class ModelConfig:
    path: str = knob(
        "asset:tiny/policy",
        "the policy: a Hugging Face directory, or a model on a hub, OWNER/NAME or OWNER/NAME@REVISION, which is "
        "downloaded; asset:NAME ships with asyncspec",
    )
    reference_path: str = knob(
        "", "the reference policy for the KL term: a directory or a model on a hub; empty: model.path"
    )
    dtype: str = knob(
        "float32",
        "dtype in which policy and draft compute; the trainer keeps weights, sums and optimizer state in float32",
        choices=("float32", "bfloat16"),
    )
    backend: str = knob(
        "torchtitan",
        "the library that computes the policy in trainer and logprob: torchtitan; or transformers, for families that "
        "torchtitan does not have, with engine.kind=vllm or sglang",
        choices=("torchtitan", "transformers"),
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


REWARDS = ("exact", "numeric", "math_verify", "format", "code", "reasoning_gym")  # tasks/builtin.py has them


@dataclass
class DataConfig:
    task: str = knob("sums", "built-in task; used only when data.train_file is empty", choices=("sums",))
    train_file: str = knob(
        "",
        "JSONL, Parquet or CSV; a prompt is text or a list of messages; hf://datasets/OWNER/NAME@REVISION/FILE is on a "
        "hub, and FILE may have wildcards; commas separate several; empty: the built-in data.task",
    )
    train_weights: str = knob(
        "",
        "weight of each source of data.train_file, separated by commas: its share of the prompts in each step; empty: "
        "all rows count alike",
    )
    filter_overlong_prompts: bool = knob(
        False, "leave out prompts of more than engine.max_prompt_tokens tokens, instead of refusing them"
    )
    eval_file: str = knob(
        "",
        "held-out prompts, a file as in data.train_file, which must be set; name=file,name=file are several sets, each "
        "with metrics of its own; empty: no evaluation there",
    )
    prompt_column: str = knob("prompt", "column of the prompt in data files")
    answer_column: str = knob(
        "answer", "column of the right answer in data files; verl's reward_model.ground_truth counts too; empty: none"
    )
    template_variables: str = knob(
        "", "variables of the policy's chat template, name=value,name=value; for example enable_thinking=false"
    )
    train_prompts: int = knob(4096, "training prompts that the built-in task generates", least=1)
    eval_prompts: int = knob(256, "held-out prompts that the built-in task generates; 0: no evaluation", least=0)
    reward: str = knob(
        "asyncspec.tasks.sums:exact_match",
        f"{', '.join(REWARDS)}, or module:function(prompt, response, answer) -> float, or of verl's or TRL's form; "
        "commas separate several",
    )
    reward_pattern: str = knob("", "regular expression that the whole response must match, for data.reward=format")
    reward_weights: str = knob("", "weight of each of several rewards, separated by commas; empty: all 1")
    reward_timeout_s: float = knob(
        10.0,
        "seconds one reward call may take; a rollout whose reward fails or times out gets the mean of its group",
        above=0,
    )
    reward_workers: int = knob(
        8, "most processes of a generator that compute rewards; further ones start while rewards wait", least=1
    )
    reward_special_tokens: bool = knob(False, "keep special tokens, such as <think>, in the response for the reward")
    reward_failures: float = knob(
        0.05,
        "share of a generator's rewards that may fail or time out before the run stops; 7 are always allowed",
        least=0,
        most=1,
    )

    @property
    def weights(self) -> list[float]:
        """The weight of each reward, empty if all are 1."""
        return [float(weight) for weight in self.reward_weights.split(",")] if self.reward_weights else []

    @property
    def source_weights(self) -> list[float]:
        """The weight of each source of `train_file`, empty if their rows count alike."""
        return [float(weight) for weight in self.train_weights.split(",")] if self.train_weights else []


ENVIRONMENTS = "module:factory, python, reasoning_gym, skyrl_gym:NAME or openenv:http://HOST:PORT"


@dataclass
class EnvironmentConfig:
    name: str = knob(
        "",
        f"what the policy acts in over several turns: {ENVIRONMENTS}; a factory makes an object with reset, step and "
        "close, with tools by method, as TRL's have, or with run, which asks the policy over HTTP; empty: a prompt has "
        "one response",
    )
    reward_from: str = knob(
        "environment",
        "who rewards an episode: the environment, by the sum of its rewards, or data.reward, from the last response",
        choices=("environment", "data.reward"),
    )
    max_turns: int = knob(16, "most turns of the policy in an episode; a longer one is truncated", least=1)
    turn_timeout_s: float = knob(
        60.0,
        "seconds that an environment may take for a turn; the episode then ends, and gets the mean of its group",
        above=0,
    )
    episode_timeout_s: float = knob(1800.0, "seconds that an episode may take with all its turns", above=0)
    failures: float = knob(
        0.05,
        "share of a generator's episodes whose environment may fail or be late before the run stops; 7 are always "
        "allowed",
        least=0,
        most=1,
    )
    workers: int = knob(
        4, "most processes of a generator that run environments; each holds many episodes", least=1, most=256
    )
    episodes: int = knob(
        0,
        "most episodes that a generator has open, those included whose environments work; 0: 4 for each of "
        "engine.slots",
        least=0,
    )
    kept: int = knob(
        0,
        "conversations whose KV cache the embedded engine keeps while their environments work; others are read again; "
        "0: as many as engine.slots",
        least=0,
    )
    host: str = knob(
        "127.0.0.1",
        "address of the generator's host on which services reach the policy, each episode with a key of its own; "
        "services on other hosts need another than loopback",
    )
    port: int = knob(0, "port for services; 0: a free one", least=0, most=65535)
    renderer: str = knob(
        "auto",
        "what turns messages into tokens: template, the policy's chat template; a name that the package renderers "
        "knows, such as qwen3; or auto: that package if it is installed and knows the model's name on the hub",
    )
    rewritten_turns: str = knob(
        "refuse",
        "if the chat template would render earlier turns otherwise once a conversation goes on: refuse the run, or "
        "allow it, with earlier turns as they were sampled",
        choices=("refuse", "allow"),
    )


@dataclass
class SamplingConfig:
    temperature: float = knob(
        1.0,
        "sampling temperature of rollouts and evaluations, used for all logprobs too; 0 (greedy) is not possible",
        least=1e-3,
    )
    top_p: float = knob(
        1.0,
        "nucleus sampling: sample from the most probable tokens whose probabilities sum to this; 1: all tokens",
        above=0,
        most=1,
    )
    top_k: int = knob(0, "sample from this many most probable tokens; 0: all tokens", least=0)
    max_response_tokens: int = knob(320, "maximum number of tokens of a response; a longer one is truncated", least=1)


@dataclass
class EngineConfig:
    kind: str = knob(
        "torch",
        "inference engine; torch: the embedded one; vllm, sglang: see docs/how-to; mock: waits instead of computing",
        choices=("torch", "vllm", "sglang", "mock"),
    )
    slots: int = knob(64, "maximum number of sequences that one generator decodes at once", least=1)
    max_prompt_tokens: int = knob(
        96, "maximum number of tokens of a prompt; a run with a longer one is refused before it starts", least=1
    )
    tensor_parallel: int = knob(
        1,
        "vllm only: processes of each generator, on as many devices of one host, which divide each weight matrix",
        least=1,
    )
    threads: int = knob(1, "CPU threads of each generator, or of each of its ranks", least=1)
    compile: bool = knob(False, "vllm only: compile the policy with torch.compile")
    gpu_memory_utilization: float = knob(
        0.9, "vllm on a GPU only: share of the GPU's memory that one generator takes", above=0, most=1
    )
    vllm: str = knob(
        "",
        "vllm only: options of its engine, by their names there, as a mapping in braces, for example {quantization: "
        "fp8, max_num_batched_tokens: 16384}",
    )
    url: str = knob("", "sglang only: one server address http://HOST:PORT for each generator, separated by commas")
    weights_dir: str = knob(
        "",
        "sglang only: directory through which weights pass to the servers; empty: one in /dev/shm, for a single host",
    )
    kv_at_swap: str = knob(
        "keep",
        "KV cache of unfinished sequences at a weight update: keep it, or recompute it with the new weights",
        choices=("keep", "recompute"),
    )


@dataclass
class SpeculationConfig:
    method: str = knob(
        "eagle3",
        "source of the proposed tokens: a trained draft (eagle3, mtp, draft_model), a lookup in earlier text (ngram, "
        "suffix), or none: no speculative decoding",
        choices=("eagle3", "mtp", "draft_model", "ngram", "suffix", "none"),
    )
    draft_length: str = knob(
        "auto", "k, tokens proposed per verification: 1 to 16, or auto, which chooses k (also 0) at each engine step"
    )
    draft_path: str = knob(
        "",
        "the draft: a directory or a model on a hub; empty: the one shipped for the default policy; ngram and suffix "
        "need none",
    )


@dataclass
class DraftConfig:
    adapt: bool = knob(
        True, "train the draft on the rollouts: mtp in the trainer, eagle3 and draft_model in the draft adapter"
    )
    lr: float = knob(3e-4, "learning rate of AdamW for the draft", above=0, most=1)
    groups_per_step: int = knob(
        4,
        "groups per optimizer step that train the draft; also how many may wait for the draft adapter (then the oldest "
        "is dropped)",
        least=1,
    )
    bytes_per_step: int = knob(
        64_000_000,
        "bytes per optimizer step that the draft adapter is sent at most, but at least one group; also how many may "
        "wait for it",
        least=1,
        most=10**12,
    )
    top_tokens: int = knob(
        512,
        "most probable tokens kept of each target distribution, the rest merged into one outcome; 0: all tokens",
        least=0,
    )
    window: int = knob(
        0,
        "positions of each rollout sent to the draft adapter, one random stretch (for long contexts); 0: all",
        least=0,
        most=10**9,
    )
    publish_every: int = knob(4, "optimizer steps of the draft between two published draft versions", least=1)
    unroll: int = knob(
        3, "draft positions over which eagle3 and mtp are unrolled in training (training-time test)", least=1
    )


@dataclass
class EvalConfig:
    every: int = knob(
        20,
        "optimizer steps between evaluations; 0: only of the first and the last version, which are always evaluated",
        least=0,
    )
    samples: int = knob(1, "n, rollouts per held-out prompt, sampled as in training", least=1)
    pass_at: str = knob("", "k of pass@k, numbers up to eval.samples separated by commas; empty: 1 and eval.samples")
    exact: bool = knob(
        False,
        "sample an evaluation with its version only: its prompts go before those for training, and generators take "
        "newer weights when they are done",
    )
    keep_best: bool = knob(
        False, "keep the version with the best held-out score in the run's best/; makes evaluations exact"
    )
    best_set: str = knob("", "the set of data.eval_file whose score says which version is best; empty: all of them")

    @property
    def ks(self) -> list[int]:
        """The k of pass@k, in ascending order."""
        return sorted({int(k) for k in self.pass_at.split(",")} if self.pass_at else {1, self.samples})

    @property
    def pinned(self) -> bool:
        """Whether each evaluation is sampled by its version only."""
        return self.exact or self.keep_best


@dataclass
class CheckpointConfig:
    every: int = knob(
        20, "optimizer steps between checkpoints, written in the background; 0: only one, at the end", least=0
    )
    keep: int = knob(2, "newest checkpoints to keep", least=1)
    export_dtype: str = knob(
        "float32",
        "dtype of the policy that is written to checkpoint/policy when the run ends, and of all exports; bfloat16 "
        "halves its size and rounds the weights",
        choices=("float32", "bfloat16"),
    )
    export_merged: bool = knob(
        True,
        "with model.lora.rank: whether an export is the whole policy, with the adapters added to its weights and also "
        "alone in adapter/; false: only the adapters",
    )
    export_every: int = knob(
        0,
        "optimizer steps between exports of the policy to exports/step-N, Hugging Face directories that all stay; "
        "0: none but checkpoint/policy, at the end",
        least=0,
    )
    push_to: str = knob(
        "",
        "repository on a hub, OWNER/NAME, to which the policy is pushed when the run has finished; made private if it "
        "does not exist; needs a token, for example in HF_TOKEN; empty: none",
    )
