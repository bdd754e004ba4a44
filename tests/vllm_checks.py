"""Checks that test_vllm.py runs with the Python of an environment that has vLLM.

Usage: vllm_checks.py [v2] [async] CHECK [field=value ...]

DEVICE=cuda:0 has the engine compute on a GPU; the references stay on the CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gpu_paths

DEVICE = os.environ.get("DEVICE", "cpu")
PATHS = [sys.argv.pop(1) for word in ("v2", "async") if sys.argv[1:2] == [word]]
if "v2" in PATHS:
    gpu_paths.before_import()

import torch
import torch.distributed as dist

torch.set_num_threads(1)

from asyncspec.actors.engines import make_engine
from asyncspec.config import load, resolve_path
from asyncspec.drafts import draft as drafts
from asyncspec.engine.protocol import Request
from asyncspec.models import policy, tokenizer
from asyncspec.models.parallel import Ranks
from asyncspec.models.rope_scaling import Llama3Scaling, YarnScaling
from asyncspec.models.shape import Experts, PolicyShape
from asyncspec.tasks.sums import sums

POLICY = resolve_path("asset:tiny/policy")
SMALL = PolicyShape(
    vocab_size=64,
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=64,
    max_positions=256,
    rope_theta=1e4,
    norm_eps=1e-5,
    tied=True,
    eos_token_id=1,
    pad_token_id=0,
)
MIXTURE = replace(SMALL, model_type="qwen3_moe", experts=Experts(8, 2, 32, True))
VLLM = ("engine.kind=vllm", "speculation.draft_length=3", "sampling.max_response_tokens=64")
GREEDY = ("sampling.top_k=1", "sampling.temperature=0.01")  # for drafts only the temperature counts


def prompts(count):
    encoder = tokenizer.load(POLICY)
    return [encoder.encode(problem.prompt).ids for problem in sums(99, count)]


def run(engine, prompts, samples=1, length=64, first=0):
    """Return {(prompt, sample): completion}, with prompts numbered from `first`."""
    for i, prompt in enumerate(prompts):
        engine.submit(Request(first + i, prompt, [1000 * i + j for j in range(samples)], length))
    return ended(engine)


def ended(engine):
    done = []
    while engine.live or engine.waiting:
        done += engine.poll()
    return {(c.request_id, c.sample): c for c in done}


def moved(module, scale):
    """The module's matrices and biases with added noise of `scale` standard deviations."""
    generator = torch.Generator().manual_seed(5)

    def noise(p):
        return scale * p.std() * torch.randn(p.shape, generator=generator)

    return {
        name: (p + noise(p) if p.ndim > 1 or name.endswith("bias") else p).detach()
        for name, p in module.named_parameters()
    }


def fill(module, tensors):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[name])
    return module


def by_transformers(model, shape):
    """callable(tokens_BL) -> logits_BLV: the policy in transformers, in float32. vLLM installs transformers."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        policy.save(model, shape, Path(folder), POLICY)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return lambda tokens_BL: reference(tokens_BL).logits


def by_torchtitan(model):
    """callable(tokens_BL) -> logits_BLV: the policy in torchtitan's modules."""
    return lambda tokens_BL: model.lm_head(policy.hidden_states(model, tokens_BL))


def difference(reference, prompt, completion, of=None, temperature=1.0):
    """The largest difference between a completion's logprobs and a fresh forward pass of the reference, over the tokens
    that `of` marks.
    """
    tokens = torch.tensor([prompt + completion.tokens.tolist()])
    with torch.no_grad():
        logprobs = (reference(tokens)[0] / temperature).log_softmax(-1)
    expected = logprobs[len(prompt) - 1 : -1].gather(1, completion.tokens.long()[:, None]).squeeze(1)
    apart = (expected - completion.logprobs).abs()
    return float((apart if of is None else apart[of]).max())


