"""`asyncspec status`: who of a run is up, what it waits for, its lag, and when it will end, from the run's files."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec

from asyncspec import lock
from asyncspec.config import resolve_path
from asyncspec.errors import UserError
from asyncspec.ledger import ledger
from asyncspec.ledger.status import FILE, Status

OLD_S = 15.0  # a controller that lives writes the file every two seconds


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "status",
        help="say who of a run is up, what it waits for, its lag, and when it will end",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Say who of a run is up, what it waits for, its lag, and when it will end. Reads the run's files\n"
        "alone, so it works on any host that sees them, and after the run. Exit code: 0 if the run starts, goes\n"
        "on or has finished, 1 if it has failed, was stopped early, or its controller writes no more.",
    )
    parser.add_argument("directory", metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print status.json, with `age_s` and `state`: starting, running, finished, failed, stopped or silent",
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(args) -> int:
    run_dir = resolve_path(args.directory).absolute()
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{args.directory}: no config.yaml in it; expected the directory of a run")
    try:
        found = msgspec.json.decode((run_dir / FILE).read_bytes(), type=Status)
    except OSError:
        raise UserError(f"{args.directory}: no {FILE} in it; expected a run whose controller has started") from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{run_dir / FILE}: {error}; expected a run of this version of asyncspec") from None
    age, state = time.time() - found.time, state_of(run_dir, found, time.time())
    if args.json:
        print(json.dumps(msgspec.to_builtins(found) | {"age_s": round(age, 1), "state": state}))
    else:
        print("\n".join(lines(args.directory, found, state, age)))
    return 0 if state in ("starting", "running", "finished") else 1


def state_of(run_dir: Path, found: Status, now: float) -> str:
    """Return "running", "finished", "failed", "stopped"; "starting": the run starts again, and its controller has
    written nothing yet; or "silent": the controller writes no more and did not say why.
    """
    # Each start writes the configuration and holds the lock.
    config, held = run_dir / "config.yaml", run_dir / "lock"
    if config.stat().st_mtime > (run_dir / FILE).stat().st_mtime and held.is_file() and lock.held(held):
        return "starting"
    if found.failure:
        return "failed"
    if found.ended:
        return "finished" if found.ended == "finished" else "stopped"
    if now - found.time <= OLD_S:
        return "running"
    # The clock of another host may differ, and its lock may not show here.
    return "running" if (run_dir / ledger.FILE).is_file() and ledger.written(run_dir) else "silent"


def lines(run: str, found: Status, state: str, age: float) -> list[str]:
    """Return the lines that say it."""
    if state == "starting":
        return [f"{run}: starts again; its controller has written nothing yet. Before, step {found.step} was reached"]
    what = {
        "running": f"running, written {max(0.0, age):.0f} s ago",
        "silent": f"silent: its controller has written nothing for {_length(age)}; see {run}/logs, then asyncspec "
        f"train --resume {run}",
        "failed": f"failed: {found.failure}",
        "stopped": f"stopped early: {found.ended}",
        "finished": "finished",
    }[state]
    ends = f", ends in about {_length(found.left_s)}" if found.left_s is not None and state == "running" else ""
    step = f"the last one took {found.step_s:.2f} s{ends}" if found.step else "none is trained yet"
    score = "" if found.score is None else f", held-out score {found.score:.3f}"
    ready = ", ".join(f"{count} {role}" for role, count in sorted(found.up.items())) or "nobody"
    told = [
        f"{run}: {what}",
        f"  step {found.step} of {found.steps}, {step}{score}",
        f"  lag {found.lag:.0f} of {found.most_lag} allowed; version {found.version} is published",
        f"  tickets: {found.waiting} waiting, {found.generating} in generators, {found.generated} generated",
        f"  {'ready' if state == 'running' else 'was ready'}: {ready}",
    ]
    for actor in found.others:
        error = f": {actor.error}" if actor.error else ""
        state_now = "loaded, and joins the others" if actor.state == "up" else actor.state
        heard = f", last heard {actor.silent_s:.1f} s before" if actor.silent_s > 0 else ""
        told.append(f"  {actor.name} is {state_now}{heard}{error}")
    if found.more:
        told.append(f"  {found.more} more are not ready")
    if found.lost:
        gone = ", ".join(f"{count} {role}" for role, count in sorted(found.lost.items()))
        told.append(f"  lost since this start: {gone}")
    if found.restarts:
        told.append(f"  continued from a checkpoint {found.restarts} time{'s' if found.restarts > 1 else ''}")
    if state in ("running", "silent") and found.waits_for:
        told.append(f"  waits for: {found.waits_for}")
    return told


def _length(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
