"""The configuration of a run: typed dataclasses, composed from YAML and overrides, checked before anything starts.

Every knob of the system is a field here, with its unit and its default; `asyncspec train --help` prints this list.
`load` merges, in this order: the dataclass defaults, a YAML file, dotlist overrides. A key that does not exist, a value
of the wrong type or an impossible combination (config_check.py) raises `ConfigError`, one line that names the field,
the value, what was expected and the nearest valid choice.

This module imports no torch, and of ours only what has no imports itself: reading a configuration must be instant.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncspec import topology
from asyncspec.fields import hint, leaves, type_of, value_of

PACKAGE_DIR = Path(__file__).resolve().parent
CONFIG_DIR = PACKAGE_DIR / "configs"
LONGEST_DRAFT = 15  # the longest draft that speculation.draft_length=auto considers


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one line for the user."""


@dataclass
class ModelConfig:
    path: str = "asset:tiny/policy"  # Hugging Face directory of the policy (config.json, *.safetensors, tokenizer.json)
    reference_path: str = ""  # reference policy for the KL term; empty: the same as path
    dtype: str = "float32"  # float32, bfloat16: what policy and draft are computed in; the trainer's weights, sums and optimizer, and a draft's training, stay in float32


@dataclass
class DataConfig:
    task: str = "sums"  # built-in task, used while train_file is empty
    train_file: str = ""  # JSONL with "prompt" and "answer" on each line
    eval_file: str = ""  # JSONL of held-out prompts, where train_file is given; empty: no evaluation then
    train_prompts: int = 4096  # prompts the built-in task makes
    eval_prompts: int = 256  # held-out prompts the built-in task makes
    reward: str = "asyncspec.rl.tasks:exact_match"  # callable(prompt, response, answer) -> float, by import path
    reward_timeout_s: float = 10.0  # of one call; a rollout whose reward fails gets the mean of its group
    reward_failures: float = 0.05  # share of rollouts whose reward may fail before the run stops


@dataclass
class SamplingConfig:
    temperature: float = 1.0  # of rollouts and evaluations; all logprobs are at this temperature too
    top_p: float = 1.0  # sample from the most probable tokens whose mass reaches this; 1: all
    top_k: int = 0  # sample from so many most probable tokens; 0: all
    max_response_tokens: int = 320  # tokens after which a rollout is cut off


@dataclass
class EngineConfig:
    kind: str = "torch"  # torch: the embedded engine; vllm, sglang: see docs/engines.md; mock: waits instead of computing, see mock
    slots: int = 64  # sequences in flight in one generator
    max_prompt_tokens: int = 96  # longest prompt; a longer one in the data is refused before the run starts
    threads: int = 1  # CPU threads of one generator
    compile: bool = False  # torch.compile for steps over few tokens: faster, but on CPUs with AVX-512, after half a minute at the first start
    gpu_memory_utilization: float = 0.9  # vllm on a GPU: share of its memory that one generator takes
    url: str = ""  # sglang: where the servers are, http://HOST:PORT for each generator, with commas between
    weights_dir: str = ""  # sglang: directory that generators and servers share, for weights on their way; empty: one in /dev/shm, on one host
    kv_at_swap: str = "keep"  # keep: go on with the KV cache of older weights; recompute: prefill again under the new


@dataclass
class SpeculationConfig:
    method: str = "eagle3"  # eagle3, mtp, draft_model, ngram, suffix; none: autoregressive generation
    draft_length: str = "auto"  # k, tokens proposed per verification; auto: chosen for each engine step, 0 included
    draft_path: str = (
        ""  # directory of the draft; empty: the one made for the default policy. ngram and suffix need none
    )


@dataclass
class RLConfig:
    group_size: int = 8  # rollouts per prompt
    groups_per_step: int = 16  # prompts per optimizer step
    advantage: str = "group"  # group: (r - mean) / std; mean: r - mean (Dr. GRPO)
    clip_low: float = 0.2  # PPO clip range below 1
    clip_high: float = 0.28  # PPO clip range above 1 (DAPO's clip-higher)
    correction: str = "truncated"  # importance weights for the lag: truncated, or none
    correction_cap: float = 2.0  # C in min(pi_prox / pi_behaviour, C)
    kl_coef: float = 0.0  # weight of KL(policy || reference); 0 skips the reference pass


