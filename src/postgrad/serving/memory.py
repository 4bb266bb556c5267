"""A lack of memory as one line that names the options of `postgrad serve`."""

from collections.abc import Iterator
from contextlib import contextmanager

from postgrad.errors import CacheMemoryError
from postgrad.model.device import is_memory_error, requested_memory

FEWER_TOKENS = "start the server with fewer --rows or a smaller --context"
SMALLER_MODEL = "serve a smaller model, or this one with --dtype bfloat16 or --device cpu"


def explain_memory_error(error: BaseException, advice: str = FEWER_TOKENS) -> str:
    """Return the line for an error of the device's memory; "" for other errors."""
    if isinstance(error, CacheMemoryError):
        return f"{error.problem}; {advice}"
    if not is_memory_error(error):
        return ""
    return f"the device has no memory{requested_memory(str(error))}; {advice}"


@contextmanager
def memory_errors_as(kind: type[Exception], advice: str = FEWER_TOKENS) -> Iterator[None]:
    """Raise an error of this kind, with the advice, in place of one of the device's memory."""
    try:
        yield
    except Exception as error:
        if line := explain_memory_error(error, advice):
            raise kind(line) from error
        raise
