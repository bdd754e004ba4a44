"""Costs of passes on GPUs: tables and the roofline, drafts, and the errors that name what is known."""

import json

import numpy as np
import pytest

from asyncspec.bench import published
from asyncspec.errors import UserError
from asyncspec.simulate import devices
from asyncspec.simulate.devices import Drafting, Roofline, Tables, forward, gpu, gpus, known_model
from asyncspec.simulate.rollout import Overheads, Rounds

SMALL, LARGE = "Qwen/Qwen3-8B", "Qwen/Qwen3-235B-A22B"


def test_the_tables_say_where_they_come_from():
    assert gpus() == ["A100", "B200", "GB200", "H100", "H200"]
    for path in devices.TABLES.glob("*.json"):
        content = json.loads(path.read_text())
        assert content["source"] == "aiconfigurator-core 0.12.0" and content["license"].startswith("Apache-2.0")
        assert all(np.diff(each["rest_us"]).min() >= 0 for each in content["models"])


def test_a_table_is_what_was_measured_and_marks_what_lies_beyond_it():
    found = forward(gpu("GB200"), known_model(SMALL))
    table = next(
        each
        for each in json.loads((devices.TABLES / "gb200.json").read_text())["models"]
        if (each["model"], each["precision"], each["tensor_parallel"]) == (SMALL, "bfloat16", 1)
    )
    assert isinstance(found, Tables) and found.rest(64) == pytest.approx(1e-6 * table["rest_us"][6])
    assert found.attend(64, 4096) == pytest.approx(1e-6 * table["attention_us"][6][3])
    assert not found.clipped
    assert found.attend(2000, 4096) == found.attend(512, 4096) and found.clipped == {"batch above 512"}


def test_a_step_of_8b_is_that_of_the_packages_own_estimate():
    """3.6, 8.8 and 24.5 ms with batches of 1, 64 and 256 at 4,000 positions."""
    found = forward(gpu("gb200"), known_model(SMALL))
    assert [1e3 * found.seconds(n, 4000) for n in (1, 64, 256)] == pytest.approx([3.6, 8.8, 24.5], rel=0.03)


def test_a_finetuned_model_has_the_table_of_its_base_and_another_shape_a_roofline():
    base = known_model(SMALL)
    assert forward(gpu("H100"), base | {"eos_token_id": 5, "torch_dtype": "bfloat16"}).source == "table"
    assert forward(gpu("H100"), base | {"num_hidden_layers": 30}).source == "roofline"
    assert forward(gpu("A100"), base, "fp8").source == "roofline"


@pytest.mark.parametrize("name", ["GB200", "H200", "H100", "A100"])
def test_the_roofline_is_near_the_tables(name):
    """Within a factor of 2 where a policy of 8 B decodes; the roofline is there to tell orders, not percents."""
    measured = forward(gpu(name), known_model(SMALL))
    ideal = Roofline(gpu(name), known_model(SMALL), "bfloat16", 1)
    for batch in (1, 16, 128):
        assert 0.5 < ideal.seconds(batch, 4000) / measured.seconds(batch, 4000) < 2


def test_a_mixture_loads_more_experts_for_more_tokens():
    ideal = Roofline(gpu("H100"), known_model(LARGE), "bfloat16", 8)
    assert ideal.loaded(1) == pytest.approx(8) and 127 < ideal.loaded(100) <= 128


def test_keys_are_read_once_for_all_proposals():
    found = forward(gpu("H100"), known_model(SMALL))
    assert found.attention(64, 4000, 8) == found.attention(64, 4000, 1)
    assert found.attention(64, 4000, 256) > 2 * found.attention(64, 4000, 1)


def test_drafting_costs_a_small_part_of_the_target():
    target = forward(gpu("GB200"), known_model(SMALL))
    costs = {m: Drafting(target, m).seconds(32, 4000, 3) for m in ("none", "ngram", "mtp", "eagle3")}
    draft = Drafting(target, "draft_model", known_model("Qwen/Qwen3-0.6B")).seconds(32, 4000, 3)
    assert costs["none"] == costs["ngram"] == 0
    assert 0.02 < costs["eagle3"] / target.seconds(32, 4000) < 0.3 and costs["mtp"] > 0
    assert draft > costs["eagle3"]


def test_overheads_are_added_to_a_round():
    target = forward(gpu("GB200"), known_model(SMALL))
    plain, slow = (
        Rounds(target, Drafting(target, "ngram"), overheads)
        for overheads in (Overheads(), Overheads(1e-3, 2e-3, 5e-4, 1e-5))
    )
    assert slow.seconds(10, 0, 500) - plain.seconds(10, 0, 500) == pytest.approx(1e-3)
    assert slow.seconds(10, 3, 500) - plain.seconds(10, 3, 500) == pytest.approx(1e-3 + 2e-3 + 1.5e-3 + 1e-4)
    costs = slow.costs(64, 3, 200, 2000)
    assert costs.base_N[10] + 500 * costs.slope_N[10] == pytest.approx(slow.seconds(10, 3, 500), rel=0.03)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: gpu("H10"), "--hardware H10: expected one of A100, B200, GB200, H100, H200"),
        (lambda: known_model("Qwen/Qwen3-8"), "--model Qwen/Qwen3-8: expected a directory, or one of"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(call, said):
    with pytest.raises(UserError) as error:
        call()
    assert said in str(error.value) and "nearest" in str(error.value)


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "expected JSON such as"),
        ("[]", "expected JSON such as"),
        ("7", "expected JSON such as"),
        ('[{"id": "235b-512/best"}]', "expected JSON such as"),
        ('{"235b-512/best": 0}', "'235b-512/best': 0: expected each cell once, with a number above 0"),
        ('{"235b-512/best": NaN}', "expected each cell once"),
        ('{"235b-512/best": true}', "expected each cell once"),
        ('[{"id": "235b-512/best", "value": 4}, {"id": "235b-512/best", "value": 4}]', "expected each cell once"),
    ],
)
def test_damaged_cells_are_refused_before_anything_is_predicted(tmp_path, content, said):
    (tmp_path / "cells.json").write_text(content)
    with pytest.raises(UserError) as error:
        published._read(str(tmp_path / "cells.json"))
    assert f"--cells {tmp_path}/cells.json: " in str(error.value) and said in str(error.value)


def test_a_list_of_cells_and_an_object_say_the_same(tmp_path):
    (tmp_path / "cells.json").write_text('[{"id": "235b-512/best", "value": 4}]')
    (tmp_path / "other.json").write_text('{"235b-512/best": 4.0}')
    assert published._read(str(tmp_path / "cells.json")) == published._read(str(tmp_path / "other.json"))
