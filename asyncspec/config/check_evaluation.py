"""What must hold of evaluations in a configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from asyncspec.config import eval_sets
from asyncspec.config.schema import Config


def rules(config: Config) -> Iterator[tuple[bool, str, str, Any]]:
    """Yield rules: whether the configuration keeps it, the field, what was expected, and the nearest valid choice."""
    evaluation, samples, data = config.eval, config.eval.samples, config.data
    text = evaluation.pass_at
    held = not text or re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", text, re.ASCII) is not None
    yield held, "eval.pass_at", "whole numbers, separated by commas", samples
    near = sorted({min(max(1, k), samples) for k in evaluation.ks})
    expected = f"numbers from 1 to eval.samples={samples}: fewer rollouts cannot tell pass@k"
    yield near == evaluation.ks, "eval.pass_at", expected, ",".join(map(str, near))
    wrong = eval_sets.fault(data.eval_file)
    yield wrong is None, "data.eval_file", *(wrong or ("", ""))
    names, best = [each.name for each in eval_sets.parse(data.eval_file)], evaluation.best_set
    expected = f"one of the sets of data.eval_file, {', '.join(names)}" if names else "nothing without data.eval_file"
    nearest = next(iter(difflib.get_close_matches(best, names, 1, 0.0)), "")
    yield not best or best in names, "eval.best_set", expected, nearest
    yield not best or evaluation.keep_best, "eval.best_set", "eval.keep_best=true as well, or nothing", ""
    held_out = bool(data.eval_file) if data.train_file else data.eval_prompts > 0
    yield held_out or not evaluation.keep_best, "eval.keep_best", "held-out prompts that score a version", "false"
