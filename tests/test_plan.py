"""asyncspec plan: its choices, the configuration that it writes, and what it refuses."""

import json
import re

import pytest

from asyncspec import config as configuration
from asyncspec.cli import main
from asyncspec.commands.plan import _nodes
from asyncspec.config import resolve_path, topology
from asyncspec.simulate.devices import gpu, known_model
from asyncspec.simulate.planner import Job, choices
from asyncspec.simulate.workload import Acceptance, Lengths

SMALL = [
    "plan",
    "--model",
    "Qwen/Qwen3-8B",
    "--hardware",
    "H100",
    "--gpus",
    "8",
    "--prompts",
    "16",
    "--group-size",
    "8",
]


@pytest.mark.parametrize("gpus, hardware", [("8", "H100"), ("32", "GB200")])
def test_the_plan_uses_all_gpus_within_the_lag(tmp_path, capsys, gpus, hardware):
    assert main([*SMALL, "--hardware", hardware, "--gpus", gpus, "--out", str(tmp_path)]) == 0
    assert f"{gpus} {hardware}, policy lag 1" in capsys.readouterr().out
    found = configuration.from_yaml((tmp_path / "plan.yaml").read_text())
    best = json.loads((tmp_path / "plan.json").read_text())[0]
    choice, roles = best["choice"], topology.total(topology.parse(found.deployment.nodes))
    assert choice["trainers"] + choice["logprobs"] + choice["replicas"] * choice["degree"] == int(gpus)
    assert roles["generator"] == choice["replicas"] * found.engine.tensor_parallel
    assert (
        roles["logprob"] % found.logprob.ranks == 0
        and best["oldest"] <= 1
        and (tmp_path / "plan.png").stat().st_size > 10_000
    )


