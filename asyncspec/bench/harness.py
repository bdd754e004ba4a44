"""The form that all benchmarks share.

A benchmark names its variants and measures one of them at a time. The harness interleaves them: it measures every
variant once, then every variant again in reverse order, so that other load on the machine affects all of them alike.
It reports medians with their quartiles, and writes result.json with every sample, and a plot.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import shlex
import signal
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from threadpoolctl import threadpool_info

from asyncspec.bench import BENCHMARKS
from asyncspec.commands.output import output_directory
from asyncspec.config.fields import hint
from asyncspec.console import terminal
from asyncspec.errors import UserError
from asyncspec.timing.attribution import COLORS, PARTS

KEPT = "samples.json"  # in a benchmark's directory: the whole repetitions that --full has measured
LABELED = 0.005  # of the longest bar: parts that are shorter in every variant have no label
TABLE_WIDTH = 150  # columns of a table that goes to a file or a pipe

Samples = dict[str, list[dict[str, float]]]  # variant -> one dict of measurements per repetition


class Benchmark(ABC):
    """A benchmark. Its module has a function `make(overrides, out) -> Benchmark`."""

    name: str
    repeats: int
    variants: Sequence[str]
    columns: Sequence[str]  # the measurements shown in the progress lines and in the table
    # What `--full` measures: repetitions, and variants after the usual ones. 0: the benchmark has no `--full`.
    full_repeats = 0
    full_variants: Sequence[str] = ()

    @abstractmethod
    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        """Measure a variant once."""

    def again(self, samples: Samples) -> tuple[int, Sequence[str]]:
        """Return which variants to measure again after all others, and at most how often. The harness keeps these
        samples under the name "again VARIANT".
        """
        return 0, ()

    def settled(self, variant: str, measured: Sequence[dict[str, float]]) -> bool:
        """Whether a variant has been measured often enough before all rounds are over. The answer may depend on how
        certain a result is, but not on the result.
        """
        return False

    @abstractmethod
    def headline(self, samples: Samples) -> dict[str, float]:
        """Return the numbers to quote."""

    @abstractmethod
    def plot(self, axes, samples: Samples) -> None:
        """Draw into matplotlib axes."""

    def tables(self, samples: Samples) -> list[Table]:
        """Return the tables to print at the end; by default one, with all variants and all columns."""
        return [_table(self, samples)]

    def close(self) -> None:
        """Stop what the benchmark started."""


def run(
    name: str,
    out: str,
    repeats: int | None,
    overrides: Sequence[str],
    only: Sequence[str] = (),
    full: bool = False,
) -> int:
    """Run a benchmark: measure, print, and write files; return the exit code.

    Args:
        only: the variants that begin with one of these words; empty: all.
        full: measure all that the benchmark can, and go on after the repetitions that are already in `out`.
    """
    if name not in BENCHMARKS:
        raise UserError(f"bench {name}: expected one of {', '.join(BENCHMARKS)}" + hint(name, list(BENCHMARKS)))
    if repeats is not None and repeats < 1:
        raise UserError(f"--repeats {repeats}: expected 1 or more")
    directory = output_directory(out)
    benchmark: Benchmark = importlib.import_module(BENCHMARKS[name].module).make(overrides, directory)
    console = terminal(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    kept = directory / KEPT
    try:
        if full and (only or not benchmark.full_repeats):
            why = "expected no --only" if only else "this benchmark has one size; expected no --full"
            raise UserError(f"bench {name} --full: {why}")
        sets = [benchmark.variants, *([benchmark.full_variants] if full and benchmark.full_variants else [])]
        samples = _kept(kept, overrides, sets) if full else {}
        repeats = repeats or (benchmark.full_repeats if full else benchmark.repeats)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what a benchmark has started
        chosen = _chosen(benchmark.variants, only)
        options = [word for begin in only for word in ("--only", begin)] + ["--full"] * full
        most = max(repeats, len(samples.get(benchmark.variants[0], ())))
        command = shlex.join(["asyncspec", "bench", name, "--repeats", str(most), *options, *overrides])
        with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:

            def measure(rounds: int, variants: Sequence[str], first: int = 0, prefix: str = "") -> None:
                bar = progress.add_task(prefix + name, total=rounds * len(variants))
                for repetition in range(rounds):
                    # Reverse the order each round: the variant that is measured first has colder caches.
                    for variant in variants if (first + repetition) % 2 == 0 else reversed(variants):
                        if benchmark.settled(prefix + variant, samples.get(prefix + variant, ())):
                            progress.update(bar, advance=1)
                            continue
                        measured = benchmark.measure(variant, first + repetition)
                        samples.setdefault(prefix + variant, []).append(measured)
                        shown = "  ".join(f"{key} {measured[key]:.3f}" for key in benchmark.columns if key in measured)
                        progress.console.print(
                            f"[{repetition + 1}/{rounds}] {prefix}{variant}: {shown}", soft_wrap=True
                        )
                        progress.update(bar, advance=1)
                    if full:
                        whole = kept.with_suffix(".partial")  # an interrupt leaves the file as it was
                        whole.write_text(json.dumps({"overrides": list(overrides), "samples": samples}))
                        whole.replace(kept)

            for variants in sets if full else [chosen]:
                done = len(samples.get(variants[0], ()))
                measure(max(repeats - done, 0), variants, done)
                if full and variants is not sets[-1]:  # the next set takes long
                    _write(benchmark, samples, directory, command, not only, console)
            rounds, variants = benchmark.again(samples)
            if rounds:
                measure(rounds, variants, repeats, "again ")
    finally:
        benchmark.close()
    _write(benchmark, samples, directory, command, not only, console)
    return 0


def _write(
    benchmark: Benchmark, samples: Samples, directory: Path, command: str, whole: bool, console: Console
) -> None:
    """Write result.json and the plot, and print tables and headline.

    Args:
        command: the command that measured the samples.
        whole: whether all usual variants were measured. With some alone there is neither a headline nor a plot.
    """
    name = benchmark.name
    headline = benchmark.headline(samples) if whole else _ratios(samples)
    (directory / "result.json").write_text(
        as_json(
            {
                "benchmark": name,
                "headline": headline,
                "samples": samples,
                "machine": machine(),
                "versions": versions(),
                "command": command,
                "date": datetime.datetime.now().isoformat(timespec="seconds"),
            }
        )
        + "\n"
    )
    for table in benchmark.tables(samples) if whole else [_table(benchmark, samples)]:
        console.print(table)
    for key, value in headline.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for name, each in parts:
            console.print(f"{key}{' ' * bool(name)}{name}: {each:.3f}", soft_wrap=True)
    written = [directory / "result.json"]
    if whole:
        written.append(directory / "plot.png")
        _plot(name, benchmark, samples, written[1])
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)


def as_json(result) -> str:
    """Return a result as JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(json.loads(json.dumps(result), parse_constant=lambda name: None), indent=1)


