"""A generator of several ranks: their engines get the same calls in the same order, whatever arrives when."""

from collections import deque
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.actors.base import ActorSpec
from asyncspec.actors.generator import Generator
from asyncspec.actors.generator_rank import STEP, GeneratorRank, RanksDiffer
from asyncspec.actors.logprob_rank import LogprobRank
from asyncspec.config import load, to_yaml
from asyncspec.engine.protocol import Completion
from asyncspec.engine.shares import Shares
from asyncspec.models import policy
from asyncspec.models.shape import Experts
from asyncspec.wire import messages as m

CONFIG = to_yaml(
    load("tiny", ["engine.kind=vllm", "speculation.draft_length=3", "engine.tensor_parallel=2", "eval.exact=true"])
)
LIVE_STEPS = 3  # engine steps that a sample takes


@pytest.mark.parametrize("made", [GeneratorRank, LogprobRank])
def test_a_rank_that_is_stopped_before_it_knows_its_leader_just_ends(made, tmp_path):
    generates = made is GeneratorRank
    text = CONFIG if generates else to_yaml(load("tiny", ["logprob.ranks=2"]))
    name = "generator0_rank1" if generates else "logprob_rank1"
    made(ActorSpec(made.role, name, str(tmp_path), text)).finish()


@pytest.mark.parametrize("name", ["generator0_rank1", "generator0_rank1.2"])
def test_a_rank_and_its_replacement_know_their_leader(name, tmp_path):
    rank = GeneratorRank(ActorSpec("generator_rank", name, str(tmp_path), CONFIG))
    assert (rank.leader, rank.rank, rank.index) == ("generator0", 1, 0)


class Engine:
    """An engine that notes its calls. It samples the version and the number of its call."""

    version = draft_version = waiting = length = 0
    slots = 100

    def __init__(self):
        self.calls, self.open, self.most_versions = [], {}, 0

    @property
    def live(self):
        return len(self.open)

    def submit(self, request):
        self.calls.append(("submit", request.request_id))
        self.open[request.request_id] = LIVE_STEPS

    def load_policy(self, tensors, version):
        self.calls.append(("policy", version))
        self.version = version

    def load_draft(self, tensors, version):
        self.calls.append(("draft", version))

    def plan(self):
        self.length = len(self.calls) // 2 % 3
        return self.length

    def follow(self, length):
        self.length = length

    def poll(self):
        self.calls.append(("poll", self.length))
        self.open = {name: left - 1 for name, left in self.open.items()}
        done = [name for name, left in self.open.items() if not left]
        for name in done:
            del self.open[name]
        tokens = torch.tensor([self.version, len(self.calls)], dtype=torch.int32)
        return [Completion(name, 0, tokens, tokens.float(), tokens, False, 1, 0, 0, 0.0) for name in done]


class Weights:
    """A receiver: versions that have arrived stay until one is taken."""

    def __init__(self, tell):
        self.complete, self.tell, self.taken = [], tell, 0

    def arrive(self, version):
        self.complete.append(version)
        self.tell(version)

    def check(self):
        pass

    def take(self, version):
        assert version in self.complete
        self.complete = [later for later in self.complete if later > version]
        return version, {}

    def drop_before(self, version):
        self.complete = [later for later in self.complete if later >= version]


class Queue:
    """An outbox and its inbox in one."""

    backlog = 0

    def __init__(self):
        self.waiting = deque()

    def put(self, message, arrays=None):
        self.waiting.append((message, {}, 0.0, 0.0))

    def take(self, kind=m.Message):
        found = next((item for item in self.waiting if isinstance(item[0], kind)), None)
        if found is not None:
            self.waiting.remove(found)
        return found


class Silent:
    def send(self, message):
        pass


def pair():
    """Return a generator and its second rank, connected."""
    leader = Generator(ActorSpec("generator", "generator0", "", CONFIG))
    other = GeneratorRank(ActorSpec("generator_rank", "generator0_rank1", "", CONFIG))
    for actor in (leader, other):
        actor.engine, actor.control, actor.inbox, actor.wait = Engine(), Silent(), Queue(), lambda seconds: None
        for kind in ("policy", "draft"):
            actor.receivers[kind] = Weights(lambda version, a=actor, k=kind: a._received.append((k, version)))
            actor.using[kind] = 0
    leader.team.outboxes, other.to_leader = [other.inbox], leader.inbox
    leader._reward = leader._end_busy_span = lambda *_: None
    leader._send_rewarded = lambda: None
    return leader, other


