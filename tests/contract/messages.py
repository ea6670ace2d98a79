"""What a refusal has to say: which argument, what was expected, and what came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from openmsa import InvalidInput


@contextmanager
def refuses(argument: str, *words: str) -> Iterator[None]:
    """The body must raise InvalidInput naming ``argument``, and contain every one of ``words``."""
    with pytest.raises(InvalidInput) as error:
        yield
    message = str(error.value)
    head, _, tail = message.partition(": ")
    assert argument in head, f"{argument!r} is not what this message is about: {message}"
    assert "expected" in tail, message
    assert ", got " in tail, message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"
