"""Imports the user's functions, which fields name as `module:function`."""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from asyncspec.errors import first_line


def import_function(field: str, path: str, example: str) -> Callable[..., Any]:
    """Import the function that `module:function` names. The working directory is searched too.

    Args:
        field: the configuration field that has the path, for messages.
        example: a valid path, for messages.

    Raises:
        ValueError: the path does not have this form, the import fails, or what it names cannot be called.
    """
    module_name, colon, name = path.partition(":")
    if os.getcwd() not in sys.path:  # the user's directory; installed commands do not have it on the path
        sys.path.append(os.getcwd())
    try:
        found = operator.attrgetter(name)(importlib.import_module(module_name))
    except BaseException as error:  # importing the user's module may raise anything, SystemExit too
        raise ValueError(
            f"{field}={path!r}: {type(error).__name__}: {first_line(error)}; expected "
            f"module:function, for example {example}"
        ) from None
    if not colon or not callable(found):
        raise ValueError(f"{field}={path!r}: expected module:function, naming something that can be called")
    for function in (inspect.unwrap(found), type(found).__call__):
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ValueError(f"{field}={path!r}: is a generator; expected a function that returns its result")
    return found
