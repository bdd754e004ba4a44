"""Wrong input is one line that names the field, the value, what was expected and the nearest valid choice."""

import json

import numpy as np
import pytest

from asyncspec.config import CONFIG_DIR, ConfigError, from_yaml, load, resolve_path, to_yaml

VLLM = ("engine.kind=vllm", "speculation.draft_length=3")


@pytest.mark.parametrize(
    "override,expected",
    [
        ("trainer.optimizer.lrr=1", "nearest valid choice: trainer.optimizer.lr "),
        ("optimizer.lr=1", "nearest valid choice: trainer.optimizer.lr "),
        ("polcy_lag=1", "nearest valid choice: policy_lag "),
        ("trainer=3", "names a section"),
        ("steps=many", "steps='many': expected a value of type int; nearest valid choice: steps=120"),
        ("draft.adapt=5", "draft.adapt=5: expected a value of type bool; nearest valid choice: draft.adapt=True"),
        ("steps=1.5", "steps='1.5'"),
        ("policy_lag=-1", "policy_lag=-1: expected at least 0; nearest valid choice: policy_lag=0"),
        ("rl.group_size=1", "rl.group_size=1: expected at least 2"),
        ("speculation.method=eagle", "nearest valid choice: speculation.method=eagle3"),
        ("speculation.draft_length=0", "speculation.method=none turns drafting off"),
        ("sampling.temperature=0", "sampling.temperature=0.0: expected at least 0.001"),
        ("sampling.top_p=1.5", "sampling.top_p=1.5"),
        (
            "rl.mini_batch_size=5",
            "rl.mini_batch_size=5: expected a divisor of rl.groups_per_step=16, or 0; nearest valid choice: "
            "rl.mini_batch_size=4",
        ),
        ("rl.clip_dual=0.5", "rl.clip_dual=0.5: expected 0, or more than 1; nearest valid choice: rl.clip_dual=3.0"),
        (
            "rl.overlong_buffer=400",
            "rl.overlong_buffer=400: expected at most sampling.max_response_tokens=320; nearest valid choice: "
            "rl.overlong_buffer=320",
        ),
        ("rl.loss_aggregation=token_mean", "nearest valid choice: rl.loss_aggregation=token-mean"),
        ("trainer.optimizer.kind=moun", "nearest valid choice: trainer.optimizer.kind=muon"),
        ("rl.correction_action=trunc", "nearest valid choice: rl.correction_action=truncate"),
        ("model.path=/no/such", "model.path='/no/such': expected a Hugging Face directory, with config.json"),
        ("data.train_file=/no/such.jsonl", "no such file"),
        ("steps", "expected field=value"),
        ("=3", "expected field=value"),
        ("steps=", "steps='': expected a value of type int"),
        ("qqq=3", "qqq in the overrides: no such field"),
        ("speculation.draft_length=--3", "expected auto or a whole number"),
        ("trainer.optimizer.lr=inf", "expected a finite number"),
        ("trainer.optimizer.lr=30", "expected more than 0 and at most 1"),
        ("trainer.optimizer.beta2=1", "below 1"),
        ("seed=-1", "seed=-1: expected at least 0"),
        ("deployment.delays=trainr:train=1", "'trainr': expected the name of an actor; nearest: trainer"),
        ("deployment.faults=generator:swap:2:kill", "'generator': expected the name of an actor; nearest: generator0"),
        ("deployment.stall_timeout_s=0", "more than 0"),
        ("engine.max_prompt_tokens=100000", "nearest valid choice: engine.max_prompt_tokens=176"),
        (
            "model.path=asset:tiny/eagle3",
            "architectures=['LlamaForCausalLMEagle3']: expected ['LlamaForCausalLM']; a policy's model_type is "
            "'qwen3', 'qwen2', 'llama'",
        ),
        ("engine.kind=vlm", "nearest valid choice: engine.kind=vllm"),
        ("engine.kind=foo", "nearest valid choice: engine.kind=torch"),
        (
            "engine.compile=true",
            "engine.compile=True: expected false with engine.kind=torch: only vllm compiles its policy; "
            "nearest valid choice: engine.compile=false",
        ),
        (
            "engine.tensor_parallel=2",
            "engine.tensor_parallel=2: expected 1 with engine.kind=torch: only vllm divides a generator's policy; "
            "nearest valid choice: engine.tensor_parallel=1",
        ),
        (
            "engine.tensor_parallel=0",
            "engine.tensor_parallel=0: expected at least 1; nearest valid choice: engine.tensor_parallel=1",
        ),
        ("engine.kind=mock", "trainer.kind='torch': expected mock with engine.kind=mock"),
        ("engine.gpu_memory_utilization=0", "engine.gpu_memory_utilization=0.0: expected more than 0 and at most 1"),
        ("speculation.draft_path=asset:tiny/draft_model", "nearest valid choice: speculation.method=draft_model"),
        ("logprob.ranks=0", "logprob.ranks=0: expected at least 1; nearest valid choice: logprob.ranks=1"),
        (
            "logprob.tensor_parallel=2",
            "logprob.tensor_parallel=2: expected a divisor of logprob.ranks=1; nearest valid choice: "
            "logprob.tensor_parallel=1",
        ),
        (
            "trainer.context_parallel=2",
            "trainer.context_parallel=2: expected a divisor of 1 (trainer.ranks=1, trainer.tensor_parallel=1); nearest "
            "valid choice: trainer.context_parallel=1",
        ),
        (
            "trainer.expert_parallel=2",
            "trainer.expert_parallel=2: expected a divisor of 1, the ranks that hold a copy of the policy "
            "(trainer.ranks=1); nearest valid choice: trainer.expert_parallel=1",
        ),
        (
            "trainer.replicas=2",
            "trainer.replicas=2: expected a divisor of 1, the number of data-parallel ranks; nearest valid choice: "
            "trainer.replicas=1",
        ),
        ("data.eval_file=held_out.jsonl", "data.eval_file='held_out.jsonl': expected data.train_file as well"),
        ("steps=1000000000000", "steps=1000000000000: expected at most 1000000; nearest valid choice: steps=1000000"),
        (
            "engine.slots=999999999999999999999999999999",
            "expected at most 1000000; nearest valid choice: engine.slots=1000000",
        ),
        (
            "deployment.start_timeout_s=1e300",
            "expected at most 10000000.0; nearest valid choice: deployment.start_timeout_s=10000000.0",
        ),
        ("mock.acceptance=1e300", "expected at most 1000000000.0"),
        ("seed=4294967296", "expected at least 0 and at most 4294967295"),
        pytest.param("rl.group_size=" + "9" * 5000, "expected a value of type int", id="5000 digits"),
        pytest.param(
            "speculation.draft_length=" + "9" * 5000, "expected auto or a whole number", id="5000 digits of k"
        ),
        (
            "deployment.host=",
            "deployment.host='': expected auto, or an address of this host; nearest valid choice: deployment.host=auto",
        ),
    ],
)
def test_wrong_overrides_give_one_clear_line(override, expected):
    with pytest.raises(ConfigError) as caught:
        load("tiny", [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dual_clip_is_for_ppo():
    with pytest.raises(ConfigError, match="rl.clip_dual=3.0: expected 0 with rl.loss_type=gspo: only ppo has a dual"):
        load("tiny", ["rl.loss_type=gspo", "rl.clip_dual=3"])
    assert load("tiny", ["rl.clip_dual=3"]).rl.clip_dual == 3


@pytest.mark.parametrize(
    "override,expected",
    [
        (
            "speculation.method=mtp",
            "speculation.method='mtp': expected eagle3, draft_model, ngram, suffix or none with engine.kind=vllm; "
            "nearest valid choice: speculation.method=eagle3",
        ),
        ("sampling.temperature=0.005", "sampling.temperature=0.005: expected 0.01 to 2 with engine.kind=vllm"),
        ("sampling.temperature=2.5", "expected 0.01 to 2 with engine.kind=vllm; nearest valid choice: sampling.temp"),
        ("trainer.kind=mock", "trainer.kind='mock': expected torch with engine.kind=vllm"),
    ],
)
def test_settings_that_vllm_does_not_support_are_refused(override, expected):
    with pytest.raises(ConfigError) as caught:
        load("tiny", ["engine.kind=vllm", "speculation.draft_length=3", override])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_draft_length_of_vllm_is_chosen_unless_suffix_decoding_chooses_it():
    assert load("tiny", ["engine.kind=vllm"]).fixed_draft_length is None
    said = "speculation.draft_length='auto': expected a whole number with engine.kind=vllm: suffix decoding chooses"
    with pytest.raises(ConfigError, match=said):
        load("tiny", ["engine.kind=vllm", "speculation.method=suffix"])


def test_vllm_refuses_a_policy_file_that_contains_an_mtp_module(tmp_path):
    source = resolve_path("asset:tiny/policy")
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1})
    )
    with pytest.raises(
        ConfigError, match="also contains an MTP module; expected a policy without one with engine.kind=vllm"
    ):
        load("tiny", ["engine.kind=vllm", "speculation.method=none", f"model.path={tmp_path}"])