@dataclass
class OptimizerConfig:
    lr: float = 2e-4  # AdamW's learning rate after warm-up
    beta1: float = 0.9  # decay of AdamW's mean of gradients
    beta2: float = 0.95  # decay of AdamW's mean of squared gradients
    eps: float = 1e-8  # added to the root in AdamW's denominator
    weight_decay: float = 0.0  # decoupled, on matrices
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    warmup_steps: int = 3  # steps of linear warm-up; 0: none


@dataclass
class TrainerConfig:
    kind: str = "torch"  # torch; mock: trainer and logprob wait instead of computing, see mock
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ranks: int = 1  # processes that hold and train one policy together, by FSDP
    tensor_parallel: int = (
        1  # of them, so many divide each matrix and read the same groups; the others read different groups
    )
    tokens_per_pass: int = (
        32768  # of one forward and backward pass, padding included, and of one of logprob; larger groups are divided
    )
    recompute: bool = False  # activations in the backward pass instead of keeping them: less memory, a third more work
    threads: int = 1  # CPU threads of each rank


@dataclass
class LogprobConfig:
    ranks: int = 1  # processes that hold the policy of one logprob actor together, by FSDP
    tensor_parallel: int = (
        1  # of them, so many divide each matrix and read the same groups; the others read different groups
    )
    threads: int = 1  # CPU threads of each rank


@dataclass
class DraftConfig:
    adapt: bool = (
        True  # train the draft on the policy's rollouts while it runs: mtp in the trainer, others in the draft adapter
    )
    lr: float = 3e-4  # learning rate of the draft's AdamW
    groups_per_step: int = (
        4  # at most so many groups of a step go to the draft adapter, or wait for it; then the oldest is dropped
    )
    bytes_per_step: int = 64_000_000  # and at most so many bytes of groups
    top_tokens: int = (
        512  # tokens kept of each target distribution, the rest of its mass as one; a smaller vocabulary is kept whole
    )
    window: int = 0  # positions of a rollout that are sent, a stretch at random, for long contexts; 0: all
    publish_every: int = 4  # optimizer steps of the draft between two published draft versions
    unroll: int = 3  # positions the draft is unrolled over in training (training-time test)


@dataclass
class EvalConfig:
    every: int = 20  # steps between two evaluations; 0: only the first and the last
    samples: int = 1  # rollouts per held-out prompt, at the sampling settings of training


@dataclass
class CheckpointConfig:
    every: int = 20  # steps between two checkpoints to resume from, written in the background; 0: one at the end
    keep: int = 2  # newest ones that stay


@dataclass
class MockConfig:
    time_scale: float = 0.05  # seconds here for one on the machines that are mocked; all below is in theirs
    gpus: int = 8  # that one generator stands for
    token_s: float = 0.003  # a decoding step of a GPU: reading the weights
    row_s: float = 0.0001  # and what each live sequence of the GPU adds
    acceptance: float = 2.77  # tokens a verification emits
    draft_length: int = 3  # k
    draft_share: float = 0.266  # of a decoding step, that each proposed token adds
    tokens_median: float = 6000.0  # of a response, log-normal
    tokens_sigma: float = 0.6  # of its logarithm
    tokens_max: int = 20480  # where it is cut off
    token_unit: int = 64  # tokens for which one is really sent
    logprob_s: float = 17.9  # all groups of a step in logprob
    train_s: float = 31.4  # all groups of a step in the trainer
    prepare_s: float = 2.1  # from a version's publication to its arrival in the generators
    weights: int = 100_000  # elements really broadcast


