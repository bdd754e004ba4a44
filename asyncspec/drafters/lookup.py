"""Drafters that look proposals up in tokens already seen.

The n-gram drafter searches the sequence's own tokens; the suffix drafter searches earlier rollouts. Both find where the
last tokens of a row occurred before and propose what followed there. Such a proposal is certain, a point mass, and is
verified as one. A row without a match has no proposal. The drafters look back at some of the finished rollouts and
report what they would have proposed in them (hindsight).

Shape suffixes: B live rows, P positions, K draft length, N orders (match lengths), T tokens of finished rollouts, R
response tokens among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from asyncspec.config import LONGEST_DRAFT as LONGEST
from asyncspec.engine.backend import Target
from asyncspec.engine.kv_cache import runs
from asyncspec.speculation.drafter import Drafter, Proposal, Slots

_BASE = 6364136223846793005  # base of the rolling hashes


class _Lookup(Drafter):
    looks_up = True
    HINDSIGHT = 32  # look back at one finished rollout in this many
    STRETCH = 512  # look back at no more than this many of its tokens

    def __init__(self, slots: Slots) -> None:
        self.slots, self._left = slots, 0

    @classmethod
    def of(cls, target: Target) -> _Lookup:
        return cls(target.slots)

    def _due(self) -> bool:
        """Whether to look back at the next finished rollout."""
        self._left += 1
        return self.learn is not None and self._left % self.HINDSIGHT == 1

    def _stretch(self, start: int, end: int) -> slice:
        """Return the part of a response to look back at.

        It is all of the response, or a stretch somewhere in a long one, so that one response cannot outweigh many
        others.
        """
        more = max(0, end - start - self.STRETCH)
        start += self._left * 7919 % (more + 1)
        return slice(start, min(end, start + self.STRETCH))

    def _tell(self, token_T, at_R, draft_RK, count_R) -> None:
        """Report what would have been proposed at these positions of a rollout to `learn`.

        Args:
            token_T: the rollout's tokens.
            at_R: positions in it.
            draft_RK, count_R: the proposals for each position, and how many of the K count.
        """
        index_K = self.slots.index_P[:LONGEST]
        token_RK = pad(token_T, (0, LONGEST), value=-1)[at_R.unsqueeze(1) + index_K]
        kept_R = ((draft_RK == token_RK) & (index_K < count_R.unsqueeze(1))).cumprod(1).sum(1)
        self.learn(count_R.cpu().numpy(), kept_R.cpu().numpy())


class NGramDrafter(_Lookup):
    """Prompt lookup (Saxena 2023): proposes what followed the longest earlier match of the row's last tokens.

    Among matches of equal length, the most recent one counts.
    """

    MATCHES = (2, 3, 4)  # match lengths in tokens: the first is the least, the last the most
    AT_ONCE = 64  # hindsight handles this many positions of a rollout at once

    def propose(self, count: int, draft_length: int, uniform_BK) -> Proposal:
        slots, span = self.slots, int(self.slots.length[:count].max())
        draft_BK, count_B = self._found(slots.token_SP[:count, :span], slots.length_S[:count], draft_length)
        return Proposal(draft_BK, None, count_B)

    def _found(self, token_BP, length_B, draft_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return proposals for rows of tokens, and how many of each row's count. length_B: tokens of each row."""
        length_B1, index_P, span = length_B.unsqueeze(1), self.slots.index_P, token_BP.shape[1]
        # match_BP: how many tokens that end at each position equal the row's last ones.
        equal_BP = token_BP == token_BP.gather(1, length_B1 - 1)
        match_BP = equal_BP.to(torch.int64)
        for back in range(1, self.MATCHES[-1]):
            last_B1 = token_BP.gather(1, (length_B1 - 1 - back).clamp(min=0))
            equal_BP = equal_BP[:, 1:] & (token_BP[:, : span - back] == last_B1)
            match_BP[:, back:] += equal_BP
        # The key ranks matches by length, then by recency. The end of the row itself is no match.
        key_BP = (match_BP * span + index_P[:span]).masked_fill_(index_P[:span] >= length_B1 - 1, 0)
        best_B = key_BP.amax(1)
        found_B, at_B = best_B // span >= self.MATCHES[0], best_B % span
        draft_BK = token_BP.gather(1, (at_B.unsqueeze(1) + 1 + index_P[:draft_length]).clamp(max=span - 1))
        return draft_BK, torch.where(found_B, (length_B - 1 - at_B).clamp(max=draft_length), 0)

    def leave(self, row: int) -> None:
        if not self._due():
            return
        token_T = self.slots.token_SP[row, : int(self.slots.length[row])]
        # The first token of a response is never proposed.
        at_R = torch.arange(len(token_T), device=token_T.device)[
            self._stretch(int(self.slots.prompt_S[row]) + 1, len(token_T))
        ]
        found = [self._found(token_T.expand(len(some), -1), some, LONGEST) for some in at_R.split(self.AT_ONCE)]
        if found:
            draft_RK, count_R = zip(*found)
            self._tell(token_T, at_R, torch.cat(draft_RK), torch.cat(count_R))


