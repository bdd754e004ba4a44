"""asyncspec doctor: which actor would run where, and whether it can."""

import json
import re
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from policies import POLICY_8B
from runs import TORCHRUN, at_master, torchrun_on
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from asyncspec.bench.namespaces import Hosts
from asyncspec.commands import differences
from asyncspec.commands.doctor import _differences
from asyncspec.commands.meeting import Node
from asyncspec.commands.placement import judge
from asyncspec.config import load, resolve_path
from asyncspec.console import terminal
from asyncspec.drafters.make import drafter_for
from asyncspec.drafts import draft as drafts
from asyncspec.drafts.supervision import Supervision, Target
from asyncspec.drafts.training import unrolled_loss
from asyncspec.engine.protocol import Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.errors import UserError
from asyncspec.launch import estimate
from asyncspec.models import eagle3, policy, sizes
from asyncspec.speculation.verify import Sampling

PLACED, NAMES = (
    [["controller", "trainer"], ["logprob", "generator0"]],
    {"controller": "controller", "trainer": "trainer", "logprob": "logprob", "generator0": "generator"},
)


def test_the_estimate_counts_parameters_and_cache_exactly(small_shape, small_policy):
    described = small_shape.to_hf()
    assert sizes.parameters(described) == sum(p.numel() for p in small_policy.parameters())
    tied = replace(small_shape, tied=True)
    assert sizes.parameters(tied.to_hf()) == sum(p.numel() for p in policy.build(tied).parameters())
    config = load(
        "tiny",
        ["engine.slots=4", "engine.max_prompt_tokens=8", "sampling.max_response_tokens=23", "speculation.method=none"],
    )
    # 32 positions fill whole cache lines.
    engine = TorchEngine(small_shape, slots=4, max_prompt_tokens=8, max_response_tokens=23)
    cache = engine.decode.cache
    assert estimate.of_actor(config, described, "generator")["KV cache"] == cache.keys.nbytes + cache.values.nbytes
    assert sizes.parameters(POLICY_8B) == pytest.approx(8.19e9, rel=1e-3)  # from its model card


def test_a_device_that_is_too_small_is_named_with_what_fills_it():
    config = load("tiny", ["deployment.device=auto", "model.dtype=bfloat16"])
    small, large = (Node("h", "a", [gb * 1e9], 1e12, 8) for gb in (24, 400))
    wrong = [
        finding
        for _, _, found in judge(config, POLICY_8B, PLACED, NAMES, [small, large])
        for finding in found
        if not finding.ok
    ]
    assert (
        len(wrong) == 1
        and "node 0" in wrong[0].text
        and "optimizer 65.5" in wrong[0].text
        and "has 24.0" in wrong[0].text
    )
    assert not [f for _, _, found in judge(config, POLICY_8B, PLACED, NAMES, [large, large]) for f in found if not f.ok]


def test_sharding_divides_the_memory_that_a_rank_needs():
    one, four = (estimate.of_actor(load("tiny", [f"trainer.ranks={n}"]), POLICY_8B, "trainer") for n in (1, 4))
    for part in ("weights and gradients", "optimizer", "snapshot"):
        assert four[part] == one[part] / 4
    one, four = (estimate.of_actor(load("tiny", [f"logprob.ranks={n}"]), POLICY_8B, "logprob") for n in (1, 4))
    assert four["weights"] == one["weights"] / 4 and four["arriving weights"] < one["arriving weights"]
    assert four == estimate.of_actor(load("tiny", ["logprob.ranks=4"]), POLICY_8B, "logprob_rank")


def test_the_ranks_of_a_generator_divide_its_weights_and_its_cache():
    vllm = ["engine.kind=vllm", "speculation.draft_length=3"]
    one, four = (
        estimate.of_actor(load("tiny", [*vllm, f"engine.tensor_parallel={n}"]), POLICY_8B, "generator") for n in (1, 4)
    )
    for part in ("weights", "KV cache of a sequence"):
        assert four[part] == one[part] / 4
    assert four["arriving weights"] < one["arriving weights"]
    config = load("tiny", [*vllm, "engine.tensor_parallel=4"])
    assert four == estimate.of_actor(config, POLICY_8B, "generator_rank")
    config.engine.tensor_parallel = 16  # two ranks have copies of one key-value head
    assert (
        estimate.of_actor(config, POLICY_8B, "generator")["KV cache of a sequence"] == one["KV cache of a sequence"] / 8
    )


