"""asyncspec plan: its choices, the configuration that it writes, and what it refuses."""

import json

import pytest

from asyncspec import config as configuration
from asyncspec.cli import main
from asyncspec.config import resolve_path, topology

SMALL = ["plan", "--model", "Qwen/Qwen3-8B", "--hardware", "H100", "--gpus", "8", "--prompts", "16"]


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
        (["--gpus", "2"], "--gpus 2: expected 3 or more"),
        (["--gpus", "20"], "--gpus 20: expected whole nodes of 8; nearest valid choice: --gpus 16"),
        (["--hardware", "H10"], "--hardware H10: expected one of"),
        (["--model", "Qwen/Qwen4"], "--model Qwen/Qwen4: expected a directory"),
        (["--model", "Qwen/Qwen3-235B-A22B"], "does not fit on so few H100"),
        (["--hardware", "A100", "--precision", "fp8"], "--precision fp8: expected bfloat16 on A100"),
        (["--acceptance", "5"], "--acceptance 5.0: expected more than 1, and at most 4"),
        (["--tokens", "20000"], "--tokens 20000.0: expected 1 to less than --most-tokens 16384"),
        (["--hardware", "this"], "--hardware this: expected --run RUN"),
        (["--hardware", "this", "--run", "nowhere"], "--run nowhere: it has no calibration.json"),
    ],
)
def test_bad_input_gets_one_line(flags, said, capsys):
    assert main([*SMALL, *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
