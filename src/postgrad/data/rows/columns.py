"""Names of columns: aliases, and those that a run must not leave out silently."""

import re
from functools import lru_cache

ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "problem", "query", "instruction", "input", "inputs"),
    "completion": ("response", "output", "targets"),
    "ground_truth": ("answer", "expected_answer", "final_answer"),
    "messages": ("conversations", "conversation"),
    "system": ("system_prompt",),
    "images": ("image",),
}
UNUSED = "unused"  # FILE:COLUMN=unused leaves a column out

# Columns that belong to what the model sees. A row that has one which its shape does not read is
# refused, until the column is renamed, merged in load(), or left out.
CONTEXT = frozenset(
    (
        *("context", "contexts", "passage", "passages", "article", "body", "document", "documents"),
        *("paragraph", "paragraphs", "story", "narrative", "puzzle", "table", "history"),
        *("options", "choices", "tools", "functions"),
        *("chat_template_kwargs", "enable_thinking", "__rollout_n__"),
    )
)
# Columns beside image and images: decoded_image, image_1, image_path, video_url and the like.
MEDIA = re.compile(
    r"(decoded_|input_)?(image|img|picture|video|audio)s?(_?\d+|_(path|url|file|bytes)s?)?"
)


@lru_cache(maxsize=1024)  # every row of a file has the same columns
def is_media(name: str) -> bool:
    """Return whether a column holds images, videos or audio, or says where they are."""
    return MEDIA.fullmatch(name.lower()) is not None


def canonical_names() -> frozenset[str]:
    """Return the names of prompts, replies and truths, and all their aliases."""
    chat = {name: names for name, names in ALIASES.items() if name not in ("system", "images")}
    return frozenset(chat).union(*chat.values())
