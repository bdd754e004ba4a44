"""The engine's passes as graphs, with a test double that records operations and repeats them on the same tensors."""

import itertools

import pytest
import torch
from engines import GREEDY, METHODS, engine_of, run
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncspec.engine import matrix, torch_engine
from asyncspec.engine.backend import TorchBackend
from asyncspec.engine.graphs import TIMES, Graphs, graph_size
from asyncspec.engine.protocol import Request
from asyncspec.speculation.draft_length import LONGEST, FixedLength


class NowAndThen(FixedLength):
    """Two steps without a draft, whose features are kept for later, then one step with a draft."""

    def __init__(self):
        super().__init__(LONGEST)
        self.step = 0

    def choose(self, live, missed_S=None, attended=None):
        self.step += 1
        return 0 if self.step % 3 else 3


class MockCudaGraphs:
    """A stand-in for `CudaGraphs` on a CPU."""

    def capture(self, call):
        return MockCudaGraph(call)

    def forget(self):
        pass


class MockCudaGraph:
    """Record the operations of a call and repeat them on the same tensors, like a CUDA graph. Reading a value is an
    error.
    """

    def __init__(self, call):
        self.operations = operations = []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), options=None):
                assert function is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
                result = function(*arguments, **(options or {}))
                operations.append((function, arguments, options or {}, result))
                return result

        with Recorder():
            call()

    def replay(self):
        for function, arguments, options, result in self.operations:
            again = function(*arguments, **options)
            for to, tensor in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(to, torch.Tensor) and to.data_ptr() != tensor.data_ptr():
                    to.copy_(tensor)


@pytest.mark.parametrize("method,k", [(None, 3), *((method, 3) for method in METHODS), ("eagle3", "now and then")])
def test_graphs_give_the_same_output_as_passes(monkeypatch, small_shape, small_policy, maker, method, k):
    # numpy must not compute anything: only torch operations are recorded
    monkeypatch.setattr(matrix, "slowed_by_mkl", lambda *_: False)
    monkeypatch.setattr(torch_engine, "backend_for", TorchBackend)
    prompts = [list(p) for p in itertools.product(range(2, 6), repeat=3)][::2]
    torch.manual_seed(9)
    new = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in small_policy.named_parameters()}
    engines = [
        engine_of(small_shape, small_policy, maker.get(method), 5, k, GREEDY, kv_at_swap="recompute") for _ in range(2)
    ]
    if k == "now and then":
        for engine in engines:
            engine.use(NowAndThen())
    engines[1].launch_by(graphs := Graphs(5, MockCudaGraphs()))
    results, proposed = [], [[], []]
    for engine, drafts_ in zip(engines, proposed):
        if method:

            def propose(*given, propose=engine.drafter.propose, drafts_=drafts_):
                proposal = propose(*given)
                drafts_.append(proposal.draft_BK.tolist())
                return proposal

            engine.drafter.propose = propose
        done = run(engine, prompts)
        engine.submit(Request(100, prompts[-1], [5, 6, 7], 24))
        engine.poll()
        for version in range(1, 5):  # rows are live, and graphs captured earlier must use the new weights
            engine.load_policy(new, version)
        results.append(
            [{key: (c.tokens.tolist(), c.accepted) for key, c in some.items()} for some in (done, run(engine, prompts))]
        )
    assert results[0] == results[1] and results[0][0] != results[0][1]
    assert proposed[0] == proposed[1]
    assert len(graphs._captured) > 2


@given(st.integers(1, 10**6))
def test_padding_costs_at_most_a_quarter_and_gives_four_sizes_per_octave(count):
    more = graph_size(count)
    assert count <= more < 1.25 * count + 1 and graph_size(more) == more
    assert len({graph_size(n) for n in range(count, 2 * count)}) <= 5 if count < 2000 else True


class Wrong:
    """Graphs that give wrong results."""

    def capture(self, call):
        self.results = call()
        return self

    def forget(self):
        pass

    def replay(self):
        for result in self.results:
            result += 1


class Impossible(Wrong):
    """Graphs that cannot capture the operation."""

    def capture(self, call):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    "backend,why", [(Wrong, "differs by .*%"), (Impossible, "could not be captured .operation not permitted")]
)
def test_a_graph_that_fails_or_gives_other_results_is_not_used(backend, why):
    class Twice:
        def of(self, x_B, spans):
            return [2 * x_B]

    twice, launcher, x_B = Twice(), Graphs(8, backend()), torch.rand(3, 1)
    with torch.inference_mode(), pytest.warns(UserWarning, match=f"{why}.*; continuing without graphs"):
        for _ in range(TIMES):
            assert torch.equal(launcher(twice.of, (x_B,), [(3, 1)])[0], 2 * x_B)
    assert torch.equal(launcher(twice.of, (x_B,), [(3, 1)])[0], 2 * x_B)
