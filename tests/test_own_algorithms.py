"""Losses and advantages of the user's own: by import path, tried before anything starts, refused in one line."""

import pytest
import torch
from groups import copied, first_gradients, random_group
from pages import ROOT

from asyncspec.config import Config, ConfigError, RLConfig, load
from asyncspec.launch.preflight import check_own_algorithms
from asyncspec.rl.own import ADVANTAGE, LOSS, estimator_of, try_advantage, try_loss


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user's with this text; return its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"own_{abs(hash((text, str(tmp_path))))}"
        (tmp_path / f"{name}.py").write_text("import torch\n" + text)
        return name

    return write


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "def f(r, g, n):\n    return r[:-1]",
            "returned a tensor of shape [2]; expected [3], a number for each reward",
        ),
        ("def f(r, g, n):\n    return list(r)", "returned a list; expected a tensor with one number for each reward"),
        ("def f(r, g, n):\n    return r / r.std()", "which is not finite; expected finite numbers"),
        ("def f(r, g, n):\n    raise KeyError('a\\nb')", "raised KeyError"),
        ("def f(r):\n    return r", "raised TypeError"),
        ("f = 3", "naming something that can be called"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_an_advantage_that_returns_nonsense_is_refused_in_one_line(module, text, said):
    with pytest.raises(ValueError) as caught:
        try_advantage(f"{module(text)}:f", RLConfig(group_size=3))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{ADVANTAGE}='own_")


@pytest.mark.parametrize(
    "text, said",
    [
        ("def f(p, t, c):\n    return (p - t.proximal_T).sum()", "returned a tensor of shape []; expected [8]"),
        ("def f(p, t, c):\n    return t.advantage_T * 2", "returned a loss without a gradient"),
        ("def f(p, t, c):\n    return p / t.advantage_T", "its loss is"),
        ("def f(p, t, c):\n    return (p - p.detach()).abs().sqrt()", "its gradient is"),
        ("def f(p, t, c):\n    return c.no_such * p", "raised AttributeError"),
        ("def g(p, t, c):\n    return p", "has no attribute 'f'"),
    ],
)
def test_a_loss_that_returns_nonsense_is_refused_in_one_line(module, text, said):
    with pytest.raises(ValueError) as caught:
        try_loss(f"{module(text)}:f", RLConfig())
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{LOSS}='own_")


def test_names_are_checked_by_the_configuration():
    for override, nearest in (
        ("rl.loss_type=cisspo", "rl.loss_type=cispo"),
        ("rl.advantage_estimator=loo", "rl.advantage_estimator=rloo"),
        ("rl.loss_type=a-b:c", "rl.loss_type="),
    ):
        with pytest.raises(ConfigError, match="or module:function; nearest valid choice: " + nearest):
            load("tiny", [override])
    assert load("tiny", ["rl.loss_type=package.module:Class.method"]).rl.loss_type == "package.module:Class.method"


def test_the_start_tries_own_functions_in_a_process_of_its_own(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = module(
        "print('said')\ndef f(r, g, n):\n    return 2 * r\ndef h(p, t, c):\n    return -t.advantage_T * p\n"
        "def bad(p, t, c):\n    return p.sum()"
    )
    check_own_algorithms(load("tiny", [f"rl.advantage_estimator={good}:f", f"rl.loss_type={good}:h"]))
    with pytest.raises(ConfigError, match=rf"rl.loss_type='{good}:bad': returned a tensor of shape \[\]"):
        check_own_algorithms(load("tiny", [f"rl.loss_type={good}:bad"]))
    ends = module("import os\nos._exit(5)")
    with pytest.raises(ConfigError, match=f"rl.loss_type='{ends}:f': ended its process with exit code 5"):
        check_own_algorithms(load("tiny", [f"rl.loss_type={ends}:f"]))


def test_an_estimator_may_ask_for_the_whole_step(module):
    name = module("def f(r, g, n):\n    return r - r.mean()\nf.whole_step = True\ndef e(r, g, n):\n    return r")
    assert estimator_of(f"{name}:f").whole_step and not estimator_of(f"{name}:e").whole_step


def test_the_examples_functions_train(monkeypatch, small_policy, small_shape):
    monkeypatch.chdir(ROOT)
    own = "examples.own_algorithm.algorithm"
    rl = RLConfig(advantage_estimator=f"{own}:best_of", loss_type=f"{own}:geometric")
    try_advantage(rl.advantage_estimator, rl)
    try_loss(rl.loss_type, rl)
    batches = [random_group(0, [2, 3], [3, 9, 1], 1), random_group(1, [4], [7, 2], 2)]
    grads, stats = first_gradients(copied(small_shape, small_policy), Config(rl=rl), batches)
    assert stats["grad/norm"] > 0 and all(grad.isfinite().all() for grad in grads.values())
    reward_R = torch.tensor([1.0, 0.0, 0.5, 3.0, 4.0], dtype=torch.float64)
    found_R = estimator_of(rl.advantage_estimator)(reward_R, torch.tensor([0, 0, 0, 1, 1]), torch.ones(5).long())
    assert found_R.tolist() == [0.5, -1.0, -0.5, -1.0, 1.0]


def test_an_advantage_may_rely_on_the_group_size_and_keep_a_gradient(module):
    name = module(
        "def f(r, g, n):\n    return (r.clone().requires_grad_().view(-1, 8) * 2).flatten()\nf.whole_step = True"
    )
    try_advantage(f"{name}:f", RLConfig(group_size=8))
    reward_R = torch.ones(8, dtype=torch.float64)
    assert estimator_of(f"{name}:f")(reward_R, reward_R.long(), reward_R.long()).numpy().tolist() == [2.0] * 8
