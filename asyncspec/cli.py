"""The command line: `asyncspec train` and `asyncspec bench`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import Sequence

from asyncspec import __version__
from asyncspec import config as configuration

TRAIN_FLAGS = ("policy_lag", "steps", "run_dir", "seed")  # short forms of fields


class _Parser(argparse.ArgumentParser):
    """Wrong input is one line here too."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Wrong input is one line on standard error and exit code 2."""
    parser = _Parser(
        prog="asyncspec", description="Asynchronous, speculative RL post-training.", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="for example:\n  asyncspec train --policy-lag 1 --steps 60\n  asyncspec bench speculation --repeats 3")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_train(commands)
    _add_bench(commands)
    # Overrides may stand between flags; argparse takes only those that stand together.
    args, rest = parser.parse_known_args(argv)
    for item in rest:
        if item.startswith("-"):
            flags = [flag for action in args.parser._actions for flag in action.option_strings]
            nearest = difflib.get_close_matches(item.split("=")[0], flags, 1, 0.0)[0]
            args.parser.error(f"{item}: no such flag; nearest: {nearest}")
    args.overrides += rest
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
    train.add_argument("--policy-lag", metavar="N", help="versions a rollout may be behind; 0 is synchronous")
    train.add_argument("--steps", metavar="N", help="optimizer steps")
    train.add_argument("--run-dir", metavar="DIR", help="where results go (default: runs/<date>-<time>)")
    train.add_argument("--seed", metavar="N", help="of the data, its order and every sample")
    train.add_argument("overrides", nargs="*", metavar="field=value", help="any field listed below, for example trainer.optimizer.lr=1e-4")
    train.set_defaults(run=_train, parser=train)


def _train(args) -> int:
    overrides = args.overrides + [f"{flag}={getattr(args, flag)}" for flag in TRAIN_FLAGS if getattr(args, flag) is not None]
    config = configuration.load(args.config, overrides)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        from asyncspec.launch import processes

        return processes.launch(config, rank, world_size)
    from asyncspec.launch import monarch

    return monarch.launch(config)


def _add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench", help="measure; writes a table, result.json and a plot", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure, all variants interleaved; prints a table and writes result.json and plot.png.\n\n"
                    "  async        the default job at policy lag 0 and 1: what asynchrony hides (about 5 minutes)\n"
                    "  engine       tokens a second by live sequences and draft length, a step's parts, vLLM and transformers\n"
                    "               beside it where ASYNCSPEC_VLLM_PYTHON and ASYNCSPEC_TRANSFORMERS_PYTHON name their\n"
                    "               interpreters (scripts/compare/make_environments.sh makes both; about 15 minutes)\n"
                    "  speculation  every drafter by live sequences and draft length, the default job's rollouts, and whether\n"
                    "               the automatic draft length ever loses (about 20 minutes)")
    bench.add_argument("name", help="async, engine or speculation")
    bench.add_argument("--out", default="bench-out", metavar="DIR", help="where result.json and the plot go (default: bench-out)")
    bench.add_argument("--repeats", type=int, default=0, metavar="N", help="repetitions of each variant (default: the benchmark's own)")
    bench.add_argument("overrides", nargs="*", default=[], metavar="field=value",
                       help="fields of the job that is measured, as for train, for example engine.threads=2")
    bench.set_defaults(run=_bench, parser=bench)


def _bench(args) -> int:
    from asyncspec.bench import harness

    return harness.run(args.name, args.out, args.repeats, args.overrides)


if __name__ == "__main__":
    sys.exit(main())
