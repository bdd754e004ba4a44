"""`asyncspec export`: makes a Hugging Face directory of a checkpoint of a run, without running the run."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncspec.config import Config, fetched_model, fetched_weights, from_yaml, resolve_path
from asyncspec.errors import Damaged, UserError, first_line
from asyncspec.files import new_folder
from asyncspec.launch.push import check_repository, push
from asyncspec.ledger import checkpoint
from asyncspec.models import CheckpointError

DTYPES = ("float32", "bfloat16")


def add_parser(commands) -> None:
    export = commands.add_parser(
        "export",
        help="make a Hugging Face directory of a checkpoint of a run, and push it to a hub",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make a Hugging Face directory of a checkpoint of a run, which need not have ended. Tokenizer,\n"
        "chat template and other files are those of the run's model.path. Adapters are merged, and lie\n"
        "beside in peft's form. With --push, push the directory to a hub:\n"
        "HF_TOKEN is a token that may write there, and HF_ENDPOINT another hub than huggingface.co.",
    )
    export.add_argument("directory", metavar="RUN", help="directory of a run")
    export.add_argument(
        "--out", default="", metavar="DIR", help="directory to make (default: exports/step-VERSION in the run's)"
    )
    export.add_argument("--version", type=int, metavar="N", help="version to export (default: the newest checkpoint's)")
    export.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: the run's export_dtype)")
    export.add_argument("--push", default="", metavar="OWNER/NAME", help="push the directory to this repository")
    export.add_argument("--private", action="store_true", help="with --push: a repository that is made is private")
    export.set_defaults(run=_run, parser=export)


def _run(args) -> int:
    if args.private and not args.push:
        args.parser.error("--private: expected --push OWNER/NAME with it")
    return export(args.directory, args.out, args.version, args.dtype, args.push, args.private)


def export(run: str, out: str, version: int | None, dtype: str | None, to: str, private: bool) -> int:
    """Export a version, and print where it is. Return the exit code. The arguments are those of the command.

    Raises:
        UserError: there is no such run or version, a file cannot be read or written, or the hub refuses.
    """
    run_dir = resolve_path(run).absolute()
    config = run_config(run, run_dir)
    if config.trainer.kind == "mock":
        raise UserError(f"{run}: expected a run with a policy, but its trainer.kind is mock")
    if to:
        check_repository("--push ", to)
    found, path = _chosen(run, run_dir, version)
    folder = resolve_path(out).absolute() if out else checkpoint.export_of(run_dir, found)
    if out and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {out}: exists already; expected a directory that is empty or does not exist")
    name = dtype or config.checkpoint.export_dtype
    try:
        with new_folder(folder) as partial:
            _write(config, path, partial, name)
    except (OSError, CheckpointError) as error:
        others = checkpoint.versions(run_dir, "trainer") if isinstance(error, Damaged) else []
        more = f"; expected another one, of {', '.join(map(str, others))}" if others else ""
        raise UserError(f"version {found} was not exported: {first_line(error)}{more}") from None
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"version {found} is in {folder} ({1e-6 * size:,.1f} MB, {name})", flush=True)
    if to:
        message = f"Version {found} of the run {run_dir.name}, trained with asyncspec"
        print(f"pushed to {push('--push ', to, folder, message, private)}")
    return 0


def run_config(run: str, run_dir: Path) -> Config:
    """Return the configuration of a run.

    Raises:
        UserError: the directory holds no run, or one of another version of asyncspec.
    """
    try:
        return from_yaml((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{run}: no config.yaml in it; expected the directory of a run") from None


def _chosen(run: str, run_dir: Path, version: int | None) -> tuple[int, Path]:
    """Return the version to export, and the path of its checkpoint."""
    there = checkpoint.versions(run_dir, "trainer")
    if not there:
        raise UserError(f"{run}: has no checkpoint yet; expected one in {run_dir / checkpoint.FOLDER}")
    if version is None:
        found = checkpoint.newest(run_dir, "trainer", lambda text: print(text, flush=True))
        if found is None:
            raise UserError(f"{run}: none of its checkpoints is intact; expected one")
        version = found[0]
    elif version not in there:
        held = ", ".join(map(str, there))
        raise UserError(f"--version {version}: {run} has no checkpoint of it; expected one of {held}")
    path = checkpoint.where(run_dir, "trainer", version)
    if fault := checkpoint.damage(path):
        others = ", ".join(str(other) for other in there if other != version)
        raise UserError(
            f"--version {version}: the checkpoint is damaged: {fault}"
            + (f"; expected another one, of {others}" if others else "; there is no other one")
        )
    return version, path


def _write(config: Config, path: Path, directory: Path, dtype: str) -> None:
    """Write the Hugging Face directory, part by part.

    Raises:
        UserError: the checkpoint cannot be read, or the model that the run began with is gone.
    """
    from asyncspec.rl.from_checkpoint import write_policy

    config.checkpoint.export_merged = True  # what a run leaves out can be had from here
    config.model.path = text = fetched_model("model.path=", config.model.path)
    fetched_weights("model.path=", text)  # tensors that training does not change are in its files
    if not resolve_path(text).is_dir():
        raise UserError(f"model.path={text!r}: no such directory; expected the model that the run began with")
    try:
        write_policy(config, path, directory, dtype)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # torch has many types for a checkpoint that cannot be read
        raise UserError(
            f"{path}: {first_line(error)}; expected a checkpoint; a run in progress removes old ones"
        ) from None
