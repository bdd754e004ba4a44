"""What a user should see as one line, without a traceback.

Every command turns a `UserError` into that line on standard error and exit code 2.
"""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can mend; the message is one line that says what was expected."""


class ConfigError(UserError):
    """A configuration that cannot run; the message names the field, the value and the nearest valid choice."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
