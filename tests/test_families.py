"""Policies of every family, written by transformers: the engine and the trainer compute what transformers does."""

import itertools

import pytest
import torch
from directories import FAMILIES, SIZES, transformers_model
from engines import GREEDY, engine_of, run

from asyncspec.models import policy, sizes
from asyncspec.rl.optimizer import decayed


@pytest.fixture(params=FAMILIES, ids=lambda given: f"{given[0]}{', tied' * given[1]}{', yarn' * bool(given[2])}")
def both(request, tmp_path):
    """transformers' model, and ours of the same files with its shape. Large weights give sharp distributions."""
    kind, tied, more = request.param
    theirs = transformers_model(
        kind, tmp_path, tie_word_embeddings=tied, initializer_range=0.3, pad_token_id=0, eos_token_id=1, **more
    )
    return theirs.eval(), *policy.load(tmp_path)


def test_the_engine_emits_what_transformers_generates(both):
    theirs, ours, shape = both
    prompts = [list(prompt) for prompt in itertools.product((2, 17, 40), repeat=3)]
    done = run(engine_of(shape, ours, None, slots=16, sampling=GREEDY), prompts)
    expected = theirs.generate(torch.tensor(prompts), max_new_tokens=24, do_sample=False)[:, 3:].tolist()
    ends = [1 + tokens.index(1) if 1 in tokens else 24 for tokens in expected]
    assert [done[i, 0].tokens.tolist() for i in range(len(prompts))] == [
        tokens[:end] for tokens, end in zip(expected, ends)
    ]
    assert len({tuple(tokens) for tokens in expected}) > len(prompts) // 2


def test_the_gradient_is_that_of_transformers(both):
    """Token 0 pads, so transformers does not train it.

    Tolerance, for float32 sums in another order: 1e-4 of each tensor's largest gradient.
    """
    theirs, ours, shape = both
    tokens = torch.randint(1, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    for logits in (ours(tokens), theirs(tokens).logits):
        logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).sum().backward()
    found = policy.to_hf(policy.skeleton(shape), {name: p.grad for name, p in ours.named_parameters()})
    # Only a mixture's tensors differ: transformers keeps all experts of a layer in one.
    expected = {name: p.grad for name, p in theirs.named_parameters() if "mlp.experts" not in name}
    assert {name for name in found if "mlp.experts" not in name} == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-4 * float(grad.abs().max()), rtol=0)


def test_parameters_are_counted_and_only_matrices_decay(both):
    _, ours, shape = both
    assert sizes.parameters(shape.to_hf()) == sum(p.numel() for p in ours.parameters())
    matrices, others = (group["params"] for group in decayed(ours, 0.1))
    assert {p.ndim for p in matrices} <= {2, 3} and not any(p.ndim > 1 for p in others if len(p) != shape.vocab_size)
    assert any(p is ours.tok_embeddings.weight for p in others)
