"""Pushes to a hub, a server of the test's own, see mock_hub.py."""

from pathlib import Path

import pytest
from mock_hub import files_of
from runs import SMALL
from test_export_command import learned

EXPORT = ("-m", "asyncspec", "export", "run", "--push")
# Pushes a directory, or prints why not.
PUSH = """
import sys; from pathlib import Path
from asyncspec.errors import UserError; from asyncspec.launch.push import push
try:
    print(push("--push ", sys.argv[1], Path("files"), "message"))
except UserError as error:
    print(error)
"""


def test_an_export_is_pushed_and_comes_back(hub, user, tmp_path):
    learned(tmp_path / "run", [1, 2])
    hub.tokens["hf_good"] = "acme"
    lfs = {"HF_TOKEN": "hf_good", "HF_HUB_DISABLE_XET": "1"}
    done = user(*EXPORT, "acme/sums", "--private", **lfs)
    folder = tmp_path / "run" / "exports" / "step-2"
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith(f"pushed to {hub.url}/acme/sums\n")
    [pushed] = hub.pushed
    assert pushed["summary"] == "Version 2 of the run run, trained with asyncspec" and hub.private["acme/sums"]
    assert hub.commits["acme/sums"][hub.refs["acme/sums", "main"]] == files_of(folder)
    assert pushed["paths"] == sorted(files_of(folder))
    came = user(
        "-c",
        "from asyncspec.config import load, resolve_path as path; print(path(load('tiny', "
        "['model.path=acme/sums']).model.path))",
    )
    assert files_of(Path(came.stdout.strip())) == files_of(folder), came.stderr
    again = user(*EXPORT, "acme/sums", "--version", "1", **lfs)  # into the repository that there is
    assert again.returncode == 0 and [each["summary"][:9] for each in hub.pushed] == ["Version 2", "Version 1"]


def test_a_push_that_cannot_be_is_one_line(hub, user, tmp_path):
    learned(tmp_path / "run", [1])
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.safetensors").write_bytes(b"weights")
    hub.tokens["hf_good"] = "acme"
    hub.down.add("acme/down")
    good, lfs = {"HF_TOKEN": "hf_good"}, {"HF_HUB_DISABLE_XET": "1"}
    refuses = f"{hub.url} refuses the token (status %s); expected one that may write there, in HF_TOKEN"
    cases = [
        ("acme", good, "expected OWNER/NAME of a model's repository, for example acme/sums-1"),
        ("acme/sums@v1", good, "expected OWNER/NAME of a model's repository, for example acme/sums-1"),
        ("acme/sums", {}, f"no token for {hub.url}; expected one that may write, in HF_TOKEN, or from `hf auth login`"),
        ("acme/sums", {"HF_TOKEN": "hf_bad"}, refuses % 401),
        ("other/sums", good, refuses % 403),
        ("acme/down", good | lfs, f"{hub.url} answers with status 503"),
        ("acme/sums", good | {"HF_HUB_OFFLINE": "1"}, "expected a network, and no HF_HUB_OFFLINE"),
        ("acme/sums", good | {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached: "),
        ("acme/sums", good, "does not take uploads by Xet; expected HF_HUB_DISABLE_XET=1, for uploads by Git LFS"),
    ]
    for to, changed, expected in cases:
        done = user("-c", PUSH, to, **changed)
        assert expected in done.stdout and done.stdout.count("\n") == 1, done.stdout + done.stderr
    assert hub.pushed == []
    done = user(*EXPORT, "acme/sums")  # before it writes anything
    assert done.returncode == 2 and done.stderr.startswith("asyncspec: --push acme/sums: no token for ")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run" / "exports").exists()


@pytest.mark.slow
def test_a_run_pushes_its_result_and_survives_a_push_that_fails(hub, user, tmp_path):
    hub.tokens["hf_good"] = "acme"
    job = [
        "-m",
        "asyncspec",
        "train",
        "--steps",
        "1",
        "checkpoint.push_to=acme/sums",
        *SMALL,
        "speculation.method=ngram",
    ]
    refused = user(*job, "--run-dir", "none")
    assert refused.returncode == 2 and "checkpoint.push_to=acme/sums: no token" in refused.stderr
    lfs = {"HF_TOKEN": "hf_good", "HF_HUB_DISABLE_XET": "1"}
    done = user(*job, "--run-dir", "run", **lfs)
    assert done.returncode == 0 and done.stdout.endswith(f"pushed to {hub.url}/acme/sums\n"), done.stdout + done.stderr
    assert hub.private["acme/sums"] and hub.pushed[0]["summary"] == "Version 1 of the run run, trained with asyncspec"
    done = user(*job, "--run-dir", "again", **lfs | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 0 and (tmp_path / "again" / "checkpoint" / "policy").is_dir()
    last = done.stdout.splitlines()[-1]
    assert last.startswith("not pushed: checkpoint.push_to=acme/sums: http://127.0.0.1:9 cannot be reached")
    assert last.endswith(f"to push it: asyncspec export {tmp_path}/again --push acme/sums --private")
