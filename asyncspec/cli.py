"""The command line: `asyncspec train` and `asyncspec bench`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Sequence

from asyncspec import __version__
from asyncspec import config as configuration


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Wrong input is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(prog="asyncspec", description="Asynchronous, speculative RL post-training.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_bench(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except configuration.ConfigError as error:
        print(f"asyncspec: {error}", file=sys.stderr)
        return 2


def _add_train(commands) -> None:
    fields = "\n".join(f"  {name}={default}" + (f"\n      {comment}" if comment else "")
                       for name, default, comment in configuration.describe())
    train = commands.add_parser(
        "train", help="train a policy; without arguments the default job",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a policy with GRPO: asynchronous under a strict policy lag, with speculative generation.\n"
                    "Without arguments: the default job (config tiny), a few minutes on two CPU cores.",
        epilog=f"fields for overrides, with their defaults:\n{fields}")
    train.add_argument("--config", default="tiny", help="YAML file, or the name of a shipped one (default: tiny)")
    train.add_argument("--policy-lag", type=int, help="versions a rollout may be behind; 0 is synchronous")
    train.add_argument("--steps", type=int, help="optimizer steps")
    train.add_argument("--run-dir", help="where results go (default: runs/<date>-<time>)")
    train.add_argument("--seed", type=int)
    train.add_argument("overrides", nargs="*", metavar="field=value", help="any field listed below, for example trainer.optimizer.lr=1e-4")
    train.set_defaults(run=_train)


def _train(args) -> int:
    overrides = list(args.overrides)
    for flag in ("policy_lag", "steps", "run_dir", "seed"):
        if getattr(args, flag) is not None:
            overrides.append(f"{flag}={getattr(args, flag)}")
    config = configuration.load(args.config, overrides)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        from asyncspec.launch import processes

        return processes.launch(config, rank, world_size)
    from asyncspec.launch import monarch

    return monarch.launch(config)


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure; writes a table, result.json and a plot")
    bench.add_argument("name", help="which benchmark: async, engine, speculation")
    bench.add_argument("--out", default="bench-out", metavar="DIR", help="where result.json and the plot go (default: bench-out)")
    bench.add_argument("--repeats", type=int, default=0, help="repetitions of each variant (default: the benchmark's own)")
    bench.add_argument("overrides", nargs="*", metavar="field=value")
    bench.set_defaults(run=_bench)


def _bench(args) -> int:
    from asyncspec.bench import harness

    return harness.run(args.name, args.out, args.repeats, args.overrides)


if __name__ == "__main__":
    sys.exit(main())
