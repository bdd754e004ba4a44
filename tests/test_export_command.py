"""`asyncspec export` and `checkpoint.export_every`: a Hugging Face directory of each version that was asked for."""

import json

import pytest
import torch
from directories import change_json, limited_files, transformers_model
from runs import Running, rows, train
from safetensors.torch import load_file

from asyncspec import cli
from asyncspec.config import load, resolve_path, to_yaml
from asyncspec.files import new_folder
from asyncspec.ledger import checkpoint, reading
from asyncspec.models import policy
from asyncspec.models.hf_files import read_tensors
from asyncspec.rl.learner import Learner
from asyncspec.timing.attribution import PARTS


def learned(run_dir, versions, *overrides):
    """Write a run's config.yaml, and checkpoints of versions that differ. Return the learner."""
    config = load("tiny", ["speculation.method=ngram", "checkpoint.keep=5", f"run_dir={run_dir}", *overrides])
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    learner = Learner(config, run_dir, "cpu")
    learner.load()
    mtp = None
    if config.draft_trainer == "trainer":
        from asyncspec.actors.mtp import MTPTrainer

        mtp = MTPTrainer(config, learner, "cpu")
    learner.join("", 0, 1.0)
    for version in versions:
        with torch.no_grad():
            for parameter in [*learner.model.parameters(), *(mtp.module.parameters() if mtp else ())]:
                parameter.add_(0.01 * version)
        learner.save(version)
        learner.checkpoints.saved(wait=True)
    learner.save_policy(lambda: learner.snapshot(export=True), mtp and mtp.module)
    return learner


def asked(capsys, *arguments):
    """Call the command; return its exit code and what it printed to standard output and standard error."""
    code = cli.main(["export", *map(str, arguments)])
    return code, *capsys.readouterr()


