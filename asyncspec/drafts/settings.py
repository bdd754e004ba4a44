"""The settings of `asyncspec draft train`: its flags, with their defaults and their help. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


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
    threads: int = 2  # CPU threads