@dataclass
class DeploymentConfig:
    generators: int = 1  # generator actors
    logprobs: int = 1  # logprob actors, of logprob.ranks processes each; each takes every so manieth group
    nodes: str = ""  # who plays where on several nodes, for example 4*trainer:4+logprob:4,12*generator:8; then it says how many there are of each
    device: str = (
        "auto"  # auto: GPUs if there are any; cpu (so the default job); cuda. GPUs are dealt out to the actors in turn
    )
    host: str = "auto"  # address the actors of this host bind to; auto: loopback, or where torchrun joins several hosts the address they are reached at
    replacements: int = 8  # generators, logprob actors (of one rank) and draft adapters started in place of ones that died, at most, between two starts of all
    restarts: int = 3  # times all may be started again from the last checkpoint because the trainer, the controller or one of several ranks died
    standby: int = 1  # with Ray: spare processes on each node, which have loaded all libraries, for the next replacements; other launchers fork theirs
    encrypt: bool = True  # the actors' sockets, with keys made for the run; who has not got them cannot connect
    start_timeout_s: float = (
        120.0  # of an actor to come up, and then to join the broadcasts; its first sign of life is due within it
    )
    stall_timeout_s: float = 300.0  # without any progress; then the run stops and says what was waited for
    silent_timeout_s: float = (
        5.0  # without a sign of life from a process; then it counts as frozen, is killed, and is a death like others
    )
    turn_timeout_s: float = 180.0  # of one turn of an actor's main loop; then it counts as stuck, likewise
    stop_timeout_s: float = 4.0  # from an interrupt to the end of every process
    record: bool = True  # what the actors do from when to when, for trace.json
    faults: str = (
        ""  # for tests of recovery: actor:place:times:kill or freeze,...; the places are in asyncspec/faults.py
    )
    delays: str = ""  # for tests of the measurement: place=seconds,...; places: generate, reward, queue, logprob, broadcast, train


@dataclass
class Config:
    steps: int = 120  # optimizer steps
    policy_lag: int = 1  # versions a rollout may be behind the policy that is trained on it; 0: synchronous
    seed: int = 0  # of the data, its order and every sample; with speculation.draft_length=auto, which looks at the clock, no run is like another to the bit
    run_dir: str = ""  # where results go; empty: runs/<date>-<time>
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
    def adapting(self) -> bool:
        """Whether there is a draft adapter."""
        return self.draft_trainer == "draft_adapter"

    @property
    def draft_trainer(self) -> str:
        """Who trains the draft while the policy moves: draft_adapter, the trainer (mtp, the policy's own), or nobody
        ("").
        """
        if not self.draft.adapt or self.trainer.kind == "mock":
            return ""
        return {"eagle3": "draft_adapter", "draft_model": "draft_adapter", "mtp": "trainer"}.get(
            self.speculation.method, ""
        )

    @property
    def server_urls(self) -> list[str]:
        """Addresses of the SGLang servers, one for each generator."""
        return [url.strip() for url in self.engine.url.split(",") if url.strip()]

    @property
    def draft_directory(self) -> str:
        """Where the draft's files are, as `resolve_path` reads it; "" for a method without files."""
        method = self.speculation.method
        return (
            (self.speculation.draft_path or f"asset:tiny/{method}")
            if method in ("eagle3", "mtp", "draft_model")
            else ""
        )


def load(config: str = "tiny", overrides: typing.Sequence[str] = ()) -> Config:
    """Compose and check a configuration.

    Args:
        config: path of a YAML file, or the name of one in the package's configs folder ("tiny").
        overrides: "a.b=value" strings, applied last, in order.

    Raises:
        ConfigError: one line that says what is wrong and what would be right.
    """
    from asyncspec.config_check import check

    path = _config_path(config)
    try:
        file_cfg = OmegaConf.load(path)
    except Exception as error:  # YAML's own errors are of many types
        raise ConfigError(f"--config {config}: not readable as YAML: {first_line(error)}") from None
    if not OmegaConf.is_dict(file_cfg) or any("\n" in str(key) for key in file_cfg):
        raise ConfigError(f"--config {config}: expected a mapping of fields at the top of the file")
    given = OmegaConf.to_container(file_cfg)
    for key in leaves(given):
        _check_key(key, f"in {path.name}")
        _check_type(key, _inner(given, key))
    for item in overrides:
        if "=" not in item or item.startswith(("-", "=")):
            raise ConfigError(
                f"override {item!r}: expected field=value without spaces, for example trainer.optimizer.lr=1e-4"
            )
        _check_key(item.split("=", 1)[0], "in the overrides")
    merged = OmegaConf.structured(Config)
    try:
        merged = OmegaConf.merge(merged, file_cfg)
        for item in overrides:
            _override(merged, *item.split("=", 1))
        result = OmegaConf.to_object(merged)
        _apply_nodes(result, {*leaves(given), *(item.split("=", 1)[0] for item in overrides)})
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        raise ConfigError(f"{key}: {first_line(error)}; expected {_expected(key)}") from None
    check(result)
    return result


