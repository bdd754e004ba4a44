"""Write the policy of a trainer's checkpoint as a Hugging Face directory.

The checkpoint may come from any number of ranks. This process reads it part by part, so it needs memory for one part
and no other rank.
"""

from __future__ import annotations

from pathlib import Path

from asyncspec.config import Config, resolve_path
from asyncspec.ledger import best, checkpoint, reading


def write_policy(config: Config, path: Path, directory: Path, dtype: str) -> None:
    """Write a checkpoint's policy, or its adapters, and its MTP module if the trainer has trained one.

    Args:
        config: of the run.
        path: the checkpoint.
        directory: the directory to write.
        dtype: of the weights.

    Raises:
        CheckpointError: a file of the model that the run began with is damaged.
        OSError: the directory cannot be written.
        Exception: the checkpoint cannot be read; of what type depends on torch.
    """
    from asyncspec.models import lora, mtp, policy
    from asyncspec.models.shape import PolicyShape
    from asyncspec.rl.exporting import write

    source = resolve_path(config.model.path)
    shape = PolicyShape.from_hf(source, config.model.backend)
    model, module = policy.skeleton(shape, 1, config.lora), None
    if config.draft_trainer == "trainer":
        module = mtp.load(resolve_path(config.draft_directory), shape, model.lm_head.weight, 1)
        own = dict(module.named_parameters())
        for part in reading.parts(path, "mtp", own):
            for name, tensor in part.items():
                own[name].data.copy_(tensor)
    write(config, directory, reading.parts(path, "trainer", lora.trained(model)), dtype, module)


def save_best(config: Config, run_dir: Path) -> str:
    """Write the policy of a run's best version to best/policy, unless it is there. Return a line that says so; "" if
    nothing was written.

    Raises:
        OSError: a file of the checkpoint has changed, or the directory cannot be written.
    """
    record, folder = best.read(run_dir), run_dir / best.FOLDER
    if record is None or (folder / best.POLICY).is_dir():
        return ""
    path, partial = folder / record["checkpoint"], folder / f"{best.POLICY}{checkpoint.PARTIAL}"
    if fault := checkpoint.damage(path):
        raise OSError(f"checkpoint {path.name}: {fault}")
    write_policy(config, path, partial, config.checkpoint.export_dtype)
    partial.rename(folder / best.POLICY)
    return f"policy of version {record['version']}, the best, written to {folder / best.POLICY}"
