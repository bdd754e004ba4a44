"""How long work may take that grows with the policy or the data: loading, checkpoints, the export, stopping.

Such a deadline is a configured number of seconds, and PATIENCE times what the work takes at a measured speed:

    deadline = seconds + PATIENCE * bytes / speed

The speed is `deployment.disk_mb_s`, which the launcher measures at the start if it is 0. A deadline is a limit for work
that hangs, so it is long: what ends earlier waits for nothing.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from functools import lru_cache
from pathlib import Path

from asyncspec.config import eval_sets
from asyncspec.config.paths import data_files, resolve_path
from asyncspec.config.schema import Config
from asyncspec.deadlines import BEAT_EVERY_S, BUCKET_BYTES_S, EXIT_GRACE_S, LEAST_BEATS, MEET_S, MOST_BEATS
from asyncspec.models import headers
from asyncspec.models.sizes import adapter_parameters, parameters

PATIENCE = 4
FASTEST = 200e6  # bytes per second. Disks are faster, but tensors are also copied, checked and summed up on the way.
UNMEASURED = 50e6  # bytes per second, where nobody has measured
DATA = 10e6  # bytes per second at which lines of JSON are read and checked
FLOAT = 4
_MOST, _LONGEST_S, _BLOCK = 64_000_000, 0.5, 4_000_000  # of a measurement: bytes, seconds, bytes at once


def measured_mb_s(directory: Path) -> float:
    """Return the megabytes per second at which a directory's disk is written. Takes about half a second at most.

    Raises:
        OSError: the directory cannot be written.
    """
    block, written, start = os.urandom(_BLOCK), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=directory) as file:
        while written < _MOST and time.perf_counter() - start < _LONGEST_S:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += _BLOCK
    return round(max(0.1, 1e-6 * written / (time.perf_counter() - start)), 1)


@lru_cache
def _parameters(directory: Path) -> int:
    """Return the number of elements of a directory's tensors; 0 if they cannot be counted."""
    try:
        return headers.parameters(directory)
    except headers.CheckpointError:
        return 0


def policy_bytes(config: Config) -> int:
    """Bytes of the policy's weights in float32."""
    return 0 if config.trainer.kind == "mock" else FLOAT * _parameters(resolve_path(config.model.path))


def draft_bytes(config: Config) -> int:
    """Bytes of the draft's weights in float32; 0 for a method without files."""
    directory = "" if config.trainer.kind == "mock" else config.draft_directory
    return FLOAT * _parameters(resolve_path(directory)) if directory else 0


def trained(config: Config, policy: dict) -> int:
    """Number of parameters that the trainer learns and publishes: the policy's, or its adapters'."""
    return parameters(policy) if config.lora is None else adapter_parameters(policy, config.lora)


def moments(config: Config, policy: dict) -> float:
    """Bytes of what the trainer's optimizer keeps of a policy: two numbers of each parameter; with Muon, one of each in
    the matrices of the layers, but not of experts.
    """
    if config.trainer.optimizer.kind == "adamw":
        return 2 * FLOAT * trained(config, policy)
    if config.lora is not None:
        return FLOAT * trained(config, policy)
    without_layers = parameters(policy | {"num_hidden_layers": 0})
    experts = policy.get("num_experts") or policy.get("num_local_experts", 0)
    of_experts = 3 * policy["hidden_size"] * policy["moe_intermediate_size"] * experts if experts else 0
    return FLOAT * (parameters(policy) + without_layers + policy["num_hidden_layers"] * of_experts)


def _learned_bytes(config: Config) -> int:
    """Bytes of what is trained of the policy, in float32."""
    whole = policy_bytes(config)
    return whole if config.lora is None or not whole else min(whole, FLOAT * trained(config, _described(config)))


def _described(config: Config) -> dict:
    return headers.read_json(resolve_path(config.model.path) / "config.json")


def export_bytes(config: Config) -> int:
    """Bytes of the policy, the best version's policy and the draft that the run writes when it ends."""
    shorter = 1 if config.checkpoint.export_dtype == "float32" else 2
    policies = 2 if config.eval.keep_best else 1
    whole = policy_bytes(config) if config.lora is None or config.checkpoint.export_merged else 0
    adapters = _learned_bytes(config) if config.lora is not None else 0
    return policies * (whole + adapters) // shorter + draft_bytes(config)


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint of what is trained of policy and draft: weights and the optimizer's moments, in float32."""
    learned = _learned_bytes(config)
    kept = 2 * learned
    # The config.json of a family that transformers loads may not say what Muon keeps.
    if learned and config.trainer.optimizer.kind == "muon" and config.model.backend != "transformers":
        kept = round(moments(config, _described(config)))
    return learned + kept + 3 * (draft_bytes(config) if config.draft_trainer else 0)


