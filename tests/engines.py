"""Engines for tests, and the exact distribution that their output must have."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import chisquare

from asyncspec.engine.protocol import Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.models.policy import hidden_states
from asyncspec.speculation.draft_length import LONGEST, FixedLength
from asyncspec.speculation.verify import AS_IS, Sampling, sampling_distribution

GREEDY = Sampling(top_k=1)
METHODS = ["eagle3", "eagle3 of few tokens", "mtp", "draft_model", "ngram", "suffix"]
PROMPT = [2, 3, 5]
ALPHA = 1e-4  # chance that one distribution test fails though the engine is exact


class RandomLength(FixedLength):
    """Choose k at random for every step; keep features always, or at random."""

    def __init__(self, always_keeps=False):
        self.longest, self.rng, self.always_keeps = LONGEST, np.random.default_rng(0), always_keeps

    def choose(self, live, missed_S=None, attended=None):
        self.keeps = self.always_keeps or self.rng.random() < 0.5
        return int(self.rng.integers(0, 5))


def engine_of(shape, policy, make_drafter, slots=64, k=3, sampling=AS_IS, **options):
    engine = TorchEngine(
        shape, make_drafter, slots=slots, max_prompt_tokens=8, max_response_tokens=40, sampling=sampling, **options
    )
    if make_drafter is not None:
        engine.use(RandomLength() if k == "random" else None if k == "auto" else FixedLength(k))
    engine.load_policy(dict(policy.named_parameters()), 0)
    return engine


def run(engine, prompts, samples=1, length=24, first_seed=0):
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, [first_seed + 1000 * i + j for j in range(samples)], length))
    done = []
    while engine.live or engine.waiting:
        done += engine.poll()
    return {(c.request_id, c.sample): c for c in done}


def exact_sequences(policy, sampling, length, eos, prompt=PROMPT):
    """Return {tokens: probability} for every response of at most `length` tokens."""
    result, open_ = {}, {(): 1.0}
    for _ in range(length):
        prefixes = list(open_)
        tokens = torch.tensor([prompt + list(p) for p in prefixes])
        logits = policy.lm_head(hidden_states(policy, tokens)[:, -1])
        probs = sampling_distribution(logits, sampling).double()
        extended = {}
        for prefix, row in zip(prefixes, probs):
            for token, p in enumerate(row.tolist()):
                if p > 0:
                    (result if token == eos else extended)[prefix + (token,)] = open_[prefix] * p
        open_ = extended
    return result | open_


def check_distribution(engine, policy, shape):
    """Check that responses are as probable as the policy says; return the numbers of tokens proposed and accepted."""
    # Many samples of one repetitive prompt, so that n-gram and suffix find plenty to copy.
    prompt, length, n = [2, 3, 5, 2, 3, 4, 2, 3], 4, 20_000
    done = run(engine, [prompt], samples=n, length=length)
    exact = exact_sequences(policy, engine.sampling, length, shape.eos_token_id, prompt)
    counts = dict.fromkeys(exact, 0)
    for completion in done.values():
        counts[tuple(completion.tokens.tolist())] += 1  # KeyError: a sequence of probability zero
    common = [s for s in sorted(exact, key=exact.get, reverse=True) if exact[s] * n >= 8]
    observed = [counts[s] for s in common] + [n - sum(counts[s] for s in common)]
    expected = [exact[s] * n for s in common] + [n - sum(exact[s] for s in common) * n]
    if expected[-1] < 8:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert chisquare(observed, expected).pvalue > ALPHA
    return sum(c.proposed for c in done.values()), sum(c.accepted for c in done.values())
