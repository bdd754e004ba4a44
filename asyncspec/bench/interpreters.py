"""Environments of other libraries, for the benchmarks that compare with them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from asyncspec.config import PACKAGE_DIR
from asyncspec.errors import UserError

SCRIPTS = PACKAGE_DIR.parent / "scripts" / "compare"


def variable(name: str) -> str:
    """Return the environment variable that names the interpreter of an environment."""
    return f"ASYNCSPEC_{name.upper()}_PYTHON"


def interpreter(name: str, out: Path) -> str:
    """Return the interpreter of an environment that make_environments.sh makes: vllm, transformers or trl. It is made
    in `out`, unless it is there or its variable is set.

    Raises:
        UserError: it could not be made, or the variable names none.
    """
    if python := os.environ.get(variable(name)):
        if not (Path(python).is_file() and os.access(python, os.X_OK)):
            raise UserError(f"{variable(name)}={python}: expected the interpreter of an environment with {name}")
        return os.path.abspath(python)  # not resolved: a virtual environment is known by the path of its interpreter
    python, whole = out / name / "bin" / "python", out / name / "complete"
    if not whole.exists():
        print(f"makes an environment with {name} in {out}, about 5 minutes; or set {variable(name)}")
        shutil.rmtree(out / name, ignore_errors=True)  # of a sitting that was cut short
        if subprocess.run(["bash", str(SCRIPTS / "make_environments.sh"), str(out), name]).returncode:
            raise UserError(f"no environment with {name}; set {variable(name)} to the interpreter of one")
        whole.touch()
    return os.path.abspath(python)
