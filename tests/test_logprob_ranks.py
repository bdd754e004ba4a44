"""A logprob actor whose policy is divided over several ranks: real processes over gloo, and broadcast weights."""

import re
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import group_of, ticket_of
from runs import SILENT, Running, events, forking, rows

from asyncspec.config import load
from asyncspec.ledger.audit import violations
from asyncspec.models.parallel import local
from asyncspec.rl.scorer import Scorer
from asyncspec.wire import layout as layouts
from asyncspec.wire import messages as m
from asyncspec.wire.layout import Layout, WholeSnapshot
from asyncspec.wire.weights import Publisher, Receiver

SETTINGS = ["rl.kl_coef=0.1", "trainer.tokens_per_pass=70"]
# For each epoch: (actor, ranks, tensor-parallel ranks). The same four processes play the ranks.
EPOCHS = [[("logprob", 4, 2)], [("logprob1", 2, 1), ("logprob2", 2, 2)]]


def config(ranks, tensor_parallel):
    return load("tiny", [*SETTINGS, f"logprob.ranks={ranks}", f"logprob.tensor_parallel={tensor_parallel}"])


def group(number):
    g = np.random.default_rng(number)
    lengths = g.integers(3, 20, 3 + 4 * number)
    ticket = ticket_of(number, g.integers(0, 16, 5).tolist(), list(range(len(lengths))))
    return group_of(ticket, [0.0] * len(lengths)), {
        "tokens": g.integers(0, 16, int(lengths.sum())).astype(np.int32),
        "lengths": lengths.astype(np.int32),
    }


def changed(tensors, version):
    g = torch.Generator().manual_seed(version)
    return {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=g) for name, tensor in tensors.items()
    }


def nbytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def work(process, port, results):
    torch.set_num_threads(1)
    layouts.BUCKET_BYTES = 16000
    for epoch, actors in enumerate(EPOCHS, start=1):
        name, rank, size, tensor_parallel = [
            (name, rank, size, tp) for name, size, tp in actors for rank in range(size)
        ][process]
        scorer = Scorer(config(size, tensor_parallel), "cpu", name, rank)
        scorer.load()
        scorer.join("127.0.0.1", port, 60)
        ranks, received = scorer.ranks, []
        receiver = Receiver(
            "127.0.0.1", port, "policy", f"{process}", "cpu", scorer.layout, received.append, scorer.keep
        )
        receiver.form(m.Membership("policy", epoch, ["trainer", *map(str, range(4))], "gloo"), 60, lambda: None)
        for version in (1, 2):
            receiver.expect(version, epoch)
        wait_for(lambda: len(received) == 2)
        both = receiver.complete
        for version in (1, 2):  # the leading rank may take them one after the other
            _, kept = receiver.take(version)
            scorer.swap(kept)
            if version == 1:  # weights gathered by this pass must not survive the next swap
                scorer.add_nothing()
                scorer.collect(1)
        counts = [scorer.passes(*group(number)) for number in range(ranks.data_size)]
        scorer.supervising = ranks.data_rank == 0
        supervision = scorer.add(*group(ranks.data_rank))
        for _ in range(max(counts) - counts[ranks.data_rank]):
            scorer.add_nothing()
        scores = scorer.collect(max(len(group(number)[1]["tokens"]) for number in range(ranks.data_size)))
        made = (
            None
            if supervision is None
            else [t.numpy() for t in (supervision().features_BLE, supervision().embeds_BLD, supervision().target[0])]
        )
        held = [
            nbytes(kept.values()),
            *(nbytes(local(p) for p in model.parameters()) for model in (scorer.model, scorer.reference)),
        ]
        results.put(((epoch, name, rank), (both, receiver.complete, counts, scores, made, held)))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_several_ranks_score_like_one_and_each_holds_only_its_share(monkeypatch):
    """Tolerance: float32 sums in another order change a logprob by up to 1e-4. The weights compared are from the second
    of two broadcast versions.
    """
    monkeypatch.setattr(layouts, "BUCKET_BYTES", 16000)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forking()
    results = context.Queue()
    children = [context.Process(target=work, args=(process, store.port, results)) for process in range(4)]
    for child in children:
        child.start()
    alone = Scorer(config(1, 1), "cpu")
    alone.load()
    alone.join("", 0, 0)
    whole = {name: parameter.clone() for name, parameter in alone.parameters.items()}
    publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cpu", Layout.of(whole))
    for epoch in range(1, len(EPOCHS) + 1):
        joined = []
        publisher.form(
            m.Membership("policy", epoch, ["trainer", *map(str, range(4))], "gloo"), 60, lambda: joined.append(1)
        )
        wait_for(lambda: joined)
        for version in (1, 2):
            wait_for(lambda: not publisher.busy)
            publisher.publish(
                m.Publish("policy", version),
                WholeSnapshot(Layout.of(whole), changed(whole, version), "cpu"),
                lambda message: None,
            )
        wait_for(lambda: not publisher.busy)
    said = dict(results.get(timeout=60) for _ in range(4 * len(EPOCHS)))
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    alone.swap(changed(whole, 2))
    expected, total = [], nbytes(whole.values())
    for number in range(2):
        alone.supervising = True
        supervision = alone.add(*group(number))()
        expected.append((alone.collect(len(group(number)[1]["tokens"]))[0], supervision))
    before = Scorer(config(1, 1), "cpu")
    before.load()
    before.add(*group(0))
    # the broadcast weights do differ from the first ones
    assert np.abs(before.collect(expected[0][0].shape[1])[0][0] - expected[0][0][0]).max() > 0.05
    assert len(said) == 8
    for (epoch, name, rank), (both, none, counts, scores, made, held) in said.items():
        size, tensor_parallel = next((size, tp) for actor, size, tp in EPOCHS[epoch - 1] if actor == name)
        assert (
            sorted(both) == [1, 2]
            and none == []
            and scores.shape[:2] == (size // tensor_parallel, 2)
            and len(set(counts)) == len(counts)
        )
        for found, (wanted, _) in zip(scores, expected):
            tokens = wanted.shape[1]
            np.testing.assert_allclose(found[:, :tokens], wanted, atol=1e-4, rtol=0)
            assert (found[:, tokens:] == 0).all()
        assert (made is not None) == (rank < tensor_parallel)
        for found, wanted in zip(
            made or (), (expected[0][1].features_BLE, expected[0][1].embeds_BLD, expected[0][1].target[0])
        ):
            np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4, rtol=1e-4)
        for bytes_held in held:  # all tensor-parallel ranks hold the norms
            assert total / size <= bytes_held < 1.1 * total / size, (name, rank, bytes_held, total)


@pytest.mark.slow
def test_a_run_with_two_logprob_ranks_survives_the_loss_of_one(tmp_path):
    run_dir, steps = tmp_path / "run", 6
    run = Running.new(
        run_dir,
        "--steps",
        str(steps),
        "logprob.ranks=2",
        "logprob.tensor_parallel=2",
        "checkpoint.every=2",
        # the first fault comes before there is a second version
        SILENT,
        "deployment.faults=logprob_rank1:work:3:kill,logprob_rank1:swap:2:freeze",
    )
    output = run.end()
    deaths = len(re.findall("logprob_rank1 died: .*all actors restart from the last checkpoint", output))
    assert deaths >= 2, output
    # A rank was silent for too long without an injected fault. The run survived that, too; the log says what it did.
    if deaths > 2:
        warnings.warn(output + (run_dir / "logs" / "logprob_rank1.log").read_text(), stacklevel=2)
    assert "logprob_rank1 is frozen" in output
    assert [row["step"] for row in rows(run_dir)] == list(range(steps)) and max(
        row["lag/max"] for row in rows(run_dir)
    ) <= 1
    assert any(row.get("draft/megabytes", 0) > 0 for row in rows(run_dir))  # hidden states were gathered and offered
    assert "logprob_rank1" in [event["actor"] for event in events(run_dir) if event["event"] == "lost"]
    assert violations(events(run_dir), 1, 4, steps) == []
