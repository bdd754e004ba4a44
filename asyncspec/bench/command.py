"""asyncspec bench: its flags, and what it lists. The harness is loaded only when a benchmark runs."""

from __future__ import annotations

import argparse
import textwrap

from asyncspec.bench import BENCHMARKS
from asyncspec.errors import UserError


def add_parser(commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="run a benchmark",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a benchmark, its variants interleaved. Prints a table and writes result.json and plot.png.\n\n"
        + "\n".join(
            textwrap.fill(
                f"{one.shows} (about {one.minutes} minutes)",
                118,
                initial_indent=f"  {name:<13}",
                subsequent_indent=" " * 15,
            )
            for name, one in BENCHMARKS.items()
        ),
    )
    bench.add_argument("name", help=", ".join(BENCHMARKS))
    bench.add_argument(
        "--out", default="bench-out", metavar="DIR", help="directory for result.json and plot.png (default: bench-out)"
    )
    bench.add_argument(
        "--repeats", type=int, metavar="N", help="repetitions of each variant (default: the benchmark's own)"
    )
    bench.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="VARIANT",
        help="measure only the variants that begin so, for example --only job --only '64 mtp' (default: all)",
    )
    bench.add_argument(
        "--full",
        action="store_true",
        help="measure more, where a benchmark can; go on after the repetitions that are already in --out",
    )
    bench.add_argument(
        "--cells", metavar="FILE", help="published: compare these cells too; JSON, id to value, or a list of both"
    )
    bench.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="field=value",
        help="set fields of the measured job, as with asyncspec train, for example engine.threads=2",
    )
    bench.set_defaults(run=_bench, parser=bench)


def _bench(args) -> int:
    from asyncspec.bench import harness

    if args.cells and args.name != "published":
        raise UserError(f"bench {args.name} --cells: expected bench published --cells")
    overrides = [*args.overrides, *([f"cells={args.cells}"] if args.cells else [])]
    return harness.run(args.name, args.out, args.repeats, overrides, args.only, args.full)
