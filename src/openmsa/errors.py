"""The three things that can go wrong, each told apart by its class.

Every message names what was given, what was expected and, where there is one, the way out.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = [
    "InvalidInput",
    "OpenMSAError",
    "UnavailableError",
    "UnsupportedProblem",
    "invalid_input",
]


class OpenMSAError(Exception):
    """Base class of every error that openmsa raises on purpose."""


class InvalidInput(OpenMSAError, ValueError):
    """An argument has a wrong shape, dtype, device or content."""


class UnsupportedProblem(OpenMSAError, NotImplementedError):
    """The backend that was asked for cannot do this problem on this device."""


class UnavailableError(OpenMSAError, ImportError):
    """A toolchain that was asked for cannot be imported here."""


def invalid_input(argument: str, expected: str, got: object, hint: str = "") -> NoReturn:
    """Raise :class:`InvalidInput` in the one form all checks share."""
    tail = f" ({hint})" if hint else ""
    raise InvalidInput(f"{argument}: expected {expected}, got {got}{tail}")
