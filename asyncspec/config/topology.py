"""Which node runs which actors: `deployment.nodes`, the one description of a topology that every launcher reads.

    4*trainer:4+logprob:4,12*generator:8

describes 16 nodes. Each of the first four has four ranks of the trainer and four ranks of logprob actors (a logprob
actor has one rank unless logprob.ranks says otherwise); each of the other twelve has eight ranks of generators (a
generator has one unless engine.tensor_parallel says otherwise, and all of its ranks are on one node). The actors of a
node are dealt to its GPUs in turn (`deal`). The controller runs on the first node, and so does the draft adapter unless
another node names it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

ROLES = ("trainer", "logprob", "generator", "draft_adapter")
TRAINER_RANK, LOGPROB_RANK, GENERATOR_RANK = "trainer_rank", "logprob_rank", "generator_rank"
_RANK = "_rank"
_COUNT = "[1-9][0-9]{0,4}"
# Beside whom the draft adapter computes, the best first. A logprob actor has time to spare. All ranks of a trainer wait
# for the slowest one, and the first rank has the most to do. A generator is in the draft's broadcast group, whose
# members need GPUs of their own for NCCL.
_BESIDE = ("logprob", LOGPROB_RANK, TRAINER_RANK, "trainer", GENERATOR_RANK, "generator")


def parse(text: str) -> list[dict[str, int]]:
    """Return the number of actors (or ranks) of each role on each node, one dict role -> number for each node.

    Raises:
        ValueError: the text has another form; the message says what is wrong and names the nearest valid choice.
    """
    nodes = []
    for item in text.replace(" ", "").split(","):
        times, star, plays = item.rpartition("*")
        if star and not re.fullmatch(_COUNT, times):
            raise ValueError(f"{times!r} in {item!r}: expected a number of nodes; nearest valid choice: 1*{plays}")
        node: dict[str, int] = {}
        for part in plays.split("+"):
            role, colon, count = part.partition(":")
            if role not in ROLES:
                raise ValueError(
                    f"{role!r} in {item!r}: expected one of {', '.join(ROLES)}; nearest: "
                    f"{difflib.get_close_matches(role, ROLES, 1, 0.0)[0]}"
                )
            if colon and not re.fullmatch(_COUNT, count):
                raise ValueError(f"{count!r} in {item!r}: expected a number of actors; nearest valid choice: {role}:1")
            if role in node:
                raise ValueError(f"{role} is named twice, expected once, in {item!r}")
            node[role] = int(count or 1)
        nodes += [dict(node) for _ in range(int(times or 1))]
    totals = total(nodes)
    for role in ROLES[:3]:
        if not totals[role]:
            raise ValueError(f"expected at least one node with role {role}")
    if totals["draft_adapter"] > 1:
        raise ValueError(f"{totals['draft_adapter']} draft adapters: expected at most one")
    return nodes


def total(nodes: list[dict[str, int]]) -> dict[str, int]:
    """Return role -> number over all nodes."""
    return {role: sum(node.get(role, 0) for node in nodes) for role in ROLES}


def name_actors(
    ranks: int, logprobs: int, logprob_ranks: int, generators: int, generator_ranks: int, adapting: bool
) -> dict[str, str]:
    """Return name -> role of every actor except the controller, in order.

    The role of a rank other than the leading one is trainer_rank, logprob_rank or generator_rank.

    Args:
        ranks: number of ranks of the trainer.
        logprobs: number of logprob actors.
        logprob_ranks: number of ranks of each logprob actor.
        generators: number of generators.
        generator_ranks: number of ranks of each generator.
        adapting: whether there is a draft adapter.
    """
    names: dict[str, str] = {}
    for role, leaders, size in (
        ("trainer", ["trainer"], ranks),
        ("logprob", [f"logprob{i or ''}" for i in range(logprobs)], logprob_ranks),
        ("generator", [f"generator{i}" for i in range(generators)], generator_ranks),
    ):
        for leader in leaders:
            names |= {name: role + _RANK if rank else role for rank, name in enumerate(rank_names(leader, size))}
    return names | ({"draft_adapter": "draft_adapter"} if adapting else {})


def rank_names(leader: str, ranks: int) -> list[str]:
    """Return the names of the ranks that hold one model together, the leader first: logprob1, logprob1_rank1, ..."""
    return [leader, *(f"{leader}{_RANK}{rank}" for rank in range(1, ranks))]


def rank_of(name: str) -> tuple[str, int]:
    """Return the name of an actor's leader, and its rank. A leader, or an actor without ranks, gives itself and 0."""
    leader, _, rank = name.partition(_RANK)
    return leader, int(rank or 0)


def assign(nodes: list[dict[str, int]], names: Mapping[str, str]) -> list[list[str]]:
    """Return the names of the actors on each node, the controller included.

    Args:
        nodes: what `parse` returns.
        names: what `name_actors` returns.
    """
    waiting = {role: [name for name, plays in names.items() if plays.removesuffix(_RANK) == role] for role in ROLES}
    placed = []
    for node in nodes:
        here = []
        for role, count in node.items():
            here += waiting[role][:count]
            waiting[role] = waiting[role][count:]
        placed.append(here)
    placed[0] = ["controller", *placed[0], *waiting["draft_adapter"]]
    return placed


def deal(played: Sequence[str], gpus: int) -> list[int]:
    """Return the index of each actor's GPU on one node.

    The GPUs are dealt in turn, so actors of one role share a GPU only if they outnumber the GPUs. The draft adapter is
    placed last, on one of the GPUs with the fewest actors. Among those, `_BESIDE` says which it shares.

    Args:
        played: the roles of the node's actors that compute; equal roles are adjacent.
        gpus: number of the node's GPUs.
    """
    on: list[list[str]] = [[] for _ in range(gpus)]
    dealt = [0] * len(played)
    for i in sorted(range(len(played)), key=lambda i: played[i] == "draft_adapter"):
        adapter = played[i] == "draft_adapter"
        dealt[i] = min(
            range(gpus), key=lambda gpu: (len(on[gpu]), adapter and max(map(_BESIDE.index, on[gpu]), default=-1))
        )
        on[dealt[i]].append(played[i])
    return dealt
