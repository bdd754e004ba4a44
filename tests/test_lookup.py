"""What lookups propose, and what they report in hindsight."""

import numpy as np
import pytest
import torch

from asyncspec.drafters.lookup import NGramDrafter, SuffixDrafter
from asyncspec.speculation.draft_length import LONGEST
from asyncspec.speculation.drafter import Slots


def slots_with(rows, positions=40):
    slots = Slots(len(rows), positions, "cpu")
    for index, row in enumerate(rows):
        slots.token_SP[index, : len(row)], slots.length_S[index] = torch.tensor(row), len(row)
    return slots


def test_ngram_proposes_what_followed_the_longest_latest_match():
    rows = [[7, 8, 9, 1, 7, 8, 5, 2, 9, 7, 8], [1, 2, 3, 4, 5, 6], [4, 5, 6, 9, 4, 5, 6, 2, 5, 6, 1, 4, 5, 6]]
    proposal = NGramDrafter(slots_with(rows)).propose(3, 4, None)
    assert proposal.count_B.tolist() == [4, 0, 4]
    assert proposal.draft_BK[0].tolist() == [5, 2, 9, 7]  # the later of two matches of length two
    assert proposal.draft_BK[2].tolist() == [2, 5, 6, 1]  # the match of three, not the later one of two


def test_suffix_remembers_rollouts_alike_in_batches_and_one_by_one():
    class OneByOne(SuffixDrafter):
        UNREMEMBERED = 1

    class Turning(SuffixDrafter):
        RING = 500  # the ring wraps many times; proposals then differ, but must be tokens that it holds

    rng = np.random.default_rng(0)
    drafters = [kind(slots_with([[]] * 8)) for kind in (OneByOne, SuffixDrafter, Turning)]
    for _ in range(40):
        lengths = rng.integers(4, 40, 8)
        rows = rng.integers(0, 4, (8, 40))
        proposals = []
        for drafter in drafters:
            slots = drafter.slots
            slots.token_SP[:], slots.length_S[:], slots.prompt_S[:] = (
                torch.from_numpy(rows),
                torch.from_numpy(lengths),
                3,
            )
            drafter.enter(0, 8)
            proposals.append(drafter.propose(8, 5, None))
            for row in range(8):
                drafter.leave(row)
        assert all(torch.equal(a, b) for a, b in zip(proposals[0][:3:2], proposals[1][:3:2]))
        assert proposals[2].draft_BK.max() < 4
    assert all(proposal.count_B.any() for proposal in proposals)


@pytest.mark.parametrize("kind", [NGramDrafter, SuffixDrafter])
def test_hindsight_reports_what_would_have_been_proposed(kind):
    rng, prompt, told = np.random.default_rng(0), 3, []
    drafter = kind(slots_with([[]]))
    slots, drafter.HINDSIGHT = drafter.slots, 2
    drafter.learn = lambda count_R, kept_R: told.append((count_R.tolist(), kept_R.tolist()))
    most = 0
    for rollout in range(60):
        length = int(rng.integers(prompt + 1, 40))
        tokens = rng.integers(0, 3, 40)
        tokens[:prompt] = rng.integers(0, 2)
        slots.token_SP[0], slots.prompt_S[0], slots.length_S[0] = torch.from_numpy(tokens), prompt, prompt
        drafter.enter(0, 1)
        counts, kept = [], []
        for at in range(prompt + 1, length):
            slots.length_S[0] = at
            found = drafter.propose(1, LONGEST, None)
            counts.append(int(found.count_B[0]))
            draft = found.draft_BK[0, : counts[-1]].tolist()
            kept.append(
                next((j for j in range(counts[-1]) if at + j >= length or draft[j] != tokens[at + j]), counts[-1])
            )
        slots.length_S[0] = length
        drafter.leave(0)
        drafter.catch_up()
        if rollout % 2 == 0:
            assert told.pop() == (counts, kept)
        assert not told
        most = max(most, *kept, 0)
    assert most > 3


def test_suffix_prefers_earlier_rollouts_of_the_same_prompt():
    rows = [[2, 3, 10, 11, 12, 13, 14], [2, 4, 10, 11, 15, 16], [2, 3, 10, 11], [2, 9, 10, 11], [6, 6, 6, 6]]
    slots = slots_with(rows)
    slots.prompt_S[:] = 2
    drafter = SuffixDrafter(slots)
    drafter.enter(0, 5)
    drafter.leave(0)
    drafter.leave(1)
    proposal = drafter.propose(5, 3, None)
    assert proposal.draft_BK[2].tolist() == [12, 13, 14]  # the same prompt's past, though another's is newer
    assert proposal.count_B.tolist()[2:] == [3, 2, 0]  # the last rollout ends after two tokens
    assert proposal.draft_BK[3, :2].tolist() == [15, 16]