def greedy(*overrides):
    """Weights loaded into a busy engine give the same output as an engine that starts with them, and not the output
    from before.
    """
    config = load("tiny", [*VLLM, *GREEDY, *overrides])
    model, shape = policy.load(POLICY)
    some = prompts(12)
    engine = make_engine(config, DEVICE)
    before = run(engine, some)
    new = moved(model, 0.2)
    run_on = Request(100, some[0], [0], 64)
    engine.submit(run_on)
    engine.poll()
    engine.load_policy(new, 1)
    if config.drafting:
        draft = drafts.load(config.speculation.method, resolve_path(config.draft_directory), shape)
        new_draft = moved(draft.module, 0.3)
        engine.load_draft(new_draft, 7)
        assert engine.draft_version == 7
    ended(engine)
    after = run(engine, some)
    assert {v for c in after.values() for v in c.versions.tolist()} == {1}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        policy.save(fill(model, new), shape, folder / "policy", POLICY)
        if config.drafting:
            fill(draft.module, new_draft)
            draft.save(folder / "draft", POLICY)
            overrides = (*overrides, f"speculation.draft_path={folder / 'draft'}")
        fresh = run(
            make_engine(load("tiny", [*VLLM, *GREEDY, f"model.path={folder / 'policy'}", *overrides]), DEVICE), some
        )
    for key, completion in fresh.items():
        assert completion.tokens.tolist() == after[key].tokens.tolist(), key
    # The loaded draft proposes the same as the fresh one; at this temperature only ties differ.
    accepted, as_fresh, earlier = (sum(c.accepted for c in done.values()) for done in (after, fresh, before))
    if config.fixed_draft_length is not None:  # else the clock decides how many are proposed
        assert abs(accepted - as_fresh) <= 0.01 * as_fresh
    if config.fixed_draft_length:
        assert 0 < accepted < 0.9 * earlier  # noise made the draft worse
    changed = sum(before[key].tokens.tolist() != after[key].tokens.tolist() for key in before)
    print(
        f"greedy {overrides[:1]}: {len(fresh)} equal to a fresh engine's, {changed} changed by the update; "
        f"{earlier} proposals accepted before, {accepted} after, {as_fresh} by the fresh one"
    )
    assert changed >= len(before) // 2


def swap(*overrides):
    """Versions, logprobs and the KV cache are right when weights arrive in flight, under speculation."""
    from asyncspec.engine import vllm_engine

    # A step prefills at most as much as the longest sequence, so some samples have no token yet at the first swap.
    vllm_engine.vllm_arguments.BATCHED_TOKENS = 1
    config = load("tiny", [*VLLM, "engine.slots=24", "sampling.temperature=0.9", *overrides])
    model, shape = policy.load(POLICY)
    models = [model, *(fill(policy.build(shape), moved(model, scale)) for scale in (0.05, 0.06))]
    references = [by_transformers(each, shape) for each in models]
    # A prompt of whole cache blocks, which its samples share. It comes first and last: before the swaps and after them.
    long = sum(prompts(20), [])[:90]
    some = [long, long, *prompts(5), long]
    engine = make_engine(config, DEVICE)
    samples = 4 if "v2" in PATHS else 8  # the interpreter is slow
    for i, prompt in enumerate(some):
        engine.submit(Request(i, prompt, list(range(100 * i, 100 * i + samples)), 64))
    done = []
    for version, polls in ((1, 2), (2, 8)):
        done += [c for _ in range(polls) for c in engine.poll()]
        engine.load_policy(dict(models[version].named_parameters()), version)
    done += ended(engine).values()
    assert len(done) == 8 * samples
    worst, kept, whole, across = 0.0, 0.0, [0, 0, 0], 0
    for c in done:
        versions = c.versions
        assert versions.tolist() == sorted(versions.tolist()) and len(versions) == len(c.tokens) == len(c.logprobs)
        assert (
            c.truncated == (int(c.tokens[-1]) != shape.eos_token_id)
            and 0 <= c.accepted <= c.proposed <= 3 * c.verifications
        )
        assert c.accepted + 1 + c.verifications >= len(c.tokens)
        unproposed = c.verifications - sum(c.reached_at[:1])  # a step after the cache was recomputed has no proposals
        assert sum(c.accepted_at) == c.accepted and 0 <= unproposed <= 2 * (config.engine.kv_at_swap == "recompute")
        assert sum(c.accepted_at[:2]) - sum(c.reached_at[1:]) in (0, 1)  # the response may end among accepted proposals
        first, last = int(versions[0]), int(versions[-1])
        whole[first] += first == last
        across += first != last
        for version in range(first, last + 1):
            apart = (
                difference(references[version], some[c.request_id], c, versions == version, 0.9)
                if (versions == version).any()
                else 0.0
            )
            if version > first and config.engine.kv_at_swap == "keep":
                kept = max(kept, apart)
            else:
                worst = max(worst, apart)
    print(
        f"swap, {config.engine.kv_at_swap}: {whole} samples of one version, {across} of several; logprobs off "
        f"transformers' by at most {worst:.1e}, "
        f"{kept:.1e} where the cache was kept; accepted {sum(c.accepted for c in done)} of "
        f"{sum(c.proposed for c in done)}"
    )
    assert min(whole[1:]) > 0 and across > 0 and worst < 1e-4
    if config.engine.kv_at_swap == "keep":
        assert kept > 1e-3  # the cache of older weights was still used


