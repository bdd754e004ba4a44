"""asyncspec plan --hardware this: what to configure on this machine, from a run that was calibrated on it."""

from __future__ import annotations

import json
from pathlib import Path

from asyncspec.commands.simulate import FILE
from asyncspec.errors import UserError

DRAFT_LENGTHS, SLOTS, GENERATORS = ("auto", 0, 1, 2, 3, 5, 7), (4, 8, 16, 32, 64, 128), (1, 2)
SHOWN = 12


def plan_here(args, out: Path) -> int:
    """Simulate the calibrated run with other draft lengths, slots and generators, and write the best configuration."""
    from rich.table import Table

    from asyncspec.console import terminal
    from asyncspec.simulate import calibrate, machine

    if not args.calibrated:
        raise UserError("--hardware this: expected --run RUN, a run that `asyncspec simulate calibrate RUN` has fitted")
    run_dir = Path(args.calibrated)
    if not (run_dir / FILE).exists():
        raise UserError(
            f"--run {args.calibrated}: it has no {FILE}; try: asyncspec simulate calibrate {args.calibrated}"
        )
    measured = machine.Measured.read(run_dir, calibrate.read(run_dir / FILE))
    found = []
    for generators in GENERATORS:
        for slots in SLOTS:
            for k in DRAFT_LENGTHS if measured.config.drafting else (0,):
                config = measured.changed(lag=args.lag, generators=generators, slots=slots, draft_length=k)
                found.append((measured.predicted(config), generators, slots, k))
    found.sort(key=lambda each: each[0].step_s)
    table = Table(title=f"{run_dir.name} on this machine, policy lag {config.policy_lag}", title_justify="left")
    for column in ("k", "generators", "slots", "step, s", "exposed generation, s"):
        table.add_column(column, justify="right")
    for predicted, generators, slots, k in found[:SHOWN]:
        seconds = f"{predicted.step_s:.3f}", f"{predicted.exposed_generation_s:.3f}"
        table.add_row(str(k), str(generators), str(slots), *seconds)
    console = terminal()
    console.print(table)
    best, generators, slots, k = found[0]
    from asyncspec.config import to_yaml

    config = measured.changed(lag=args.lag, generators=generators, slots=slots, draft_length=k)
    config.run_dir = ""
    (out / "plan.yaml").write_text(f"# A step of {best.step_s:.2f} s, from asyncspec plan.\n" + to_yaml(config))
    rows = [
        {"step_s": p.step_s, "exposed_generation_s": p.exposed_generation_s, "generators": g, "slots": s, "k": k}
        for p, g, s, k in found
    ]
    (out / "plan.json").write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"written: {out / 'plan.yaml'}, {out / 'plan.json'}")
    return 0
