"""The best version of a run: its score, and exactly its weights."""

import json

import pytest
import torch
from test_checkpoint import saved

from asyncspec.ledger import best, checkpoint
from asyncspec.ledger.best import Best


def scored(version, score, newest=None, **sets):
    found = {"eval/score": score, "eval/score_low": score - 0.1, "eval/score_high": score + 0.1}
    found |= {f"eval/{name}/score": value for name, value in sets.items()}
    return found | {"eval/policy_version": version, "eval/policy_version_max": newest or version}


def weights(path):
    """Return the parameters of a checkpoint, in order."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    checkpoint.load(path, {"learned": {"parameters": parameters}})
    return list(parameters.values())


def test_of_scores_that_rise_and_fall_the_best_is_kept_with_its_weights(tmp_path):
    told, states = [], {}
    kept = Best(tmp_path, "", told.append)
    for version, score in ((1, 0.2), (2, 0.4), (3, 0.7), (4, 0.7), (5, 0.3), (6, 0.1)):
        states |= saved(tmp_path, [version], keep=2)
        kept.settled(version)
        kept.evaluated(scored(version, score))
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["trainer-000005", "trainer-000006"]
    record = best.read(tmp_path)
    assert record["version"] == 3 and (record["score"], record["score_low"], record["set"]) == (0.7, 0.7 - 0.1, "")
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["best.json", "trainer-000003"]
    path = tmp_path / "best" / record["checkpoint"]
    assert checkpoint.damage(path) == ""
    assert all(torch.equal(a, b) for a, b in zip(weights(path), states[3], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(path), states[6], strict=True))
    assert [line.split()[1] for line in told] == ["1", "2", "3"]


def test_a_checkpoint_may_be_complete_after_its_evaluation(tmp_path):
    kept = Best(tmp_path, "", lambda text: None)
    kept.evaluated(scored(1, 0.5))
    assert kept.awaits(1) and best.read(tmp_path) is None
    saved(tmp_path, [1])
    kept.settled(1)
    assert best.read(tmp_path)["version"] == 1 and not kept.awaits(1)


def test_a_version_whose_checkpoint_was_not_written_is_named_and_not_waited_for(tmp_path):
    told = []
    kept = Best(tmp_path, "", told.append)
    kept.evaluated(scored(4, 0.5))
    kept.settled(4)
    assert not kept.awaits(4) and told == ["version 4 scored best, but has no checkpoint; it is not kept"]
    saved(tmp_path, [6])
    kept.evaluated(scored(5, 0.4))  # the trainer was still writing another one
    assert kept.awaits(5)
    kept.settled(6)
    assert best.read(tmp_path) is None and len(told) == 2
    kept.settled(8)  # before the evaluation is complete
    kept.evaluated(scored(8, 0.6))
    assert not kept.awaits(8) and len(told) == 3


def test_samples_of_several_versions_and_unknown_scores_do_not_count(tmp_path):
    saved(tmp_path, [1, 2])
    kept = Best(tmp_path, "hard", lambda text: None)
    kept.evaluated(scored(1, 0.9, newest=2, hard=0.9))
    kept.evaluated(scored(2, 0.9) | {"eval/hard/score": None})
    assert best.read(tmp_path) is None
    kept.evaluated(scored(1, 0.9, hard=0.3))
    kept.evaluated(scored(2, 0.1, hard=0.4))
    assert best.read(tmp_path)["version"] == 2 and best.read(tmp_path)["score"] == 0.4


def test_a_resumed_run_goes_on_with_the_best_so_far(tmp_path):
    saved(tmp_path, [1, 2])
    Best(tmp_path, "", lambda text: None).evaluated(scored(1, 0.5))
    again = Best(tmp_path, "", lambda text: None)
    again.evaluated(scored(2, 0.4))
    assert best.read(tmp_path)["version"] == 1
    # The run was cut short between the evaluation and the checkpoint of version 2, and of version 3, which is gone.
    again.resume([scored(2, 0.6), scored(3, 0.9)])
    assert best.read(tmp_path)["version"] == 2 and not again.awaits(3)


def test_a_record_without_its_checkpoint_is_no_best(tmp_path):
    (tmp_path / "best").mkdir()
    for text in ("{", "[]", json.dumps({"checkpoint": "trainer-000003"})):
        (tmp_path / "best" / "best.json").write_text(text)
        assert best.read(tmp_path) is None


@pytest.mark.parametrize("links", [True, False])
def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch, links):
    def no_link(source, target):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", no_link)
    states = saved(tmp_path, [1])
    Best(tmp_path, "", lambda text: None).evaluated(scored(1, 0.5))
    original, copy = (tmp_path / name / "trainer-000001" / "manifest.json" for name in ("checkpoints", "best"))
    assert original.samefile(copy) is links
    assert all(torch.equal(a, b) for a, b in zip(weights(copy.parent), states[1], strict=True))