def turns(*overrides):
    """A turn of a conversation goes on with the KV cache of the turn before, also over a swap that keeps it."""
    config = load("tiny", [*VLLM, "speculation.method=ngram", *overrides])
    model, shape = policy.load(POLICY)
    models = [model, fill(policy.build(shape), moved(model, 0.06))]
    references = [by_transformers(each, shape) for each in models]
    engine = make_engine(config, DEVICE)
    before, apart = {}, {0: [], 1: []}
    for turn, version in enumerate((0, 0, 1)):
        if version > engine.version:
            engine.load_policy(dict(models[version].named_parameters()), version)
        asked = {}
        for number, prompt in enumerate(prompts(4)):
            said = [9, 12, 4, 16] * 8  # by the environment
            tokens = [*before[number][0], *before[number][1].tokens.tolist(), *said] if turn else [*prompt, *said]
            request_id, follows = 10 * turn + number, 10 * (turn - 1) + number if turn else None
            left = config.engine.max_prompt_tokens + config.sampling.max_response_tokens - len(tokens)
            engine.submit(Request(request_id, tokens, [turn], min(12, left), keeps=True, follows=follows))
            asked[number] = tokens
        found = ended(engine)
        for number, tokens in asked.items():
            completion = found[10 * turn + number, 0]
            before[number] = tokens, completion
            apart[version].append(difference(references[version], tokens, completion))
    for request_id in range(30):
        engine.forget(request_id)
    print(
        f"turns, {config.engine.kv_at_swap}: logprobs off transformers' by at most {max(apart[0]):.1e} before a swap, "
        f"and by {min(apart[1]):.1e} to {max(apart[1]):.1e} after it"
    )
    assert max(apart[0]) < 1e-4 and not engine._salts
    if config.engine.kv_at_swap == "keep":
        assert min(apart[1]) > 1e-3  # earlier turns are as the old weights read them
    else:
        assert max(apart[1]) < 1e-4


def drained(*overrides):
    """A sample that ends in the step that an update waits for still counts as work, and is returned."""
    engine = make_engine(load("tiny", [*VLLM, "speculation.method=none", *overrides]), DEVICE)
    model, _ = policy.load(POLICY)
    engine.submit(Request(0, prompts(1)[0], [0], 6))
    while sum(len(sample.tokens) for sample in engine._live.values()) < 5:
        assert not engine.poll()
    engine.load_policy(dict(model.named_parameters()), 1)
    left, done = engine.waiting, engine.poll()
    print(f"drained: {left} sample ended in the step that the update waited for")
    assert left == 1 and [len(c.tokens) for c in done] == [6] and set(done[0].versions.tolist()) == {0}
    assert not engine.live and not engine.waiting and not engine.poll()


def seeds(*overrides):
    """A sample depends on its seed and not on its neighbors, even in an engine that replaces another in the same
    process.
    """
    some, tokens = prompts(6), {}
    length = 12 if "v2" in PATHS else 64  # the interpreter is slow
    for slots in (64, 3):
        engine = make_engine(load("tiny", [*VLLM, f"engine.slots={slots}", *overrides]), DEVICE)
        tokens[slots] = {key: c.tokens.tolist() for key, c in run(engine, some, 4, length).items()}
    different = len({tuple(t) for t in tokens[3].values()})
    print(
        f"seeds {overrides[:1]}: {len(tokens[3])} samples, {different} different; the same with 64 slots and with 3: "
        f"{tokens[64] == tokens[3]}"
    )
    assert len(tokens[3]) == 24 and different > 12 and tokens[64] == tokens[3]


def suffix(*overrides):
    """Suffix decoding copies from samples that ended earlier, and samples as the policy says."""
    distribution("speculation.method=suffix", *overrides)


