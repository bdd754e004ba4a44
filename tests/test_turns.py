"""Conversations in the embedded engine: what follows a turn is as if all of it had been read at once."""

import copy

import numpy as np
import pytest
import torch
from engines import METHODS, engine_of

from asyncspec.engine.protocol import Request
from asyncspec.models.policy import hidden_states
from asyncspec.speculation.draft_length import FixedLength


def fresh_logprobs(policy, prompt, response):
    """Return the logprobs of a response, from one pass over everything."""
    logits = policy.lm_head(hidden_states(policy, torch.tensor([[*prompt, *response]]))[0])
    found = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    return found.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)


def converse(engine, conversations, turns, rng, vocabulary, between=lambda turn: None, length=7):
    """Have conversations of so many turns. Yield each turn's (prompt, completion)."""
    prompts = {number: prompt for number, prompt in enumerate(conversations)}
    before, next_id = dict.fromkeys(prompts), 0
    for turn in range(turns):
        asked = {}
        for number, prompt in prompts.items():
            engine.submit(Request(next_id, prompt, [next_id], length, keeps=True, follows=before[number]))
            asked[next_id], before[number] = number, next_id
            next_id += 1
        done = []
        while engine.live or engine.waiting:
            done += engine.poll()
        assert sorted(c.request_id for c in done) == sorted(asked)
        for completion in done:
            number = asked[completion.request_id]
            prompt = prompts[number]
            yield prompt, completion
            said = rng.integers(1, vocabulary, int(rng.integers(1, 5))).tolist()  # by the environment
            prompts[number] = [*prompt, *completion.tokens.tolist(), *said]
        between(turn)
    for request_id in before.values():
        engine.forget(request_id)


@pytest.mark.parametrize("kept", [0, 2, 8])
@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_turn_has_the_logprobs_of_the_whole_conversation(small_shape, small_policy, maker, method, kept):
    make = None if method is None else maker[method]
    engine = engine_of(small_shape, small_policy, make, slots=3, k="random" if make else 3, kept=kept)
    rng = np.random.default_rng(kept)
    conversations = [rng.integers(1, small_shape.vocab_size, size).tolist() for size in (3, 8, 5, 2, 5)]
    tokens = 0
    for prompt, completion in converse(engine, conversations, 3, rng, small_shape.vocab_size):
        response = completion.tokens.tolist()
        torch.testing.assert_close(
            completion.logprobs, fresh_logprobs(small_policy, prompt, response), rtol=0, atol=2e-5
        )
        tokens += len(response)
    assert tokens > 20
    assert not engine.kept._rows


def test_what_a_draft_accepts_in_a_later_turn(small_shape, small_policy, maker):
    """A draft that goes on from the row that was kept proposes as well as one that reads everything."""
    found = {}
    for kept in (0, 8):
        rng = np.random.default_rng(3)
        engine = engine_of(small_shape, small_policy, maker["eagle3"], slots=4, k=3, kept=kept)
        prompts = [rng.integers(1, small_shape.vocab_size, 6).tolist() for _ in range(4)]
        turns = list(converse(engine, prompts, 3, rng, small_shape.vocab_size, length=9))
        found[kept] = [(c.tokens.tolist(), c.accepted) for _, c in turns]
    assert found[0] == found[8]


@pytest.mark.parametrize("kv_at_swap", ["keep", "recompute"])
def test_new_weights_between_two_turns(small_shape, small_policy, kv_at_swap):
    other = copy.deepcopy(small_policy)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    engine = engine_of(small_shape, small_policy, None, slots=2, kept=4, kv_at_swap=kv_at_swap)
    rng = np.random.default_rng(5)
    swap = lambda turn: engine.load_policy(dict(other.named_parameters()), turn + 1)  # noqa: E731
    gaps = []
    for prompt, completion in converse(engine, [[2, 3, 5], [4, 2]], 2, rng, small_shape.vocab_size, swap):
        version = int(completion.versions[0])
        assert (completion.versions == version).all()
        if version:
            fresh = fresh_logprobs(other, prompt, completion.tokens.tolist())
            gaps.append(float((completion.logprobs - fresh).abs().max()))
    assert len(gaps) == 2
    if kv_at_swap == "recompute":
        assert max(gaps) < 2e-5
    else:
        assert min(gaps) > 1e-4  # earlier turns keep what the old weights made of them


def test_the_suffix_drafter_proposes_what_came_between_two_turns(small_shape, small_policy, maker):
    engine = engine_of(small_shape, small_policy, maker["suffix"], slots=1, k=2, kept=1)
    engine.use(FixedLength(2))
    said = [4, 4, 3, 3, 5, 5]
    engine.submit(Request(0, [2, 3], [0], 3, keeps=True))
    (first,) = [c for _ in range(9) for c in engine.poll()]
    engine.submit(Request(1, [2, 3, *first.tokens.tolist(), *said], [1], 20, follows=0))
    engine.poll()
    drafter, slots = engine.drafter, engine.tokens
    slots.token_SP[0, slots.length[0] - 2 : slots.length[0]] = torch.tensor([4, 4])
    proposal = drafter.propose(1, 2, None)
    assert proposal.draft_BK[0, : int(proposal.count_B[0])].tolist() == [3, 3]


def test_a_turn_may_be_as_long_as_prompt_and_response_together(small_shape, small_policy):
    engine = engine_of(small_shape, small_policy, None, slots=1, kept=1)  # 8 + 40
    engine.submit(Request(0, [1] * 45, [0], 3, follows=5))
    for prompt, most in (45, 4), (9, 40):
        with pytest.raises(ValueError, match="prompt of"):
            engine.submit(Request(1, [1] * prompt, [0], most, follows=5))
    with pytest.raises(ValueError, match="prompt of"):
        engine.submit(Request(2, [1] * 9, [0], 1))


def test_a_kept_row_is_used_only_as_far_as_its_tokens_are_the_prompt_s(small_shape, small_policy, maker):
    """A turn may go on from a part of what was sampled, for example up to a stop string."""
    for method in (None, "eagle3"):
        engine = engine_of(small_shape, small_policy, maker[method] if method else None, slots=2, k=3, kept=4)
        for number, (kept_tokens, said) in enumerate([(2, [3, 4]), (1, []), (0, [5]), (4, [2, 2, 2])]):
            engine.submit(Request(10 * number, [2, 3, 5], [number], 8, keeps=True))
            done = []
            while engine.live or engine.waiting:
                done += engine.poll()
            prompt = [2, 3, 5, *done[0].tokens.tolist()[:kept_tokens], *said]
            engine.submit(Request(10 * number + 1, prompt, [number], 6, follows=10 * number))
            while engine.live or engine.waiting:
                done += engine.poll()
            fresh = fresh_logprobs(small_policy, prompt, done[1].tokens.tolist())
            torch.testing.assert_close(done[1].logprobs, fresh, rtol=0, atol=2e-5)
