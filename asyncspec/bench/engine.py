"""bench engine: the generation engine by itself, and compared with vLLM and transformers.

For 1 to 64 live sequences it reports:

- tokens per second at each EAGLE-3 draft length from 0 (no speculation) to 7, and with the length chosen for each
  step;
- acceptance by position;
- the parts of a step's time;
- the memory floor: the time to load a dense policy's weights from memory once, at the measured rate of the device, as
  a share of a step without speculation. With few sequences a large policy's step cannot be faster.

Then the same rollouts run, from the first to the last token, through this engine, vLLM on the CPU and transformers'
generate, with the same weights, prompts, temperature and threads, all in float32. On a GPU, or in bfloat16, only this
engine runs.

The other engines live in environments of their own. scripts/compare/make_environments.sh makes them and prints the
variables to set: ASYNCSPEC_VLLM_PYTHON and ASYNCSPEC_TRANSFORMERS_PYTHON. An engine without its variable is left out,
and a line says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.table import Table

from asyncspec import config as configuration
from asyncspec.bench.harness import Benchmark, Samples, median, ratio, spread
from asyncspec.bench.loads import Loads
from asyncspec.engine.protocol import Completion
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.errors import UserError
from asyncspec.models import sizes
from asyncspec.models.shape import PolicyShape

LIVE = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (0, *range(1, 8), "auto")
ROLLOUTS = 24  # rollouts of a measurement, in addition to those still live when it ends
COMPARED = (1, 4, 16, 64)
PARTS = ("admit", "draft", "target", "rest")  # of a step; "rest" verifies, and commits the result
SCRIPTS = configuration.PACKAGE_DIR.parent / "scripts" / "compare"
OTHERS = {  # name: environment variable, program, further arguments
    "vllm": ("ASYNCSPEC_VLLM_PYTHON", "vllm_cpu.py", ["512"]),
    "vllm eager": ("ASYNCSPEC_VLLM_PYTHON", "vllm_cpu.py", ["512", "--eager"]),
    "transformers": ("ASYNCSPEC_TRANSFORMERS_PYTHON", "transformers_generate.py", []),
}


class Other:
    """Another engine, in an environment and a process of its own; see scripts/compare/common.py."""

    def __init__(self, python: str, program: str, arguments: list[str], log: Path) -> None:
        self.process = subprocess.Popen(
            [python, str(SCRIPTS / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self.log = log
        self.about = self._answer()

    def measure(self, **request) -> dict[str, float]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise UserError(
                f"bench engine: {self.process.args[1]} ended with code {self.process.wait()}; see {self.log}"
            )
        return json.loads(line)


def read_rate(device: str) -> float:
    """Return the bytes per second at which this device, or these threads of a CPU, load a gigabyte from memory."""
    gigabyte, took = torch.ones(2**28, device=device), []
    for _ in range(6):
        start = time.perf_counter()
        float(gigabyte.sum())
        took.append(time.perf_counter() - start)
    return 4 * len(gigabyte) / min(took[1:])


def weight_bytes(shape: PolicyShape, dtype: torch.dtype) -> int:
    """Return the bytes of a dense policy's weights that a step loads. An embedding that is not also the head does not
    count: a step loads only a few of its rows.
    """
    looked_up = 0 if shape.tied else shape.vocab_size * shape.dim
    return dtype.itemsize * (sizes.parameters(shape.to_hf()) - looked_up)


class TimedEngine(TorchEngine):
    """An engine that measures the parts of its steps."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.timed = False
        self.seconds: Counter[str] = Counter()  # by part, and for all parts ("all"), while `timed` is set

    def poll(self) -> list[Completion]:
        if not self.timed:
            return super().poll()
        return self._timed("all", super().poll)

    def _admit(self) -> list[Completion]:
        return self._timed("admit", super()._admit)

    def _propose(self, *args):
        return self._timed("draft", super()._propose, *args)

    def _read(self, *args):
        return self._timed("target", super()._read, *args)

    def _timed(self, part: str, function: Callable, *args):
        if not self.timed:
            return function(*args)
        began = self._now()
        result = function(*args)
        self.seconds[part] += self._now() - began
        return result

    def _now(self) -> float:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class GenerationBenchmark(Benchmark):
    name = "engine"
    repeats = 5
    columns = ("tokens_per_s", "acceptance_length", "step_ms")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.loads = Loads(overrides, TimedEngine)
        self.others: dict[str, Other] = {}
        c = self.loads.config
        self.floor_ms = (
            1e3 * weight_bytes(self.loads.shape, getattr(torch, c.model.dtype)) / read_rate(self.loads.device)
        )
        alike = self.loads.device == "cpu" and c.model.dtype == "float32"  # the other engines can do only this
        for name, (variable, program, arguments) in OTHERS.items() if alike else ():
            python = os.environ.get(variable)
            if python and SCRIPTS.is_dir():
                directory = str(configuration.resolve_path(c.model.path))
                log = out / f"{name.replace(' ', '-')}.log"
                self.others[name] = Other(python, program, [directory, str(c.engine.threads), *arguments], log)
            else:
                print(
                    f"bench engine: {name} is left out: {variable} is not set; scripts/compare/make_environments.sh "
                    f"prints its value"
                )
        self.variants = [f"{live} k={k}" for live in LIVE for k in LENGTHS]
        self.variants += [f"{live} {name}" for live in COMPARED for name in ("none", "eagle3", *self.others)]

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        live, name = variant.split(" ", 1)
        loads, live = self.loads, int(live)
        rollouts = max(16, 2 * live)
        if name in self.others:
            prompts = [loads.prompts[(repetition * rollouts + i) % len(loads.prompts)] for i in range(rollouts)]
            c = loads.config.sampling
            done = self.others[name].measure(
                prompts=prompts, live=live, max_tokens=c.max_response_tokens, temperature=c.temperature
            )
            return done | {"tokens_per_s": done["tokens"] / done["seconds"]}
        length = name.removeprefix("k=") if name.startswith("k=") else "auto" if name == "eagle3" else "0"
        engine = loads.engine("none" if length == "0" else "eagle3", live, length)
        engine.seconds.clear()
        # Timing the parts of a step synchronizes a GPU at each, so on a GPU they get a measurement of their own.
        engine.timed = loads.device == "cpu"
        if engine.decode.graphs is not None:  # capture what a job has captured early on
            loads.steady(repetition, ROLLOUTS + live, engine)
        if not name.startswith("k="):
            return loads.batch(repetition, rollouts, 1, engine)[0]
        measured = parted = loads.steady(repetition, ROLLOUTS + live, engine)[0]
        if not engine.timed:
            engine.timed = True
            parted = loads.steady(repetition, live, engine)[0]
        seconds, steps = engine.seconds, round(1e3 * parted["seconds"] / parted["step_ms"])
        seconds["rest"] = 2 * seconds["all"] - seconds.total()
        return measured | {f"{part}_ms": 1e3 * seconds[part] / steps for part in PARTS}

    def headline(self, samples: Samples) -> dict[str, float]:
        result = {f"tokens_per_s_{live}_live": median(samples, f"{live} k=0", "tokens_per_s") for live in LIVE}
        result |= {f"tokens_per_s_{live}_live_auto": median(samples, f"{live} k=auto", "tokens_per_s") for live in LIVE}
        result |= {
            f"memory_floor_share_{live}_live": self.floor_ms / median(samples, f"{live} k=0", "step_ms")
            for live in LIVE
        }
        for name in self.others:
            for ours in ("none", "eagle3"):
                result |= {
                    f"{ours}_over_{name.replace(' ', '_')}_{live}_live": ratio(
                        samples, "tokens_per_s", f"{live} {ours}", f"{live} {name}"
                    )
                    for live in COMPARED
                }
        return result

    def tables(self, samples: Samples) -> list[Table]:
        rates = Table(title="EAGLE-3, tokens/s (over k=0) by live sequences and draft length", title_justify="left")
        parts = Table(title="milliseconds per step", title_justify="left")
        accepted = Table(
            title="share of proposals accepted, by position, given that all earlier ones were", title_justify="left"
        )
        compared = Table(
            title="the same rollouts, first to last token: tokens/s, and this engine over the other",
            title_justify="left",
        )
        for table, columns in (
            (rates, [f"k={k}" for k in LENGTHS]),
            (parts, ["k", *PARTS, "all"]),
            (accepted, [str(i) for i in range(1, 8)]),
            (compared, ["engine", "tokens/s", "none over other", "eagle3 over other"]),
        ):
            for column in ("live", *columns):
                table.add_column(column, justify="right")
        for live in LIVE:
            rates.add_row(
                str(live),
                *(
                    f"{median(samples, f'{live} k={k}', 'tokens_per_s'):.0f} "
                    f"({ratio(samples, 'tokens_per_s', f'{live} k={k}', f'{live} k=0'):.2f})"
                    for k in LENGTHS
                ),
            )
            for k in (0, 3, 7, "auto"):
                variant = f"{live} k={k}"
                parts.add_row(
                    str(live),
                    str(k),
                    *(f"{median(samples, variant, f'{part}_ms'):.2f}" for part in PARTS),
                    f"{median(samples, variant, 'step_ms'):.2f}",
                )
            measured = samples[f"{live} k=7"]
            reached = [
                [sample[key] for sample in measured if key in sample]
                for key in (f"acceptance_{i}" for i in range(1, 8))
            ]
            accepted.add_row(str(live), *(f"{statistics.median(values):.3f}" if values else "" for values in reached))
        for live in COMPARED:
            for name in ("none", "eagle3", *self.others):

                def over(ours: str) -> str:
                    if name not in self.others:
                        return ""
                    pairs = zip(samples[f"{live} {ours}"], samples[f"{live} {name}"])
                    low, middle, high = spread([a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs])
                    return f"{middle:.2f} ({low:.2f} to {high:.2f})"

                compared.add_row(
                    str(live),
                    name,
                    f"{median(samples, f'{live} {name}', 'tokens_per_s'):.0f}",
                    over("none"),
                    over("eagle3"),
                )
        return [rates, parts, accepted, compared]

    def plot(self, axes, samples: Samples) -> None:
        for k in LENGTHS:
            axes.plot(
                LIVE,
                [median(samples, f"{n} k={k}", "tokens_per_s") for n in LIVE],
                marker="o",
                label=f"EAGLE-3, k={k}" if k else "no speculation",
                linewidth=2.5 if k in (0, "auto") else 1,
            )
        for name in self.others:
            axes.plot(
                COMPARED,
                [median(samples, f"{n} {name}", "tokens_per_s") for n in COMPARED],
                marker="x",
                linestyle="--",
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(LIVE, [str(n) for n in LIVE])
        axes.set_xlabel("live sequences")
        axes.set_ylabel("tokens/s")
        axes.legend(fontsize=7)

    def close(self) -> None:
        for other in self.others.values():
            other.process.stdin.close()
            other.process.wait(30)


def make(overrides: Sequence[str], out: Path) -> GenerationBenchmark:
    return GenerationBenchmark(overrides, out)