def _chosen(variants: Sequence[str], only: Sequence[str]) -> Sequence[str]:
    """Return the variants that begin with one of these words; all if there are none.

    Raises:
        UserError: no variant begins so.
    """

    def begins(variant: str, begin: str) -> bool:
        return variant == begin or variant.startswith((f"{begin} ", f"{begin},"))

    for begin in only:
        if not any(begins(variant, begin) for variant in variants):
            known = [" ".join(one.split()[:words]) for one in variants for words in (1, 2, 3)]
            example = f"expected the beginning of a variant, for example {variants[0]!r}"
            raise UserError(f"--only {begin!r}: {example}" + hint(begin, list(dict.fromkeys(known))))
    return [variant for variant in variants if not only or any(begins(variant, begin) for begin in only)]


def _kept(file: Path, overrides: Sequence[str], sets: Sequence[Sequence[str]]) -> Samples:
    """Return the samples of the whole repetitions that earlier sittings have measured.

    Raises:
        UserError: the file is damaged, or they were measured with other fields, or are of other variants.
    """
    if not file.exists():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        fields, samples = list(kept["overrides"]), dict(kept["samples"])
        counts = [{len(samples[variant]) for variant in variants if variant in samples} for variants in sets]
        if not all(sample and isinstance(sample, dict) for measured in samples.values() for sample in measured):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{file}: damaged; expected what --full has written; delete it, or take another --out"
        ) from None
    begun = [variant for variants in sets if variants[0] in samples for variant in variants]
    if list(samples) != begun or any(len(each) > 1 for each in counts):
        raise UserError(f"{file}: of another benchmark or its other version; expected another --out")
    if fields != list(overrides):
        raise UserError(f"{file}: measured with {fields} before; expected the same fields, or another --out")
    return samples


def _ratios(samples: Samples) -> dict[str, float]:
    """Return the median ratio of each pair of variants that took turns."""
    pairs = [variant for variant, measured in samples.items() if "over" in measured[0]]
    return {f"{pair}, median ratio": median(samples, pair, "over") for pair in pairs}


def median(samples: Samples, variant: str, key: str) -> float:
    return statistics.median(sample[key] for sample in samples[variant])


def ratio(samples: Samples, key: str, above: str, below: str) -> float:
    """Return the median over repetitions of the ratio of two variants, each pair from the same repetition."""
    return statistics.median(a[key] / b[key] for a, b in zip(samples[above], samples[below]))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    return (
        tuple(statistics.quantiles(values, n=4, method="inclusive")) if len(values) > 1 else (*values, *values, *values)
    )


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of normally distributed values, from their quartiles."""
    low, _, high = spread(values)
    return 1.2533 * (high - low) / 1.349 / len(values) ** 0.5


def plot_parts(axes, samples: Samples, variants: Sequence[str]) -> None:
    """Draw a step of each variant as a bar of its parts, in the colors of all figures."""
    left = dict.fromkeys(variants, 0.0)
    longest = max(median(samples, variant, "step_s") for variant in variants)
    for part in PARTS:
        widths = [median(samples, variant, f"{part}_s") for variant in variants]
        label = part.replace("_", " ") if max(widths) >= LABELED * longest else None
        axes.barh(variants, widths, left=list(left.values()), label=label, color=COLORS[part])
        left = {variant: begun + width for (variant, begun), width in zip(left.items(), widths)}
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False, fontsize=8)


def machine() -> dict[str, str | int]:
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    blas = sorted({library["architecture"] for library in threadpool_info() if "architecture" in library})
    torch = sys.modules.get("torch")  # a benchmark that does not import torch uses no GPU
    gpu = {"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": model,
        "cores": os.cpu_count() or 0,
        "numpy_kernels": ", ".join(blas),
    } | gpu


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("asyncspec", "torch", "torchtitan", "pyzmq")},
    }


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(benchmark: Benchmark, samples: Samples) -> Table:
    table = Table(title=f"bench {benchmark.name}: median (first to third quartile)", title_justify="left")
    table.add_column("variant")
    for column in benchmark.columns:
        table.add_column(column, justify="right")
    for variant, measured in samples.items():
        cells = []
        for column in benchmark.columns:
            values = [sample[column] for sample in measured if column in sample]
            if not values:
                cells.append("")
                continue
            low, middle, high = spread(values)
            cells.append(f"{_short(middle)} ({_short(low)} to {_short(high)})")
        table.add_row(variant, *cells)
    return table


def _plot(name: str, benchmark: Benchmark, samples: Samples, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    benchmark.plot(axes, samples)
    axes.set_title(f"asyncspec bench {name}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
