"""The settings of `asyncspec draft train`: its flags, with their defaults, their help and what they may be. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncspec.config import ConfigError, resolve_path


@dataclass
class Training:
    method: str = "eagle3"  # eagle3, mtp or draft_model
    policy: str = "asset:tiny/policy"  # Hugging Face directory of the policy
    out: str = "draft"  # where the draft goes
    prompts: str = ""  # JSONL with prompt on each line; the policy samples its answers; empty: the built-in task
    rollouts: str = ""  # JSONL with prompt and response on each line; nothing is sampled
    init: str = ""  # a draft to go on from; empty: a new one
    minutes: float = 4.0  # time to train; 0: until --steps are done
    steps: int = 0  # optimizer steps; 0: until --minutes are over
    batch: int = 16  # rollouts of a step
    unroll: int = 3  # positions eagle3 and mtp are unrolled over in training
    lr: float = 0.0  # AdamW's learning rate, annealed to zero; 0: 2e-3 at width 64, falling with its root
    temperature: float = 1.0  # of the policy's samples
    max_prompt_tokens: int = 96  # longer prompts are left out
    max_response_tokens: int = 320  # rollouts are cut off here
    draft_vocab: int = 0  # let eagle3 propose only so many most frequent tokens: a smaller head; 0: all
    draft_length: int = 3  # k at which the result is measured
    held_out: int = 256  # prompts held out to measure it on, a tenth at most
    seed: int = 0  # of initialisation, prompts and samples
    threads: int = 1  # CPU threads; more pay for wide policies, and cost much where other work shares the cores


def check(settings: Training) -> None:
    """Refuse what cannot be trained with.

    Raises:
        ConfigError: one line that names the flag, its value and what is expected.
    """

    def need(held: bool, name: str, expected: str) -> None:
        if not held:
            raise ConfigError(f"draft train: --{name.replace('_', '-')} {getattr(settings, name)}: expected {expected}")

    for name in ("batch", "unroll", "max_prompt_tokens", "max_response_tokens", "held_out", "threads"):
        need(getattr(settings, name) >= 1, name, "at least 1")
    for name in ("minutes", "steps", "lr", "draft_vocab"):
        need(getattr(settings, name) >= 0, name, "at least 0")
    need(1 <= settings.draft_length <= 16, "draft_length", "1 to 16")
    need(settings.temperature >= 1e-3, "temperature", "at least 0.001")
    need(settings.minutes > 0 or settings.steps > 0, "minutes", "more than 0, or --steps")
    need(
        not settings.draft_vocab or settings.method == "eagle3",
        "draft_vocab",
        "0 with --method mtp and draft_model, which use the policy's",
    )
    need(not (settings.draft_vocab and settings.init), "draft_vocab", "0 with --init, whose draft has its vocabulary")
    need(not (settings.prompts and settings.rollouts), "rollouts", "either --prompts or --rollouts")
    for name in ("policy", "init"):
        value = getattr(settings, name)
        need(not value or (resolve_path(value) / "config.json").is_file(), name, "a directory with config.json in it")
    for name in ("prompts", "rollouts"):
        value = getattr(settings, name)
        need(not value or Path(value).is_file(), name, "a JSONL file that is there")
    out = Path(settings.out)
    need(not out.exists() or out.is_dir(), "out", "a directory to write to")
