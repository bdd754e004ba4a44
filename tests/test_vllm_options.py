"""engine.vllm: which of vLLM's options pass, and how others are refused."""

import importlib.util

import pytest

from asyncspec.config import ConfigError, load, vllm_options
from asyncspec.launch.preflight import check_vllm


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{quantization: fp8", "not readable as YAML"),
        ("[fp8]", "expected a mapping in braces"),
        ("{max_num_seqs: 8}", "'max_num_seqs' follows from engine.slots; set that"),
        ("{logprobs_mode: raw_logits}", "'logprobs_mode' is not passed on; expected "),
        ("{quantisation: fp8}", "'quantisation' is not passed on; expected quantization"),
        ("{stream_interval: 10}", "'stream_interval' is not passed on; expected one of quantization, "),
        ("{hf_overrides: abc}", "hf_overrides: expected a mapping"),
        ("{a: !!timestamp 'x'}", "not readable as YAML"),
        ("[" * 3000, "not readable as YAML"),
    ],
)
def test_options_of_vllm_that_cannot_be_are_refused(text, expected):
    with pytest.raises(ConfigError) as caught:
        load("tiny", ["engine.kind=vllm", f"engine.vllm={text}"])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(vllm_options.NOT_ON_CPUS))
def test_options_that_vllm_cannot_have_on_a_cpu_are_refused_before_the_start(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *args: True)
    config = load("tiny", ["engine.kind=vllm", f"engine.vllm={{{name}: true, quantization: fp8}}"])
    with pytest.raises(
        ConfigError, match=f"with {name} vLLM .* nearest valid choice: engine.vllm='{{quantization: fp8}}'"
    ):
        check_vllm(config)
    with pytest.raises(ConfigError, match="engine.vllm='{quantization: fp8}': expected empty with engine.kind=torch"):
        load("tiny", ["engine.vllm={quantization: fp8}"])
    config.engine.vllm = f"{{{name}: false}}"
    check_vllm(config)
