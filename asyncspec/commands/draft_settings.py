"""The settings of `asyncspec draft train`: its flags with their defaults, help and bounds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncspec.config import resolve_path
from asyncspec.config.fields import describe, knob, refusal
from asyncspec.errors import UserError


@dataclass
class Training:
    method: str = knob("eagle3", "what proposes tokens", choices=("eagle3", "mtp", "draft_model"))
    policy: str = knob("asset:tiny/policy", "Hugging Face directory of the policy")
    out: str = knob("draft", "directory that the draft is written to")
    prompts: str = knob("", "JSONL with prompt on each line; the policy samples its answers; empty: the built-in task")
    rollouts: str = knob("", "JSONL with prompt and response on each line; nothing is sampled")
    init: str = knob("", "a draft to start from; empty: a new one")
    minutes: float = knob(4.0, "minutes to train; 0: until --steps are done", least=0)
    steps: int = knob(0, "optimizer steps; 0: until --minutes are over", least=0)
    batch: int = knob(16, "rollouts of a step", least=1)
    unroll: int = knob(3, "positions that eagle3 and mtp are unrolled over in training", least=1)
    lr: float = knob(
        0.0, "AdamW's learning rate, annealed to zero; 0: 2e-3 at width 64, falling with its square root", least=0
    )
    temperature: float = knob(1.0, "temperature of the policy's samples", least=1e-3)
    max_prompt_tokens: int = knob(96, "longer prompts are left out", least=1)
    max_response_tokens: int = knob(320, "tokens after which a rollout is cut off", least=1)
    draft_vocab: int = knob(0, "eagle3 proposes only this many most frequent tokens: a smaller head; 0: all", least=0)
    draft_length: int = knob(3, "k at which the result is measured", least=1, most=16)
    held_out: int = knob(256, "prompts held out to measure the result on, a tenth of all at most", least=1)
    seed: int = knob(0, "random seed of initialization, prompts and samples")
    threads: int = knob(
        1, "CPU threads; more pay for wide policies, and cost much on cores that other work uses", least=1
    )


def check(settings: Training) -> None:
    """Refuse what cannot be trained with.

    Raises:
        UserError: one line that names the flag, its value and what is expected.
    """

    def need(held: bool, name: str, expected: str) -> None:
        if not held:
            raise UserError(f"draft train: --{name.replace('_', '-')} {getattr(settings, name)}: expected {expected}")

    for name, default, metadata in describe(Training):
        if refused := refusal(getattr(settings, name), default, metadata, seconds=False):
            need(False, name, refused[0])
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
