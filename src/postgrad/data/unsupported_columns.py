"""Refuses rows whose columns change what a model would see in a way that is not supported here.

Other columns that no schema knows are kept in `problem.extra`. These would be lost silently.
"""

import json
import re
from functools import lru_cache

from postgrad.data.messages import MESSAGE_COLUMNS
from postgrad.data.rows import Row, RowError

# image, images, decoded_image, image_1, image_path, video_url and the like.
MEDIA = re.compile(
    r"(decoded_|input_)?(image|img|picture|video|audio)s?(_?\d+|_(path|url|file|bytes)s?)?"
)
# Python's text of a list of messages: pandas writes it to csv, with or without commas.
PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")


def refuse_unsupported(row: Row) -> None:
    """Raises RowError for media, functions, template options, samples per row and Python's texts.

    A column that is null or empty in this row is no reason to refuse it.
    """
    for name, value in row.items():
        if value and isinstance(name, str) and _is_media(name):
            raise RowError(
                f"column {name}: models are trained on text only; remove the rows with {name}, "
                f"or leave the column out if the text is enough (FILE:{name}=unused)"
            )
    for name in MESSAGE_COLUMNS:
        value = row.get(name)
        if isinstance(value, str) and PYTHON_MESSAGES.match(value):
            raise RowError(
                f"{name} is a list of messages as Python prints it, which pandas writes to csv; "
                "write the file as parquet, or the column as JSON (json.dumps)"
            )
    _refuse_hidden_tools(row)
    if row.get("functions"):
        raise RowError(
            "column functions: schemas of tools are read from a column tools; "
            "rename it (FILE:functions=tools)"
        )
    options = row.get("chat_template_kwargs")
    if options:
        items = options.items() if isinstance(options, dict) else ()
        name = next((name for name, value in items if value not in (None, "")), "NAME")
        raise RowError(
            "column chat_template_kwargs: options of the chat template are the same for all rows; "
            f"set data.template_options.{name}=VALUE and leave the column out "
            "(FILE:chat_template_kwargs=unused)"
        )
    if row.get("enable_thinking") is not None:
        value = str(row["enable_thinking"]).lower()
        raise RowError(
            "column enable_thinking: options of the chat template are the same for all rows; "
            f"remove the column and set data.template_options.enable_thinking={value}"
        )
    if row.get("__rollout_n__") is not None:
        raise RowError(
            "column __rollout_n__: all problems have the same number of responses; "
            "remove the column and set rollout.samples=N"
        )


@lru_cache(maxsize=1024)  # every row of a file has the same columns
def _is_media(name: str) -> bool:
    return MEDIA.fullmatch(name.lower()) is not None


def _refuse_hidden_tools(row: Row) -> None:
    """Raises RowError for the schemas of tools that Nemotron's sets have in `metadata`."""
    metadata = row.get("metadata")
    if isinstance(metadata, str) and metadata.lstrip().startswith("{") and '"tools"' in metadata:
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            return
    if isinstance(metadata, dict) and metadata.get("tools") and not row.get("tools"):
        raise RowError(
            "metadata has schemas of tools, which are read from a column tools; "
            "rename them (FILE:metadata.tools=tools)"
        )
