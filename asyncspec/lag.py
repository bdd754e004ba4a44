"""The policy clock and the strict policy lag.

Step s turns version s into version s + 1. A group trained in step s may contain no token sampled by a version older
than s - lag. Admission keeps this bound, and the trainer checks it again:

- a ticket for step s is issued only once version s - lag is published (`PolicyClock.may_issue`);
- a generator samples for a ticket only with that version or a newer one (`Ticket.min_version`), and versions only grow;
- the trainer refuses a group that breaks the bound (`check_lag`).

With lag 1 and two groups a step:

    version published      0                       1                       2
    trainer                |  (waiting)   step 0   |  step 1               |  step 2 ...
    tickets issued         steps 0 and 1           step 2                  step 3

Generation for step 1 overlaps the training of step 0; its tokens come from version 0 or 1. With lag 0 the tickets of
step 1 wait for version 1: this is synchronous, on-policy training by the same actors.
"""

from __future__ import annotations

from collections.abc import Sequence


class LagError(RuntimeError):
    """A version or a group breaks the order of versions or the policy lag."""


class PolicyClock:
    """Keeps the newest published version, which only grows, and says which steps may get tickets."""

    def __init__(self, lag: int, version: int = 0) -> None:
        self.lag, self.version = lag, version

    def publish(self, version: int) -> None:
        if version != self.version + 1:
            raise LagError(f"version {version} published after {self.version}: expected {self.version + 1}")
        self.version = version

    def min_version(self, step: int) -> int:
        return max(0, step - self.lag)

    def may_issue(self, step: int) -> bool:
        """Whether tickets for `step` are admitted."""
        return self.version >= step - self.lag


def check_lag(step: int, lag: int, ticket_id: int, versions: Sequence[int]) -> None:
    """Check the bound for a group that is about to be trained.

    Args:
        step: the step that trains the group.
        lag: the policy lag.
        ticket_id: the group's ticket, for the error message.
        versions: the version of each token of the group.

    Raises:
        LagError: a token is older than step - lag, or newer than the policy being trained.
    """
    oldest, newest = min(versions), max(versions)
    if oldest < step - lag:
        raise LagError(
            f"ticket {ticket_id} in step {step}: a token of version {oldest}; policy lag {lag} allows "
            f"{max(0, step - lag)} and newer"
        )
    if newest > step:
        raise LagError(f"ticket {ticket_id} in step {step}: a token of version {newest}, which does not exist yet")
