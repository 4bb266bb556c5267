"""Refuses rows whose columns change what a model would see in a way that is not supported here.

Other columns that no schema knows are kept in `problem.extra`. These would be lost silently.
"""

from postgrad.data.rows import Row, RowError

MEDIA = ("images", "image", "videos", "video", "audios", "audio")


def refuse_unsupported(row: Row) -> None:
    """Raises RowError for media, functions, template options, and samples per row.

    A column that is null or empty in this row is no reason to refuse it.
    """
    for name in MEDIA:
        if row.get(name):
            raise RowError(
                f"column {name}: models are trained on text only; remove the rows with {name}, "
                "or the column if the text is enough"
            )
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
