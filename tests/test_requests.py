"""What a server needs of the embedded engine: samplings of requests, progress of live samples, and cancelling."""

import pytest
import torch
from engines import GREEDY, METHODS, PROMPT, check_distribution, engine_of, run

from asyncspec.engine.protocol import QueueingEngine, Request
from asyncspec.speculation.verify import Sampling, sampling_distribution, sampling_distributions

KINDS = [None, GREEDY, Sampling(0.7, 0.8, 3), Sampling(1.5, 1.0, 0)]


def finished(engine):
    done = {}
    while engine.live or engine.waiting:
        done |= {(each.request_id, each.sample): each for each in engine.poll()}
    return done


def test_each_row_has_its_own_distribution():
    logits = torch.randn(6, 3, 11, generator=torch.Generator().manual_seed(0))
    samplings = [kind or Sampling() for kind in (*KINDS, KINDS[1], KINDS[2])]
    found = sampling_distributions(logits, samplings)
    for row, sampling in enumerate(samplings):
        assert torch.equal(found[row], sampling_distribution(logits[row], sampling))


@pytest.mark.parametrize("slots", [3, 64])
def test_a_request_is_sampled_as_by_an_engine_of_that_sampling(small_shape, small_policy, slots):
    engine = engine_of(small_shape, small_policy, None, slots=slots)
    for i, kind in enumerate(KINDS):
        engine.submit(Request(i, PROMPT, range(100 * i, 100 * i + 8), 24, kind))
    together = finished(engine)
    for i, kind in enumerate(KINDS):
        alone = engine_of(small_shape, small_policy, None, sampling=kind or Sampling())
        alone.submit(Request(i, PROMPT, range(100 * i, 100 * i + 8), 24))
        for key, expected in finished(alone).items():
            assert torch.equal(together[key].tokens, expected.tokens)
            torch.testing.assert_close(together[key].logprobs, expected.logprobs)


@pytest.mark.parametrize(
    "method",
    [pytest.param(method, marks=() if method in ("eagle3", "ngram") else pytest.mark.slow) for method in METHODS],
)
def test_speculation_keeps_the_distribution_of_each_request(small_shape, small_policy, maker, method):
    """Requests of three samplings in one batch; those of one must be as probable as the policy says."""
    engine = engine_of(small_shape, small_policy, maker[method], k=3, sampling=KINDS[3])

    class Among(type(engine)):
        """Submits others' requests beside the one that is checked."""

        def submit(self, request):
            super().submit(Request(-1, [2, 3], range(7, 2007), 4, GREEDY))
            super().submit(request)
            super().submit(Request(-2, [3, 2], range(3000), 3, KINDS[2]))

        def poll(self):
            others.extend(done := super().poll())
            return [each for each in done if each.request_id >= 0]

    others = []
    engine.__class__ = Among
    proposed, accepted = check_distribution(engine, small_policy, small_shape)
    assert proposed > accepted > 0
    greedy = {tuple(each.tokens.tolist()) for each in others if each.request_id == -1}
    assert len(greedy) == 1  # one prompt has one greedy answer


def test_logits_that_were_packed_belong_to_their_rows(small_shape, small_policy, maker):
    """Rows at their limits leave tokens out of a pass, so its tokens are no rectangle."""
    engine = engine_of(small_shape, small_policy, maker["ngram"], k=3, slots=32)
    for i in range(32):
        engine.submit(Request(i, [2, 3, 5, 2, 3][: 3 + i % 3], [i], 3 + i, GREEDY if i % 2 else None))
    done = finished(engine)
    alone = engine_of(small_shape, small_policy, None, sampling=GREEDY)
    expected = run(alone, [[2, 3, 5, 2, 3][: 3 + i % 3] for i in range(32)], length=40)
    for i in range(1, 32, 2):
        assert torch.equal(done[i, 0].tokens, expected[i, 0].tokens[: 3 + i])
    assert len({tuple(done[i, 0].tokens.tolist()[:3]) for i in range(0, 32, 2)}) > 3


def test_other_engines_refuse_a_sampling_of_the_request(small_shape):
    engine = QueueingEngine(small_shape, 4, 8, 8)
    engine.submit(Request(0, PROMPT, [1], 8))
    with pytest.raises(ValueError, match="request 1: expected the engine's own sampling"):
        engine.submit(Request(1, PROMPT, [1], 8, GREEDY))


@pytest.mark.parametrize("method", [None, "ngram", "eagle3"])
def test_progress_grows_into_the_completion(small_shape, small_policy, maker, method):
    engine = engine_of(small_shape, small_policy, maker[method] if method else None, slots=4)
    for i in range(3):
        engine.submit(Request(i, PROMPT, range(100 * i, 100 * i + 9), 30))
    seen, done = {}, {}
    while engine.live or engine.waiting:
        done |= {(each.request_id, each.sample): each for each in engine.poll()}
        for each in engine.progress([0, 2, 99]):
            seen.setdefault((each.request_id, each.sample), []).append(each)
    assert {request for request, _ in seen} <= {0, 2} and len(seen) >= 3 and len(done) == 27
    for key, partials in seen.items():
        lengths = [len(each.tokens) for each in partials]
        assert lengths == sorted(lengths) and lengths[0] >= 1 and done[key].tokens.dtype == partials[0].tokens.dtype
        for each in partials:
            assert torch.equal(each.tokens, done[key].tokens[: len(each.tokens)])
            assert torch.equal(each.logprobs, done[key].logprobs[: len(each.tokens)])


@pytest.mark.parametrize("method", [None, *METHODS])
def test_cancelled_samples_free_their_slots_and_leave_the_others_alone(small_shape, small_policy, maker, method):
    def engine():
        return engine_of(small_shape, small_policy, maker[method] if method else None, slots=4, k=2)

    def submit(one, request_ids):
        for i in request_ids:
            one.submit(Request(i, PROMPT[: 1 + i % 3], [1000 * i, 1000 * i + 1], 40))

    one = engine()
    submit(one, range(6))
    done = {}
    for _ in range(2):
        done |= {(each.request_id, each.sample): each for each in one.poll()}
    here = {key: key not in done for key in [(0, 0), (0, 1), (1, 1)]}
    assert one.cancel(0) == here[0, 0] + here[0, 1]  # live
    assert one.cancel(1, 1) == here[1, 1]  # live, one sample
    assert one.cancel(4) == 2 and one.cancel(5, 0) == 1  # waiting
    assert one.cancel(77) == one.cancel(4) == 0
    assert one.live + one.waiting == 12 - len(done) - sum(here.values()) - 3
    submit(one, [6])
    done |= finished(one)
    gone = {(4, 0), (4, 1), (5, 0)} | ({(0, 0), (0, 1), (1, 1)} - {*done})
    assert {*done} == {(i, j) for i in range(7) for j in range(2)} - gone
    if method not in ("suffix", "eagle3", "eagle3 of few tokens", "mtp", "draft_model"):  # the proposals are the same
        other = engine()
        submit(other, range(7))
        expected = finished(other)
        assert all(torch.equal(done[key].tokens, expected[key].tokens) for key in done)
    assert one.live == one.waiting == 0
    one.cancel(1)  # nothing is left
    submit(one, [8])
    assert len(finished(one)) == 2