@pytest.mark.parametrize(
    "override,expected",
    [
        ("data.reward=nomodule:f", "data.reward='nomodule:f': ModuleNotFoundError: No module named"),
        ("data.reward=json:nothing", "expected module:function"),
        ("engine.max_prompt_tokens=10", "has 64 tokens; nearest valid choice: engine.max_prompt_tokens=64"),
        ("data.train_file=bad.jsonl", "data.train_file='bad.jsonl': line 2: expected an answer"),
        ("data.train_file=empty.jsonl", "data.train_file='empty.jsonl': the file is empty"),
    ],
)
def test_wrong_inputs_are_found_before_anything_starts(override, expected, tmp_path, monkeypatch):
    from asyncspec.launch.preflight import check_inputs

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1="}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError) as caught:
        check_inputs(load("tiny", [override]))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_compiling_without_a_compiler_gives_one_line(device, monkeypatch):
    monkeypatch.setattr("asyncspec.config.check.cxx_compiler", lambda: None)
    by_vllm = ["engine.kind=vllm", "speculation.draft_length=3", "engine.compile=true"]
    with pytest.raises(ConfigError) as caught:
        load("tiny", [*by_vllm, f"deployment.device={device}"])
    assert str(caught.value) == (
        "engine.compile=True: expected a C++ compiler on the PATH (g++, or the one CXX names); "
        "nearest valid choice: engine.compile=false"
    )
    load("tiny", [*by_vllm, "deployment.device=cuda"])


