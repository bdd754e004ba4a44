"""Every drafter in the engine: output is exact whatever it proposes, and it sees the input it should."""

import copy
import itertools

import numpy as np
import pytest
import torch
from engines import ALPHA, GREEDY, METHODS, RandomLength, check_distribution, engine_of, exact_sequences, run
from scipy.stats import chisquare

from asyncspec.drafters.draft_model import DraftModelDrafter
from asyncspec.drafters.make import drafter_for, drafter_maker
from asyncspec.drafts import draft as drafts
from asyncspec.engine import backend, calibrate, kv_cache, layers, torch_engine
from asyncspec.engine.protocol import Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.models import policy as policies
from asyncspec.speculation.draft_length import FixedLength
from asyncspec.speculation.drafter import Slots
from asyncspec.speculation.verify import AS_IS, Sampling

FIRST_AND_SLOWER = ["eagle3", *(pytest.param(method, marks=pytest.mark.slow) for method in ("mtp", "draft_model"))]


@pytest.fixture(autouse=True)
def short_calibrations(monkeypatch):
    """Any draft length must be exact, so how well it is chosen does not matter here."""
    monkeypatch.setattr(calibrate, "CALIBRATION_S", 0.2)
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    monkeypatch.setattr(calibrate, "LEAST_S", 0.0)


@pytest.mark.parametrize("method", [*drafts.METHODS, "ngram"])
def test_greedy_output_of_other_families_is_the_same_with_and_without_a_draft(tmp_path, other, method):
    """Drafts have random weights, and are loaded as they were saved."""
    shape, policy = other
    if method == "ngram":
        maker = drafter_maker(method, tmp_path, shape)
    else:
        torch.manual_seed(6)
        new = drafts.new(method, shape, policy)
        new.save(tmp_path)
        read = drafts.load(method, tmp_path, shape, policy)
        for name, tensor in new.module.state_dict().items():
            assert torch.equal(tensor, read.module.state_dict()[name])
        maker = drafter_for(read)
    prompts = [list(p) for p in itertools.product(range(2, 5), repeat=3)]
    plain, drafted = (run(engine_of(shape, policy, made, slots=12, sampling=GREEDY), prompts) for made in (None, maker))
    assert {key: c.tokens.tolist() for key, c in plain.items()} == {
        key: c.tokens.tolist() for key, c in drafted.items()
    }
    assert sum(c.proposed for c in drafted.values()) > sum(c.accepted for c in drafted.values()) > 0


