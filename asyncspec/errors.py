"""Errors that a user should see as one line, without a traceback.

Every command prints a `UserError` as one line on standard error and exits with code 2.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can correct; the message is one line that says what was expected."""


class ConfigError(UserError):
    """A configuration that cannot run; the message names the field, the value and the nearest valid choice."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's message: if another process raised it, what it was raised for comes after
    its traceback. An empty message gives the name of the type.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Damaged(OSError):
    """A file has changed since it was written."""
