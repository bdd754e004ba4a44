"""Chooses what renders the conversations of a run."""

from __future__ import annotations

import importlib.util
from contextlib import suppress

from tokenizers import Tokenizer

from asyncspec.config import Config, resolve_path
from asyncspec.environments.rendering import Renderer
from asyncspec.models import CheckpointError
from asyncspec.models.chat import ChatTemplate, parse_variables


def renderer_of(config: Config, tokenizer: Tokenizer) -> Renderer:
    """Return the renderer of a run's policy: the package's if it knows the model, else that of its chat template.

    Raises:
        ValueError: environment.renderer names none. The message is one line.
    """
    template, variables = None, parse_variables(config.data.template_variables)
    with suppress(CheckpointError):  # without one, prompts that are text still do
        template = ChatTemplate(resolve_path(config.model.path))
    name = config.environment.renderer
    if name == "template" or (name == "auto" and importlib.util.find_spec("renderers") is None):
        return Renderer(tokenizer, template, variables)
    try:
        from asyncspec.environments.library import LibraryRenderer, name_of
    except ImportError as error:
        raise ValueError(
            f"environment.renderer={name!r}: {error}; expected what `pip install 'asyncspec[environments]'` brings"
        ) from None
    known = name_of(config.model.path.partition("@")[0]) if name == "auto" else name
    if known is None:
        return Renderer(tokenizer, template, variables)
    return LibraryRenderer(known, tokenizer, template, variables, config.environment.rewritten_turns == "allow")
