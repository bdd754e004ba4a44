"""Proof of delivery: a reader is named once if it is late, holds other bytes, or samples from other weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actors.delivery import KEPT, PROPOSALS, Acceptance, Delivery
from asyncspec.actors.engines import make_engine
from asyncspec.config import load, resolve_path, work
from asyncspec.drafts import draft as drafts
from asyncspec.drafts.supervision import supervise
from asyncspec.drafts.training import DraftTrainer
from asyncspec.engine.protocol import Request
from asyncspec.models import policy, tokenizer
from asyncspec.tasks.sums import sums
from asyncspec.timing.metrics import summed
from asyncspec.wire.messages import GroupRecord, Publish, Whole


def test_a_reader_that_uses_an_old_version_for_too_long_is_named_once():
    delivery = Delivery(30.0)
    delivery.published("policy", 4, 10.0)
    using = [("generator0", {"policy": 4, "draft": 0}), ("logprob", {"policy": 3}), ("generator1", {})]
    assert delivery.late(using, 40.0) == []
    (late,) = delivery.late(using, 41.0)
    assert str(late) == "logprob still uses policy version 3: version 4 was published 31 s ago"
    assert delivery.late(using, 99.0) == []
    delivery.published("policy", 4, 100.0)  # sent again, in another epoch
    assert delivery.late(using, 200.0) == []
    delivery.published("policy", 5, 200.0)
    assert delivery.late([("generator0", {"policy": 4})], 229.0) == []
    assert [late.name for late in delivery.late(using[:2], 231.0)] == ["generator0", "logprob"]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=20))
def test_nobody_who_takes_each_version_in_time_is_named(steps):
    delivery, now = Delivery(10.0), 0.0
    for version, (until_used, until_next) in enumerate(steps, 1):
        delivery.published("policy", version, now)
        assert delivery.late([("generator0", {"policy": version - 1})], now + until_used) == []
        assert delivery.late([("generator0", {"policy": version})], now + until_used) == []
        now += until_used + until_next


def test_a_reader_that_holds_other_bytes_than_were_sent_is_named_once():
    delivery, senders = Delivery(30.0), {"policy": "trainer"}
    sent, held = ("trainer", {"policy": Whole(4, 77)}), ("generator0", {"policy": Whole(4, 77)})
    assert delivery.different(senders, [held]) == []  # the sender has not told its checksum yet
    assert delivery.different(senders, [sent, held]) == []
    damaged = ("generator1", {"policy": Whole(4, 78), "draft": Whole(1, 5)})
    (different,) = delivery.different(senders, [sent, held, damaged])
    assert str(different) == "generator1 holds other bytes of policy version 4 than trainer has sent"
    assert delivery.different(senders, [("trainer", {"policy": Whole(5, 1)}), held, damaged]) == []
    (different,) = delivery.different(senders, [("logprob", {"policy": Whole(5, 2)}), damaged])
    assert different[:3] == ("logprob", "policy", 5)


def test_the_time_for_a_delivery_grows_with_the_policy():
    config = load("tiny")
    assert 60 < work.delivery_s(config) < 100
    assert work.delivery_s(config) > work.delivery_s(load("tiny", ["deployment.stall_timeout_s=30"]))


def record(generator, reached_at, accepted_at, draft_version=1, version=0):
    """Return the record of a group in which only drafting matters."""
    zeros = dict.fromkeys(("version_min", "proximal_version", "verifications", "proposed", "accepted", "truncated"), 0)
    return GroupRecord(
        ticket_id=0,
        generator=generator,
        reward_mean=0.0,
        rewards_differ=True,
        response_tokens=[1],
        version_max=version,
        draft_version=draft_version,
        phases=[],
        reached_at=reached_at,
        accepted_at=accepted_at,
        **zeros,
    )


def judge(expected):
    """Return an `Acceptance` that knows draft version 1, trained for policy version 0."""
    acceptance = Acceptance()
    acceptance.published(Publish("draft", 1, 0, expected))
    return acceptance


def test_a_generator_whose_draft_accepts_too_little_is_named_once():
    acceptance, half = judge(0.6), PROPOSALS // 2
    good, bad = record("generator0", [half], [half * 6 // 10]), record("generator1", [half], [half // 5])
    assert acceptance.wrong([good, bad]) == []  # too few proposals to judge
    (line,) = acceptance.wrong([good, bad])
    assert line.startswith("the draft of generator1 has 20% of its proposals accepted, and a fresh pass of the same ")
    assert "expects 60%" in line
    assert acceptance.wrong([good, bad, good, bad]) == []


@pytest.mark.parametrize(
    "why", ["the draft that the run began with", "a version of which nothing is known", "a policy that has moved on"]
)
def test_a_draft_is_judged_only_by_its_own_version(why):
    """An adapter that learns fast, or that was lost, makes no generator look wrong."""
    acceptance = judge(0.9)
    acceptance.published(Publish("draft", 2, 0))
    of = {"draft_version": 0} if "began" in why else {"draft_version": 2} if "nothing" in why else {"version": KEPT + 1}
    assert acceptance.wrong([record("generator0", [2 * PROPOSALS], [0], **of)]) == []
    assert len(acceptance.wrong([record("generator0", [2 * PROPOSALS], [0])])) == 1


@given(st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_chance_names_no_generator(expected, seed):
    """The rate of false lines is below 1e-9: what is found would lie ten standard errors or more below its mean."""
    random, acceptance = np.random.default_rng(seed), judge(expected)
    for _ in range(20):
        groups = [record("generator0", [100], [int(random.binomial(100, expected))]) for _ in range(4)]
        assert acceptance.wrong(groups) == []


@pytest.mark.parametrize("wrong", [False, True])
def test_a_draft_with_other_weights_is_found_by_what_it_accepts(wrong):
    """The real engine with the real draft; what is expected comes from a pass of the draft over the same rollouts."""
    torch.manual_seed(0)
    config = load("tiny", ["speculation.method=eagle3", "speculation.draft_length=3", "engine.slots=32"])
    engine, path = make_engine(config, "cpu"), resolve_path(config.model.path)
    if wrong:
        some = {name: torch.randn(value.shape) * 0.1 for name, value in engine.parameters("draft").items()}
        engine.load_draft(some, 1)
    encode = tokenizer.load(path).encode
    prompts = [encode(problem.prompt).ids for problem in sums(1, 12)]
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, list(range(100 * i, 100 * i + 8)), 40))
    done = []
    while engine.live or engine.waiting:
        done += engine.poll()
    model, shape = policy.load(path)
    draft = drafts.load("eagle3", resolve_path(config.draft_directory), shape, positions=128)
    rows = [(prompts[c.request_id], c.tokens.tolist()) for c in done]
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    tokens_BL = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask_BL = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (prompt, response) in enumerate(rows):
        tokens_BL[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
        mask_BL[row, len(prompt) : len(prompt) + len(response)] = True
    trainer = DraftTrainer(draft.module, draft.loss(1, config.sampling.temperature), 1e-4)
    _, rates = trainer.step(supervise(model, draft.aux_layers, tokens_BL, mask_BL, config.sampling.temperature))
    group = record("generator0", summed(c.reached_at for c in done), summed(c.accepted_at for c in done))
    assert sum(group.reached_at) >= PROPOSALS
    assert trainer.expected() == rates[0] and trainer.expected() == -1
    assert bool(judge(rates[0]).wrong([group])) == wrong
