"""Write the report: one HTML file that needs no network, or text for a terminal. Two runs are shown side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from asyncspec.config import resolve_path, to_yaml
from asyncspec.console import terminal
from asyncspec.errors import UserError
from asyncspec.report import rollouts
from asyncspec.report.advice import CHANGES, Replayed, advice, replayed
from asyncspec.report.pages import render
from asyncspec.report.run import STATES, Run
from asyncspec.timing.attribution import COLORS, PARTS, explain
from asyncspec.timing.gantt import GANTT_STEPS, gantt

SLOWEST = 5


def title(runs: Sequence[Run]) -> str:
    """Return what ran, in a line."""
    return runs[0].what if len(runs) == 1 else f"{runs[0].name} compared with {runs[1].name}"


def slowest(run: Run, count: int = SLOWEST) -> list[str]:
    """Return a line for each of the slowest steps, without the steps that fill the pipeline."""
    steps = sorted(run.steps[run.steady], key=lambda s: s.start - s.end)[:count]
    return [explain(step, 1)[0] for step in steps]


def what_ifs(replays: Sequence[Replayed]) -> list[SimpleNamespace]:
    """Return a row for each change, with its result for each run; none if a run is too short."""
    if not all(replays):
        return []
    return [SimpleNamespace(change=name, values=[changes[name] for changes in replays]) for name in CHANGES]


def html(runs: Sequence[Run], beside: str = "") -> str:
    """Return the report as an HTML page.

    Args:
        beside: the file name of the page of rollouts; "": there is none.
    """
    from markupsafe import Markup

    from asyncspec.report import figures

    def svg(figure) -> Markup:
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
        text = buffer.getvalue()
        return Markup(text[text.index("<svg") :])

    def worst(run: Run) -> int:
        steady = range(len(run.steps))[run.steady] or range(len(run.steps))
        middle = max(steady, key=lambda i: run.steps[i].end - run.steps[i].start)
        return max(0, min(middle - GANTT_STEPS // 2, len(run.steps) - GANTT_STEPS))

    summaries, replays = [run.summary() for run in runs], [replayed(run) for run in runs]
    names = list(dict.fromkeys(name for summary in summaries for name, _ in summary))
    parts = [
        SimpleNamespace(
            name=part.replace("_", " "),
            color=COLORS[part],
            values=[(run.parts()[part], run.parts()[part] / run.step_seconds()) for run in runs],
        )
        for part in PARTS
    ]
    pictures = [
        (
            "reward and held-out score",
            figures.lines(runs, {"reward/mean": "reward", "eval/score": "held-out score"}, ""),
        ),
        (
            "exposed generation",
            figures.lines(
                runs,
                {"time/exposed_generation": "exposed", "time/generation": "any group generates"},
                "seconds per step",
            ),
        ),
        (
            "acceptance and draft length",
            figures.lines(
                runs, {"spec/acceptance_length": "acceptance length", "spec/draft_length": "draft length"}, "tokens"
            ),
        ),
        ("tokens per second", figures.lines(runs, {"throughput/tokens_per_s": "tokens/s"}, "")),
        ("lag", figures.lags(runs)),
        ("response lengths", figures.lengths(runs)),
    ]
    return render(
        "page.html",
        title=title(runs),
        rollouts=beside,
        advice=[(run, advice(run, changes)) for run, changes in zip(runs, replays)],
        runs=[SimpleNamespace(name=r.name, label=r.label, yaml=to_yaml(r.config)) for r in runs],
        states=[state.replace("_", " on ") for state in STATES],
        actors=[(run, run.actors()) for run in runs],
        summary=[(name, *(dict(summary).get(name, "") for summary in summaries)) for name in names],
        parts=parts,
        breakdown=svg(figures.breakdown(runs)),
        slowest=[(run, slowest(run)) for run in runs],
        whatif=what_ifs(replays),
        gantt=[svg(gantt(run.steps[worst(run) : worst(run) + GANTT_STEPS])) for run in runs if run.steps],
        pictures=[(caption, svg(figure)) for caption, figure in pictures],
    )


def text(runs: Sequence[Run], console: Console) -> None:
    """Print the report."""
    console.print(title(runs), soft_wrap=True)
    replays = [replayed(run) for run in runs]
    for run, changes in zip(runs, replays):
        console.print(f"What to change{f' in {run.name}' if len(runs) > 1 else ''}:")
        for line in advice(run, changes):
            console.print(f"  {line}", soft_wrap=True)
    summary = Table(show_header=len(runs) > 1)
    summary.add_column("")
    for run in runs:
        summary.add_column(run.label)
    summaries = [dict(run.summary()) for run in runs]
    for name in dict.fromkeys(name for found in summaries for name in found):
        summary.add_row(name, *(found.get(name, "") for found in summaries))
    console.print(summary)
    table = Table(title="seconds per step", title_justify="left")
    table.add_column("part")
    for _ in runs:
        table.add_column("seconds", justify="right")
        table.add_column("share", justify="right")
    for part in PARTS:
        cells = [(run.parts()[part], run.parts()[part] / run.step_seconds()) for run in runs]
        table.add_row(
            part.replace("_", " "), *(cell for seconds, share in cells for cell in (f"{seconds:.3f}", f"{share:.1%}"))
        )
    console.print(table)
    for run in runs:
        for name, shares in run.actors():
            console.print(
                f"{run.name}, {name}: "
                + ", ".join(f"{state.replace('_', ' on ')} {share:.0%}" for state, share in shares.items()),
                soft_wrap=True,
            )
    for run in runs:
        console.print(f"the slowest steps of {run.name}:")
        for line in slowest(run) or ["the run has no timeline"]:
            console.print(f"  {line}", soft_wrap=True)
    for row in what_ifs(replays):
        console.print(
            f"{row.change}: "
            + "; ".join(f"{seconds:.3f} s per step, {ratio:.2f} times as long as now" for seconds, ratio in row.values),
            soft_wrap=True,
        )


def report(directories: Sequence[str], out: str, as_text: bool) -> int:
    """Write the report of one or two runs; return the exit code.

    Raises:
        UserError: a directory holds no run, or the page cannot be written.
    """
    runs = [Run.read(resolve_path(directory)) for directory in directories]
    console = terminal()
    if as_text:
        text(runs, console)
        return 0
    folders = [resolve_path(directory) for directory in directories]
    path = resolve_path(out) if out else folders[0] / "report.html"
    beside = path.with_name(rollouts.FILE if not out else f"{path.stem}-{rollouts.FILE}")
    read = rollouts.page(folders)
    for file, page in ((path, html(runs, beside.name if read else "")), (beside, read)):
        if not page:
            continue
        try:
            file.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UserError(f"report: --out {file}: {error.strerror}; expected a writable file") from None
        console.print(f"written: {file}", soft_wrap=True)
    return 0