def test_a_run_can_be_started_with_the_written_configuration(tmp_path):
    """With files in place of those that the user supplies."""
    policy = str(resolve_path("asset:tiny/policy"))
    assert (
        main(
            [*SMALL, "--model", policy, "--gpus", "4", "--tokens", "90", "--most-tokens", "300", "--out", str(tmp_path)]
        )
        == 0
    )
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    overrides = [f"data.train_file={data}", f"data.eval_file={data}", "speculation.draft_path="]
    found = configuration.load(str(tmp_path / "plan.yaml"), overrides)
    assert found.trainer.ranks + found.deployment.logprobs + found.deployment.generators == 4
    assert found.model.path == policy and found.policy_lag == 1


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--gpus", "2"], "--gpus 2: expected 3 to 16384"),
        (["--gpus", "20"], "--gpus 20: expected whole nodes of 8; nearest valid choice: --gpus 16"),
        (["--hardware", "H10"], "--hardware H10: expected one of"),
        (["--model", "Qwen/Qwen4"], "--model Qwen/Qwen4: expected a directory"),
        (["--model", "Qwen/Qwen3-235B-A22B"], "does not fit on so few H100"),
        (["--hardware", "A100", "--precision", "fp8"], "--precision fp8: expected bfloat16 on A100"),
        (["--acceptance", "5"], "--acceptance 5.0: expected more than 1, and at most 4"),
        (["--tokens", "20000"], "--tokens 20000.0: expected 1 to less than --most-tokens 16384"),
        (["--gpus", "12"], "--gpus 12: expected whole nodes of 8"),
        (["--most-tokens", "-1"], "--most-tokens -1: expected 2 to"),
        (["--prompts", "1000000"], "--prompts 1000000: expected 1 to 65536"),
        (["--lag", "17"], "--lag 17: expected 0 to 16"),
        (["--run", "runs/x"], "--run runs/x: expected it with --hardware this only"),
        (["--hardware", "this"], "--model Qwen/Qwen3-8B: expected no such flag with --hardware this"),
    ],
)
def test_bad_input_gets_one_line(flags, said, capsys, tmp_path):
    assert main([*SMALL, "--out", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--hardware", "this"], "--hardware this: expected --run RUN"),
        (["--hardware", "this", "--run", "nowhere"], "--run nowhere: it has no calibration.json"),
        (["--hardware", "this", "--run", "nowhere", "--lag", "-1"], "--lag -1: expected 0 to 16"),
    ],
)
def test_a_plan_for_this_machine_needs_a_calibrated_run(flags, said, capsys, tmp_path):
    assert main(["plan", *flags, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_file_in_place_of_the_directory_is_refused_before_the_search(tmp_path, capsys):
    (tmp_path / "plan").write_text("")
    assert main([*SMALL, "--out", str(tmp_path / "plan")]) == 2
    assert "File exists; expected a directory to write to" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--lag", "8"], ["--sigma", "0"], ["--lag", "0"], ["--acceptance", "1.01"]])
def test_the_best_choice_comes_first_whether_it_speculates_or_not(tmp_path, flags, capsys):
    assert main([*SMALL, "--tokens", "1000", "--most-tokens", "4000", *flags, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [each["step_s"] for each in found] == sorted(each["step_s"] for each in found)
    assert all(each["limit"] != "training" or each["train_s"] > 0.7 * each["step_s"] for each in found)
    if flags[0] == "--acceptance":
        assert found[0]["choice"]["draft_length"] == 0


@pytest.mark.parametrize("gpus, name", [(16, "H100"), (24, "H100"), (8, "GB200"), (64, "GB200")])
def test_no_node_has_more_actors_than_gpus(gpus, name):
    for choice in choices(job_of(gpus, name)):
        nodes = topology.parse(_nodes(choice, gpu(name).gpus_per_node))
        assert all(sum(node.values()) <= max(choice.degree, gpu(name).gpus_per_node) for node in nodes)
        assert all(node.get("generator", 0) % choice.degree == 0 for node in nodes)
        roles = topology.total(nodes)
        assert (roles["trainer"], roles["logprob"]) == (choice.trainers, choice.logprobs)
        assert roles["generator"] == choice.replicas * choice.degree


def job_of(gpus, name):
    lengths, acceptance = Lengths(1000, 0.5, 4000), Acceptance.of_length(2.8, 3)
    return Job(known_model("Qwen/Qwen3-8B"), gpu(name), gpus, 1, 16, 8, lengths, 200.0, "eagle3", acceptance)


def test_a_shipped_configuration_is_predicted_without_its_files(capsys, tmp_path):
    """The slower of the trainer and the engines sets the step. With fewer GPUs that train, it is longer."""
    steps = []
    for number, nodes in enumerate(("4*trainer:5+logprob:3,12*generator:8", "4*trainer:2+logprob:6,12*generator:8")):
        text = (configuration.CONFIG_DIR / "qwen3_8b_12plus4.yaml").read_text()
        assert "nodes: 4*trainer:5+logprob:3,12*generator:8\n" in text
        (tmp_path / f"{number}.yaml").write_text(text.replace("4*trainer:5+logprob:3,12*generator:8", nodes))
        flags = ["--config", str(tmp_path / f"{number}.yaml"), "--model", "Qwen/Qwen3-8B", "--hardware", "H200"]
        assert main(["plan", *flags, "--tokens", "6000"]) == 0
        said = capsys.readouterr().out
        assert "on 128 H200, policy lag 1" in said and "A generator has 48 slots, of which the lag fills 32." in said
        steps.append([float(value) for value in re.findall(r"│ +([0-9.]+) │ +([0-9.]+) │", said)[0]])
    (balanced, training), (slow, slow_training) = steps
    assert training <= balanced < 1.1 * training and slow_training == pytest.approx(2.5 * training, abs=0.2)
    assert slow == pytest.approx(slow_training, rel=0.05)
    assert not list(tmp_path.glob("plan*"))


def test_a_configuration_that_cannot_be_predicted_is_refused(capsys):
    flags = ["--model", "Qwen/Qwen3-8B", "--hardware", "H200"]
    assert main(["plan", "--config", "tiny", *flags]) == 2
    assert "--config tiny: engine.kind=torch: expected vllm, which is simulated" in capsys.readouterr().err
    assert main(["plan", "--config", "qwen3_8b", *flags]) == 2
    assert "--config qwen3_8b: no such file; expected a YAML file or one of" in capsys.readouterr().err
    assert main(["plan", "--config", "qwen3_8b_8gpu", *flags, "--group-size", "4"]) == 2
    assert "--group-size 4: expected no such flag with --config, which says it" in capsys.readouterr().err


@pytest.mark.parametrize("change, said", [("method: ngram", "speculation.method=ngram: expected eagle3, mtp, none")])
def test_a_configuration_is_not_predicted_as_another_one(change, said, tmp_path, capsys):
    text = (configuration.CONFIG_DIR / "qwen3_8b_8gpu.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text.replace("method: eagle3", change))
    flags = ["--config", str(tmp_path / "own.yaml"), "--model", "Qwen/Qwen3-8B", "--hardware", "A100"]
    assert main(["plan", *flags]) == 2 and said in capsys.readouterr().err
    # the KV cache may be in 8 bits where weights are not
    (tmp_path / "own.yaml").write_text(text.replace("compile: true", 'compile: true\n  vllm: "{kv_cache_dtype: fp8}"'))
    assert main(["plan", *flags, "--tokens", "100"]) == 0