def _apply_nodes(config: Config, given: typing.AbstractSet[str]) -> None:
    """The topology says how many actors there are; what is given besides must agree."""
    text = config.deployment.nodes
    if not text:
        return
    try:
        totals = topology.total(topology.parse(text))
    except ValueError as error:
        raise ConfigError(f"deployment.nodes={text!r}: {error}") from None
    ranks = max(1, config.logprob.ranks)
    if totals["logprob"] % ranks:
        raise ConfigError(
            f"deployment.nodes={text!r}: names {totals['logprob']} ranks of logprob actors; expected a multiple of "
            f"logprob.ranks={ranks}; "
            f"nearest valid choice: logprob.ranks={math.gcd(ranks, totals['logprob'])}"
        )
    totals["logprob"] //= ranks
    for name, role in (
        ("trainer.ranks", "trainer"),
        ("deployment.logprobs", "logprob"),
        ("deployment.generators", "generator"),
    ):
        if name in given and value_of(config, name) != totals[role]:
            raise ConfigError(
                f"{name}={value_of(config, name)}: expected {totals[role]}, as deployment.nodes={text!r} says; or an "
                f"empty deployment.nodes"
            )
        section, field_name = name.split(".")
        setattr(getattr(config, section), field_name, totals[role])


def _override(merged, key: str, text: str) -> None:
    try:
        # A string field takes its text as it stands; for all others YAML's reading of the text counts.
        value = (
            text if type_of(Config, key) is str else OmegaConf.to_container(OmegaConf.from_dotlist([f"v={text}"]))["v"]
        )
        _check_type(key, value)
        OmegaConf.update(merged, key, value)
    except ConfigError:
        raise
    except (OmegaConfBaseException, YAMLError, ValueError):  # Python reads no number of more than 4300 digits
        raise ConfigError(f"{key}={text!r}: expected {_expected(key)}") from None


def _check_type(key: str, value: Any) -> None:
    """Yes and no are no numbers, and no number is yes or no: omegaconf takes either for the other."""
    interpolated = isinstance(value, str) and value.startswith("${")
    if not interpolated and (type_of(Config, key) is bool) != isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: expected {_expected(key)}")


def _inner(tree: dict, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load` and `from_yaml` read back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> Config:
    """The configuration that `to_yaml` wrote; it was checked then.

    Raises:
        ConfigError: it is damaged, or of another version.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text)))
    except Exception as error:  # YAML's own errors are of many types
        raise ConfigError(f"config.yaml: {first_line(error)}; expected what this version of asyncspec writes") from None


def resolve_path(path: str) -> Path:
    """The folder a configured path names; "asset:NAME" is a file that ships inside the package."""
    if path.startswith("asset:"):
        return PACKAGE_DIR / "assets" / path.removeprefix("asset:")
    return Path(path).expanduser()


def _config_path(config: str) -> Path:
    for candidate in (Path(config), CONFIG_DIR / f"{config}.yaml"):
        if candidate.is_file():
            return candidate
    names = sorted(p.stem for p in CONFIG_DIR.glob("*.yaml"))
    raise ConfigError(
        f"--config {config}: no such file; expected a YAML file or one of {', '.join(names)}"
        + hint(Path(config).stem, names)
    )


def _check_key(key: str, where: str) -> None:
    known = leaves(dataclasses.asdict(Config()))
    if key in known:
        return
    inner = [name for name in known if name.startswith(key + ".")]
    if inner:
        raise ConfigError(f"{key} {where}: names a section, not a field; expected for example {inner[0]}=...")
    near = nearest_field(key)
    if not near:
        raise ConfigError(f"{key} {where}: no such field; asyncspec train --help lists all")
    raise ConfigError(f"{key} {where}: no such field; nearest valid choice: {near} (default {default_of(near)!r})")


def nearest_field(key: str) -> str | None:
    """The field most like what was given, if any is."""
    known = leaves(dataclasses.asdict(Config()))
    # A right last name under a wrong section is the commonest slip, so it is offered first.
    same_name = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    return next(iter(same_name[:1] or difflib.get_close_matches(key, known, 1, 0.5)), None)


def _expected(key: str) -> str:
    try:
        return f"a value of type {type_of(Config, key).__name__}; nearest valid choice: {key}={default_of(key)}"
    except (KeyError, TypeError):
        return "a known field"


def default_of(key: str) -> Any:
    """A configuration field's default."""
    return value_of(Config(), key)


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return str(error).strip().splitlines()[0]


def default_run_dir() -> str:
    import datetime

    return os.path.join("runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
