"""The command line: parses what the user typed, and calls what stands in commands/, launch/, report/ and bench/."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Sequence

from asyncspec import __version__
from asyncspec import config as configuration
from asyncspec.bench import command
from asyncspec.commands import export, plan, serve, simulate, status
from asyncspec.config.fields import bounds, describe, hint
from asyncspec.console import never_fail
from asyncspec.errors import UserError
from asyncspec.launch import choice

TRAIN_FLAGS = ("policy_lag", "steps", "run_dir", "seed")  # short forms of fields


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong input in one line."""

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            where = ", before any flag" if action.metavar == "COMMAND" else ""
            raise argparse.ArgumentError(
                action, f"{value!r}: expected one of {', '.join(choices)}{where}" + hint(str(value), choices)
            )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Wrong input is one line on standard error and exit code 2."""
    never_fail()
    parser = _Parser(
        prog="asyncspec",
        description="Asynchronous, speculative RL post-training for language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  asyncspec train --policy-lag 1 --steps 60\n  asyncspec train --resume "
        "runs/20261121-120000 steps=240\n  asyncspec draft train --minutes 4 --out draft\n  asyncspec bench "
        "speculation --repeats 3",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_train(commands)
    _add_host(commands)
    _add_draft(commands)
    _add_doctor(commands)
    _add_data(commands)
    export.add_parser(commands)
    serve.add_parser(commands)
    plan.add_parser(commands)
    simulate.add_parser(commands)
    status.add_parser(commands)
    _add_report(commands)
    _add_audit(commands)
    command.add_parser(commands)
    # Overrides may stand between flags, but argparse takes only those that stand together.
    args, rest = parser.parse_known_args(argv)
    for item in rest:
        if item.startswith("-"):
            flags = {flag.strip("-"): flag for action in args.parser._actions for flag in action.option_strings}
            name, _, value = item.strip("-").partition("=")
            field = configuration.nearest_field(name.replace("-", "_")) if hasattr(args, "overrides") else None
            near = [flags[flag] for flag in difflib.get_close_matches(name, flags, 1, 0.6 if field else 0.0)] or [
                f"{field}={value or '...'}"
            ]
            args.parser.error(f"{item}: no such flag; nearest: {near[0]}")
    if rest and not hasattr(args, "overrides"):
        args.parser.error(f"{rest[0]!r}: expected flags only")
    if rest:
        args.overrides += rest
    try:
        return args.run(args)
    except UserError as error:
        print(f"asyncspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"asyncspec {args.command}: interrupted", file=sys.stderr)
        return 130


def run_script(name: str, file: str, *flags: str) -> None:
    """Run `asyncspec train` with these flags if the script is the program; the scripts in launch/ share this.

    Removes the script's directory from `sys.path`: its ray.py and monarch.py must not be imported as the packages.
    """
    here = os.path.dirname(os.path.realpath(file))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
    if name == "__main__":
        sys.exit(main(["train", *flags, *sys.argv[1:]]))


def _add_train(commands) -> None:
    wrapped = textwrap.TextWrapper(100, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    fields = "\n".join(
        f"  {name}={default}\n" + wrapped.fill(metadata["help"] + bounds(metadata))
        for name, default, metadata in describe(configuration.Config)
    )
    train = commands.add_parser(
        "train",
        help="train a policy; without arguments, run the default job",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a policy with GRPO, asynchronously under a strict policy lag, with speculative generation.\n"
        "Without arguments, run the default job (config tiny): a few minutes on two CPU cores.",
        epilog=f"fields that can be set, with their defaults:\n{fields}",
    )
    train.add_argument("--config", metavar="NAME", help="YAML file, or the name of a shipped config (default: tiny)")
    train.add_argument("--policy-lag", metavar="N", help="versions that a rollout may be behind; 0 is synchronous")
    train.add_argument("--steps", metavar="N", help="number of optimizer steps")
    train.add_argument("--run-dir", metavar="DIR", help="directory for the results (default: runs/<date>-<time>)")
    train.add_argument(
        "--resume",
        metavar="RUN",
        help="resume the run in this directory from its newest checkpoint, with its own configuration",
    )
    train.add_argument(
        "--node",
        type=int,
        metavar="K",
        help="play only node K of deployment.nodes: node 0 starts the run, the other nodes --join it",
    )
    train.add_argument(
        "--join", metavar="RUN", help="with --node: join the run that node 0 has started in this directory"
    )
    train.add_argument(
        "--hosts",
        metavar="HOST[:PORT],...",
        help="hosts that play the nodes after the first, in order; each must run `asyncspec host`. Further hosts are "
        "spares, which replace lost ones",
    )
    train.add_argument("--seed", metavar="N", help="random seed for the data, its order and every sample")
    train.add_argument(
        "--launcher",
        choices=choice.LAUNCHERS,
        default="auto",
        help="what starts and watches the actors (default: torchrun if it has started several ranks, else monarch)",
    )
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="field=value",
        help="set any field listed below, for example trainer.optimizer.lr=1e-4",
    )
    train.set_defaults(run=_train, parser=train)


def _train(args) -> int:
    if args.join is not None:
        from asyncspec.launch.join import join

        given = [name for name in (*TRAIN_FLAGS, "config", "resume", "hosts", "overrides") if getattr(args, name)]
        if args.node is None or given:
            raise UserError(
                f"--join {args.join}: expected --node K with it and nothing else"
                + (f", not {given[0]}" if given else "")
            )
        return join(args.join, args.node)
    overrides = args.overrides + [
        f"{flag}={getattr(args, flag)}" for flag in TRAIN_FLAGS if getattr(args, flag) is not None
    ]
    if args.resume is not None:
        from asyncspec.launch.resume import configure

        config = configure(args.resume, args.config, overrides)
    else:
        config = configuration.load(args.config or "tiny", overrides)
    return choice.launch(config, args.resume is not None, args.launcher, args.node, args.hosts)


def _add_host(commands) -> None:
    host = commands.add_parser(
        "host",
        help="let launchers on other hosts start actors on this host",
        description="Let `asyncspec train --hosts` on another host play nodes of its runs on this host, through\n"
        "Monarch, one run after another, until Ctrl-C. Anyone who reaches the port can run code under the\n"
        "account that started this command: see docs/explanation/security.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    host.add_argument(
        "address",
        nargs="?",
        default="",
        metavar="[HOST][:PORT]",
        help="address or name of this host to listen on (default: this host's own address, port 26600)",
    )
    host.set_defaults(run=_host, parser=host)


def _host(args) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from asyncspec.launch.ending import end_at_once
    from asyncspec.launch.hosts import serve

    end_at_once(serve(args.address))


def _add_doctor(commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="show what would run where, and check whether it can",
        description="Show what a run would place where and how much memory each part takes, and check this host:\n"
        "versions, GPUs, NCCL, addresses, memory. Under torchrun, with one rank on each node, also check\n"
        "whether the nodes reach each other and share a file system, and how far apart their clocks are:\n\n"
        "  torchrun --nnodes 16 --nproc-per-node 1 ... --no-python asyncspec doctor --config qwen3_8b_12plus4\n"
        "  RAY_ADDRESS=HEAD:6379 asyncspec doctor --launcher ray --config qwen3_8b_12plus4\n\n"
        "A table shows in what the nodes differ: versions, files, limits, networks, variables.\n"
        "The exit code is 1 if a check fails.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_configuration(doctor)
    doctor.add_argument(
        "--launcher",
        choices=("auto", "ray"),
        default="auto",
        help="auto: check this host, or the nodes of the torchrun that starts this; ray: those of a Ray cluster",
    )
    doctor.set_defaults(run=_doctor, parser=doctor)


def _doctor(args) -> int:
    from asyncspec.commands.doctor import examine

    try:
        config, wrong = configuration.load(args.config, args.overrides), ""
    except UserError as error:
        if int(os.environ.get("WORLD_SIZE") or 1) == 1 or not int(os.environ.get("RANK") or 0):
            raise
        # The first node reports what this one lacks, and needs only its own files for that.
        config, wrong = configuration.load(args.config, args.overrides, files=False), str(error)
    return examine(config, args.launcher, wrong)


def _add_configuration(parser) -> None:
    parser.add_argument(
        "--config", metavar="NAME", default="tiny", help="YAML file, or the name of a shipped config (default: tiny)"
    )
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="set fields, as with asyncspec train")


def _add_data(commands) -> None:
    data = commands.add_parser("data", help="show a run's data", description="Show a run's data.")
    show = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND", parser_class=_Parser).add_parser(
        "show",
        help="show prompts as the policy gets them",
        description="Show the first prompts of a run: as text, rendered with the policy's chat template if they are\n"
        "messages, and as tokens; and what the reward gets. With --samples the policy answers each, and\n"
        "the reward scores the answers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--count", metavar="N", type=int, default=3, help="prompts to show (default: 3)")
    show.add_argument("--samples", metavar="N", type=int, default=0, help="responses to each (default: 0)")
    show.add_argument("--held-out", action="store_true", help="show held-out prompts, not those for training")
    _add_configuration(show)
    show.set_defaults(run=_data_show, parser=show)


def _data_show(args) -> int:
    from asyncspec.commands.data_show import show

    no_draft = "speculation.method=none"  # the shipped one need not fit this policy, and is not used
    for name in ("count", "samples"):
        if (number := getattr(args, name)) < 0:
            args.parser.error(f"--{name} {number}: expected 0 or more")
    config = configuration.load(args.config, [*args.overrides, no_draft])
    return show(config, args.count, args.samples, args.held_out)


def _add_draft(commands) -> None:
    from asyncspec.commands import draft_settings as settings

    draft = commands.add_parser("draft", help="make a draft for a policy", description="Make a draft for a policy.")
    train = draft.add_subparsers(
        dest="draft_command", required=True, metavar="COMMAND", parser_class=_Parser
    ).add_parser(
        "train",
        help="train a draft on a policy's samples",
        description="Train a draft for a policy, then measure it by drafting on held-out prompts. Writes files that\n"
        "the engine and vLLM can load, and TensorBoard scalars beside them. An interrupt ends training\n"
        "early and keeps what was learned.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default, metadata in describe(settings.Training):
        train.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="TEXT" if isinstance(default, str) else "N",
            help=f"{metadata['help']}{bounds(metadata)} (default: {default!r})",
            choices=metadata["choices"] or None,
        )
    train.set_defaults(run=_draft_train, parser=train)


def _draft_train(args) -> int:
    began = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from asyncspec.commands.draft_settings import Training, check

    settings = Training()
    for name in vars(settings):
        if (text := getattr(args, name)) is not None:
            try:
                setattr(settings, name, type(getattr(settings, name))(text))
            except ValueError:
                args.parser.error(f"--{name.replace('_', '-')} {text}: expected a number")
    check(settings)
    for number in (signal.SIGTERM, signal.SIGHUP):  # they are interrupts, too, except under nohup
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    from asyncspec.commands import draft_train as offline

    return offline.run(settings, began)


def _add_report(commands) -> None:
    report = commands.add_parser(
        "report",
        help="show how a run went, or compare two, as one HTML file or as text",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show where the time of a run's steps went, what the slowest steps waited for, what would make\n"
        "steps faster, and how the run learned. Writes RUN/report.html, which needs no network. Two runs\n"
        "are shown side by side.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run; a second one to compare it with")
    report.add_argument(
        "--out", default="", metavar="FILE", help="file to write (default: report.html in the first run's directory)"
    )
    report.add_argument("--text", action="store_true", help="print to the terminal instead of writing a file")
    report.set_defaults(run=_report, parser=report)


def _report(args) -> int:
    if len(args.runs) > 2:
        args.parser.error(f"{len(args.runs)} runs: expected one or two")
    from asyncspec.report import write

    return write.report(args.runs, args.out, args.text)


def _add_audit(commands) -> None:
    audit = commands.add_parser(
        "audit",
        help="check that a run kept its promises",
        description="Check from a run's ledger that each ticket was either trained once, in its step and within the "
        "policy lag, or dropped with a reason, and that no step is missing. Prints each violation; the exit code is 1 "
        "if there is one.",
    )
    audit.add_argument("directory", metavar="RUN", help="directory of a run")
    audit.set_defaults(run=_audit, parser=audit)


def _audit(args) -> int:
    from asyncspec.ledger.audit import audit

    return audit(args.directory)


if __name__ == "__main__":
    sys.exit(main())
