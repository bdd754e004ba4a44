"""Models and data by their names on a Hugging Face hub. The hub is a server of the test's own, see mock_hub.py."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mock_hub import files_of

from asyncspec.config import from_yaml, resolve_path
from asyncspec.config.hub import HubName
from asyncspec.config.transfer import interruptible

TINY = files_of(resolve_path("asset:tiny/policy"))
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
SMALL = ["data.train_prompts=64", "data.eval_prompts=8", "rl.groups_per_step=2", "rl.group_size=2"]
# Prints for each list of overrides what the fields are, or the error.
LOAD = """
import json, sys
from asyncspec.config import ConfigError, data_files, load, resolve_path
for overrides in json.loads(sys.argv[1]):
    try:
        c = load("tiny", overrides)
        print(json.dumps([c.model.path, str(resolve_path(c.model.path)), c.data.train_file,
                          [str(file) for file in data_files(c.data.train_file)]]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def jsonl(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def loaded(user):
    """Loads a configuration for each list of overrides; returns what LOAD prints."""

    def load(*overrides, **changed) -> list:
        done = user("-c", LOAD, json.dumps(overrides), **changed)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return load


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "main", "")),
        ("Qwen/Qwen3-0.6B@v1.0", ("Qwen/Qwen3-0.6B", "v1.0", "")),
        ("Qwen/Qwen3-0.6B@refs/pr/3", ("Qwen/Qwen3-0.6B", "refs/pr/3", "")),
        ("hf://datasets/a/b/c.csv", ("a/b", "main", "c.csv")),
        ("hf://datasets/a/b@v2/data/t-*.parquet", ("a/b", "v2", "data/t-*.parquet")),
        ("hf://datasets/a/b@refs/convert/parquet/main/0.parquet", ("a/b", "refs/convert/parquet", "main/0.parquet")),
    ],
)
def test_names_on_a_hub_are_parsed_and_written(text, expected):
    name = HubName.parse(text)
    assert name == expected and HubName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["", "model", "asset:tiny/policy", "./a/b", "../b", "~/b", "/a/b", "a/b/c", "a/b/", "a//b", "a/.b", "a--b/c"]
    + ["a/b@../../c", "a/b@", "hf://a/b", "hf://datasets/a/b", "hf://datasets/a/b/../c.csv", "https://a/b", "a/b.git"],
)
def test_other_texts_are_no_names_on_a_hub(text):
    assert HubName.parse(text) is None


def test_only_the_files_that_a_model_needs_are_downloaded(hub, loaded, tmp_path):
    more = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"x", "consolidated.safetensors": b"x"}
    sha = hub.commit("acme/tiny", TINY | more | {"LICENSE": b"free", "onnx/model.safetensors": b"x"})
    [(path, folder, *_)] = loaded(["model.path=acme/tiny"])
    assert path == f"acme/tiny@{sha}"
    assert files_of(Path(folder)) == TINY | {"LICENSE": b"free"}
    assert hub.fetched("acme/tiny") == {*TINY, "LICENSE"}


def test_shards_are_those_that_the_index_names(hub, loaded):
    shards = {f"model-0000{i}-of-00002.safetensors": b"x" for i in (1, 2)}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../../model.safetensors"}}
    files = {name: TINY[name] for name in TINY if name != "model.safetensors"}
    hub.commit("acme/sharded", files | shards | {"model.safetensors.index.json": json.dumps(index).encode()})
    loaded(["model.path=acme/sharded"])
    assert hub.fetched("acme/sharded") - {*files} == {
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    }


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, loaded):
    old = hub.commit("acme/tiny", TINY | {"LICENSE": b"old"}, "v1", "feature/x")
    new = hub.commit("acme/tiny", TINY | {"LICENSE": b"new"})
    found = loaded(*([f"model.path=acme/tiny{at}"] for at in ("", "@main", "@v1", "@feature/x", f"@{old}")))
    assert [path for path, *_ in found] == [f"acme/tiny@{sha}" for sha in (new, new, old, old, old)]
    assert [(Path(folder) / "LICENSE").read_text() for _, folder, *_ in found] == ["new", "new", "old", "old", "old"]


