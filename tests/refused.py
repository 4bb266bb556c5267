"""`refused`: the block raises a ConfigError of a code, at a place."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from postgrad.errors import ConfigError


@contextmanager
def refused(
    code: str, at: object = "", shows: str = ""
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Check that the block raises a ConfigError with this code and place; yield what is caught.

    `shows` is a pattern of what the sentence computes, such as a number or the user's own name.
    """
    with pytest.raises(ConfigError) as caught:
        yield caught
    error = caught.value
    assert (error.code, error.at) == (code, str(at)), str(error)
    assert re.search(shows, str(error)), str(error)
