"""`asyncspec audit`: check that a run's ledger shows what the system promises.

- Every ticket was trained once, evaluated once, or dropped with a reason.
- Each ticket was trained in the step it was issued for, with no token older than the policy lag allows or newer than
  the policy that was trained.
- What was trained is what its generator sampled: the same tokens, the same of them the policy's own, the same versions.
- Steps and versions follow each other without a gap.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from asyncspec.config import from_yaml, resolve_path
from asyncspec.errors import UserError
from asyncspec.ledger import ledger
from asyncspec.timing.metrics import read_rows

SHOWN = 10  # most violations that are printed one by one
FATES = ("trained", "evaluated", "dropped")


def fates(events: Iterable[dict]) -> dict[int, Counter]:
    """Count how often each issued ticket was trained, evaluated and dropped: ticket id -> Counter of `FATES`.

    Events that became void when the run resumed from a checkpoint do not count.
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
    """Return the violations of the promises in a ledger, one line each; an empty list if there are none.

    Args:
        events: the ledger's lines, in order.
        lag: the run's policy lag.
        groups_per_step: places of each step: tickets that it trains or leaves out.
        steps_trained: number of rows of metrics.jsonl; None for a run that has not ended, whose tickets may still be
            open and whose newest step may be incomplete.
    """
    ended = steps_trained is not None
    found: list[str] = []
    issued: Counter = Counter()
    step_of: dict[int, int] = {}
    steps: Counter = Counter()  # step -> tickets that were trained in it, or left out because it was skipped
    empty: Counter = Counter()  # step -> places that stay empty, known before the step is trained
    made: dict[tuple[int, str], set[int]] = {}  # (ticket, generator) -> checksums of the groups that it sent on
    events = list(events)
    for event in events:
        kind = event["event"]
        if kind == "resumed":  # from a checkpoint: later steps are void, and their tickets are issued again
            version = event["version"]
            if version and steps[version - 1] + empty[version - 1] != groups_per_step:
                found.append(f"resumed from version {version}, which was never trained")
            issued = Counter({ticket: n for ticket, n in issued.items() if step_of[ticket] < version})
            steps, empty = (Counter({step: n for step, n in each.items() if step < version}) for each in (steps, empty))
        if kind == "generated":
            made.setdefault((event["ticket"], event.get("generator", "")), set()).add(event["checksum"])
        if kind not in ("issued", *FATES):  # an event of the run, or a reissue, which keeps the same ticket
            continue
        ticket, step = event["ticket"], event["step"]
        step_of[ticket] = step
        if kind == "issued":
            issued[ticket] += 1
        elif not issued[ticket]:
            found.append(f"ticket {ticket}: {kind} before it was issued")
        if "left_out_in" in event:  # a skipped step still counts as done
            steps[event["left_out_in"]] += 1
        if "empty_in" in event:
            empty[event["empty_in"]] += 1
        if kind == "dropped" and not event.get("reason"):
            found.append(f"ticket {ticket}: dropped without a reason")
        if (other := event.get("replaced_by")) is not None and not (issued[other] and step_of[other] == step):
            found.append(f"ticket {ticket}: replaced by ticket {other}, which was not issued for step {step}")
        if kind != "trained":
            continue
        steps[event["trained_in"]] += 1
        # The report of a generator that died may be missing.
        sent = made.get((ticket, event.get("generator", "")))
        if sent and event.get("checksum") not in sent:
            found.append(f"ticket {ticket}: trained other tokens, masks or versions than {event.get('generator')} sent")
        if event["trained_in"] != step:
            found.append(f"ticket {ticket}: trained in step {event['trained_in']}, issued for step {step}")
        if event["version_min"] < step - lag:
            found.append(
                f"ticket {ticket}: a token of version {event['version_min']} trained in step {step}, beyond policy lag "
                f"{lag}"
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
                + (
                    ", ".join(f"{fate} {n} times" for fate, n in ends.items())
                    or "no end: neither trained, evaluated nor dropped"
                )
            )
    # Nothing else in the ledger tells that a step of empty places alone was done.
    done = {*steps, *(step for step, n in empty.items() if n == groups_per_step and step < (steps_trained or 0))}
    for step in range(max(done, default=-1) + ended):
        if (count := steps[step] + empty[step]) != groups_per_step:
            found.append(f"step {step}: {count} tickets trained or left out, expected {groups_per_step}")
    if ended and steps_trained != len(done):
        found.append(f"metrics.jsonl has {steps_trained} steps, but the ledger has {len(done)}")
    return found


def audit(directory: str) -> int:
    """Check a run's ledger and print the result; return 0 if there is no violation, else 1. A run that was cut short is
    unfinished, which is no violation: its ledger has no end.

    Raises:
        UserError: the directory is not a run's, or a line of its ledger is damaged.
    """
    run = resolve_path(directory)
    for name in ("config.yaml", "ledger.jsonl"):
        if not os.path.isfile(run / name):
            raise UserError(f"audit {directory}: no {name} in it; expected the directory of a run")
    config = from_yaml((run / "config.yaml").read_text(encoding="utf-8", errors="replace"))
    going_on = ledger.written(run)
    try:
        events = list(ledger.read(run))
    except ValueError as error:
        raise UserError(f"audit {directory}: {error}") from None
    # count whole lines before reading them, since a run in progress may write more
    metrics = run / "metrics.jsonl"
    written, rows = (metrics.read_bytes().count(b"\n"), read_rows(metrics)) if metrics.exists() else (0, [])
    found = [f"metrics.jsonl, line {len(rows) + 1}: not the row of a step"] if len(rows) < written else []
    ended = ledger.ended(events) and not going_on
    found += violations(events, config.policy_lag, config.rl.groups_per_step, len(rows) if ended else None)
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
        faults += f"; resuming from a checkpoint undid {undone} trained tickets and dropped {void} unfinished ones; "
        faults += "all of them were issued again"
    if faults:
        print(f"{directory}: {faults}")
    open_now = len(ledger.open_tickets(events))
    if going_on:
        print(
            f"{directory}: still running; {open_now} tickets are open; audit again after the run to check that each of "
            f"them ends once"
        )
    elif not ended:
        print(
            f"{directory}: unfinished: the run was cut short, its ledger "
            + ("ends in a torn line" if ledger.torn(run) else "has no end")
            + f"; {open_now} tickets are open; to continue: asyncspec train --resume {directory}"
        )
    trained = {event["ticket"]: event for event in events if event["event"] == "trained"}.values()
    sampled, others = (sum(event.get(name, 0) for event in trained) for name in ("tokens", "environment_tokens"))
    if others:
        print(f"{directory}: trained {sampled} tokens that the policy sampled, and none of {others} of environments")
    print(
        f"{directory}: {counts['issued']} tickets issued, {counts['trained']} trained in {len(rows)} steps, "
        f"{counts['evaluated']} evaluated, "
        f"{counts['dropped']} dropped; policy lag {config.policy_lag}: "
        + (f"{len(found)} violations" if found else "no violations")
    )
    return 1 if found else 0