def checkpoint_s(config: Config) -> float:
    """Seconds that a checkpoint may take until the trainer says that it is late."""
    return config.deployment.stall_timeout_s + _writing_s(config, checkpoint_bytes(config))


def patience_s(config: Config) -> float:
    """Seconds that the trainer's first rank waits for the other ranks' parts of a checkpoint before it gives it up."""
    return PATIENCE * checkpoint_s(config)


def stop_s(config: Config, seconds: float = 0.0) -> float:
    """Seconds that actors may take to stop: to end the checkpoint that they write, to write another, and to export.

    Args:
        seconds: for all but the writing; 0: deployment.stop_timeout_s, as after an interrupt.
    """
    seconds = seconds or config.deployment.stop_timeout_s
    if config.rl.updates_per_step > 1:  # a batch whose first optimizer step was taken is trained to its end
        seconds += config.deployment.turn_timeout_s
    exports = 2 if config.checkpoint.export_every else 1
    return seconds + _writing_s(config, 2 * checkpoint_bytes(config) + exports * export_bytes(config))


def warning_s(config: Config) -> int:
    """Seconds from an interrupt until the last process of a run has ended: what a scheduler or torchrun has to wait."""
    return 10 * math.ceil((stop_s(config) + EXIT_GRACE_S) / 10)


def start_s(config: Config) -> float:
    """Seconds that an actor may take to start: to load policy, reference and draft, or to read the data."""
    models = policy_bytes(config) * (2 if config.rl.kl_coef > 0 else 1) + draft_bytes(config)
    return config.deployment.start_timeout_s + _writing_s(config, models) + PATIENCE * data_bytes(config) / DATA


def beat_every_s(config: Config) -> float:
    """Seconds between two heartbeats of an actor. In a large run there are fewer, so that the controller has the time
    for all of them; but always several in `deployment.silent_timeout_s`.
    """
    d, trainer, logprob = config.deployment, config.trainer.ranks, config.logprob.ranks
    actors = d.generators * config.engine.tensor_parallel + d.logprobs * logprob + trainer
    return min(max(BEAT_EVERY_S, actors / MOST_BEATS), d.silent_timeout_s / LEAST_BEATS)


def turn_s(config: Config) -> float:
    """Seconds that one turn of an actor's main loop may take. In a turn the trainer copies a checkpoint's tensors, or
    writes an export.
    """
    return config.deployment.turn_timeout_s + _writing_s(config, checkpoint_bytes(config)) + _exporting_s(config)


def stall_s(config: Config) -> float:
    """Seconds that a run may go without any progress. While the trainer writes an export, there may be none."""
    return config.deployment.stall_timeout_s + _exporting_s(config)


def delivery_s(config: Config) -> float:
    """Seconds after which a version should be in use everywhere: its members may come late, and its bytes take time."""
    return MEET_S + policy_bytes(config) / BUCKET_BYTES_S + config.deployment.stall_timeout_s / 10


def data_bytes(config: Config) -> int:
    """Bytes of the data files."""
    files = [*data_files(config.data.train_file), *data_files(eval_sets.paths(config.data.eval_file))]
    return sum(file.stat().st_size for file in files if file.is_file())


def told(config: Config) -> str:
    """Return the deadlines in one line, for a person."""
    seconds = {
        "to start": start_s(config),
        "one turn": turn_s(config),
        "a checkpoint": checkpoint_s(config),
        "to stop": stop_s(config),
    }
    return (
        f"a checkpoint takes {1e-9 * checkpoint_bytes(config):.2g} GB; "
        f"deadlines at {1e-6 * speed(config):.0f} MB/s: "
        + ", ".join(f"{what} {limit:.0f} s" for what, limit in seconds.items())
        + f"; so under Slurm --signal=B:TERM@{warning_s(config)}, and torchrun --shutdown-timeout {warning_s(config)}"
    )


def speed(config: Config) -> float:
    """Bytes per second with which deadlines are computed."""
    return min(FASTEST, 1e6 * config.deployment.disk_mb_s) or UNMEASURED


def _exporting_s(config: Config) -> float:
    """Seconds that an export in the midst of a run may take; 0 if the run makes none."""
    return _writing_s(config, export_bytes(config)) if config.checkpoint.export_every else 0.0


def _writing_s(config: Config, size: float) -> float:
    return PATIENCE * size / speed(config)