@pytest.mark.parametrize("method", drafts.METHODS)
def test_a_generator_needs_memory_for_its_draft_and_the_distributions_of_a_step(tmp_path, small_shape, method):
    torch.manual_seed(5)
    # 48 positions fill whole cache lines.
    shape, settings = (
        replace(small_shape, vocab_size=4096),
        {"engine.slots": 8, "engine.max_prompt_tokens": 8, "sampling.max_response_tokens": 34},
    )
    model = policy.build(shape)
    model.init_states()
    draft = drafts.new(method, shape, model)
    draft.save(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert sizes.draft_parameters(method, described) == sum(p.numel() for p in draft.module.parameters())
    config = load(
        "tiny",
        [f"{name}={value}" for name, value in settings.items()]
        + [f"speculation.method={method}", "speculation.draft_length=5"],
    )
    config.speculation.draft_path = str(tmp_path)
    for top_p in 1.0, 0.9:
        config.sampling.top_p = top_p
        needs = estimate.of_actor(config, shape.to_hf(), "generator")
        engine = TorchEngine(
            shape,
            drafter_for(draft),
            slots=8,
            max_prompt_tokens=8,
            max_response_tokens=34,
            draft_length=5,
            sampling=Sampling(0.9, top_p),
        )
        engine.load_policy(dict(model.named_parameters()), 0)
        cache, drafter = engine.decode.cache, engine.drafter
        own = (
            drafter.decode.cache.keys.nbytes
            + drafter.decode.cache.values.nbytes
            + getattr(drafter, "feature_SPE", torch.empty(0)).nbytes
        )
        assert (needs["KV cache"], needs["draft's features and cache"]) == (
            cache.keys.nbytes + cache.values.nbytes,
            own,
        )
        engine.submit(Request(0, [2, 3], list(range(8)), 34))
        engine.poll()
        with Largest() as largest:
            engine.poll()
        assert 0.4 * needs["distributions"] < largest.bytes < needs["distributions"], (
            largest.bytes / needs["distributions"]
        )


class Largest(TorchDispatchMode):
    """Record the peak memory of the tensors that are created inside this context, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes, self.held, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for tensor in pytree.tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and (storage := tensor.untyped_storage()).data_ptr() not in self.known | given
            ):
                self.known.add(storage.data_ptr())
                self.held += storage.nbytes()
                self.bytes = max(self.bytes, self.held)
                weakref.finalize(storage, self._end, storage.data_ptr(), storage.nbytes())
        return result

    def _end(self, address, count):
        self.known.discard(address)
        self.held -= count


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_draft_adapter_needs_memory_for_its_draft_and_the_unrolled_passes(tmp_path, small_shape, tokens):
    shape = eagle3.DraftShape.for_policy(small_shape, tokens)
    draft = eagle3.Eagle3(shape, torch.arange(tokens) if tokens else None)
    eagle3.save(draft, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    P = sizes.eagle3_parameters(described)
    assert P == sum(p.numel() for p in draft.parameters())
    config = load(
        "tiny", ["engine.max_prompt_tokens=40", "sampling.max_response_tokens=60", "draft.window=50", "rl.group_size=4"]
    )
    config.speculation.draft_path = str(tmp_path)
    needs = estimate.of_actor(config, small_shape.to_hf(), "draft_adapter")
    assert (needs["weights and gradients"], needs["optimizer"], needs["snapshot"]) == (8 * P, 8 * P, 4 * P)
    # Measure what autograd keeps for a batch of that size.
    kept, (B, L, V, D) = {}, (4, 52, small_shape.vocab_size, small_shape.dim)
    target = Target(torch.randn(B, L, V).log_softmax(-1))
    supervision = Supervision(
        torch.zeros(B, L, dtype=torch.int64),
        torch.ones(B, L, dtype=torch.bool),
        target,
        torch.randn(B, L, 3 * D),
        torch.randn(B, L, D),
    )

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = unrolled_loss(draft, supervision, config.draft.unroll)
    working = sum(needs[name] for name in ("activations", "logits", "attention weights"))
    assert 0.6 * working < sum(kept.values()) - 4 * P < working, (working, sum(kept.values()), loss)


def test_a_draft_adapter_that_shares_a_gpu_is_counted_there():
    config = load("tiny", ["deployment.device=auto", "speculation.method=draft_model"])
    names = NAMES | {"draft_adapter": "draft_adapter"}
    placed = [["controller", "trainer", "logprob", "draft_adapter"], ["generator0"]]
    nodes = [Node("h", "a", [400e9] * 2, 1e12, 8), Node("h", "a", [400e9], 1e12, 8)]
    judged = judge(config, POLICY_8B, placed, names, nodes)
    trainer, logprob, adapter = (
        sum(estimate.of_actor(config, POLICY_8B, role).values()) for role in ("trainer", "logprob", "draft_adapter")
    )
    assert judged[0][1] == f"{max(trainer, logprob + adapter) / 1e9:.1f} GB of GPU memory"
    assert [f.text for f in judged[0][2]] == [
        "node 0: logprob and draft_adapter share a GPU",
        "policy weights travel over NCCL",
        "draft weights travel over NCCL",
    ]
    placed = [["controller", "trainer", "logprob"], ["generator0", "draft_adapter"]]
    said = [f.text for _, _, found in judge(config, POLICY_8B, placed, names, nodes) for f in found]
    assert (
        "policy weights travel over NCCL" in said
        and "draft weights travel over gloo, through host memory: some members share a GPU" in said
    )


def test_a_checkpoint_on_its_way_needs_host_memory():
    config = load("tiny", ["deployment.device=auto", "trainer.ranks=8", "rl.groups_per_step=8"])
    names = {f"trainer_rank{i}" if i else "trainer": "trainer_rank" if i else "trainer" for i in range(8)} | {
        "logprob": "logprob",
        "generator0": "generator",
    }
    placed = [list(names)]
    # 98e9 for 8.19e9 parameters and two moments, and 33e9 that the generator loads; versions are gathered on the GPUs
    for memory, enough in ((125e9, False), (145e9, True)):
        ((_, _, found),) = judge(config, POLICY_8B, placed, names, [Node("h", "a", [400e9] * 10, memory, 8)])
        assert ([f.text for f in found if not f.ok] == []) == enough


def test_a_clock_that_is_far_off_fails_the_check():
    node = Node("h", "a", [], 1e12, 8, skew_s=-90.0)
    assert [
        "-90 s" in f.text
        for _, _, found in judge(load("tiny"), POLICY_8B, PLACED[:1], NAMES, [node])
        for f in found
        if not f.ok
    ] == [True]


def doctor(tmp_path, *args, launcher=(sys.executable, "-m", "asyncspec.cli")):
    done = subprocess.run([*launcher, "doctor", *args], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_default_job_can_run_here(tmp_path):
    code, said = doctor(tmp_path)
    assert code == 0 and "all checks passed" in said and "generator0" in said and "torchtitan" in said, said


@pytest.mark.slow
def test_failed_checks_are_printed_and_set_the_exit_code(tmp_path):
    code, said = doctor(tmp_path, "deployment.host=203.0.113.7", "deployment.device=cuda")
    assert code == 1 and "WRONG" in said and "expected an address of this host" in said and "asks for one" in said, said


@pytest.mark.slow
def test_nodes_check_each_other(tmp_path):
    code, said = doctor(
        tmp_path,
        "deployment.nodes=trainer+logprob,2*generator:2",
        launcher=(*TORCHRUN, "--nproc-per-node", "3", "-m", "asyncspec.cli"),
    )
    assert code == 0 and "all checks passed" in said, said
    assert "generator0-1" in said and "generator2-3" in said and "is the same as on node 0" in said
    assert len(re.findall(r"[+-]\d+\.\d ms", said)) == 3


@pytest.mark.slow
def test_missing_nodes_give_one_line(tmp_path):
    code, said = doctor(
        tmp_path,
        "deployment.nodes=trainer+logprob,2*generator:2",
        launcher=(*TORCHRUN, "--nproc-per-node", "2", "-m", "asyncspec.cli"),
    )
    assert code != 0 and "names 3 nodes" in said and "torchrun --nnodes 3" in said


@pytest.mark.slow
def test_the_first_node_reports_what_another_one_lacks(tmp_path):
    model = "$([ $RANK = 1 ] && echo model.path=missing)"
    command = f"asyncspec doctor deployment.nodes=trainer+logprob,generator {model}"
    launcher = [*TORCHRUN, "--nproc-per-node", "2", "--no-python", "sh", "-c", command]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode and "WRONG node 1: model.path='missing': expected a Hugging Face directory" in said, said
    assert "WRONG model.path differs between nodes; expected the same on all of them" in said


@pytest.mark.slow
def test_nodes_are_told_in_what_they_differ(tmp_path):
    """Hosts in network namespaces: one has another variable and another MTU. No key is shown."""
    try:
        hosts = Hosts(2)
    except UserError as error:
        pytest.skip(str(error))
    script = """
import os, sys
os.chdir(sys.argv[1])
if sys.argv[2] == "1":
    os.environ |= {"NCCL_IB_DISABLE": "1", "VLLM_API_KEY": "secret"}
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""
    start = ["-c", script, str(tmp_path)]

    try:
        subprocess.run(["ip", "-n", f"{hosts.name}n1", "link", "set", f"{hosts.name}i1", "mtu", "1400"], check=True)
        command = ["--no-python", "asyncspec", "doctor", "deployment.nodes=trainer+logprob,generator"]
        running = torchrun_on(
            hosts, tmp_path, at_master(hosts, 29516), *command, before=lambda node: [*start, str(node)]
        )
        codes, said = [process.wait(120) for process, _ in running], running[0][1].read_text()
    finally:
        hosts.close()
    assert codes == [0, 0], said + running[1][1].read_text()
    assert re.search(r"NCCL_IB_DISABLE.*none.*0 .*\n.*1 +│ 1 ", said), said
    assert re.search(r"network +│ \w+i0, MTU 1500.*│ 0 .*\n.*\w+i1, MTU 1400.*│ 1 ", said), said
    assert "secret" not in said and "torch" not in said[said.index("what differs") : said.index("ok  ")]


def test_what_nodes_must_have_in_common_is_wrong_where_it_differs(capsys):
    told = [{"torch": "2.13.0", "kernel": "6.1"}] * 3 + [{"torch": "2.12.0", "kernel": "6.2"}, {"kernel": "6.1"}]
    assert differences.differing(told) == {
        "torch": {"2.13.0": [0, 1, 2], "2.12.0": [3], "none": [4]},
        "kernel": {"6.1": [0, 1, 2, 4], "6.2": [3]},
    }
    assert differences.numbers([0, 1, 2, 4, 7, 8]) == "0-2, 4, 7-8"
    nodes = [Node(f"host{i}", "", [], 1e9, 8, facts=facts) for i, facts in enumerate(told)]
    found = _differences(terminal(width=100), nodes)
    assert [finding.text for finding in found] == ["torch differs between nodes; expected the same on all of them"]
    assert not found[0].ok and "kernel" in capsys.readouterr().out


def test_a_change_of_the_package_or_of_a_models_files_shows(tmp_path, monkeypatch):
    shutil.copytree(resolve_path("asset:tiny/policy"), tmp_path / "model")
    config = load("tiny", [f"model.path={tmp_path}/model", "speculation.method=none"])
    for name in ("VLLM_API_KEY", "VLLM_HOST_AUTH", "NCCL_PROXY_CRED", "GLOO_PW"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("UCX_PROXY", "http://user:secret@proxy:80")
    before = differences.facts(config, "127.0.0.1")
    assert before["UCX_PROXY"] == "http://...@proxy:80" and "secret" not in str(before)
    assert before["network"].startswith("lo, MTU")
    with open(tmp_path / "model" / "config.json", "a") as file:
        file.write(" ")
    monkeypatch.setattr(differences.asyncspec, "__file__", str(tmp_path / "__init__.py"))
    after = differences.facts(config, "127.0.0.1")
    assert {name for name in after if after[name] != before[name]} == {"asyncspec", "model.path"}
