"""What the flags of `asyncspec plan` describe: a model, GPUs, and the responses that it is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncspec.errors import UserError

if TYPE_CHECKING:
    from asyncspec.simulate.planner import Job, Outcome

METHODS = ("eagle3", "mtp", "none")
MOST_PROMPT, MOST_DRAFT = 2048, 16  # tokens of a prompt, and of a round
MOST_GPUS, MOST_ROLLOUTS, MOST_LAG, MOST_TOKENS = 16_384, 65_536, 16, 1 << 20  # that are simulated within minutes


def _model(name: str) -> dict[str, Any]:
    """Return the fields of config.json of a directory, or of a model that has tables."""
    from asyncspec.models import CheckpointError
    from asyncspec.models.shape import PolicyShape
    from asyncspec.simulate.devices import known_model

    if not Path(name).is_dir():
        return known_model(name)
    try:
        return PolicyShape.from_hf(Path(name)).to_hf()
    except CheckpointError as error:
        raise UserError(f"--model {error}") from None


def need(held: bool, flag: str, value: Any, expected: str) -> None:
    if not held:
        raise UserError(f"--{flag} {value}: expected {expected}")


def job_of(args) -> Job:
    """Return the job of the flags, some of which get their defaults.

    Raises:
        UserError: a flag is missing, or has an impossible value.
    """
    from asyncspec.simulate.devices import gpu
    from asyncspec.simulate.planner import Job
    from asyncspec.simulate.workload import Acceptance, Lengths

    device, per_node = gpu(args.hardware), gpu(args.hardware).gpus_per_node
    args.lag = 1 if args.lag is None else args.lag
    args.prompts = 128 if args.prompts is None else args.prompts
    args.group_size = 16 if args.group_size is None else args.group_size
    known = "a directory with config.json, or a name such as Qwen/Qwen3-8B"
    need(args.calibrated is None, "run", args.calibrated, "it with --hardware this only")
    if args.model is None:
        raise UserError(f"--model: expected it, {known}")
    few = f"3 to {MOST_GPUS}: one each to generate, to train and to compute logprobs"
    need(args.gpus is not None and 3 <= args.gpus <= MOST_GPUS, "gpus", args.gpus, few)
    nearest = max(1, round(args.gpus / per_node)) * per_node
    whole = args.gpus <= per_node or args.gpus % per_node == 0
    need(whole, "gpus", args.gpus, f"whole nodes of {per_node}; nearest valid choice: --gpus {nearest}")
    need(0 <= args.lag <= MOST_LAG, "lag", args.lag, f"0 to {MOST_LAG}")
    need(1 <= args.prompts <= MOST_ROLLOUTS, "prompts", args.prompts, f"1 to {MOST_ROLLOUTS}")
    most = MOST_ROLLOUTS // args.prompts
    need(2 <= args.group_size <= most, "group-size", args.group_size, f"2 to {most}, for {MOST_ROLLOUTS} rollouts")
    model = _model(args.model)
    room = model.get("max_position_embeddings", MOST_TOKENS) - MOST_DRAFT - 1
    args.most_tokens = min(16384, room) if args.most_tokens is None else args.most_tokens
    args.tokens = min(4000.0, args.most_tokens / 2) if args.tokens is None else args.tokens
    need(2 <= args.most_tokens <= room, "most-tokens", args.most_tokens, f"2 to {room}")
    shorter = f"1 to less than --most-tokens {args.most_tokens}"
    need(1 <= args.tokens < args.most_tokens, "tokens", args.tokens, shorter)
    need(0 <= args.sigma <= 2, "sigma", args.sigma, "0 to 2")
    need(1 < args.acceptance <= 4, "acceptance", args.acceptance, "more than 1, and at most 4")
    need(0 <= args.spread <= 0.3, "spread", args.spread, "0 to 0.3")
    has = args.precision == "bfloat16" or device.flops_fp8 > 0
    need(has, "precision", args.precision, f"bfloat16 on {device.name}")
    return Job(
        model=model,
        gpu=device,
        gpus=args.gpus,
        lag=args.lag,
        prompts=args.prompts,
        group_size=args.group_size,
        lengths=Lengths(args.tokens, args.sigma, float(args.most_tokens)),
        prompt=200.0,
        method=args.method,
        acceptance=Acceptance.of_length(args.acceptance, 3, args.spread),
        precision=args.precision,
    )


def basis(best: Outcome) -> str:
    """Say what the times rest on."""
    if best.source == "roofline":
        return "There is no table for this model on these GPUs: times are from a roofline, and may be off by half."
    beyond = f" Beyond the tables, their edge was taken: {', '.join(best.clipped)}." if best.clipped else ""
    return f"Times are from measured operator tables; training reaches an assumed share of the peak.{beyond}"
