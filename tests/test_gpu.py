"""The engine, the broadcast and the default job on a GPU, compared with a CPU. Skipped without a GPU."""

import itertools
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engines import GREEDY, METHODS, check_distribution, engine_of, run
from runs import Running, rows
from test_turns import converse, fresh_logprobs
from versions import SHAPES, tensors, wait_until_idle

from asyncspec.drafters.make import drafter_for
from asyncspec.drafts import draft as drafts
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.ledger.audit import audit
from asyncspec.models.policy import build
from asyncspec.models.shape import Experts
from asyncspec.speculation.verify import AS_IS, Sampling, sample
from asyncspec.wire.layout import Layout, WholeSnapshot
from asyncspec.wire.messages import Membership, Publish
from asyncspec.wire.weights import Publisher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROMPTS = [list(p) for p in itertools.product(range(2, 6), repeat=3)]


@pytest.mark.parametrize("launched", ["kernels", "graphs"])
@pytest.mark.parametrize("method", [None, *METHODS])
def test_gpu_and_cpu_give_the_same_greedy_output(small_shape, small_policy, maker, method, launched):
    torch.manual_seed(9)
    new, results = (
        {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in small_policy.named_parameters()},
        [],
    )
    for device in ("cpu", "cuda:0"):
        engine = engine_of(small_shape, small_policy, maker.get(method), sampling=GREEDY, device=device)
        graphs = engine.decode.graphs
        if launched == "kernels":
            engine.launch_by(None)
        tokens = [{key: c.tokens.tolist() for key, c in run(engine, PROMPTS).items()}]
        engine.load_policy(new, 1)
        results.append([*tokens, {key: c.tokens.tolist() for key, c in run(engine, PROMPTS).items()}])
    assert results[0] == results[1]
    assert launched == "kernels" or graphs._captured


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_gpu_and_cpu_give_the_same_greedy_output_of_other_families(other, method):
    shape, model = other
    if shape.experts is not None:
        pytest.skip("a mixture has a test of its own")
    torch.manual_seed(6)
    maker, results = drafter_for(drafts.new(method, shape, model)), []
    for device in ("cpu", "cuda:0"):
        engine = engine_of(shape, model, maker, sampling=GREEDY, device=device)
        results.append({key: c.tokens.tolist() for key, c in run(engine, PROMPTS).items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_gives_the_same_output_with_graphs(small_shape, dtype):
    shape = replace(small_shape, model_type="qwen3_moe", experts=Experts(5, 2, 32, normed=True))
    torch.manual_seed(3)
    model, results = build(shape), []
    model.init_states()
    for launched in ("kernels", "graphs"):
        engine = TorchEngine(
            shape,
            None,
            slots=5,
            max_prompt_tokens=8,
            max_response_tokens=24,
            sampling=GREEDY,
            device="cuda:0",
            dtype=dtype,
        )
        engine.load_policy(dict(model.named_parameters()), 0)
        if launched == "kernels":
            engine.launch_by(None)
        results.append({key: c.tokens.tolist() for key, c in run(engine, PROMPTS).items()})
    assert results[0] == results[1]
    assert bool(engine.decode.graphs) == (dtype is torch.bfloat16)  # float32 grouped products wait for the host


@pytest.mark.parametrize("sampling", [AS_IS, Sampling(0.7, 0.9, 4)])
@pytest.mark.parametrize("k", [3, "auto"])
@pytest.mark.parametrize("launched", ["kernels", "graphs"])
@pytest.mark.parametrize("method", METHODS)
def test_sequences_fit_the_exact_distribution(small_shape, small_policy, maker, method, launched, k, sampling):
    engine = engine_of(
        small_shape,
        small_policy,
        maker[method],
        256,
        k,
        sampling,
        device="cuda:0",
    )
    if launched == "kernels":
        engine.launch_by(None)
    check_distribution(engine, small_policy, small_shape)


@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("method", [None, "eagle3", "suffix"])
def test_a_turn_has_the_logprobs_of_the_whole_conversation(small_shape, small_policy, maker, method, kept):
    make = None if method is None else maker[method]
    engine = engine_of(small_shape, small_policy, make, slots=3, k="random" if make else 3, kept=kept, device="cuda:0")
    rng = np.random.default_rng(kept)
    conversations = [rng.integers(1, small_shape.vocab_size, size).tolist() for size in (3, 8, 5, 2, 5)]
    for prompt, completion in converse(engine, conversations, 3, rng, small_shape.vocab_size):
        fresh = fresh_logprobs(small_policy, prompt, completion.tokens.tolist())
        torch.testing.assert_close(completion.logprobs, fresh, rtol=0, atol=1e-4)


def test_no_token_of_probability_zero_is_ever_drawn():
    weights = torch.rand(1, 151936, device="cuda:0") * (torch.rand(1, 151936, device="cuda:0") < 0.01)
    drawn = torch.cat([sample(weights, torch.randint(2**23, (1,), device="cuda:0") / 2**23) for _ in range(2000)])
    assert (weights[0, drawn] > 0).all()


def test_nccl_broadcasts_versions_at_world_size_1():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    live, joined = {name: torch.full(shape, 1.0, device="cuda:0") for name, shape in SHAPES.items()}, threading.Event()
    publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cuda:0", Layout.of(tensors(0)))
    publisher.form(Membership("policy", 1, ["trainer"], "nccl"), 60, joined.set)
    assert joined.wait(60)
    for version in range(1, 4):
        snapshot = WholeSnapshot(Layout.of(tensors(0)), live, "cuda:0")
        publisher.publish(Publish("policy", version), snapshot, lambda message: None)
        for tensor in live.values():
            tensor += 1.0
        wait_until_idle(publisher)
        assert publisher._lane.error is None
        assert (snapshot.flat == version).all()
    publisher.close()


def test_a_publication_finishes_beside_a_long_kernel_of_the_stream_that_computes():
    """Products are queued for seconds behind the snapshot. The broadcast waits for the snapshot, and not for them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    live, joined = {str(i): torch.full((1 << 22,), 1.0, device="cuda:0") for i in range(32)}, threading.Event()
    layout = Layout.of(live, "bfloat16")
    publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cuda:0", layout)
    publisher.form(Membership("policy", 1, ["trainer"], "nccl"), 60, joined.set)
    assert joined.wait(60)
    publisher.publish(Publish("policy", 1), WholeSnapshot(layout, live, "cuda:0"), lambda message: None)
    wait_until_idle(publisher)  # the communicator exists from here on
    matrix, ended = torch.randn(4096, 4096, device="cuda:0"), torch.cuda.Event()
    snapshot = WholeSnapshot(layout, live, "cuda:0")
    for _ in range(2000):
        matrix = (matrix @ matrix).clamp(-1, 1)
    ended.record()
    publisher.publish(Publish("policy", 2), snapshot, lambda message: None)
    wait_until_idle(publisher)
    assert publisher._lane.error is None and (snapshot.flat == 1).all()
    assert not ended.query(), "the products were done first: this GPU needs more of them"
    torch.cuda.synchronize()
    publisher.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_job_runs_on_a_gpu_that_all_actors_share(tmp_path, dtype):
    run_dir = tmp_path / "run"
    Running.new(run_dir, "deployment.device=cuda", f"model.dtype={dtype}", "--steps", "4").end()
    assert len(rows(run_dir)) == 4 and audit(str(run_dir)) == 0
    trace = json.loads((run_dir / "trace.json").read_text())
    assert any("cuda" in event.get("args", {}).get("device", "") for event in trace)  # spans timed by the GPU


def test_varlen_attention_over_a_packed_row_equals_attention_prompt_by_prompt():
    """The causal mask of varlen attention is aligned lower right, which shared prompts need. Tolerance: bfloat16."""
    from asyncspec.models.attention import Packing, _by_documents, _by_segments

    packing = Packing.of([(5, [4, 30, 1, 4]), (70, [6]), (3, [1, 1]), (130, [90, 17, 64])], "cuda:0")
    g = torch.Generator("cuda:0").manual_seed(0)
    found = []
    for attend, dtype in ((_by_segments, torch.float32), (_by_documents, torch.bfloat16)):
        g.manual_seed(0)
        q, k, v, out = (
            torch.randn(packing.tokens, heads, 64, device="cuda:0", generator=g).to(dtype).requires_grad_()
            for heads in (4, 2, 2, 4)
        )
        result = attend(packing, q, k, v, None, True)
        (result * out.detach()).sum().backward()
        found.append([result.float(), *(t.grad.float() for t in (q, k, v))])
    for exact, rounded in zip(*found):
        assert float((exact - rounded).norm() / exact.norm()) < 0.02
