"""The answer to "what should I change?": sentences for the top of a report, the most useful first."""

from __future__ import annotations

import numpy as np

from asyncspec.report.learning import learning
from asyncspec.report.run import Run
from asyncspec.timing import whatif
from asyncspec.wire.facts import UNNAMED, added

CHANGES = {  # label: (change to replay the run with, how to make it)
    "training twice as fast": (whatif.Change(train=2), "more trainer.ranks, or a faster device for the trainer"),
    "generation twice as fast": (
        whatif.Change(generation=2),
        "a draft that is accepted more often (asyncspec draft train), or a faster device for the generator",
    ),
    "logprob twice as fast": (whatif.Change(logprob=2), "more deployment.logprobs or logprob.ranks"),
    "one more generator": (whatif.Change(generators=1), "deployment.generators"),
    "policy lag larger by one": (whatif.Change(lag=1), "policy_lag"),
}
WORTH = 0.95  # of a step's time: a change that leaves more than this is not named
MOSTLY, SOME = 0.85, 0.1  # shares from which a step counts as training, and recovery is named


Replayed = dict[str, tuple[float, float]]  # change: (seconds that a step would take, their ratio to now)


def replayed(run: Run) -> Replayed:
    """Replay a run under each change; return nothing if the run is too short, or waited for environments, which the
    replay does not know.
    """
    if len(run.steps) <= whatif.SKIP + 1 or run.config.environment.name:
        return {}
    now = float(np.mean([step.end - step.start for step in run.steps[whatif.SKIP :]]))
    c, changes = run.config, [change for change, _ in CHANGES.values()]
    seconds = whatif.predicted(run.steps, c.policy_lag, c.engine.slots, changes, c.deployment.logprobs)
    return {name: (value, value / now) for name, value in zip(CHANGES, seconds)}


def advice(run: Run, changes: Replayed) -> list[str]:
    """Return what to change in the next run, in sentences.

    Args:
        changes: what `replayed` returns for the run.
    """
    return [*_speed(run, changes), *_tools(run), *learning(run)]


def _tools(run: Run) -> list[str]:
    """Name the slowest tool, if the run has an environment."""
    used = added(group.tools for step in run.steps for group in (*step.groups, *step.unused))
    if not used:
        return []
    name, use = max(used.items(), key=lambda item: item[1].seconds / item[1].calls)
    what = "The environment's steps" if name == UNNAMED else f"The slowest tool is {name}: its calls"
    exposed = run.parts()["exposed_environment"]
    return [
        f"{what} take {use.seconds / use.calls:.3f} s on average and {use.longest:.3f} s at most, over {use.calls} "
        f"calls; {exposed:.2f} s of a step were spent waiting for environments."
    ]


def _speed(run: Run, changes: Replayed) -> list[str]:
    parts, seconds = run.parts(), run.step_seconds()
    said = []
    if parts["train"] >= MOSTLY * seconds:
        said.append(
            f"Training takes {parts['train'] / seconds:.0%} of a step, so generation is hidden already. "
            "To make a step shorter, give the trainer more ranks, or a faster device."
        )
    else:
        name = max((part for part in parts if part != "train"), key=lambda part: parts[part])
        said.append(
            f"The largest part besides training is {name.replace('_', ' ')}: {parts[name]:.2f} s of a step of "
            f"{seconds:.2f} s ({parts[name] / seconds:.0%})."
        )
    best = min(changes, key=lambda name: changes[name][1], default="")
    if best and changes[best][1] <= WORTH:
        after, ratio = changes[best]
        said.append(
            f"The change that would help most is {best}: a step of {after:.2f} s, {ratio:.2f} times as long as now. "
            f"To make it: {CHANGES[best][1]}."
        )
    elif changes:
        said.append("No single change would make a step much faster.")
    if parts["recovery"] >= SOME * seconds:
        said.append(f"Recovery takes {parts['recovery'] / seconds:.0%} of a step: find out why actors are lost.")
    return said
