# Triton is untyped, and absent on macOS: for the type checker everything in it is Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
