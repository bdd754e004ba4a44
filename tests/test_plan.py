"""asyncspec plan: its choices, the configuration that it writes, and what it refuses."""

import json

import pytest

from asyncspec import config as configuration
from asyncspec.cli import main

SMALL = ["plan", "--model", "Qwen/Qwen3-8B", "--hardware", "H100", "--gpus", "8", "--prompts", "16"]


def test_the_written_configuration_is_valid_and_uses_all_gpus(tmp_path, capsys):
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert "policy lag 1" in capsys.readouterr().out
    (tmp_path / "data").mkdir()
    found = configuration.from_yaml((tmp_path / "plan.yaml").read_text())
    best = json.loads((tmp_path / "plan.json").read_text())[0]
    choice = best["choice"]
    assert choice["trainers"] + choice["logprobs"] + choice["replicas"] * choice["degree"] == 8
    assert found.engine.tensor_parallel == choice["degree"] and found.deployment.generators == choice["replicas"]
    assert best["oldest"] <= 1 and (tmp_path / "plan.png").stat().st_size > 10_000


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
