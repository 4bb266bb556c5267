"""Programming tasks. The ground truth is a JSON list of test programs.

Each test program runs after the code of the response and passes if it raises nothing.
"""

import json

from postgrad.data.prepare.base import Context, DataSet, Draft, first_text
from postgrad.data.rows.values import Row, RowError, text_of, type_name

REQUEST = "Answer with the whole program in one ```python block."


def fenced(code: str) -> str:
    """The code in a Markdown block."""
    return f"```python\n{code.strip(chr(10))}\n```"


def humaneval(row: Row, context: Context) -> Draft:
    """A function to complete, with a test program."""
    prompt = text_of(row, "prompt")
    name = text_of(row, "entry_point")
    solution = prompt + text_of(row, "canonical_solution")
    tests = [f"{text_of(row, 'test')}\n\ncheck({name})\n"]
    extra = {"task_id": str(row.get("task_id", "")), "entry_point": name}
    return Draft(
        f"Complete this Python function. {REQUEST}\n\n{fenced(prompt)}",
        json.dumps(tests),
        (fenced(solution),),
        extra,
    )


def mbpp(row: Row, context: Context) -> Draft:
    """A row of the full set (text, test_setup_code) or the sanitized one (prompt, test_imports)."""
    tests = row.get("test_list")
    imports = row.get("test_imports") or []
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise RowError(f"test_list must be a list of tests, not {type_name(tests)}")
    setup = "\n".join([*imports, str(row.get("test_setup_code") or "")]).strip()
    programs = [f"{setup}\n{test}\n" if setup else f"{test}\n" for test in tests]
    task = first_text(row, ("text", "prompt")).strip()
    shown_tests = fenced("\n".join(tests))
    question = f"{task} {REQUEST} It must pass these tests:\n\n{shown_tests}"
    return Draft(
        question,
        json.dumps(programs),
        (fenced(text_of(row, "code")),),
        {"task_id": str(row.get("task_id", ""))},
    )


CODE: dict[str, DataSet] = {
    "humaneval": DataSet(
        "164 functions to complete, with tests",
        "openai/openai_humaneval",
        {"test": ("openai_humaneval/test-*.parquet",)},
        humaneval,
        "humaneval",
        local=("*human*eval*",),
        ability="code",
    ),
    "mbpp": DataSet(
        "basic Python problems, three tests each",
        "google-research-datasets/mbpp",
        {
            "train": ("full/train-*.parquet",),
            "test": ("full/test-*.parquet",),
            "validation": ("full/validation-*.parquet",),
            "sanitized": ("sanitized/test-*.parquet",),
        },
        mbpp,
        "mbpp",
        local=("*mbpp*",),
        ability="code",
    ),
}