def test_a_draft_made_for_another_policy_is_refused(tmp_path):
    config = json.loads((resolve_path("asset:tiny/eagle3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(ConfigError, match="made for hidden_size=128; expected 64"):
        load("tiny", [f"speculation.draft_path={tmp_path}"])


def test_a_reference_with_another_vocabulary_is_refused_if_it_is_used(tmp_path):
    config = json.loads((resolve_path("asset:tiny/policy") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    load("tiny", [f"model.reference_path={tmp_path}"])  # without a KL term it is not used
    load("tiny", ["model.reference_path=asset:tiny/policy", "rl.kl_coef=0.1"])
    with pytest.raises(
        ConfigError,
        match=f"model.reference_path='{tmp_path}': has vocab_size=128; expected {config['vocab_size']}, as in "
        f"model.path",
    ):
        load("tiny", [f"model.reference_path={tmp_path}", "rl.kl_coef=0.1"])


def test_defaults_file_and_overrides_are_merged_in_this_order(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 7\ntrainer:\n  optimizer:\n    lr: 0.5\n")
    config = load(str(path), ["trainer.optimizer.lr=1e-4", "run_dir=2026"])
    assert (config.steps, config.trainer.optimizer.lr, config.rl.group_size, config.run_dir) == (7, 1e-4, 8, "2026")


def test_the_resolved_configuration_loads_back_unchanged(tmp_path):
    config = load("tiny", ["seed=5", "rl.kl_coef=0.25"])
    assert from_yaml(to_yaml(config)) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(str(tmp_path / "config.yaml")) == config


def test_every_shipped_config_loads_or_names_the_model_the_user_must_supply():
    """test_topology.py loads the configs that name a model, with a model."""
    for path in CONFIG_DIR.glob("*.yaml"):
        if "models/" not in path.read_text():
            load(path.stem)
            continue
        with pytest.raises(
            ConfigError, match="^model.path='models/[^']*': expected a Hugging Face directory, with config.json"
        ):
            load(path.stem)


@pytest.mark.slow
def test_damaged_configurations_are_refused_in_one_line_or_load_as_written():
    """A shorter version of `bench fuzz`."""
    from asyncspec.bench.fuzz import fuzz_configs

    counts = fuzz_configs(np.random.default_rng(4), 200)
    assert counts["crashes"] == counts["silent"] == 0 and counts["refused"] > 100


@pytest.mark.parametrize(
    "override", ["engine.compile=1", "steps=true", "steps=!!python/object:os.system {}", "engine.compile='yes'"]
)
def test_booleans_are_not_numbers_and_yaml_tags_are_not_executed(override):
    with pytest.raises(ConfigError) as error:
        load("tiny", [override])
    assert override.split("=")[0] in str(error.value) and "\n" not in str(error.value)


def test_a_reference_policy_with_too_few_positions_is_refused(tmp_path):
    source = resolve_path("asset:tiny/policy")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load("tiny", [f"model.reference_path={tmp_path}"])  # not read without a KL term
    with pytest.raises(ConfigError, match="has 200 positions; expected at least 416, .*max_response_tokens=104"):
        load("tiny", [f"model.reference_path={tmp_path}", "rl.kl_coef=0.1"])


def test_a_configuration_that_cannot_fit_the_memory_is_refused():
    from asyncspec.launch.machine import check_memory

    check_memory(load("tiny"), total=8e9)
    with pytest.raises(ConfigError, match=r"engine.slots=60000: the actors need at least .*nearest.*engine.slots=\d+"):
        check_memory(load("tiny", ["engine.slots=60000", "speculation.method=none"]), total=8e9)
    fits = load("tiny", ["engine.slots=5000", "speculation.method=none"])
    check_memory(fits, total=24e9)
