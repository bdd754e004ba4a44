"""Routing replay: the engine tells the experts of each token, and trainer and logprob send tokens to them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engines import engine_of
from engines import run as generate
from groups import copied, plain_logprobs, random_group
from hypothesis import given
from hypothesis import strategies as st
from runs import in_ranks

from asyncspec.actors.driven import cut
from asyncspec.config import Config, RLConfig, TrainerConfig
from asyncspec.drafters.make import drafter_maker
from asyncspec.engine import routes
from asyncspec.models import experts, packed
from asyncspec.models.context import SharedPacking
from asyncspec.models.parallel import Ranks
from asyncspec.models.policy import build, hidden_states
from asyncspec.models.shape import Experts
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.batch import Part, divide, from_message, pack, place, to_message

PROMPTS = [[2, 3, 5], [1, 4, 2, 3, 3, 5, 2], [4], [2, 3, 5, 1]]


@pytest.fixture(scope="module")
def mixture(small_shape):
    """(shape, policy) with five experts in each layer, of which a token takes two."""
    shape = replace(small_shape, model_type="qwen3_moe", experts=Experts(5, 2, 24, normed=True))
    torch.manual_seed(9)
    model = build(shape)
    model.init_states()
    return shape, model.requires_grad_(False)


def chosen_by(model, tokens):
    """Return what the routers choose for each token of a sequence, [L, M, K] in ascending order."""
    found, hooks = [], []
    for layer in model.layers.values():
        hooks.append(layer.moe.router.register_forward_hook(lambda _, given, result: found.append(result[1][0])))
    hidden_states(model, torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1)[0]


@pytest.mark.parametrize("k, slots", [(None, 3), (3, 3), ("random", 8)])
def test_the_engine_tells_the_experts_of_each_token(mixture, k, slots):
    """With proposals that are rejected, and rows that are moved and filled again. A near tie may fall otherwise."""
    shape, model = mixture
    maker = None if k is None else drafter_maker("ngram", None, shape)
    engine = engine_of(shape, model, maker, slots=slots, k=k or 0, routing=True)
    same = []
    for (request, _), completion in generate(engine, PROMPTS, samples=8).items():
        tokens = [*PROMPTS[request], *completion.tokens.tolist()]
        assert completion.experts.shape == (len(tokens) - 1, shape.n_layers, 2)
        found = completion.experts.sort(-1)[0].long() == chosen_by(model, tokens[:-1])
        same.append(found.flatten())
    assert torch.cat(same).float().mean() > 0.999 and len(same) == 32


def test_an_engine_that_is_not_asked_tells_nothing(mixture):
    shape, model = mixture
    assert all(done.experts is None for done in generate(engine_of(shape, model, None), PROMPTS).values())


def told(model, arrays, prompt, seed=0, count=5):
    """Return the arrays of a group with random experts, no two the same for a token."""
    generator = torch.Generator().manual_seed(seed)

    def random(tokens):
        scores = torch.rand(tokens, len(model.layers), count, generator=generator)
        return scores.topk(2, -1)[1].to(torch.uint8).numpy()

    return arrays | {"experts": random(len(arrays["tokens"])), "prompt_experts": random(len(prompt))}


def test_each_token_is_sent_to_the_experts_that_were_told(mixture, monkeypatch):
    """The same as padded passes whose routers are made to choose these experts. Tolerance: float32 sums."""
    _, model = mixture
    prompt = [2, 3, 5, 1]
    group, arrays = random_group(0, prompt, [7, 1, 12], seed=3)
    arrays = told(model, arrays, prompt)
    part = Part(prompt, {name: arrays[name] for name in ("tokens", "lengths", "experts", "prompt_experts")})
    found = packed.run(model, pack([part]), 1.0).chosen.logprob_T
    expected, ends = [], np.cumsum(arrays["lengths"])
    for first, end in zip([0, *ends], ends):
        tokens = [*prompt, *arrays["tokens"][first:end].tolist()]
        chosen = np.concatenate([arrays["prompt_experts"], arrays["experts"][first : end - 1]])
        for index, layer in enumerate(model.layers.values()):
            bonus_LE = torch.zeros(len(chosen), 5).scatter_(1, torch.from_numpy(chosen[:, index]).long(), 10.0)
            router, own = layer.moe.router, type(layer.moe.router).__mro__[1].forward
            monkeypatch.setattr(
                router, "forward", lambda x, bias=None, router=router, own=own, b=bonus_LE: own(router, x, b)
            )
        logprobs = model(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
        at = torch.arange(len(prompt) - 1, len(tokens) - 1)
        expected.append(logprobs[at, torch.tensor(tokens)[at + 1]])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=0)
    monkeypatch.undo()
    experts.replay(model, None)
    own = packed.run(model, pack([Part(prompt, {n: arrays[n] for n in ("tokens", "lengths")})]), 1.0).chosen.logprob_T
    torch.testing.assert_close(own, plain_logprobs(model, prompt, arrays), atol=1e-5, rtol=0)
    assert (own - found).abs().max() > 1e-3


@pytest.mark.parametrize("recompute", [False, True])
def test_the_routers_learn_from_what_was_replayed(mixture, recompute):
    """The gradient is that of divided passes too, and the metric counts the choices that differ."""
    shape, model = mixture
    gradients = []
    for most in (1 << 20, 30):
        own = copied(shape, model).requires_grad_(True)
        if recompute:
            Ranks("trainer", 0).shard(own, trained=True, recompute=True)
        rl = RLConfig(routing_replay=True)
        accumulator = GradientAccumulator(own, Config(rl=rl, trainer=TrainerConfig(tokens_per_pass=most)))
        for number in range(3):
            group, arrays = random_group(number, [2, 3, 5, 1], [7, 3, 12], seed=number)
            group.rewards[:] = [0.0, 1.0, 0.5]
            rounds = accumulator.add(group, told(model, arrays, [2, 3, 5, 1], number))
            for passes in rounds:
                accumulator.run(passes[0])
        for passes in accumulator.flush():
            accumulator.run(passes[0])
        gradients.append({name: p.grad.clone() for name, p in own.named_parameters()})
        assert all(gradients[-1][f"layers.{n}.moe.router.gate.weight"].any() for n in range(shape.n_layers))
        assert 0.3 < accumulator.step()["experts/replayed_otherwise"] < 0.9  # random: 3 of 5
    largest = max(float(each.abs().max()) for each in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5 * largest, rtol=0)


GROUPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 200), min_size=1, max_size=5),
        st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=6), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@given(GROUPS, st.integers(1, 3), st.integers(5, 40), st.integers(1, 4))
def test_experts_stay_with_their_tokens(groups, bins, most, size):
    """Each token's expert is the token itself, through every way to divide, send and pack."""
    parts = []
    for prompt, responses in groups:
        tokens = np.concatenate([np.array(each, np.int32) for each in responses])
        lengths = np.array([len(each) for each in responses], np.int32)
        chosen = {
            name: np.array(each, np.uint8).reshape(-1, 1, 1)
            for name, each in (("experts", tokens), ("prompt_experts", prompt))
        }
        parts += divide(Part(prompt, {"tokens": tokens, "lengths": lengths, **chosen}), most)
    filled, left = place(parts, bins, most)
    for each in [*filled, left]:
        sent = from_message(*to_message(0, each))
        if not sent:
            continue
        row = pack(sent)
        assert torch.equal(row.experts_LMK[:, 0, 0].long(), row.tokens_1L[0])
        for rank in range(size):
            packing = SharedPacking(row.packing.segments, rank=rank, size=size)
            assert torch.equal(packing.part(row.experts_LMK)[:, 0, 0].long(), packing.part(row.tokens_1L[0]))


