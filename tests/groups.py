"""Tickets and groups for tests."""

from asyncspec.wire import messages as m


def ticket_of(ticket_id=0, prompt_tokens=(3, 12, 4, 13), seeds=(0, 1), step=0, min_version=0):
    return m.Ticket(
        ticket_id=ticket_id,
        step=step,
        min_version=min_version,
        prompt="1+2=",
        answer="3",
        prompt_tokens=list(prompt_tokens),
        seeds=list(seeds),
        issued=0.0,
    )


def group_of(ticket, rewards):
    return m.Group(
        ticket=ticket,
        generator="generator0",
        rewards=list(rewards),
        truncated=0,
        verifications=1,
        proposed=3,
        accepted=1,
        draft_version=0,
        phases=[],
    )
