"""asyncspec simulate: fits a run's pieces of work, for simulations of other settings on the same machine."""

from __future__ import annotations

from pathlib import Path

FILE = "calibration.json"  # in a run's directory


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
    cost, units = work.rounds, {"table": 1.0}
    shown = [f"{name} {w * units.get(name, 1e3):.4g}" for name, w in zip(cost.names, cost.weights)]
    console.print(f"a round, in milliseconds{' and times its table' if cost.lives else ''}: " + "  ".join(shown))
    others = {k: v for k, v in vars(work).items() if k.endswith("_s") and isinstance(v, float)}
    console.print("others, in milliseconds: " + "  ".join(f"{k[:-2]} {1e3 * v:.3f}" for k, v in others.items()))
    console.print(f"{work.sharing:.0%} of all cores' time is used while more actors are busy than there are cores")
    table = Table(title="fitted over measured", title_justify="left")
    for column in ("what", "pieces", "seconds", "1st quartile", "median", "3rd quartile"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, fit in work.fits.items():
        table.add_row(name, str(fit.pieces), f"{fit.seconds:.1f}", *(f"{q:.3f}" for q in fit[2:]))
    console.print(table)
    console.print(f"written: {run_dir / FILE}")
    return 0
