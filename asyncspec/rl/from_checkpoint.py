"""Write the policy of a trainer's checkpoint as a Hugging Face directory.

The checkpoint may come from any number of ranks. This process reads it part by part, so it needs memory for one part
and no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from asyncspec.config import Config, resolve_path
from asyncspec.ledger import best, checkpoint

PART_BYTES = 1 << 30  # weights that are read at once


def parts(path: Path, sizes: dict[str, torch.Size]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a checkpoint's parameters in float32, some at a time.

    Args:
        path: the checkpoint.
        sizes: name -> shape of each parameter.

    Raises:
        OSError: a file of it has changed.
    """
    if fault := checkpoint.damage(path):
        raise OSError(f"checkpoint {path.name}: {fault}")
    part: dict[str, torch.Tensor] = {}
    for name, size in sizes.items():
        part[name] = torch.empty(size)
        if sum(4 * tensor.numel() for tensor in part.values()) >= PART_BYTES:
            yield _read(path, part)
            part = {}
    if part:
        yield _read(path, part)


def save_policy(config: Config, path: Path, directory: Path) -> None:
    """Write a checkpoint's policy. An MTP module is not in it.

    Args:
        config: of the run.
        path: the checkpoint.
        directory: the directory to write.

    Raises:
        OSError: the checkpoint has changed, or the directory cannot be written.
    """
    from asyncspec.models import policy
    from asyncspec.models.contents import check_policy

    source = resolve_path(config.model.path)
    shape = check_policy(source)
    model = policy.skeleton(shape, config.positions)
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    dtype = getattr(torch, config.checkpoint.export_dtype)
    policy.save(model, shape, directory, source, None, dtype, parts(path, sizes))


def save_best(config: Config, run_dir: Path) -> str:
    """Write the policy of a run's best version to best/policy, unless it is there. Return a line that says so; "" if
    nothing was written.

    Raises:
        OSError: see `save_policy`.
    """
    record, folder = best.read(run_dir), run_dir / best.FOLDER
    if record is None or (folder / best.POLICY).is_dir():
        return ""
    partial = folder / f"{best.POLICY}{checkpoint.PARTIAL}"
    save_policy(config, folder / record["checkpoint"], partial)
    partial.rename(folder / best.POLICY)
    return f"policy of version {record['version']}, the best, written to {folder / best.POLICY}"


def _read(path: Path, part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    dcp.load({"trainer": {"parameters": part}}, checkpoint_id=str(path), no_dist=True)
    return part