def test_the_second_time_needs_no_hub(hub, loaded):
    hub.commit("acme/tiny", TINY, "v1")
    hub.commit("datasets/acme/sums", {"train.jsonl": jsonl(ROWS)})
    names = ["model.path=acme/tiny", "data.train_file=hf://datasets/acme/sums/train.jsonl"]
    [first] = loaded(names)
    commits = [f"model.path={first[0]}", f"data.train_file={first[2]}"]
    asked = len(hub.asked)
    assert loaded(commits) == [first]
    assert [path for path in hub.asked[asked:] if "acme" in path] == []  # a commit never changes
    asked = len(hub.asked)
    *found, refused = loaded(names, commits, ["model.path=acme/tiny@v1"], HF_HUB_OFFLINE="1")
    assert found == [first, first] and "there is no such directory, and HF_HUB_OFFLINE is set" in refused
    assert loaded(names, commits, HF_ENDPOINT="http://127.0.0.1:9") == [first, first]
    assert len(hub.asked) == asked


def test_what_exists_here_is_no_name_on_a_hub(hub, loaded, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    for name, content in TINY.items():
        (tmp_path / "acme" / "tiny" / name).write_bytes(content)
    assert loaded(["model.path=acme/tiny"]) == [["acme/tiny", "acme/tiny", "", []]]
    assert hub.asked == []


def test_wildcards_name_the_files_of_a_split_in_order(hub, user, loaded):
    parts = {f"data/train-{i}.jsonl": jsonl(ROWS[8 * i : 8 * i + 8]) for i in range(3)}
    sha = hub.commit("datasets/acme/sums", parts | {"data/test-0.jsonl": jsonl(ROWS[60:]), "load.py": b"exit()"})
    [(_, _, name, files)] = loaded(["data.train_file=hf://datasets/acme/sums/data/train-*.jsonl"])
    assert name == f"hf://datasets/acme/sums@{sha}/data/train-*.jsonl"
    assert [Path(file).read_bytes() for file in files] == [*parts.values()]
    assert hub.fetched("datasets/acme/sums") == {*parts}
    rows = (
        "import sys; from asyncspec.config import DataConfig; from asyncspec.tasks.data import load_rows\n"
        "for row in load_rows('rows', sys.argv[1], DataConfig()): print(row.prompt, row.where)"
    )
    lines = user("-c", rows, name).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [row["prompt"] for row in ROWS[:24]]
    assert lines[8].endswith("rows: train-1.jsonl: line 1")
    (Path(files[1])).unlink()
    [refused] = loaded([f"data.train_file={name}"], HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, while the cache" in refused


NEITHER = (
    "expected a Hugging Face directory, with config.json in it, or a model on a hub; there is no such directory, and "
)


def test_each_mistake_is_one_line(hub, loaded):
    hub.commit("acme/tiny", TINY)
    hub.commit("acme/gated", TINY)
    hub.gated.add("acme/gated")
    hub.commit("acme/pickled", {name: TINY[name] for name in TINY if "safe" not in name} | {"pytorch_model.bin": b"x"})
    hub.commit("acme/quantized", {"q4.gguf": b"x"})
    hub.commit("datasets/acme/sums", {"train.jsonl": jsonl(ROWS), "test.csv": b""})
    unknown = f"{NEITHER}{hub.url} has no such model, or a private one, which needs HF_TOKEN"
    cases = {
        "model.path=models/Qwen3-0.6": unknown,
        "model.reference_path=acme/none": unknown,
        "speculation.draft_path=acme/none": unknown,
        "model.path=acme/tiny@v9": "acme/tiny has no revision 'v9'; expected a branch, a tag or a commit",
        "model.path=acme/gated": f"is gated; expected you to accept its conditions on {hub.url}/acme/gated, and to set "
        "HF_TOKEN",
        "model.path=acme/pickled": "has no model.safetensors, only pytorch_model.bin; expected safetensors; "
        "transformers' save_pretrained writes them",
        "model.path=acme/quantized": "has no config.json; expected a model in the layout of transformers",
        f"model.path=acme/tiny@{'0' * 40}": f"acme/tiny has no revision '{'0' * 40}'; expected a branch, a tag or a "
        "commit",
        "model.path=hf://datasets/acme/sums/train.jsonl": "expected a Hugging Face directory, with config.json in it, "
        "or a model on a hub, OWNER/NAME; create it, or name another; model.path=asset:tiny/policy is the shipped one",
        "model.path=a/b/c": "expected a Hugging Face directory, with config.json in it, or a model on a hub, "
        "OWNER/NAME; create it, or name another; model.path=asset:tiny/policy is the shipped one",
        "data.train_file=hf://datasets/acme/none/a.csv": f"{hub.url} has no data set acme/none, or a private one, "
        "which needs HF_TOKEN",
        "data.train_file=hf://datasets/acme/sums/a.csv": "has no such file; it has test.csv, train.jsonl",
        "data.train_file=hf://datasets/acme/sums/a.py": "expected a file that ends in .jsonl, .json, .parquet, .csv",
        "data.train_file=hf://acme/sums/a.csv": "expected hf://datasets/OWNER/NAME@REVISION/FILE",
        "data.train_file=acme/sums": "no such file; expected JSONL, Parquet or CSV, or hf://datasets/OWNER/NAME"
        "@REVISION/FILE",
    }
    for override, said in zip(cases, loaded(*([override] for override in cases))):
        field, _, value = override.partition("=")
        if "pickled" not in said:  # that name has its commit by then
            assert said == f"{field}={value!r}: {cases[override]}"
        assert said.endswith(cases[override]) and "\n" not in said


def test_a_hub_out_of_reach_is_one_line(hub, loaded, tmp_path):
    hub.commit("acme/tiny", TINY)
    for changed, expected in (
        ({"HF_HUB_OFFLINE": "1"}, f"{NEITHER}HF_HUB_OFFLINE is set, while the cache"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, f"{NEITHER}http://127.0.0.1:9 cannot be reached, while the cache"),
    ):
        [said] = loaded(["model.path=models/Qwen3-0.6"], **changed)
        assert said.startswith(f"model.path='models/Qwen3-0.6': {expected}") and "\n" not in said
    hub.down.add("acme/down")
    hub.commit("acme/down", TINY)
    [said] = loaded(["model.path=acme/down"])
    assert said == f"model.path='acme/down': {hub.url} answers with status 503; try again later"
    commit = f"acme/tiny@{'0' * 40}"
    [said] = loaded([f"model.path={commit}"], HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith(f"model.path={commit!r}: ") and "onnect" in said and "\n" not in said
    (tmp_path / "file").touch()
    [said] = loaded(["model.path=acme/tiny"], HF_HOME=str(tmp_path / "file"))
    assert f"the cache {tmp_path}/file/hub: Not a directory; expected" in said and "HF_HOME of another cache" in said


def test_a_full_disk_is_one_line(hub, user):
    """A limit on the size of files stands in for the disk."""
    hub.commit("acme/tiny", TINY)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + LOAD
    said = json.loads(user("-c", limited, json.dumps([["model.path=acme/tiny"]])).stdout)
    assert "hub: File too large; expected a directory to write to, or HF_HOME of another cache" in said


def test_weights_are_downloaded_after_everything_is_checked(hub, loaded):
    config = json.loads(TINY["config.json"]) | {"model_type": "gpt2"}
    hub.commit("acme/other", TINY | {"config.json": json.dumps(config).encode()})
    hub.commit("acme/tiny", TINY)
    tiny, other = "model.path=acme/tiny", "model.path=acme/other"
    refused = loaded([tiny, "steps=0"], [tiny, "sampling.max_response_tokens=9999"], [other])
    assert all(isinstance(said, str) for said in refused)
    assert "config.json" in hub.fetched("acme/tiny") & hub.fetched("acme/other")
    assert "model.safetensors" not in hub.fetched("acme/tiny") | hub.fetched("acme/other")


def test_a_resumed_run_keeps_its_commit_when_the_branch_has_moved(hub, user, tmp_path):
    old = hub.commit("acme/tiny", TINY)
    begin = (
        "import sys; from asyncspec.config import load; from asyncspec.launch.roles import prepare_run_dir\n"
        "prepare_run_dir(load('tiny', ['run_dir=run', *sys.argv[1:]]))"
    )
    hub.commit("datasets/acme/sums", {"train.jsonl": jsonl(ROWS)})
    data = ["data.train_file=hf://datasets/acme/sums/train.jsonl", "speculation.method=none"]
    done = user("-c", begin, "model.path=acme/tiny", *data)
    assert done.returncode == 0, done.stderr
    config = from_yaml((tmp_path / "run" / "config.yaml").read_text())
    assert config.model.path == f"acme/tiny@{old}"
    hub.commit("acme/tiny", TINY | {"LICENSE": b"new"})
    hub.commit("datasets/acme/sums", {"train.jsonl": jsonl(ROWS[1:])})
    resume = (
        "from asyncspec.config import to_yaml; from asyncspec.launch.resume import configure\n"
        "from asyncspec.launch import fingerprints\n"
        "config = configure('run', None, ['steps=200']); fingerprints.compare(config); print(to_yaml(config))"
    )
    done = user("-c", resume)
    resumed = from_yaml(done.stdout)
    assert (resumed.model, resumed.data, resumed.steps) == (config.model, config.data, 200), done.stderr


def test_another_rank_takes_the_first_ranks_commit(hub, user):
    old = hub.commit("acme/tiny", TINY)
    code = (
        "import sys; from asyncspec.config import hub_names, load, resolve_path, use_names\n"
        "c = load('tiny', ['model.path=acme/tiny']); use_names(c, {'model.path': sys.argv[1]})\n"
        "print(hub_names(c), (resolve_path(c.model.path) / 'model.safetensors').is_file())"
    )
    hub.commit("acme/tiny", TINY | {"LICENSE": b"new"})
    done = user("-c", code, f"acme/tiny@{old}")
    assert done.stdout == f"{{'model.path': 'acme/tiny@{old}'}} True\n", done.stderr


def test_an_interrupt_ends_a_download_at_once(hub, environment):
    hub.commit("acme/tiny", TINY)
    hub.slow_s = 60.0
    command = [sys.executable, "-m", "asyncspec", "data", "show", "model.path=acme/tiny"]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not any(path.startswith("GET /acme/tiny/resolve") for path in hub.asked):
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.05)
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130 and child.stderr.read() == "asyncspec data: interrupted\n"
    assert time.monotonic() - began < 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_loses_is_not_lost():
    class Destroyed:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with interruptible() as check:
        check()
        one = Destroyed()
        del one  # nobody sees what a destructor raises
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_commands_take_names_on_a_hub(hub, user):
    hub.commit("acme/tiny", TINY)
    hub.commit("datasets/acme/sums", {"train.jsonl": jsonl(ROWS)})
    data = "data.train_file=hf://datasets/acme/sums/train.jsonl"
    shown = user(
        "-m", "asyncspec", "data", "show", "model.path=acme/tiny", data, "--count=1", "speculation.method=none"
    )
    assert shown.returncode == 0 and "sums" in shown.stdout and "prompt 1" in shown.stdout, shown.stderr
    refused = user("-m", "asyncspec", "draft", "train", "--policy", "acme/none", "--out", "draft")
    assert refused.returncode == 2 and refused.stderr.startswith("asyncspec: draft train: --policy 'acme/none': ")
    assert "there is no such directory" in refused.stderr and refused.stderr.count("\n") == 1


def test_a_model_on_a_hub_is_served(hub, user):
    sha = hub.commit("acme/tiny", TINY)
    code = (
        "from asyncspec.commands.serve import configuration, _name\n"
        "c = configuration('acme/tiny', ['engine.slots=2'])\n"
        "print(c.model.path, _name('acme/tiny@main'), c.speculation.method, c.engine.slots, c.engine.max_prompt_tokens)"
    )
    done = user("-c", code)
    assert done.stdout == f"acme/tiny@{sha} acme/tiny ngram 2 240\n", done.stderr
    refused = user("-m", "asyncspec", "serve", "acme/none", "--port", "0")
    assert refused.returncode == 2 and refused.stderr.startswith("asyncspec: CHECKPOINT 'acme/none': ")
    assert refused.stderr.count("\n") == 1


@pytest.mark.slow
def test_doctor_and_training_take_names_on_a_hub(hub, user, tmp_path):
    hub.commit("acme/tiny", TINY | {"LICENSE": b"free", "modeling.py": b"exit()"})
    hub.commit("datasets/acme/sums", {"train.jsonl": jsonl(ROWS)})
    names = ["model.path=acme/tiny", "data.train_file=hf://datasets/acme/sums/train.jsonl", "speculation.method=ngram"]
    checked = user("-m", "asyncspec", "doctor", *names)
    assert checked.returncode == 0 and "all checks passed" in checked.stdout, checked.stdout + checked.stderr
    done = user("-m", "asyncspec", "train", "--steps", "1", "--run-dir", "run", *names, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    export = tmp_path / "run" / "checkpoint" / "policy"
    assert {*files_of(export)} == {*TINY, "LICENSE"} and not any(file.is_symlink() for file in export.iterdir())
    hub.commit("acme/tiny", {"config.json": b"{}"})
    again = user("-m", "asyncspec", "train", "--resume", "run", "steps=2")
    assert again.returncode == 0, again.stdout + again.stderr
    from asyncspec.models import policy

    policy.load(export)