@pytest.mark.parametrize("sampling", [AS_IS, Sampling(0.7, 0.9, 4)])
@pytest.mark.parametrize("k", [3, "random", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_sequences_fit_the_exact_distribution(small_shape, small_policy, maker, method, k, sampling):
    engine = engine_of(small_shape, small_policy, maker[method], 256, k, sampling)
    proposed, accepted = check_distribution(engine, small_policy, small_shape)
    if k != "auto":  # auto may rightly find that such a draft does not pay off
        assert 0 < accepted < 0.9 * proposed


@pytest.mark.parametrize("method", FIRST_AND_SLOWER)
def test_sequences_fit_the_distribution_computed_in_16_bits(small_shape, small_policy, maker, method):
    policy = policies.cast(copy.deepcopy(small_policy), torch.bfloat16)
    engine = engine_of(small_shape, policy, maker[method], 256, 3, dtype=torch.bfloat16)
    proposed, accepted = check_distribution(engine, policy, small_shape)
    assert 0 < accepted < 0.9 * proposed
    assert engine.decode.cache.kv.dtype == torch.bfloat16 and {
        p.dtype for p in engine.parameters("draft").values()
    } == {torch.bfloat16}


@pytest.mark.parametrize("k", [1, 4, "random", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_the_same_with_and_without_a_draft(small_shape, small_policy, maker, method, k):
    prompts = [list(p) for p in itertools.product(range(2, 6), repeat=3)]
    plain = run(engine_of(small_shape, small_policy, None, sampling=GREEDY), prompts)
    drafted = run(engine_of(small_shape, small_policy, maker[method], 24, k, sampling=GREEDY), prompts)
    for c in drafted.values():
        assert sum(c.accepted_at) == c.accepted and sum(c.reached_at) <= c.proposed
        assert all(
            accepted <= reached for reached, accepted in itertools.zip_longest(c.reached_at, c.accepted_at, fillvalue=0)
        )
    assert {key: c.tokens.tolist() for key, c in drafted.items()} == {
        key: c.tokens.tolist() for key, c in plain.items()
    }


@pytest.mark.slow
def test_suffix_stays_exact_when_a_seed_is_repeated(small_shape, small_policy, maker):
    """Suffix then proposes exactly the tokens that the seed's random numbers chose the first time."""
    prompt, length, n = [2, 3, 5], 2, 1500
    engine = engine_of(small_shape, small_policy, maker["suffix"], 1, 1)
    exact = exact_sequences(small_policy, AS_IS, length, small_shape.eos_token_id, prompt)
    counts = dict.fromkeys(exact, 0)
    for seed in range(n):
        for _ in range(2):
            engine.submit(Request(0, prompt, [seed], length))
            done = []
            while engine.live or engine.waiting:
                done += engine.poll()
        counts[tuple(done[0].tokens.tolist())] += 1  # the second run of each seed
    common = [s for s in exact if exact[s] * n >= 8]
    observed, expected = [counts[s] for s in common], [exact[s] * n for s in common]
    assert chisquare([*observed, n - sum(observed)], [*expected, n - sum(expected)]).pvalue > ALPHA


@pytest.fixture
def mock_gpu(monkeypatch):
    """Shapes of the tensors copied to the host, in order, while engines run on the meta device.

    Meta tensors have shapes but no values, so mixing them with host tensors or reading a value is an error. Copies to
    the host get made-up values.
    """
    copied, to = [], torch.Tensor.to

    def to_host(tensor):
        copied.append(tensor.shape)
        return torch.zeros(tensor.shape, dtype=tensor.dtype) + (tensor.dtype == torch.int64)

    def refresh(slots, count):
        copied.append((count,))
        slots.length[:count] = np.maximum(slots.length[:count] + 1, 4)

    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: to_host(tensor) if tensor.is_meta else to(tensor, "cpu"))
    monkeypatch.setattr(Slots, "refresh", refresh)
    return copied


@pytest.mark.parametrize("method", [None, *METHODS])
def test_the_host_waits_for_a_gpu_only_at_the_end_of_a_step(small_shape, small_policy, maker, mock_gpu, method):
    waits = {}
    for k in (1, 5):
        engine = engine_of(small_shape, small_policy, maker.get(method), 4, k, device="meta", kv_at_swap="recompute")
        engine.submit(Request(0, [2, 3, 5, 4], [1, 2, 3], 16))
        engine.poll()
        engine.load_policy(dict(small_policy.named_parameters()), 1)
        mock_gpu.clear()
        engine.poll()
        assert engine.live == 3
        waits[k] = list(mock_gpu)
    # rows that finished, lengths, accepted proposals and, for a lookup, proposals found
    assert waits[1] == waits[5] and len(waits[1]) <= 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limits", [(1, 1), (1, 2), (4, 6)])
def test_the_smallest_engines_work(small_shape, small_policy, maker, method, limits):
    engine = TorchEngine(
        small_shape, maker[method], slots=2, max_prompt_tokens=limits[0], max_response_tokens=limits[1]
    )
    engine.load_policy(dict(small_policy.named_parameters()), 0)
    engine.submit(Request(0, [2] * limits[0], list(range(6)), limits[1]))
    done = []
    while engine.live or engine.waiting:
        done += engine.poll()
    assert len(done) == 6 and all(0 < len(c.tokens) <= limits[1] for c in done)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_attending_in_groups_of_rows_gives_the_same_output(small_shape, small_policy, maker, method, monkeypatch):
    prompts = [list(p)[: 1 + i % 8] for i, p in enumerate(itertools.product(range(2, 6), repeat=8)) if i % 997 == 0][
        :40
    ]

    def output(exchanges):
        # Suffix proposals depend on the order in which rollouts end; greedy tokens do not depend on proposals.
        greedy = {"sampling": GREEDY} if method == "suffix" else {}
        engine = engine_of(small_shape, small_policy, method and maker[method], 12, 0, **greedy)
        if method:  # always keep features: missing ones would differ between runs and change the proposals
            engine.use(RandomLength(always_keeps=True))
        exchange = engine.rows.move

        def counting(source, target):
            exchanges.append(target == engine.slots)
            exchange(source, target)

        engine.rows.move = counting
        # Greedy samples of one prompt are identical, so one is enough.
        return {key: c.tokens.tolist() for key, c in run(engine, prompts, samples=1 if greedy else 3).items()}

    whole = output([])
    monkeypatch.setattr(kv_cache, "GROUP_GAIN", 1)
    monkeypatch.setattr(kv_cache, "GROUP_ROWS", 2)
    exchanges = []
    assert output(exchanges) == whole
    assert sum(exchanges) > 5, sum(exchanges)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_torch_and_numpy_attention_give_the_same_output(small_shape, small_policy, maker, method, monkeypatch):
    prompts = [list(p) for p in itertools.product(range(2, 6), repeat=3)][::2]
    done = []
    for by_numpy in (True, False):
        if not by_numpy:
            monkeypatch.setattr(torch_engine, "backend_for", backend.TorchBackend)
        engine = engine_of(small_shape, small_policy, method and maker[method], 12, 0, sampling=GREEDY)
        if method:
            engine.use(RandomLength(always_keeps=True))
        done.append(run(engine, prompts))
    assert all(torch.equal(c.tokens, done[1][key].tokens) for key, c in done[0].items())
    if method != "suffix":  # suffix proposals depend on the order in which rollouts end
        assert all(
            (c.proposed, c.accepted) == (done[1][key].proposed, done[1][key].accepted) for key, c in done[0].items()
        )


@pytest.mark.parametrize("method", METHODS)
def test_skipping_proposals_beyond_the_end_of_a_row_does_not_change_the_output(
    small_shape, small_policy, maker, method, monkeypatch
):
    prompts, read, done = [list(p) for p in itertools.product(range(2, 6), repeat=3)], [], []
    layer_pass = layers.DecodeLayer.project

    def counting(self, space):
        if self.index == 1:  # a draft's only layer is 0
            read[-1] += space.rows[0] * space.rows[1]
        layer_pass(self, space)

    monkeypatch.setattr(layers.DecodeLayer, "project", counting)
    for packs in (True, False):
        monkeypatch.setattr(backend.CpuBackend, "packs", packs)
        read.append(0)
        done.append(
            run(engine_of(small_shape, small_policy, maker[method], 12, 7, sampling=Sampling(0.7)), prompts, length=20)
        )
    assert read[0] < 0.9 * read[1], read
    for key, completion in done[0].items():
        assert torch.equal(completion.tokens, done[1][key].tokens)
        torch.testing.assert_close(completion.logprobs, done[1][key].logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 3, "random"])
def test_a_draft_model_equal_to_the_policy_is_always_accepted(small_shape, small_policy, k):
    """This shows that at every step the draft's cache holds exactly what the policy's cache holds."""

    def same(target):
        return DraftModelDrafter(target.model, small_shape, target)

    prompts = [[2 + i % 4, 3, 2 + i // 4] for i in range(12)]
    done = run(engine_of(small_shape, small_policy, same, 7, k), prompts, samples=3)
    # Summing float32 in another order can break a tie differently, so one proposal in a thousand may be rejected.
    proposed, accepted = sum(c.proposed for c in done.values()), sum(c.accepted for c in done.values())
    # proposals beyond a stop token or the limit are not counted as accepted
    cut = sum(min(5, c.proposed) for c in done.values())
    assert accepted >= 0.999 * proposed - cut and accepted > 0.5 * proposed


@pytest.mark.parametrize("greedy", [GREEDY, Sampling(1e-3)])
@pytest.mark.parametrize("pattern", [[0, 0, 3, 0, 3], [3, 0, 0, 0]])
@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_a_draft_that_is_asked_rarely_proposes_the_same_tokens(
    small_shape, small_policy, maker, method, pattern, greedy
):
    """A draft that is asked only at some steps proposes the same tokens as one that is asked at every step."""

    class Now(FixedLength):
        def __init__(self, pattern):
            self.longest, self.pattern, self.step = 3, pattern, -1

        def choose(self, live, missed_S=None, attended=None):
            self.step += 1
            return self.pattern[self.step % len(self.pattern)]

    def proposals(pattern):
        engine = engine_of(small_shape, small_policy, maker[method], 12, 3, greedy)
        engine.use(Now(pattern))
        seen, propose = [], engine.drafter.propose

        def recording(count, draft_length, uniform_BK):
            proposal = propose(count, draft_length, uniform_BK)
            for row in range(count):
                tokens = tuple(engine.tokens.token_SP[row, : engine.tokens.length[row]].tolist())
                seen.append((tokens, tuple(proposal.draft_BK[row].tolist())))
            return proposal

        engine.drafter.propose = recording
        run(engine, [list(p) for p in itertools.product(range(2, 6), repeat=3)])
        return dict(seen)

    always, sometimes = proposals([3]), proposals(pattern)
    common = always.keys() & sometimes.keys()
    assert len(common) >= 8
    assert all(always[tokens] == sometimes[tokens] for tokens in common)


def test_a_lookup_learns_in_hindsight_while_it_is_not_used(small_shape, small_policy, maker):
    engine = engine_of(small_shape, small_policy, maker["ngram"], 12, "auto")
    run(engine, [list(p) for p in itertools.product(range(2, 6), repeat=3)], samples=8)
    assert engine.chooser._found_KM.any()


def test_an_engine_knows_which_rows_lack_features(small_shape, small_policy, maker, monkeypatch):
    monkeypatch.setattr(kv_cache, "GROUP_GAIN", 1)
    monkeypatch.setattr(kv_cache, "GROUP_ROWS", 2)
    engine, entered, missed, met = engine_of(small_shape, small_policy, maker["eagle3"], 12), set(), set(), []

    class Recording(RandomLength):
        watches = kept = True

        def choose(self, live, missed_S=None, attended=None):
            k = super().choose(live)
            sequences = [(s.request.request_id, s.number) for s in engine.rows.samples]
            if not self.kept:  # sequences that entered since have no features either
                missed.update(set(sequences) - entered)
            missed_B = missed_S[:live]
            assert missed_B.tolist() == [s in missed for s in sequences]
            met.append(missed_B.any() and not missed_B.all())
            entered.update(sequences)
            self.kept = k > 0 or self.keeps
            if not self.kept:
                missed.update(sequences)
            return k

        def observe(self, step):
            sequences = [(s.request.request_id, s.number) for s in engine.rows.samples]
            assert step.missed_B.tolist() == [s in missed for s in sequences]  # rows may have been exchanged

    engine.use(Recording())
    run(engine, [list(p) for p in itertools.product(range(2, 6), repeat=3)], samples=8)
    assert sum(met) > 10


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_an_engine_reports_the_proposals_that_each_row_kept(small_shape, small_policy, maker, monkeypatch, method):
    monkeypatch.setattr(kv_cache, "GROUP_GAIN", 1)
    monkeypatch.setattr(kv_cache, "GROUP_ROWS", 2)
    engine, lengths, ends = engine_of(small_shape, small_policy, maker[method], 12), {}, 0

    class Recording(RandomLength):
        watches = True

        def observe(self, step):
            nonlocal ends
            sequences = [(s.request.request_id, s.number) for s in engine.rows.samples]  # rows may be exchanged
            for row, s in enumerate(sequences):
                length = int(engine.tokens.length[row])
                if s in lengths and step.draft_length:
                    assert step.kept_B[row] == length - lengths[s] - 1  # even if a draft leads beyond the end
                    ends += step.kept_B[row] < step.draft_length and bool(
                        engine.rows.stops_V[engine.tokens.token_SP[row, length - 1]]
                    )
                lengths[s] = length

    engine.use(Recording())
    run(engine, [list(p) for p in itertools.product(range(2, 6), repeat=3)], samples=8)
    assert ends > 10


@pytest.mark.parametrize("method", FIRST_AND_SLOWER)
def test_shipped_drafts_are_accepted(method):
    from asyncspec.bench.loads import Loads

    loads = Loads([])
    [measured] = loads.steady(0, 100, loads.engine(method, 16, 3))
    # The maximum is 4. Measured: 3.6 to 3.8, so chance does not bring it down to 3.2.
    assert measured["acceptance_length"] > 3.2