def test_a_group_has_the_experts_of_its_tokens(mixture):
    """Also of an episode that ends with what its environment wrote."""
    shape, model = mixture
    done = [*generate(engine_of(shape, model, None, routing=True), PROMPTS[:1], samples=4).values()]
    longer = replace(done[0], tokens=torch.cat([done[0].tokens, torch.ones(3, dtype=torch.int32)]))
    group = [longer, *done[1:]]
    arrays, first = routes.arrays_of(group, 3), len(done[0].tokens) - 1
    own = arrays["experts"]
    assert own.dtype == np.uint8 and len(own) == sum(len(each.tokens) for each in group)
    assert np.array_equal(arrays["prompt_experts"], done[0].experts[:3].numpy())
    assert np.array_equal(own[:first], done[0].experts[3:].numpy()) and not own[first : first + 4].any()
    second = own[len(longer.tokens) :][: len(done[1].tokens) - 1]
    assert np.array_equal(second, done[1].experts[3:].numpy())


def shared_row(rank, shape, state, part, sizes, port, results):
    """Run a replayed pass as one of the ranks that share its row; tell logprobs, gradients and metrics."""
    torch.set_num_threads(1)
    ranks = Ranks("trainer", rank, 2, **sizes)
    ranks.join("127.0.0.1", port, "cpu", 60, 60)
    model = build(shape)
    model.load_state_dict(state)
    ranks.shard(model, trained=True)
    experts.reset(model)
    found = packed.run(model, pack([part]), 1.0, context=ranks.context).chosen.logprob_T
    found.sum().backward()
    grads = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    results.put((rank, found.detach().numpy(), grads, experts.balance(model, ranks)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [{"context_parallel": 2}, {"context_parallel": 2, "expert_parallel": 2}])
def test_a_shared_row_is_replayed_like_a_whole_one(mixture, sizes):
    """Its end is padded; the experts of padding must not upset those of other tokens. Tolerance: float32 sums."""
    shape = replace(mixture[0], experts=Experts(4, 2, 24, normed=True))  # as many as two ranks share out
    torch.manual_seed(9)
    model = build(shape)
    model.init_states()
    prompt = [2, 3, 5, 1, 4]
    group, arrays = random_group(0, prompt, [7, 2, 11], seed=3)
    arrays = told(model, arrays, prompt, count=4)
    part = Part(prompt, {name: arrays[name] for name in ("tokens", "lengths", "experts", "prompt_experts")})
    assert len(pack([part]).tokens_1L[0]) % 4  # there is padding
    said = {rank: rest for rank, *rest in in_ranks(2, shared_row, shape, model.state_dict(), part, sizes)}
    experts.reset(model)
    found = packed.run(model, pack([part]), 1.0).chosen.logprob_T
    found.sum().backward()
    for rank in range(2):
        np.testing.assert_allclose(said[rank][0], found.detach().numpy(), atol=1e-5)
        for name, parameter in model.named_parameters():
            largest = float(parameter.grad.abs().max())
            np.testing.assert_allclose(said[rank][1][name], parameter.grad.numpy(), atol=1e-5 * largest + 1e-7)
        one = experts.balance(model, None)["experts/replayed_otherwise"]
        assert said[rank][2]["experts/replayed_otherwise"] == pytest.approx(one)


def test_a_token_that_is_told_the_same_expert_twice_has_its_router_choose(mixture):
    """An environment's last words, and padding, come without choices. Other tokens are not disturbed."""
    _, model = mixture
    prompt = [2, 3, 5, 1]
    group, arrays = random_group(0, prompt, [9], seed=3)
    own = chosen_by(model, [*prompt, *arrays["tokens"].tolist()])[:, :, [1, 0]].to(torch.uint8).numpy()
    arrays |= {"experts": own[4:].copy(), "prompt_experts": own[:4]}
    found = []
    for known in (9, 5, 0):
        arrays["experts"][known:] = 0
        part = Part(prompt, {name: arrays[name] for name in ("tokens", "lengths", "experts", "prompt_experts")})
        found.append(packed.run(model, pack([part]), 1.0).chosen.logprob_T)
    experts.replay(model, None)
    for each in found:
        torch.testing.assert_close(each, plain_logprobs(model, prompt, arrays), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_completion_that_is_cut_has_the_experts_of_what_is_left(mixture, count):
    shape, model = mixture
    done = generate(engine_of(shape, model, None, routing=True), PROMPTS[:1])[0, 0]
    left = max(1, len(done.tokens) - count)
    short = cut(done, left)
    assert len(short.experts) == 3 + left - 1
    arrays = routes.arrays_of([short], 3)
    assert len(arrays["experts"]) == left and np.array_equal(arrays["experts"][:-1], done.experts[3 : 2 + left].numpy())
