"""The functions that rl.advantage_estimator and rl.loss_type name: built-in ones, or the user's.

    advantage(reward_R, group_R, length_R) -> advantage_R      see advantage.py
    loss(logprob_T, tokens, config) -> loss_T                  see loss.py; without clipped_T

What a user's function returns is checked at each call. As a program, this file calls the user's functions once before
anything starts, in a process of its own: what they print or break does no harm, and the launcher need not load torch.
preflight.py starts it by its path, and both sides send one JSON object:

    {"path": sys.path, "parent": process id, "config": YAML}  ->  {"error": what is wrong, or ""}
"""

from __future__ import annotations

import json
import os
import sys

ADVANTAGE, LOSS = "rl.advantage_estimator", "rl.loss_type"
EXAMPLES = {ADVANTAGE: "asyncspec.rl.advantage:grpo", LOSS: "my_package.losses:my_loss"}


def estimator_of(name: str):
    """Return the advantage estimator of this name.

    Raises:
        ValueError: the user's function cannot be imported.
    """
    from asyncspec.rl import advantage
    from asyncspec.tasks.importing import import_function

    if name in advantage.BUILT_IN:
        return advantage.BUILT_IN[name]
    function = import_function(ADVANTAGE, name, EXAMPLES[ADVANTAGE])

    def estimator(reward_R, group_R, length_R):
        found = _checked(ADVANTAGE, name, function(reward_R, group_R, length_R), reward_R, "reward").detach().cpu()
        if not found.isfinite().all():
            raise _wrong(ADVANTAGE, name, f"returned {found.tolist()}, which is not finite", "finite numbers")
        return found.double()

    estimator.whole_step = getattr(function, "whole_step", False)
    return estimator


def loss_of(name: str):
    """Return the policy loss of this name.

    Raises:
        ValueError: the user's function cannot be imported.
    """
    import torch

    from asyncspec.rl import loss
    from asyncspec.tasks.importing import import_function

    if name in loss.BUILT_IN:
        return loss.BUILT_IN[name]
    function = import_function(LOSS, name, EXAMPLES[LOSS])

    def own(logprob_T, tokens, config):
        loss_T = _checked(LOSS, name, function(logprob_T, tokens, config), logprob_T, "token")
        if not loss_T.requires_grad:
            raise _wrong(LOSS, name, "returned a loss without a gradient", "one that depends on logprob_T")
        return loss_T, torch.zeros_like(logprob_T)

    return own


def _checked(field: str, name: str, found, like, what: str):
    import torch

    if not isinstance(found, torch.Tensor) or found.is_complex():
        raise _wrong(field, name, f"returned a {type(found).__name__}", f"a tensor with one number for each {what}")
    if found.shape != like.shape:
        shapes = list(found.shape), list(like.shape)
        raise _wrong(field, name, f"returned a tensor of shape {shapes[0]}", f"{shapes[1]}, a number for each {what}")
    return found


def _wrong(field: str, name: str, found: str, expected: str) -> ValueError:
    return ValueError(f"{field}={name!r}: {found}; expected {expected}")


def try_advantage(name: str, config) -> None:
    """Call the user's estimator on the rewards of a step's groups, or of each of them, and check what it returns.

    Args:
        config: the section `rl`.

    Raises:
        ValueError: it cannot be imported, raises, or returns nonsense; one line.
    """
    import torch

    estimator = estimator_of(name)
    size, groups = config.group_size, config.groups_per_step if estimator.whole_step else 3
    index_R = torch.arange(size * groups)
    # The second group's rewards are equal, and one reward is negative.
    reward_R = (index_R % 3).double() / 2
    reward_R[size : 2 * size], reward_R[-1] = 1.0, -2.0
    group_R, length_R = index_R // size, index_R % 7 + 1
    for rows in (slice(None),) if estimator.whole_step else [slice(i * size, (i + 1) * size) for i in range(groups)]:
        _tried(ADVANTAGE, name, lambda: estimator(reward_R[rows], group_R[rows], length_R[rows]))


def try_loss(name: str, config) -> None:
    """Call the user's loss on three responses, and check the loss and its gradient.

    Raises:
        ValueError: it cannot be imported, raises, or returns nonsense; one line.
    """
    import torch

    from asyncspec.rl.loss import Tokens

    loss = loss_of(name)
    logprob_T = torch.linspace(-3.0, -0.1, 8).requires_grad_()
    proximal_T, length_R = torch.linspace(-2.8, -0.3, 8), torch.tensor([4, 1, 3])
    advantage_T = torch.tensor([1.0, 0.0, -1.0]).repeat_interleave(length_R)
    tokens = Tokens(proximal_T, proximal_T.flip(0), advantage_T, length_R, proximal_T if config.kl_coef > 0 else None)

    def act():
        loss_T, _ = loss(logprob_T, tokens, config)
        loss_T.sum().backward()
        for what, values in (("loss", loss_T), ("gradient", logprob_T.grad)):
            if values is None or not values.isfinite().all():
                raise _wrong(LOSS, name, f"its {what} is {values}".replace("\n", " "), "finite numbers")

    _tried(LOSS, name, act)


def _tried(field: str, name: str, act) -> None:
    from asyncspec.errors import first_line

    try:
        act()
    except Exception as error:  # the user's function may raise anything
        text = first_line(error)
        if text.startswith(f"{field}="):
            raise ValueError(text) from None
        raise ValueError(f"{field}={name!r}: raised {type(error).__name__}: {text}") from None


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # what the user's module prints is no part of the answer
    asked = json.loads(sys.stdin.read())
    sys.path[:] = asked["path"]

    from asyncspec.config import from_yaml
    from asyncspec.parent import die_with

    die_with(asked["parent"])
    config, error = from_yaml(asked["config"]).rl, ""
    try:
        if ":" in config.advantage_estimator:
            try_advantage(config.advantage_estimator, config)
        if ":" in config.loss_type:
            try_loss(config.loss_type, config)
    except ValueError as wrong:
        error = str(wrong)
    os.write(answer, json.dumps({"error": error}).encode())


if __name__ == "__main__":
    main()
