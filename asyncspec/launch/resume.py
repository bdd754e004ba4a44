"""Makes the configuration with which `--resume` continues a run."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence

from asyncspec.config import Config, from_yaml, load, resolve_path
from asyncspec.config.fields import value_of
from asyncspec.errors import ConfigError, UserError
from asyncspec.ledger import ledger
from asyncspec.timing.metrics import read_rows

# Fields that may change when a run resumes. All others decide what the run has learned and what its records mean.
CHANGEABLE = (
    "steps",
    "model.path",  # the same files in another place, see fingerprints.py
    "model.reference_path",
    "model.dtype",
    "data.train_file",
    "data.eval_file",
    "eval.",
    "engine.",
    "checkpoint.",
    "deployment.",
    "trainer.",
    "logprob.",
    "logging.",
    "speculation.draft_length",
    "data.reward_timeout_s",
    "data.reward_failures",
    "data.reward_workers",
    "draft.lr",
    "draft.groups_per_step",
    "draft.bytes_per_step",
    "draft.publish_every",
)


def configure(directory: str, config: str | None, overrides: Sequence[str]) -> Config:
    """Return the configuration that a run was started with, with the overrides applied.

    Args:
        directory: the directory of the run.
        config: the value of --config, which is refused with --resume.
        overrides: `field=value` of the fields to change.

    Raises:
        UserError: there is no such run, it is finished, its ledger is damaged, or a field may not change.
    """
    run_dir = resolve_path(directory).absolute()
    if config is not None:
        raise UserError(f"--config {config}: expected none with --resume: the run has its own, {run_dir}/config.yaml")
    if not os.path.isfile(run_dir / "config.yaml"):
        runs = sorted(path.parent.name for path in run_dir.parent.glob("*/config.yaml"))
        nearest = difflib.get_close_matches(run_dir.name, runs, 1, 0.0)
        raise UserError(
            f"--resume {directory}: no config.yaml in it; expected the directory of a run"
            + (f"; nearest: {run_dir.parent / nearest[0]}" if nearest else "")
        )
    before = from_yaml((run_dir / "config.yaml").read_text(encoding="utf-8"))  # its files may have been moved
    after = load(str(run_dir / "config.yaml"), [*overrides, f"run_dir={run_dir}"])
    for name in [item.split("=", 1)[0] for item in overrides]:
        fixed = not name.startswith(CHANGEABLE) or name.endswith(".kind")
        # This length decides which prompts are left out.
        fixed = fixed or (name == "engine.max_prompt_tokens" and before.data.filter_overlong_prompts)
        if fixed and value_of(before, name) != value_of(after, name):
            raise ConfigError(
                f"{name}={value_of(after, name)!r}: the run was started with {value_of(before, name)!r}, and this "
                f"field cannot change; nearest valid choice: {name}={value_of(before, name)}"
            )
    trained = len(read_rows(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else 0
    try:
        events = list(ledger.read(run_dir)) if (run_dir / ledger.FILE).exists() else []
    except ValueError as error:
        raise UserError(f"--resume {directory}: {error}") from None
    if trained > after.steps or (trained == after.steps and ledger.finished(events)):
        raise UserError(
            f"--resume {directory}: {trained} steps are trained, and steps={after.steps} adds none; expected more, "
            f"steps={2 * trained} for example"
        )
    return after
