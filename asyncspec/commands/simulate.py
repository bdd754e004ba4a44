"""asyncspec simulate: fits a run's pieces of work, for simulations of other settings on the same machine."""

from __future__ import annotations

from pathlib import Path

FILE = "calibration.json"  # in a run's directory
PIECES = {  # of `Work`, as they are shown
    "enter_s": "a sequence gets a slot",
    "finish_s": "a generator ends a group",
    "swap_s": "a generator swaps in a policy",
    "logprob_s": "logprob: a group",
    "logprob_token_s": "logprob: each of its tokens",
    "group_s": "training: a group is taken",
    "pass_s": "training: a pass",
    "token_s": "training: each of its tokens",
    "response_s": "training: each of its responses",
    "update_s": "training: an update",
    "adapt_s": "the draft learns from a group",
    "control_s": "all else, for each group",
    "reward_s": "wait: until a group has its rewards",
    "delivery_s": "wait: until a version has arrived",
}


def add_parser(commands) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="fit the simulator to a run",
        description="Fit the simulator to what a run measured.",
    )
    inner = simulate.add_subparsers(dest="what", required=True, metavar="COMMAND")
    calibrate = inner.add_parser(
        "calibrate",
        help="fit the work of each piece of a run to its spans",
        description="Fit the seconds of work of each piece of a run: a round of the engine by live sequences and draft "
        f"length, a group in logprob, a pass of the trainer. Writes RUN/{FILE} and prints how far each fit is from "
        "what was measured. `asyncspec plan --hardware this --run RUN` uses it.",
    )
    calibrate.add_argument("directory", metavar="RUN", help="directory of a run of the embedded engine")
    calibrate.set_defaults(run=_calibrate, parser=calibrate)


def _calibrate(args) -> int:
    from rich.table import Table

    from asyncspec.console import terminal
    from asyncspec.simulate import calibrate, machine

    run_dir = Path(args.directory)
    work = calibrate.calibrate(run_dir)
    machine.Measured.read(run_dir, work).fit_sharing()
    calibrate.save(work, run_dir / FILE)
    console = terminal()
    cost = work.rounds
    weights = [w if name == "table" else 1e3 * w for name, w in zip(cost.names, cost.weights)]
    units = ["" if name == "table" else " ms" for name in cost.names]
    shown = [f"{name} {weight:.4f}{unit}" for name, weight, unit in zip(cost.names, weights, units)]
    console.print(f"A round of the engine: {', '.join(shown)}")
    pieces = Table(title="work", title_justify="left")
    pieces.add_column("piece")
    pieces.add_column("ms", justify="right")
    for name, what in PIECES.items():
        pieces.add_row(what, f"{1e3 * getattr(work, name):.3f}")
    console.print(pieces)
    console.print(f"With each busy actor more than there are cores, {work.sharing:.0%} of the cores' time is left.")
    if work.sharing <= 1.01 * machine.LEAST_SHARING:
        console.print("This is the least that is tried: something else ran beside this run, so do not plan with it.")
    table = Table(title="fitted over measured; near 1 is good", title_justify="left")
    for column in ("what", "pieces", "seconds", "1st quartile", "median", "3rd quartile"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, fit in work.fits.items():
        table.add_row(name, str(fit.pieces), f"{fit.seconds:.1f}", *(f"{q:.3f}" for q in fit[2:]))
    console.print(table)
    console.print(f"written: {run_dir / FILE}")
    return 0
