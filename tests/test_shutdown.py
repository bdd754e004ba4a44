"""torchrun kills its workers some time after an interrupt: a run says so if that is too early for its checkpoint."""

import os
import subprocess

import pytest
from runs import TORCHRUN

from asyncspec.config import load, work
from asyncspec.launch import torchrun

WORKER = "from asyncspec.launch import torchrun; print('told', torchrun.shutdown_s(), flush=True)\n"


@pytest.mark.parametrize(
    "flags,environment,told",
    [
        ((), {}, "30.0"),
        (("--shutdown-timeout", "77"), {}, "77.0"),
        (("--shutdown_timeout=78",), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, "78.0"),
        ((), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, "600.0"),
    ],
    ids=["default", "flag", "flag and variable", "variable"],
)
@pytest.mark.slow
def test_a_worker_finds_torchruns_shutdown_timeout(tmp_path, flags, environment, told):
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "worker.sh").write_text(f"python {tmp_path}/worker.py; true\n")
    command = [*TORCHRUN, *flags, "--no-python", "bash", str(tmp_path / "worker.sh"), "--steps", "3"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert f"told {told}\n" in done.stdout, done.stdout + done.stderr


def test_a_run_that_torchrun_would_kill_too_early_says_so_in_one_line(monkeypatch):
    config, said = load("tiny", ["deployment.disk_mb_s=100"]), []
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    torchrun.warn(config, said.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    torchrun.warn(config, said.append)  # the default job needs less than the 30 s that are torchrun's default
    assert work.stop_s(config) < 30 and not said
    config.deployment.stop_timeout_s = 300.0
    torchrun.warn(config, said.append)
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("torchrun kills its workers 30 s after it is interrupted, and this run may need 30")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", said[0].rsplit(" ", 1)[1])
    torchrun.warn(config, said.append)  # with what it expects, it is content
    assert len(said) == 1
