"""What would run where, and whether it can."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from asyncspec import estimate
from asyncspec.config import load
from asyncspec.doctor import Node, judge
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.models import policy
from runs import TORCHRUN

POLICY_8B = {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
             "intermediate_size": 12288, "num_hidden_layers": 36, "tie_word_embeddings": False}
PLACED, NAMES = [["controller", "trainer"], ["logprob", "generator0"]], {
    "controller": "controller", "trainer": "trainer", "logprob": "logprob", "generator0": "generator"}


def test_parameters_and_cache_are_counted_as_they_are(small_shape, small_policy):
    described = small_shape.to_hf()
    assert estimate.parameters(described) == sum(p.numel() for p in small_policy.parameters())
    tied = replace(small_shape, tied=True)
    assert estimate.parameters(tied.to_hf()) == sum(p.numel() for p in policy.build(tied).parameters())
    config = load("tiny", ["engine.slots=4", "engine.max_prompt_tokens=8", "sampling.max_response_tokens=16", "speculation.method=none"])
    engine = TorchEngine(small_shape, slots=4, max_prompt_tokens=8, max_response_tokens=16)
    cache = engine.decode.cache.kv
    assert estimate.of_actor(config, described, "generator")["KV cache"] == cache.numel() * cache.element_size()
    assert estimate.parameters(POLICY_8B) == pytest.approx(8.19e9, rel=1e-3)  # as its model card says


def test_a_device_that_is_too_small_is_named_with_what_fills_it():
    config = load("tiny", ["deployment.device=auto", "trainer.dtype=bfloat16"])
    small, large = (Node("h", "a", [gb * 1e9], 1e12, 8) for gb in (24, 400))
    wrong = [finding for _, _, found in judge(config, POLICY_8B, PLACED, NAMES, [small, large]) for finding in found if not finding.ok]
    assert len(wrong) == 1 and "node 0" in wrong[0].text and "optimizer 65.5" in wrong[0].text and "has 24.0" in wrong[0].text
    assert not [f for _, _, found in judge(config, POLICY_8B, PLACED, NAMES, [large, large]) for f in found if not f.ok]


def test_sharding_divides_what_a_rank_needs():
    one, four = (estimate.of_actor(load("tiny", [f"trainer.ranks={n}"]), POLICY_8B, "trainer") for n in (1, 4))
    for part in ("weights and gradients", "optimizer", "snapshot"):
        assert four[part] == one[part] / 4
    one, four = (estimate.of_actor(load("tiny", [f"logprob.ranks={n}"]), POLICY_8B, "logprob") for n in (1, 4))
    assert four["weights"] == one["weights"] / 4 and four["arriving weights"] < one["arriving weights"]
    assert four == estimate.of_actor(load("tiny", ["logprob.ranks=4"]), POLICY_8B, "logprob_rank")


def test_a_clock_far_off_is_wrong():
    node = Node("h", "a", [], 1e12, 8, skew_s=-90.0)
    assert ["-90 s" in f.text for _, _, found in judge(load("tiny"), POLICY_8B, PLACED[:1], NAMES, [node]) for f in found if not f.ok] == [True]


def doctor(tmp_path, *args, launcher=(sys.executable, "-m", "asyncspec.cli")):
    done = subprocess.run([*launcher, "doctor", *args], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    return done.returncode, done.stdout + done.stderr


def test_the_default_job_can_run_here(tmp_path):
    code, said = doctor(tmp_path)
    assert code == 0 and "nothing speaks against this run" in said and "generator0" in said and "torchtitan" in said, said


def test_what_speaks_against_a_run_is_said_and_is_the_exit_code(tmp_path):
    code, said = doctor(tmp_path, "deployment.host=203.0.113.7", "deployment.device=cuda")
    assert code == 1 and "WRONG" in said and "expected an address of this host" in said and "asks for one" in said, said


def test_nodes_look_at_each_other(tmp_path):
    code, said = doctor(tmp_path, "deployment.nodes=trainer+logprob,2*generator:2",
                        launcher=(*TORCHRUN, "--nproc-per-node", "3", "-m", "asyncspec.cli"))
    assert code == 0 and "nothing speaks against" in said, said
    assert "generator0-1" in said and "generator2-3" in said and "is the same as on node 0" in said
    assert len(re.findall(r"[+-]\d+\.\d ms", said)) == 3


def test_nodes_that_are_not_there_are_one_line(tmp_path):
    code, said = doctor(tmp_path, "deployment.nodes=trainer+logprob,2*generator:2",
                        launcher=(*TORCHRUN, "--nproc-per-node", "2", "-m", "asyncspec.cli"))
    assert code != 0 and "names 3 nodes" in said and "torchrun --nnodes 3" in said