def distribution(*overrides):
    """Responses are as probable as the policy says. This check fails by chance once in 10,000 runs."""
    shape = replace(SMALL, vocab_size=16, head_dim=32, tied=False)
    torch.manual_seed(0)
    method = load("tiny", [*VLLM, *overrides]).speculation.method
    model, prompt, length = policy.build(shape), [2, 3, 5, 2, 3, 4, 2, 3], 3
    samples = 250 if "v2" in PATHS else 5000  # the interpreter is slow
    model.init_states()
    with tempfile.TemporaryDirectory() as folder:
        policy.save(model, shape, Path(folder), POLICY)
        fields = [f"model.path={folder}"]
        if method in ("eagle3", "draft_model"):
            draft = drafts.new(method, shape, model)
            if method == "draft_model":  # the policy itself with noise
                draft = replace(draft, module=fill(policy.build(shape), moved(model, 0.3)), shape=shape)
            draft.save(Path(folder) / "draft", POLICY)
            fields.append(f"speculation.draft_path={folder}/draft")
        engine = make_engine(load("tiny", [*VLLM, *fields, *overrides]), DEVICE)
    counts, proposed, accepted = {}, 0, 0
    repeats = 2 if method == "suffix" else 1  # with the same seeds
    for _ in range(repeats):
        for c in run(engine, [prompt], samples // repeats, length).values():
            counts[tuple(c.tokens.tolist())] = counts.get(tuple(c.tokens.tolist()), 0) + 1
            proposed, accepted = proposed + c.proposed, accepted + c.accepted
    ended, open_ = {}, {(): 1.0}
    with torch.no_grad():
        for _ in range(length):
            tokens = torch.tensor([prompt + list(prefix) for prefix in open_])
            probs = model.lm_head(policy.hidden_states(model, tokens)[:, -1]).double().softmax(-1).tolist()
            extended = [
                ((*prefix, token), p * q)
                for (prefix, p), row in zip(open_.items(), probs)
                for token, q in enumerate(row)
            ]
            ended |= {tokens: p for tokens, p in extended if tokens[-1] == shape.eos_token_id}
            open_ = {tokens: p for tokens, p in extended if tokens[-1] != shape.eos_token_id}
    common = {tokens: p * samples for tokens, p in (ended | open_).items() if p * samples >= 8}
    expected = [*common.values(), samples - sum(common.values())]
    observed = [
        *(counts.get(tokens, 0) for tokens in common),
        samples - sum(counts.get(tokens, 0) for tokens in common),
    ]
    if expected[-1] < 8:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, expected))
    pvalue = float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(chi2 / 2)))
    print(
        f"distribution {overrides}: {samples} samples, {len(expected)} kinds, chi-square {chi2:.0f}, p {pvalue:.3f}; "
        f"accepted {accepted} of {proposed}"
    )
    assert pvalue > 1e-4 and 0 < accepted < proposed