def files_of(directory):
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_an_export_of_a_checkpoint_is_the_directory_that_the_run_would_write(tmp_path, capsys):
    learned(tmp_path / "run", [1, 2])
    code, said, wrong = asked(capsys, tmp_path / "run")
    assert (code, wrong) == (0, "")
    folder = checkpoint.export_of(tmp_path / "run", 2)
    assert said == f"version 2 is in {folder} (4.8 MB, float32)\n"
    assert files_of(folder) == files_of(tmp_path / "run" / "checkpoint" / "policy")
    assert asked(capsys, tmp_path / "run")[0] == 0  # again, in its place
    assert [path.name for path in folder.parent.iterdir()] == ["step-2"]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_transformers_loads_an_export_and_gives_the_same_logits(tmp_path, capsys, kind):
    import transformers

    transformers_model(kind, tmp_path / "in", dtype="float32", tie_word_embeddings=False)
    change_json(tmp_path / "in" / "generation_config.json", temperature=0.6)
    limits = ["engine.max_prompt_tokens=32", "sampling.max_response_tokens=64"]
    learner = learned(tmp_path / "run", [1], f"model.path={tmp_path / 'in'}", *limits)
    out = tmp_path / "out"
    assert asked(capsys, tmp_path / "run", "--out", out)[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(learner.model(tokens), theirs(tokens).logits, atol=2e-4, rtol=1e-4)
    assert theirs.generation_config.temperature == 0.6
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template.startswith("{% for m in messages")


def test_a_version_and_a_dtype_can_be_chosen(tmp_path, capsys):
    learned(tmp_path / "run", [1, 2, 3])
    for version in 1, 3:
        out = tmp_path / f"out{version}"
        asked(capsys, tmp_path / "run", "--version", version, "--out", out, "--dtype", "bfloat16")
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    one, three = (load_file(tmp_path / f"out{version}" / "model.safetensors") for version in (1, 3))
    start = load_file(resolve_path("asset:tiny/policy") / "model.safetensors")
    name = "model.norm.weight"
    assert {tensor.dtype for tensor in one.values()} == {torch.bfloat16}
    torch.testing.assert_close(one[name], (start[name].float() + 0.01).bfloat16())
    torch.testing.assert_close(three[name], (start[name].float() + 0.06).bfloat16())


def test_an_export_has_the_mtp_module_that_was_trained_with_the_policy(tmp_path, capsys):
    learned(tmp_path / "run", [1], "speculation.method=mtp")
    assert asked(capsys, tmp_path / "run")[0] == 0
    exported = read_tensors(checkpoint.export_of(tmp_path / "run", 1))
    expected = read_tensors(tmp_path / "run" / "checkpoint" / "policy")
    before = read_tensors(resolve_path("asset:tiny/mtp"))
    assert {*exported} == {*expected} and any(name.startswith("mtp.") for name in exported)
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert not any(torch.equal(exported[name], before[name]) for name in before if name.startswith("mtp."))


def test_a_reader_needs_memory_for_a_part(tmp_path):
    learner = learned(tmp_path / "run", [1])
    wanted, path = dict(learner.model.named_parameters()), checkpoint.where(tmp_path / "run", "trainer", 1)
    longest = max(tensor.nbytes for tensor in wanted.values())
    parts = list(reading.parts(path, "trainer", wanted, part_bytes=longest))
    assert len(parts) > 3 and max(sum(t.nbytes for t in part.values()) for part in parts) < 2 * longest
    found = {name: tensor for part in parts for name, tensor in part.items()}
    assert [*found] == [*wanted] and all(torch.equal(found[name], wanted[name].detach()) for name in wanted)


def test_each_mistake_is_one_line(tmp_path, capsys):
    run = tmp_path / "run"
    learned(run, [1, 2])
    full, gone, flipped = (tmp_path / name for name in ("full", "gone", "mock"))
    full.mkdir()
    (full / "notes.txt").touch()
    gone.mkdir()
    config = load("tiny", ["speculation.method=ngram"])
    config.model.path = str(tmp_path / "none")
    (gone / "config.yaml").write_text(to_yaml(config))
    (gone / "checkpoints").symlink_to(run / "checkpoints")
    flipped.mkdir()
    (flipped / "config.yaml").write_text(to_yaml(load("mock_rl_think_8b")))
    cases = {
        (tmp_path / "full",): "no config.yaml in it; expected the directory of a run",
        (flipped,): "expected a run with a policy, but its trainer.kind is mock",
        (gone,): "no such directory; expected the model that the run began with",
        (run, "--version", 7): f"--version 7: {run} has no checkpoint of it; expected one of 1, 2",
        (run, "--out", full): f"--out {full}: exists already; expected a directory that is empty or does not exist",
        (run, "--push", "sums"): "--push 'sums': expected OWNER/NAME of a model's repository, for example acme/sums-1",
    }
    for arguments, expected in cases.items():
        code, said, wrong = asked(capsys, *arguments)
        assert code == 2 and said == "" and wrong.endswith(expected + "\n") and wrong.count("\n") == 1, wrong
    with pytest.raises(SystemExit):
        asked(capsys, run, "--private")
    assert "--private: expected --push OWNER/NAME with it" in capsys.readouterr().err
    with limited_files(50_000):
        code, said, wrong = asked(capsys, run)
    assert code == 2 and "version 2 was not exported: [Errno 27] File too large" in wrong
    assert not list((run / "exports").iterdir())


def test_a_damaged_checkpoint_is_named_and_put_aside(tmp_path, capsys):
    run = tmp_path / "run"
    learned(run, [1, 2])
    file = checkpoint.where(run, "trainer", 2) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), 1000):  # in the weights too, which are all that an export reads
        content[place] ^= 1
    file.write_bytes(content)
    code, _, wrong = asked(capsys, run)
    assert code == 2 and "version 2 was not exported: checkpoint trainer-000002: __0_0.distcp has changed" in wrong
    assert wrong.endswith("it is now trainer-000002.damaged; expected another one, of 1\n") and wrong.count("\n") == 1
    assert not list((run / "exports").iterdir())
    code, said, _ = asked(capsys, run)
    assert code == 0 and "version 1 is in" in said


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    def write(content, fails=False):
        with new_folder(tmp_path / "out") as partial:
            assert not (tmp_path / "out" / content).exists()
            (partial / content).touch()
            if fails:
                raise OSError

    for content in "first", "second":
        write(content)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [content]
    with pytest.raises(OSError):
        write("third", fails=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_run_exports_every_so_many_steps(tmp_path, capsys):
    run = tmp_path / "run"
    settings = ["checkpoint.export_every=2", "checkpoint.every=1", "checkpoint.keep=9", "trainer.ranks=2"]
    done = train(run, "--steps", "4", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["step-2", "step-4"]
    assert files_of(run / "exports" / "step-4") == files_of(run / "checkpoint" / "policy")
    metrics = rows(run)
    assert [row["time/export"] > 0 for row in metrics] == [False, False, True, False]
    for row in metrics:
        assert sum(row[f"time/{part}"] for part in PARTS) == pytest.approx(row["time/step"], rel=0.01)
    there = checkpoint.versions(run, "trainer")  # one is left out if the one before is still being written
    for version in {2, 4} & {*there}:
        out = tmp_path / f"out-{version}"
        assert asked(capsys, run, "--version", version, "--out", out)[0] == 0
        assert files_of(out) == files_of(run / "exports" / f"step-{version}")
    before = (run / "exports" / "step-4").stat()
    Running.resumed(run, "steps=6").end()
    assert (run / "exports" / "step-4").stat() == before  # the version that it resumed from
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["step-2", "step-4", "step-6"]
    policy.load(run / "exports" / "step-6")


@pytest.mark.slow
def test_a_run_that_cannot_export_continues(tmp_path):
    run = Running.new(tmp_path / "run", "--steps", "4", "checkpoint.export_every=2", "checkpoint.every=1")
    run.wait_for(lambda: (tmp_path / "run" / "config.yaml").exists(), "the run's directory")
    (tmp_path / "run" / "exports").write_text("a file")
    output = run.end()
    assert output.count("the run continues; `asyncspec export` makes one from a checkpoint") == 2
    assert len(rows(tmp_path / "run")) == 4 and (tmp_path / "run" / "checkpoint" / "policy").is_dir()
