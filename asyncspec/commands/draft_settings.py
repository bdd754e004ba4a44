"""The settings of `asyncspec draft train`: its flags, with defaults, help and bounds. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncspec.config import data_files, fetched_data, fetched_model, fetched_weights, resolve_path
from asyncspec.config.fields import describe, knob, refusal
from asyncspec.config.hub import DATA_FORM
from asyncspec.errors import UserError
from asyncspec.models.chat import parse_variables


@dataclass
class Training:
    method: str = knob("eagle3", "kind of draft to train", choices=("eagle3", "mtp", "draft_model"))
    policy: str = knob("asset:tiny/policy", "Hugging Face directory of the policy, or its name on a hub")
    out: str = knob("draft", "directory to write the draft to")
    prompts: str = knob(
        "",
        "data as in data.train_file of a run; the policy samples the responses; empty: the built-in task",
    )
    rollouts: str = knob("", "data file with the columns prompt and response; the policy then samples nothing")
    prompt_column: str = knob("prompt", "column of the prompt in these files")
    template_variables: str = knob("", "as data.template_variables of a run, for prompts that are messages")
    init: str = knob("", "directory of a draft to start from; empty: start a new draft")
    minutes: float = knob(
        4.0, "minutes that the command takes: to sample, train and measure; 0: until --steps are done", least=0
    )
    steps: int = knob(0, "optimizer steps; 0: as many as --minutes allow", least=0)
    batch: int = knob(16, "rollouts per optimizer step", least=1)
    unroll: int = knob(3, "positions over which eagle3 and mtp are unrolled in training", least=1)
    lr: float = knob(
        0.0, "AdamW's learning rate, annealed to zero; 0: 2e-3 * sqrt(64 / W) for a policy of width W", least=0
    )
    temperature: float = knob(1.0, "temperature at which the policy samples", least=1e-3)
    max_prompt_tokens: int = knob(96, "leave out prompts with more tokens than this", least=1)
    max_response_tokens: int = knob(320, "cut off a rollout after this many tokens", least=1)
    draft_vocab: int = knob(
        8192, "let eagle3 propose only this many tokens, the most frequent ones: its head is smaller; 0: all", least=0
    )
    draft_length: int = knob(3, "draft length k at which the result is measured", least=1, most=16)
    held_out: int = knob(256, "prompts held out to measure the result, at most a tenth of all", least=1)
    seed: int = knob(0, "random seed for initialization, prompts and samples", least=0, most=2**32 - 1)
    threads: int = knob(1, "CPU threads; more help a wide policy, but cost much if other work uses the cores", least=1)


def check(settings: Training) -> None:
    """Refuse settings that cannot be trained with.

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
    whole = settings.draft_vocab in (0, Training.draft_vocab)
    need(
        whole or settings.method == "eagle3",
        "draft_vocab",
        "no value with --method mtp or draft_model: they use the policy's vocabulary",
    )
    need(whole or not settings.init, "draft_vocab", "no value with --init: that draft has its own vocabulary")
    try:
        parse_variables(settings.template_variables)
    except ValueError as error:
        need(False, "template_variables", f"name=value,name=value: {error}")
    need(not (settings.prompts and settings.rollouts), "rollouts", "--prompts or --rollouts, but not both")
    out = resolve_path(settings.out)
    need(not os.path.exists(out) or os.path.isdir(out), "out", "a directory to write to")
    again = bool(settings.init) and out.resolve() == resolve_path(settings.init).resolve()
    held = os.path.exists(out / "config.json") and not again
    need(not held, "out", "a directory without a model in it, or that of --init, whose draft is then trained further")
    for name in ("policy", "init"):
        setattr(settings, name, value := fetched_model(f"draft train: --{name} ", getattr(settings, name)))
        held = not value or os.path.isfile(resolve_path(value) / "config.json")
        need(held, name, "a directory with config.json in it, or a model on a hub, OWNER/NAME")
        fetched_weights(f"draft train: --{name} ", value)
    for name in ("prompts", "rollouts"):
        setattr(settings, name, value := fetched_data(f"draft train: --{name} ", getattr(settings, name)))
        need(not value or all(map(os.path.isfile, data_files(value))), name, f"a data file that exists, or {DATA_FORM}")
