"""bench vllm: vLLM's generation on this machine without speculation, with fixed draft lengths, and with the chosen one.

Each method has an engine in a process of its own, and so has no speculation. A fixed length goes through the same table
as a chosen one. Variants alternate. A rate is of tokens a second while a number of sequences are in flight: when one
ends, the next begins.

vLLM lives in an environment of its own, and ASYNCSPEC_VLLM_PYTHON names its interpreter; without it the benchmark makes
one with scripts/compare/make_environments.sh, which takes about 5 minutes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.table import Table

from asyncspec.bench.harness import Benchmark, Samples, median, ratio, spread
from asyncspec.bench.interpreters import interpreter
from asyncspec.config import load
from asyncspec.errors import UserError

METHODS, LIVES, FIXED = ("draft_model", "eagle3", "ngram"), (1, 4, 16), (0, 1, 2, 3, 5, 7)
SLOTS = max(LIVES)
VARIED = ("engine.kind", "engine.slots", "speculation.method", "speculation.draft_length", "engine.tensor_parallel")
WINDOW_S, WARM_UP_S = 3.0, 8.0  # seconds of a measurement, and of auto before the first one


class Worker:
    """An engine in a process of its own, see vllm_worker.py."""

    def __init__(self, python: str, method: str, overrides: Sequence[str], log: Path) -> None:
        command = [python, "-m", "asyncspec.bench.vllm_worker", str(SLOTS), f"speculation.method={method}", *overrides]
        with log.open("w") as written:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written, text=True
            )
        self.log = log

    def ask(self, **request) -> dict:
        with suppress(BrokenPipeError):  # then it ended, and there is no answer
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict:
        if not (line := self.process.stdout.readline()):
            raise UserError(f"bench vllm: an engine ended with code {self.process.wait()}; see {self.log}")
        return json.loads(line)


class VllmBenchmark(Benchmark):
    name = "vllm"
    repeats = 5
    columns = ("tokens_per_s", "acceptance_length")
    variants = tuple(
        f"{live} {name}"
        for live in LIVES
        for name in ("none", *(f"{method} {k}" for method in METHODS for k in (*FIXED, "auto")))
    )

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        for field in (override.partition("=")[0] for override in overrides):
            if field in VARIED:
                raise UserError(f"bench vllm {field}=...: the benchmark sets it; expected other fields")
        load("tiny", ["engine.kind=vllm", *overrides])  # wrong fields, before anything is made
        python = interpreter("vllm", out)
        self.workers = {
            method: Worker(python, method, overrides, out / f"{method}.log") for method in ("none", *METHODS)
        }
        for worker in self.workers.values():
            worker.answer()
        for method in METHODS:
            for live in LIVES:
                self.workers[method].ask(live=live, length="auto", seconds=WARM_UP_S)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        live, method, *length = variant.split()
        done = self.workers[method].ask(live=int(live), length=length[0] if length else 0, seconds=WINDOW_S)
        return {"tokens_per_s": done["tokens"], "acceptance_length": done["acceptance_length"]}

    def headline(self, samples: Samples) -> dict[str, float]:
        cells = {(live, method): self._cell(samples, live, method) for live in LIVES for method in METHODS}
        gains = [ratio(samples, "tokens_per_s", f"{live} eagle3 auto", f"{live} none") for live in LIVES]
        return {"auto_min": min(cells.values()), "auto_gain": statistics.median(gains)} | {
            f"auto_{method}_{live}_live": value for (live, method), value in cells.items()
        }

    def _cell(self, samples: Samples, live: int, method: str) -> float:
        """Return the rate of auto over the better of none and the best fixed length, by medians."""
        others = [f"{live} none", *(f"{live} {method} {k}" for k in FIXED)]
        best = max(others, key=lambda variant: median(samples, variant, "tokens_per_s"))
        return ratio(samples, "tokens_per_s", f"{live} {method} auto", best)

    def tables(self, samples: Samples) -> list[Table]:
        table = Table(title="tokens/s over none, median of the pairs (quartiles of auto)", title_justify="left")
        for column in ("live", "method", *(f"k={k}" for k in FIXED), "auto", "auto over the best"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for live in LIVES:
            for method in METHODS:
                over = [ratio(samples, "tokens_per_s", f"{live} {method} {k}", f"{live} none") for k in FIXED]
                pairs = zip(samples[f"{live} {method} auto"], samples[f"{live} none"])
                low, middle, high = spread([a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs])
                table.add_row(
                    str(live),
                    method,
                    *(f"{each:.2f}" for each in over),
                    f"{middle:.2f} ({low:.2f} to {high:.2f})",
                    f"{self._cell(samples, live, method):.3f}",
                )
        return [table]

    def plot(self, axes, samples: Samples) -> None:
        for method in METHODS:
            over = [ratio(samples, "tokens_per_s", f"{live} {method} auto", f"{live} none") for live in LIVES]
            axes.plot(LIVES, over, "o-", label=f"{method}, auto")
        axes.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(LIVES, [str(live) for live in LIVES])
        axes.set_xlabel("live sequences")
        axes.set_ylabel("tokens/s over no speculation")
        axes.legend(fontsize=7)

    def close(self) -> None:
        for worker in getattr(self, "workers", {}).values():
            worker.process.stdin.close()
            worker.process.wait(30)


def make(overrides: Sequence[str], out: Path) -> VllmBenchmark:
    return VllmBenchmark(overrides, out)
