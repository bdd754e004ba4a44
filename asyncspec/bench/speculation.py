"""bench speculation: what speculation gains, and whether it ever loses, on the shipped policy.

There are two loads:

- The job: 64 rollouts of the default job through 16 slots, five times. The responses have the job's own length
  distribution, with its long tail.
- A fixed number of live sequences, from 1 to 64, for each drafter, an untrained one included: without speculation,
  with fixed draft lengths, and with the length chosen for each step (auto).

Auto is then measured again, by turns with the best of the others, until the median of each pair is known well enough.
The headline rests on these pairs. For comparison, two engines without speculation take turns as well: a smaller
difference than theirs means nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from asyncspec.bench.harness import Benchmark, Samples, median, median_error, ratio, spread
from asyncspec.bench.loads import METHODS, Loads
from asyncspec.speculation.draft_length import LONGEST

# A measurement does JOBS jobs, one after the other, because one job takes only a sixth of a second.
JOB_ROLLOUTS, JOB_SLOTS, JOBS = 64, 16, 5
JOB_LENGTHS = (*range(1, 8), LONGEST, "auto")
LIVE = (1, 2, 4, 8, 16, 32, 64)
FEW = (1, 2, 4)
FIXED = (1, 2, 3, 5, 7, LONGEST)
# Rollouts of a measurement, and further ones per slot, in addition to those still live when it ends.
ROLLOUTS, ROLLOUTS_SLOT = 32, 3
# How often auto is measured by turns with the best: at least, at most, and until the median has this standard error.
PAIRS, MOST_PAIRS, ERROR = 12, 46, 0.004
NEVER_LOSES = 0.97  # least tokens per second that auto should reach, as a share of the best
_ALIKE = "{} eagle3 none over none"


class SpeculationBenchmark(Benchmark):
    name = "speculation"
    repeats = 3
    columns = ("tokens_per_s", "over", "acceptance_length", "proposals", "step_ms")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.loads = Loads(overrides)
        # On a GPU: the variants, with the instances of their engines, whose graphs are captured.
        self._captured: set[tuple[str, int]] = set()
        # "none", no speculation, is measured again for each drafter, next to auto: the machine's other load changes
        # within seconds.
        self.variants = [f"job eagle3 {k}" for k in (*JOB_LENGTHS, "none")]
        self.variants += [
            f"{live} {method} {k}" for live in LIVE for method in METHODS for k in (*FIXED, "auto", "none")
        ]

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        """Measure a variant, named LOAD DRAFTER LENGTH, or LOAD DRAFTER LENGTH over LENGTH for two that take turns.
        LOAD is "job" or a number of live sequences.
        """
        load, method, *lengths = variant.replace("over ", "").split()
        slots, loads = JOB_SLOTS if load == "job" else int(load), self.loads

        def run() -> list[dict[str, float]]:
            engines = [
                loads.engine("none" if k == "none" else method, slots, 0 if k == "none" else k, (repetition + i) % 2)
                for i, k in enumerate(lengths)
            ]
            if load != "job":
                return loads.steady(repetition, ROLLOUTS + (1 + ROLLOUTS_SLOT) * slots, *engines)
            samples = loads.config.rl.group_size
            jobs = [
                loads.batch(JOBS * repetition + job, JOB_ROLLOUTS // samples, samples, *engines) for job in range(JOBS)
            ]
            return [_together(of_engine) for of_engine in zip(*jobs)]

        if loads.device != "cpu" and (variant, repetition % 2) not in self._captured:
            self._captured.add((variant, repetition % 2))
            run()
        measured = run()
        if len(measured) == 2:
            measured[0]["over"] = measured[0]["tokens_per_s"] / measured[1]["tokens_per_s"]
        return measured[0]

    def headline(self, samples: Samples) -> dict[str, float]:
        def over(variant: str) -> float:
            return median(samples, f"again {variant}", "over")

        def fixed_over_none(load: str, k: int) -> float:
            return ratio(samples, "tokens_per_s", f"{load} eagle3 {k}", f"{load} eagle3 none")

        cells = {(live, method): self._against_best(samples, live, method) for live in LIVE for method in METHODS}
        worst = min(cells, key=lambda cell: cells[cell][2])
        best, low, middle, high = cells[worst]
        error = median_error([sample["over"] for sample in samples[f"again {worst[0]} {worst[1]} auto over {best}"]])
        alike = [over(_ALIKE.format(live)) for live in LIVE]
        return {
            "generation_speedup_auto": over("job eagle3 auto over none"),
            "generation_speedup_few": min(over(f"{live} eagle3 auto over none") for live in FEW),
            "never_loses_min": middle,
            "never_loses_min_first_quartile": low,
            "never_loses_min_third_quartile": high,
            "never_loses_min_error": error,
            "never_loses_min_live": worst[0],
            "never_loses_median": statistics.median(cell[2] for cell in cells.values()),
            "never_loses_share": sum(cell[2] >= NEVER_LOSES for cell in cells.values()) / len(cells),
            "alike_min": min(alike),
            "alike_max": max(alike),
            **{f"generation_speedup_k{k}": fixed_over_none("job", k) for k in JOB_LENGTHS if k != "auto"},
            **{f"generation_speedup_{live}_live": over(f"{live} eagle3 auto over none") for live in LIVE},
            **{f"generation_speedup_16_live_k{k}": fixed_over_none("16", k) for k in FIXED},
            "acceptance_length_k3": median(samples, "job eagle3 3", "acceptance_length"),
            "tokens_per_s_none": median(samples, "job eagle3 none", "tokens_per_s"),
            "tokens_per_s_auto": median(samples, "job eagle3 auto", "tokens_per_s"),
        }

    def again(self, samples: Samples) -> tuple[int, list[str]]:
        """Return the pairs that the headline rests on: auto with no speculation, and auto with the best. Both of a
        pair are measured anew, because the best of several noisy results is also the luckiest.
        """
        pairs = []
        for load, method in dict.fromkeys(tuple(variant.split()[:2]) for variant in samples):
            if f"{load} {method} auto" not in samples or f"{load} {method} none" not in samples:
                continue
            if method == "eagle3":
                pairs.append(f"{load} eagle3 auto over none")
            if load != "job" and all(f"{load} {method} {k}" in samples for k in FIXED):
                pairs.append(f"{load} {method} auto over {self._best(samples, load, method)}")
                pairs += [_ALIKE.format(load)] if method == "eagle3" else []
        return MOST_PAIRS, list(dict.fromkeys(pairs))

    def settled(self, variant: str, measured: Sequence[dict[str, float]]) -> bool:
        return (
            variant.startswith("again ")
            and len(measured) >= PAIRS
            and median_error([sample["over"] for sample in measured]) <= ERROR
        )

    def _best(self, samples: Samples, live: int | str, method: str) -> str:
        """Return the fastest of no speculation ("none") and the fixed draft lengths."""
        return max(("none", *map(str, FIXED)), key=lambda k: median(samples, f"{live} {method} {k}", "tokens_per_s"))

    def _against_best(self, samples: Samples, live: int, method: str) -> tuple[str, float, float, float]:
        """Return the name of the best, and the quartiles of auto over it."""
        best = self._best(samples, live, method)
        return best, *spread([sample["over"] for sample in samples[f"again {live} {method} auto over {best}"]])

    def tables(self, samples: Samples) -> list[Table]:
        job = Table(title=f"the job: {JOB_ROLLOUTS} rollouts through {JOB_SLOTS} slots, EAGLE-3", title_justify="left")
        for column in ("draft length", "tokens/s", "over none", "acceptance length", "acceptance by position"):
            job.add_column(column, justify="right")
        for variant in (f"job eagle3 {k}" for k in ("none", *JOB_LENGTHS)):
            low, middle, high = spread(
                [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(samples[variant], samples["job eagle3 none"])]
            )
            by_position = [
                f"{median(samples, variant, f'acceptance_{i}'):.2f}"
                for i in range(1, LONGEST + 1)
                if all(f"acceptance_{i}" in s for s in samples[variant])
            ]
            length = f"{median(samples, variant, 'acceptance_length'):.2f}" if by_position else ""
            job.add_row(
                variant.split()[2],
                f"{median(samples, variant, 'tokens_per_s'):.0f}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                length,
                " ".join(by_position),
            )
        cells = Table(
            title="fixed number of live sequences: tokens/s, and auto over the best of no speculation and fixed k",
            title_justify="left",
        )
        for column in (
            "live",
            "drafter",
            "none",
            *(f"k={k}" for k in FIXED),
            "auto",
            "proposals",
            "best",
            "auto over best",
            "auto over none",
        ):
            cells.add_column(column, justify="right")
        for live in LIVE:
            for method in METHODS:
                auto = f"{live} {method} auto"
                best, low, middle, high = self._against_best(samples, live, method)
                cells.add_row(
                    str(live),
                    method,
                    *(
                        f"{median(samples, v, 'tokens_per_s'):.0f}"
                        for v in (*(f"{live} {method} {k}" for k in ("none", *FIXED)), auto)
                    ),
                    f"{median(samples, auto, 'proposals'):.1f}",
                    best,
                    f"{middle:.3f} ({low:.3f} to {high:.3f})",
                    f"{ratio(samples, 'tokens_per_s', auto, f'{live} {method} none'):.2f}",
                )
            low, middle, high = spread([sample["over"] for sample in samples[f"again {_ALIKE.format(live)}"]])
            cells.add_row(
                str(live), "none against none", *[""] * 8, "none", f"{middle:.3f} ({low:.3f} to {high:.3f})", ""
            )
        return [job, cells]

    def plot(self, axes, samples: Samples) -> None:
        for method in METHODS:
            axes.plot(
                LIVE,
                [ratio(samples, "tokens_per_s", f"{n} {method} auto", f"{n} {method} none") for n in LIVE],
                marker="o",
                label=method,
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(LIVE, [str(n) for n in LIVE])
        axes.set_xlabel("live sequences")
        axes.set_ylabel("tokens/s, auto over no speculation")
        axes.legend(fontsize=8)


def _together(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine the results of several loads that ran one after the other: means, and all tokens over all seconds."""
    result = {
        key: statistics.fmean(m[key] for m in measured if key in m)
        for key in dict.fromkeys(key for m in measured for key in m)
    }
    return result | {"tokens_per_s": result["tokens"] / result["seconds"]}


def make(overrides: Sequence[str], out: Path) -> SpeculationBenchmark:
    return SpeculationBenchmark(overrides, out)