class SuffixDrafter(_Lookup):
    """Suffix decoding (after Oliaro et al. 2024, arXiv 2411.04975) over the rollouts of this step and earlier ones.

    A suffix tree would have Python objects as nodes. In its place there is a hash table of contexts of several lengths.
    Each context of a finished rollout, once with its prompt and once without, points to where it was last seen in a
    ring of past tokens. The ring overwrites old rollouts, so proposals follow the policy as it changes. A hash
    collision proposes wrong tokens, which costs acceptance, not exactness.
    """

    ORDERS = (16, 12, 8, 6, 4, 3, 2)  # tokens of context, longest first
    RING = 1 << 20  # tokens
    UNREMEMBERED = 64  # at most this many finished rollouts wait to be entered
    TABLE = 1 << 20  # contexts
    _SALT, _MIX = 1442695040888963407, -7046029254386353131

    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        device, longest = slots.device, self.ORDERS[0]
        # A margin after the ring, so that reading a proposal never runs past its end.
        self.ring = torch.zeros(self.RING + slots.positions, dtype=torch.int64, device=device)
        # the context's hash, and the index in the ring of the token after it
        self.seen_T2 = torch.zeros(self.TABLE, 2, dtype=torch.int64, device=device)
        self.end = 1  # index in the ring for the next rollout; index 0 means "not seen"
        self._entered = 0  # number of sequences so far; a sequence's number salts its seed
        power = [1]
        for _ in range(longest - 1):
            power.append((power[-1] * _BASE) % (1 << 64))
        self._power_N = torch.tensor([p - (1 << 64) if p >= 1 << 63 else p for p in power], device=device)
        self._order_N, self._back_N = torch.tensor(self.ORDERS, device=device), torch.arange(longest, device=device)
        self._salt_N = self._order_N * self._SALT
        self._rank_N = torch.arange(2 * len(self.ORDERS), 0, -1, device=device)
        self._prompt_S = torch.zeros(len(slots.length), dtype=torch.int64, device=device)
        # not entered yet: tokens, the prompt's hash, where the new ones begin, and whether they are a response, which
        # could be proposed
        self._finished: list[tuple[torch.Tensor, torch.Tensor, int, bool]] = []

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        """Return a copy of everything the drafter remembers."""
        self.catch_up()
        return {"ring": self.ring.clone(), "seen": self.seen_T2.clone(), "end": self.end, "entered": self._entered}

    def load_state_dict(self, state: Mapping[str, torch.Tensor | int]) -> None:
        """Replace everything the drafter remembers by what `state_dict` returned."""
        self.ring.copy_(state["ring"])
        self.seen_T2.copy_(state["seen"])
        self.end, self._entered = state["end"], state["entered"]
        self._finished.clear()

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        first, self._entered = self._entered, self._entered + len(seeds)
        return [hash((seed, first + i)) for i, seed in enumerate(seeds)]

    def enter(self, first_row: int, count: int) -> None:
        rows, slots = slice(first_row, first_row + count), self.slots
        prompt_B1 = slots.prompt_S[rows].unsqueeze(1)
        width = int(slots.length[rows].max())
        inside_BP = slots.index_P[:width] < prompt_B1
        mixed_BP = (slots.token_SP[rows, :width] + 1) * self._MIX + slots.index_P[:width] * _BASE
        mixed_BP = (mixed_BP ^ (mixed_BP >> 29)) * self._MIX
        self._prompt_S[rows] = torch.where(inside_BP, mixed_BP, 0).sum(1)

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        for source, copies in runs(sources, rows):
            self._prompt_S[copies] = self._prompt_S[source]

    def extended(self, row: int, start: int) -> None:
        self._remember(row, max(1, start), False)

    def leave(self, row: int) -> None:
        self._remember(row, int(self.slots.prompt_S[row]), True)

    def _remember(self, row: int, start: int, sampled: bool) -> None:
        slots = self.slots
        length = int(slots.length[row])
        # -1 after the last token marks the end of the rollout.
        self._finished.append(
            (pad(slots.token_SP[row, :length], (0, 1), value=-1), self._prompt_S[row].clone(), start, sampled)
        )
        if len(self._finished) == min(self.UNREMEMBERED, max(1, self.RING // slots.positions)):
            self.catch_up()

    def catch_up(self) -> None:
        """Enter finished rollouts into ring and table, many at once.

        Entered one by one, each would cost up to a tenth of an engine step.
        """
        finished, self._finished = self._finished, []
        for start in range(0, len(finished), self.HINDSIGHT):
            part = finished[start : start + self.HINDSIGHT]
            self._enter_past(part, any([self._due() for _ in part]) and part[0][3])

    def _enter_past(self, rollouts: list, look_back: bool) -> None:
        """Enter rollouts into ring and table. If `look_back`, first look back at the first of them."""
        tokens, hashes, prompts, _ = zip(*rollouts)
        lengths, token_T = np.array([len(t) for t in tokens]), torch.cat(tokens)
        position_T = np.arange(len(token_T)) - np.repeat(lengths.cumsum() - lengths, lengths)
        response_T = (position_T >= np.repeat(prompts, lengths)) & (position_T < np.repeat(lengths - 1, lengths))
        at_R = torch.from_numpy(response_T.nonzero()[0]).to(token_T.device)  # the index of each response token
        window_RN = pad(token_T, (self.ORDERS[0], 0)).unfold(0, self.ORDERS[0], 1)[at_R].flip(1)
        hash_R = torch.stack(hashes).repeat_interleave(torch.from_numpy(lengths).to(token_T.device))[at_R]
        key_RN, valid_RN = self._keys(window_RN, hash_R, torch.from_numpy(position_T[response_T]).to(token_T.device))
        if look_back:
            # Leave out the response's first token, which is never proposed, and the end mark.
            here = self._stretch(1, int(lengths[0]) - prompts[0] - 1)
            self._tell(token_T, at_R[here], *self._found(key_RN[here], valid_RN[here], LONGEST))
        if self.end + len(token_T) > self.RING:
            self.end = 1
        self.ring[self.end : self.end + len(token_T)] = token_T
        keys, places = key_RN[valid_RN], (self.end + at_R).unsqueeze(1).expand_as(key_RN)[valid_RN]
        self.seen_T2[self._bucket(keys)] = torch.stack([keys, places], 1)
        self.end += len(token_T)

    def propose(self, count: int, draft_length: int, uniform_BK) -> Proposal:
        self.catch_up()
        slots, length_B = self.slots, self.slots.length_S[:count]
        window_BN = slots.token_SP[:count].gather(1, (length_B.unsqueeze(1) - 1 - self._back_N).clamp_(min=0))
        key_BN, valid_BN = self._keys(window_BN, self._prompt_S[:count], length_B)
        draft_BK, count_B = self._found(key_BN, valid_BN, draft_length)
        return Proposal(draft_BK.clamp_(min=0), None, count_B)

    def _found(self, key_BN, valid_BN, draft_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return draft_BK, with -1 where a rollout ended, and count_B, how many of each row's K count."""
        seen_BN2 = self.seen_T2[self._bucket(key_BN)]
        rank_B, best_B = (((seen_BN2[..., 0] == key_BN) & valid_BN) * self._rank_N).max(1)
        place_B = seen_BN2[..., 1].gather(1, best_B.unsqueeze(1)).squeeze(1) * (rank_B > 0)
        draft_BK = self.ring[place_B.unsqueeze(1) + self.slots.index_P[:draft_length]]
        follows_BK = (draft_BK >= 0).cumprod(1) * (rank_B > 0).unsqueeze(1)
        return draft_BK, follows_BK.sum(1)

    def _keys(self, window_BN, prompt_B, length_B) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hashes of the contexts of each order, [B, 2N], and which of these contexts exist.

        Each order has two hashes: first with the prompt, then without. A context exists if the row is long enough.

        Args:
            window_BN: the last tokens of each row, newest first.
            prompt_B: the hash of each row's prompt.
            length_B: the length of each row.
        """
        rolling_BN = ((window_BN + 1) * self._power_N).cumsum(1)[:, self._order_N - 1] + self._salt_N
        rolling_BN = (rolling_BN ^ (rolling_BN >> 31)) * self._MIX
        exists_BN = self._order_N <= length_B.unsqueeze(1)
        # At each order the hash with the prompt ranks first: rollouts of the same prompt predict better.
        keys = torch.stack([rolling_BN + prompt_B.unsqueeze(1), rolling_BN], -1).flatten(1)
        return keys, torch.stack([exists_BN, exists_BN], -1).flatten(1)

    def _bucket(self, keys: torch.Tensor) -> torch.Tensor:
        return (keys ^ (keys >> 33)) & (self.TABLE - 1)
