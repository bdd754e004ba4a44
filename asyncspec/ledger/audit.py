"""`asyncspec audit`: does a run's ledger prove what the system promises?

Every ticket was trained once, evaluated once, or dropped with a reason; each was trained in the step it was issued for,
no token of it older than the policy lag allows or newer than the policy it trained; steps and versions follow each
other without a gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from asyncspec.config import from_yaml
from asyncspec.errors import UserError
from asyncspec.ledger import ledger
from asyncspec.timing.metrics import read_rows

SHOWN = 10  # violations printed one by one
FATES = ("trained", "evaluated", "dropped")


def fates(events: Iterable[dict]) -> dict[int, Counter]:
    """How often each ticket that was issued was trained, evaluated and dropped; of what a resumed run made void nothing
    counts.
    """
    counts: dict[int, Counter] = {}
    step_of: dict[int, int] = {}
    for event in events:
        if event["event"] == "resumed":
            counts = {ticket: ends for ticket, ends in counts.items() if step_of[ticket] < event["version"]}
        elif event["event"] == "issued":
            counts.setdefault(event["ticket"], Counter())
            step_of[event["ticket"]] = event["step"]
        elif event["event"] in FATES and event["ticket"] in counts:
            counts[event["ticket"]][event["event"]] += 1
    return counts


def violations(events: Iterable[dict], lag: int, groups_per_step: int, steps_trained: int | None) -> list[str]:
    """What in a ledger breaks a promise, a line each; none if all is well.

    Args:
        events: the ledger's lines, in order.
        steps_trained: rows of metrics.jsonl; None for a run that goes on: its tickets may still be without an end, its
            newest step incomplete.
    """
    ended = steps_trained is not None
    found: list[str] = []
    issued: Counter = Counter()
    step_of: dict[int, int] = {}
    steps: Counter = Counter()  # tickets trained in each, or left out with it
    events = list(events)
    for event in events:
        kind = event["event"]
        if kind == "resumed":  # from a checkpoint: what came later than that is void, and happens anew
            version = event["version"]
            if version and steps[version - 1] != groups_per_step:
                found.append(f"resumed from version {version}, which was never trained")
            issued = Counter({ticket: n for ticket, n in issued.items() if step_of[ticket] < version})
            steps = Counter({step: n for step, n in steps.items() if step < version})
        if kind not in ("issued", *FATES):  # of the run; or an actor died with the ticket, which is the same
            continue
        ticket, step = event["ticket"], event["step"]
        step_of[ticket] = step
        if kind == "issued":
            issued[ticket] += 1
        elif not issued[ticket]:
            found.append(f"ticket {ticket}: {kind} before it was issued")
        if "left_out_in" in event:  # a step that could not be taken is done all the same
            steps[event["left_out_in"]] += 1
        if kind == "dropped" and not event.get("reason"):
            found.append(f"ticket {ticket}: dropped without a reason")
        if kind != "trained":
            continue
        steps[event["trained_in"]] += 1
        if event["trained_in"] != step:
            found.append(f"ticket {ticket}: trained in step {event['trained_in']}, issued for step {step}")
        if event["version_min"] < step - lag:
            found.append(
                f"ticket {ticket}: a token of version {event['version_min']} trained in step {step}, beyond policy "
                f"lag {lag}"
            )
        if event["version_max"] > step:
            found.append(
                f"ticket {ticket}: a token of version {event['version_max']} trained in step {step}, which made "
                f"version {step + 1}"
            )
    for ticket, times in issued.items():
        if times > 1:
            found.append(f"ticket {ticket}: issued {times} times")
    for ticket, ends in fates(events).items():
        if sum(ends.values()) != 1 and (ends or ended):
            found.append(
                f"ticket {ticket}: "
                + (", ".join(f"{fate} {n} times" for fate, n in ends.items()) or "no end: neither trained nor dropped")
            )
    for step in range(max(steps, default=-1) + ended):
        if steps[step] != groups_per_step:
            found.append(f"step {step}: {steps[step]} tickets trained, expected {groups_per_step}")
    if ended and steps_trained != len(steps):
        found.append(f"metrics.jsonl has {steps_trained} steps, the ledger trained {len(steps)}")
    return found


def audit(directory: str) -> int:
    """Check a run and say so; returns 0 if all holds, 1 if not.

    Raises:
        UserError: the directory holds no run, or a line of its ledger is damaged.
    """
    run = Path(directory)
    for name in ("config.yaml", "ledger.jsonl", "metrics.jsonl"):
        if not (run / name).is_file():
            raise UserError(f"audit {directory}: no {name} in it; expected the directory of a run")
    config = from_yaml((run / "config.yaml").read_text(errors="replace"))
    going_on = ledger.written(run)
    try:
        events = list(ledger.read(run))
    except ValueError as error:
        raise UserError(f"audit {directory}: {error}") from None
    # whole lines; before they are read, as the run may go on
    written = (run / "metrics.jsonl").read_bytes().count(b"\n")
    rows = read_rows(run / "metrics.jsonl")
    found = [f"metrics.jsonl, line {len(rows) + 1}: not the row of a step"] if len(rows) < written else []
    found += violations(events, config.policy_lag, config.rl.groups_per_step, None if going_on else len(rows))
    counts = Counter(event["event"] for event in events)
    for line in found[:SHOWN]:
        print(f"violated: {line}")
    if len(found) > SHOWN:
        print(f"and {len(found) - SHOWN} more")
    faults = ", ".join(
        f"{count} {name}" for name in ("frozen", "lost", "joined", "resumed", "reissued") if (count := counts[name])
    )
    undone, void = (
        sum(event.get(name, 0) for event in events if event["event"] == "resumed")
        for name in ("tickets_undone", "tickets_void")
    )
    if undone or void:
        faults += f"; going back to a checkpoint undid {undone} trained tickets and dropped {void} unfinished ones; "
        faults += "all of them were issued again"
    if faults:
        print(f"{directory}: {faults}")
    if going_on:
        print(
            f"{directory}: still running; {len(ledger.open_tickets(events))} tickets are on their way, and whether "
            f"each has one end can be said when it has ended"
        )
    print(
        f"{directory}: {counts['issued']} tickets issued, {counts['trained']} trained in {len(rows)} steps, "
        f"{counts['evaluated']} evaluated, "
        f"{counts['dropped']} dropped; policy lag {config.policy_lag}: "
        + (f"{len(found)} violations" if found else "all of it holds")
    )
    return 1 if found else 0
