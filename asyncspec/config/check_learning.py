"""What must hold of the algorithms that a configuration chooses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from asyncspec.config.learning import ESTIMATORS, LOSSES
from asyncspec.config.schema import Config

PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def rules(config: Config) -> Iterator[tuple[bool, str, str, Any]]:
    """Yield rules: whether the configuration keeps it, the field, what was expected, and the nearest valid choice."""
    rl, longest = config.rl, config.sampling.max_response_tokens
    for name, value, known in (
        ("rl.advantage_estimator", rl.advantage_estimator, ESTIMATORS),
        ("rl.loss_type", rl.loss_type, LOSSES),
    ):
        held = value in known or PATH.fullmatch(value) is not None
        nearest = difflib.get_close_matches(value, known, 1, 0.0)[0]
        yield held, name, f"{', '.join(known)}, or module:function", nearest
    size, groups = rl.mini_batch_size, rl.groups_per_step
    divisor = min((n for n in range(1, groups + 1) if groups % n == 0), key=lambda n: abs(n - size))
    held = size == 0 or groups % size == 0
    yield held, "rl.mini_batch_size", f"a divisor of rl.groups_per_step={groups}, or 0", divisor
    yield rl.clip_dual == 0 or rl.clip_dual > 1, "rl.clip_dual", "0, or more than 1", 3.0
    held = rl.clip_dual == 0 or rl.loss_type == "ppo"
    yield held, "rl.clip_dual", f"0 with rl.loss_type={rl.loss_type}: only ppo has a dual clip", 0
    held = rl.overlong_buffer <= longest
    yield held, "rl.overlong_buffer", f"at most sampling.max_response_tokens={longest}", longest
