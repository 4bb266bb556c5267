# The type checker need not read the 500 model families that transformers' own __init__ lists.
# The classes that Postgrad uses as types come from their modules; everything else is Any.
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase

def __getattr__(name: str) -> Any: ...
