"""bench drafts: what a draft's training data and its online adaptation are worth.

The default policy has two forms: as shipped (RL-Zero) and after some RL (RL-Think). For each form, one EAGLE-3 draft
is trained on the task's own prompts (in-domain) and another, for as long, on other tasks' prompts (general). An RL
run starts from each draft and adapts it.

Everything is measured on the policy at the end of that run: the draft that the run started with (frozen), the draft
that it ended with (online), and the other drafters. So the frozen and the adapted draft face the same policy.

Drafts and runs are kept under the output directory; a later run of the benchmark reuses them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from asyncspec.bench.harness import Benchmark, Samples, median, spread
from asyncspec.bench.jobs import run_job, train_draft
from asyncspec.bench.loads import Loads
from asyncspec.commands.draft_samples import Rollout, Sampler, batches
from asyncspec.commands.draft_settings import Training
from asyncspec.config import resolve_path
from asyncspec.models import policy, tokenizer
from asyncspec.models.policy import hidden_states
from asyncspec.tasks.sums import sums

FORMS, INITS, MODES, LENGTHS = ("zero", "think"), ("general", "in-domain"), ("frozen", "online"), (3, 5, 7)
OTHERS = ("mtp", "draft_model", "ngram", "suffix")
DRAFT_MINUTES, THINK_STEPS, RUN_STEPS = 2.7, 60, 120  # of the minutes three quarters are training
GENERAL_PROMPTS = 8192
ROLLOUTS, SAMPLES, SLOTS = 64, 8, 16
# arXiv 2604.26779, k = 3: acceptance length and generation speedup.
PUBLISHED = {
    ("zero", "general", "frozen"): (2.88, 1.51),
    ("zero", "general", "online"): (3.04, 1.63),
    ("zero", "in-domain", "frozen"): (3.32, 1.77),
    ("zero", "in-domain", "online"): (3.29, 1.78),
    ("think", "general", "frozen"): (2.40, 1.19),
    ("think", "general", "online"): (2.55, 1.26),
    ("think", "in-domain", "frozen"): (2.77, 1.53),
    ("think", "in-domain", "online"): (2.74, 1.52),
    ("zero", "other", "ngram"): (2.47, 0.7),
    ("think", "other", "ngram"): (2.05, 0.5),
}


class DraftsBenchmark(Benchmark):
    name = "drafts"
    repeats = 7
    columns = ("tokens_per_s", "acceptance_length")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out
        base = Loads(self.overrides).config
        start = {
            "zero": str(resolve_path(base.model.path).resolve()),
            "think": str(self._run("think-start", THINK_STEPS) / "policy"),
        }
        prompts = out / "general.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": p}) + "\n" for p in general_prompts(base.seed, GENERAL_PROMPTS))
        )
        self.loads: dict[tuple[str, str, str], Loads] = {}
        self.kl: dict[tuple[str, str], float] = {}
        for form in FORMS:
            for init in INITS:
                draft = out / f"draft-{form}-{init}"
                if not (draft / "config.json").is_file():
                    print(f"bench drafts: training {draft} for {DRAFT_MINUTES} minutes", flush=True)
                    train_draft(
                        draft,
                        "--policy",
                        start[form],
                        "--minutes",
                        str(DRAFT_MINUTES),
                        "--seed",
                        str(base.seed),
                        *(["--prompts", str(prompts)] if init == "general" else []),
                    )
                ended = self._run(
                    f"run-{form}-{init}", RUN_STEPS, f"model.path={start[form]}", f"speculation.draft_path={draft}"
                )
                for mode, directory in (("frozen", draft), ("online", ended / "draft")):
                    self.loads[form, init, mode] = Loads(
                        [
                            *self.overrides,
                            f"model.path={ended / 'policy'}",
                            "speculation.method=eagle3",
                            f"speculation.draft_path={directory}",
                        ]
                    )
                self.kl[form, init] = divergence(ended / "policy", Path(start[form]))
        self.variants = [
            f"{form} {init} {variant}"
            for form in FORMS
            for init in INITS
            for variant in ("none", *(f"{mode} {k}" for mode in MODES for k in LENGTHS))
        ]
        self.variants += [f"{form} other {method} {k}" for form in FORMS for method in OTHERS for k in LENGTHS]

    def _run(self, name: str, steps: int, *overrides: str) -> Path:
        """Do an RL run at lag 1 that adapts its draft, with fixed k, unless it is done; return its checkpoint."""
        directory = self.out / name
        if not (directory / "checkpoint" / "policy" / "config.json").is_file():
            print(f"bench drafts: running {directory} for {steps} steps", flush=True)
            run_job(
                directory,
                "--steps",
                str(steps),
                "--policy-lag",
                "1",
                "eval.every=0",
                "speculation.draft_length=3",
                *self.overrides,
                *overrides,
            )
        return directory.resolve() / "checkpoint"

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        form, init, mode, *k = variant.split()
        if init == "other":
            loads, method = self.loads[form, "in-domain", "frozen"], mode
        else:
            loads, method = (
                self.loads[form, init, "frozen" if mode == "none" else mode],
                "none" if mode == "none" else "eagle3",
            )
        engine = loads.engine(method, SLOTS, k[0] if k else 0)
        return loads.batch(repetition, ROLLOUTS // SAMPLES, SAMPLES, engine)[0]

    def headline(self, samples: Samples) -> dict[str, float]:
        def accepted(form: str, init: str, mode: str) -> float:
            return median(samples, f"{form} {init} {mode} 3", "acceptance_length")

        result = {
            "acceptance_in_domain": accepted("zero", "in-domain", "frozen"),
            "acceptance_general_frozen": accepted("zero", "general", "frozen"),
            "acceptance_general_online": accepted("zero", "general", "online"),
            "acceptance_in_domain_online": accepted("zero", "in-domain", "online"),
        }
        result |= {
            f"acceptance_think_{init}_{mode}".replace("-", "_"): accepted("think", init, mode)
            for init in INITS
            for mode in MODES
        }
        return result | {f"kl_{form}_{init}".replace("-", "_"): self.kl[form, init] for form in FORMS for init in INITS}

    def tables(self, samples: Samples) -> list[Table]:
        table = Table(
            title="acceptance length, and speedup over no speculation (quartiles), on the policy at each run's end",
            title_justify="left",
        )
        for column in (
            "form",
            "draft",
            "",
            "KL to start",
            *(f"{what}, k={k}" for k in LENGTHS for what in ("accepted", "speedup")),
            "published, k=3",
        ):
            table.add_column(column, justify="right")
        rows = [(form, init, mode) for form in FORMS for init in INITS for mode in MODES]
        for form, init, mode in [*rows, *((form, "other", method) for form in FORMS for method in OTHERS)]:
            none = f"{form} {'in-domain' if init == 'other' else init} none"
            cells = []
            for k in LENGTHS:
                variant = f"{form} {init} {mode} {k}"
                low, middle, high = spread(
                    [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(samples[variant], samples[none])]
                )
                cells += [
                    f"{median(samples, variant, 'acceptance_length'):.2f}",
                    f"{middle:.2f} ({low:.2f} to {high:.2f})",
                ]
            published = PUBLISHED.get((form, init, mode))
            table.add_row(
                form,
                init,
                mode,
                f"{self.kl[form, init]:.4f}" if init != "other" else "",
                *cells,
                f"{published[0]:.2f}, {published[1]:.2f}x" if published else "",
            )
        return [table]

    def plot(self, axes, samples: Samples) -> None:
        rows = [(form, init, mode) for form in FORMS for init in INITS for mode in MODES]
        places = range(len(rows))
        axes.bar(
            [p - 0.2 for p in places],
            [median(samples, f"{' '.join(row)} 3", "acceptance_length") for row in rows],
            0.4,
            label="measured",
        )
        axes.bar(
            [p + 0.2 for p in places],
            [PUBLISHED[row][0] for row in rows],
            0.4,
            label="published, Qwen3-8B",
            color="lightgray",
        )
        axes.set_xticks(places, ["\n".join(row) for row in rows], fontsize=7)
        axes.set_ylabel("acceptance length, k=3")
        axes.legend(fontsize=8)


@torch.inference_mode()
def divergence(ended: Path, start: Path, prompts: int = 128) -> float:
    """Return KL(ended || start) of two policies, in nats per token, over samples of `ended` at temperature 1."""
    (model, shape), (before, _) = policy.load(ended), policy.load(start)
    encoder = tokenizer.load(ended)
    prompts_ = [tokenizer.encode_prompt(encoder, p.prompt) for p in sums(91, prompts)]
    done = Sampler(model, shape, Training())(prompts_, 1)
    total = tokens = 0.0
    for tokens_BL, mask_BL in batches(
        [Rollout(tuple(prompts_[i]), tuple(c.tokens.tolist())) for i, c in done], 32, np.random.default_rng(0)
    ):
        logp, logq = (
            m.lm_head(hidden_states(m, tokens_BL))[:, :-1][mask_BL[:, 1:]].log_softmax(-1) for m in (model, before)
        )
        total, tokens = total + float((logp.exp() * (logp - logq)).sum()), tokens + len(logp)
    return total / tokens


def make(overrides: Sequence[str], out: Path) -> DraftsBenchmark:
    return DraftsBenchmark(overrides, out)


def general_prompts(seed: int, count: int) -> list[str]:
    """Make prompts of tasks other than sums, from a seed, to train a general-purpose draft on."""
    rng = np.random.default_rng([seed, 0x6765])

    def number(digits: int) -> str:
        return str(rng.integers(10 ** (digits - 1), 10**digits))

    def word() -> str:
        return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), int(rng.integers(2, 9))))

    kinds = (
        lambda: f"{number(int(rng.integers(1, 4)))}*{number(int(rng.integers(1, 3)))}=",
        lambda: f"{number(int(rng.integers(1, 5)))}-{number(int(rng.integers(1, 5)))}=",
        lambda: ",".join(number(int(rng.integers(1, 3))) for _ in range(rng.integers(2, 8))) + ";",
        lambda: "_".join(word() for _ in range(rng.integers(2, 6))) + "?",
        lambda: f"({number(1)}+{number(1)})*{number(1)}=",
        lambda: f"{word()}:{word()}|",
    )
    return [kinds[rng.integers(len(kinds))]() for _ in range(count)]
