"""Each example runs as it stands, cut to few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["rl.groups_per_step=4", "data.eval_prompts=8"]


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(path.parent.name for path in (ROOT / "examples").glob("*/run.sh")))
def test_an_example_runs(example, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "RUN": str(tmp_path / "run"), "MINUTES": "0.05", "DRAFT": str(tmp_path)}
    command = ["bash", str(ROOT / "examples" / example / "run.sh"), "--steps", "2", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "results in" in done.stdout