def families(*overrides):
    """Logprobs of families other than dense Qwen3 match transformers, with their first weights and with later ones."""
    base = replace(SMALL, other_eos_token_ids=(7,))
    wide = replace(base, n_heads=2, n_kv_heads=1, head_dim=32)  # vLLM's CPU attention takes heads of this width
    # vLLM's experts are approximate on a CPU, so in at most one sample of ten a router chooses another expert.
    for shape, tolerance in (
        (replace(base, model_type="llama", rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 64)), 1e-4),
        (replace(base, model_type="mistral", tied=False), 1e-4),
        (replace(base, model_type="qwen2", rope_scaling=YarnScaling(4.0, 64)), 1e-4),  # with wider heads
        (replace(wide, model_type="qwen2", tied=False), 1e-4),
        (replace(wide, rope_scaling=YarnScaling(4.0, 64, attention_factor=1.5)), 1e-4),
        (replace(base, model_type="qwen3_moe", experts=Experts(8, 2, 32, True)), 2e-3),
    ):
        torch.manual_seed(0)
        model, worst = policy.build(shape), []
        model.init_states()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # biases start as zeros
                    parameter.normal_(std=0.2)
        with tempfile.TemporaryDirectory() as folder:
            policy.save(model, shape, Path(folder), POLICY)
            engine = make_engine(
                load("tiny", [*VLLM, f"model.path={folder}", "speculation.method=ngram", *overrides]), DEVICE
            )
        some = prompts(6)
        for version in (0, 1):
            if version:
                fill(model, moved(model, 0.2))
                engine.load_policy(dict(model.named_parameters()), version)
            done = run(engine, some, 3)
            assert {int(c.tokens[-1]) for c in done.values() if not c.truncated} == {1, 7}
            reference = by_transformers(model, shape)
            apart = sorted(difference(reference, some[key[0]], c) for key, c in done.items())
            worst.append(apart[-1] if shape.experts is None else apart[len(apart) * 9 // 10])
        print(f"families: {shape.model_type}, logprobs off transformers' by", *(f"{apart:.1e}" for apart in worst))
        assert max(worst) < tolerance


def ranks(*overrides):
    """Two ranks sample the tokens of one, with drafts and an update in flight, and greedily after it."""
    alone, first = one_and_two_ranks(*overrides)
    worst = max(float((a[2] - b[2]).abs().max()) for a, b in zip(alone, first))
    accepted, swapped = sum(each[3] for each in first), sum(len({*each[1]}) > 1 for each in first)
    print(
        f"ranks {overrides[:1]}: {len(first)} samples on 2 ranks, logprobs off those of one rank by {worst:.1e}, "
        f"{swapped} across the update; {accepted} proposals accepted"
    )
    assert [each[:2] for each in alone] == [each[:2] for each in first]
    assert worst < 1e-4 and swapped > 5 and accepted > 100


def experts(*overrides):
    """Two ranks that divide a mixture of experts sample what one samples. On a CPU vLLM's experts are approximate, so
    now and then another token is sampled.
    """
    torch.manual_seed(0)
    model = policy.build(MIXTURE)
    model.init_states()
    with tempfile.TemporaryDirectory() as folder:
        policy.save(model, MIXTURE, Path(folder), POLICY)
        alone, first = one_and_two_ranks(f"model.path={folder}", "speculation.method=ngram", *overrides)
    same = sum(a[0] == b[0] for a, b in zip(alone, first))
    apart = sorted(float((a[2] - b[2]).abs().max()) for a, b in zip(alone, first) if a[0] == b[0])
    swapped = sum(len({*each[1]}) > 1 for each in first)
    print(
        f"experts {overrides}: {same} of {len(first)} samples on 2 ranks are those of one, logprobs apart by "
        f"{apart[-1]:.1e}, {swapped} across the update"
    )
    assert same >= 0.8 * len(first) and apart[len(apart) * 9 // 10] < 2e-3 and swapped > 5


def one_and_two_ranks(*overrides):
    """Return what an engine of one rank and one of two sample `in_flight`; both ranks of the latter sampled alike."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, *PATHS, "rank1", str(store.port), *overrides]
    with subprocess.Popen(command) as other:
        config = load("tiny", [*VLLM, *overrides])
        alone = in_flight(make_engine(config, DEVICE), config)
        first, second = rank(0, store.port, *overrides), store.get("rank1").decode()
        assert other.wait(60) == 0
    assert json.dumps([each[:2] for each in first]) == second
    return alone, first


def rank(number, port, *overrides):
    """Return what one of two ranks samples `in_flight`."""
    from asyncspec.engine import vllm_engine

    vllm_engine.shut_down()
    both = Ranks("generator0", number, 2, 2)
    both.connect("127.0.0.1", int(port), DEVICE, 300, 300)
    config = load("tiny", [*VLLM, "engine.tensor_parallel=2", *overrides])
    done = in_flight(make_engine(config, DEVICE, ranks=both), config)
    if number:
        dist.TCPStore("127.0.0.1", int(port), is_master=False).set("rank1", json.dumps([each[:2] for each in done]))
    return done


def in_flight(engine, config):
    """Return (tokens, versions, logprobs, accepted proposals) of samples that meet an update of policy and draft, and
    then of greedy ones.
    """
    model, shape = policy.load(resolve_path(config.model.path))
    some, updates = prompts(12), [("policy", moved(model, 0.1), engine.load_policy)]
    if config.draft_directory:
        draft = drafts.load(config.speculation.method, resolve_path(config.draft_directory), shape)
        updates.append(("draft", moved(draft.module, 0.3), engine.load_draft))
    for i, prompt in enumerate(some):
        engine.submit(Request(i, prompt, [1000 * i, 1000 * i + 1], 64))
    done = [c for _ in range(5) for c in engine.poll()]
    for kind, tensors, load_new in updates:
        load_new({name: engine.keep(kind, name, tensor) for name, tensor in tensors.items()}, 1)
    found = {(c.request_id, c.sample): c for c in done} | ended(engine)
    engine._sampling = load("tiny", [*VLLM, *GREEDY]).sampling
    found |= run(engine, some, first=100)
    return [
        (c.tokens.tolist(), c.versions.tolist(), c.logprobs, c.accepted) for c in (found[key] for key in sorted(found))
    ]


CHECKS = {
    "greedy": greedy,
    "swap": swap,
    "turns": turns,
    "drained": drained,
    "seeds": seeds,
    "suffix": suffix,
    "distribution": distribution,
    "families": families,
    "ranks": ranks,
    "experts": experts,
}

if __name__ == "__main__":
    if PATHS:
        from asyncspec.engine import vllm_engine  # noqa: F401

        if "v2" in PATHS:
            gpu_paths.after_import()
            gpu_paths.change_lengths_at_random()
        if "async" in PATHS:
            gpu_paths.schedule_asynchronously()
        usual, make_engine = make_engine, None

        def make_engine(*args, **named):
            engine = usual(*args, **named)
            if "v2" in PATHS:
                gpu_paths.check(engine)
            assert (engine._core.batch_queue is not None) == ("async" in PATHS)
            return engine

    (CHECKS | {"rank1": partial(rank, 1)})[sys.argv[1]](*sys.argv[2:])