ACTS = [
    "ticket",
    "evaluation",
    "leader",
    "follower",
    *(f"{kind} {who}" for kind in ("policy", "draft") for who in "01"),
]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(ACTS), max_size=60))
def test_all_ranks_make_the_same_calls_whatever_arrives_when(acts):
    leader, other = actors = pair()
    arrived, tickets = {f"{kind} {who}": 0 for kind in ("policy", "draft") for who in "01"}, 0
    for act in [*acts, *10 * ["leader"]]:
        if act in arrived:
            arrived[act] += 1
            kind, who = act.split()
            actors[int(who)].receivers[kind].arrive(arrived[act])
        elif act in ("ticket", "evaluation"):
            # the policy that a ticket needs may be on its way
            least = arrived["policy 0"] if act == "ticket" else 0
            leader.handle(m.Ticket(tickets, 0, least, "", "", [2, 3], [0], 0.0, evaluation=act == "evaluation"))
            tickets += 1
        else:
            (leader if act == "leader" else other).turn()
    while other.inbox.waiting or other._received:
        other.turn()
    for _ in range(3 + LIVE_STEPS * tickets):  # whatever both ranks have is used in the end
        leader.turn()
        while other.inbox.waiting:
            other.turn()
    assert leader.engine.calls == other.engine.calls and leader.sampled == other.sampled
    for kind in ("policy", "draft"):
        both = min(arrived[f"{kind} 0"], arrived[f"{kind} 1"])
        assert [call[1] for call in leader.engine.calls if call[0] == kind][-1:] == [both] * (both > 0)
        assert {actor.using.get(kind, both) for actor in actors} == {both}
        # newer versions stay for as long as another rank lacks them
        assert all(version > both for actor in actors for version in actor.receivers[kind].complete)


def test_versions_that_arrive_during_an_exact_evaluation_do_not_pile_up():
    leader, other = actors = pair()
    leader.handle(m.Ticket(0, 0, 0, "", "", [2, 3], [0], 0.0, evaluation=True))
    leader.turn()
    while other.inbox.waiting:
        other.turn()
    for version in range(1, 6):
        for actor in actors:
            actor.receivers["policy"].arrive(version)
        other.turn()  # it reports the version
        leader.engine.open = other.engine.open = {0: 100}  # the evaluation goes on
        leader.turn()
        while other.inbox.waiting:
            other.turn()
        assert [actor.receivers["policy"].complete for actor in actors] == [[version]] * 2
        assert "policy" not in leader.using and "policy" not in other.using
    assert leader.engine.version == other.engine.version == 0


def test_a_rank_that_sampled_other_tokens_says_so():
    _, other = pair()
    other.sampled = 7
    with pytest.raises(RanksDiffer, match="generator0_rank1 has sampled other tokens than generator0"):
        other.follow(m.Order(STEP, 8), {})


@pytest.mark.parametrize("size, tied", [(1, True), (2, True), (4, False)])
def test_each_rank_keeps_its_share_of_arriving_weights(small_shape, size, tied):
    """With more ranks than key-value heads, two ranks keep the same head."""
    shape = replace(small_shape, n_heads=4, n_kv_heads=2, vocab_size=40, tied=tied)
    whole = {name: torch.rand(p.shape) for name, p in policy.skeleton(shape).named_parameters()}
    found = {}
    for rank in range(size):
        shares = Shares(shape, rank, size)
        kept = {name: shares.keep(name, tensor) for name, tensor in whole.items()}
        for name, tensor in kept.items():
            divided = 0 if size == 1 else tensor.numel() / whole[name].numel()
            if name.split(".")[-2] in ("wo", "w1", "w2", "w3"):
                assert divided in (0, 1 / size)
            elif "wqkv" in name:
                assert divided in (0, 1 / 2)
        for block in shares.blocks(kept, whole):
            for name, tensor in block.items():
                had = found.setdefault(name, torch.full_like(tensor, torch.nan))
                found[name] = torch.where(tensor.isnan(), had, tensor)
    assert list(found) == list(whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("whole_experts", [False, True])
def test_each_rank_keeps_its_share_of_the_experts(small_shape, whole_experts):
    shape = replace(small_shape, model_type="qwen3_moe", experts=Experts(8, 2, 32, True))
    every = [(name, p) for name, p in policy.skeleton(shape).named_parameters() if "experts" in name]
    assert len(every) == 3 * shape.n_layers
    for name, parameter in every:
        tensor = torch.rand(parameter.shape)
        parts = [Shares(shape, rank, 2, whole_experts).keep(name, tensor) for rank in range(2)]
        dim = 0 if whole_experts else {"w1": 1, "w3": 1, "w2": 2}[name.split(".")[-1].split("_")[0]]
        assert torch.equal(torch.cat(parts, dim), tensor)
