"""MkDocs hook: the Python reference from docstrings, and formulas as MathML.

`mkdocs.yml` names this file. The reference is a page of the site only; no file of the repository
holds it. Formulas are written as $...$ in a line and as $$...$$ on lines of their own. Browsers
draw MathML, so the site loads no script and no font from elsewhere.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import postgrad

REFERENCE = "reference.md"
FIRST = ("train", "Trainer", "Run", "evaluate", "generate", "score", "Session")
HEAD = """# Python reference

Every name of `import postgrad`, from its docstring; `help(postgrad.train)` prints the same.
[From Python](python.md) is the guide.
"""
SECTIONS = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns"}
SECTIONS |= {"Yields": "Yields", "Raises": "Raises"}
# Code keeps its dollar signs: fenced and indented blocks, and spans.
CODE = re.compile(r"^```.*?^```|^(?: {4}|\t)[^\n]*$|(`+).+?\1", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)((?:[^$\n]|\n(?!\n))+?)(?<=\S)\$(?![\w$])", re.DOTALL
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference to the pages of the site."""
    files.append(File.generated(config, REFERENCE, content=reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with MathML in place of its formulas."""
    return with_formulas(markdown)


# ---- formulas


def with_formulas(text: str) -> str:
    """Return Markdown with MathML in place of $...$ and $$...$$ outside of code."""
    parts: list[str] = []
    start = 0
    for code in CODE.finditer(text):
        parts += [FORMULA.sub(_mathml, text[start : code.start()]), code[0]]
        start = code.end()
    return "".join([*parts, FORMULA.sub(_mathml, text[start:])])


def _mathml(match: re.Match[str]) -> str:
    if match[1]:
        return f'<div class="formula">{convert(match[1].strip(), display="block")}</div>'
    return convert(match[2])


# ---- reference


def reference() -> str:
    """Return the page: an entry per public name, and one per member of a class."""
    parts = [HEAD.rstrip()]
    for name in dict.fromkeys((*FIRST, *postgrad.__all__)):
        value = getattr(postgrad, name)
        if isinstance(value, str):  # the version
            continue
        parts.append(entry("##", name, value))
        for member, function in members(value) if isinstance(value, type) else ():
            parts.append(entry("###", f"{name}.{member}", function))
    return "\n\n".join(parts) + "\n"


def members(kind: type) -> list[tuple[str, Any]]:
    """Return the public functions and properties that a class defines."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(kind).items():
        if not name.startswith("_") and inspect.isfunction(function_of(value)):
            found.append((name, value))
    return found


def function_of(value: Any) -> Any:
    """Return the function behind a property, a class method or a static method."""
    function = value.fget if isinstance(value, property) else value
    return getattr(function, "__func__", function)


def entry(level: str, name: str, value: Any) -> str:
    """Return heading, signature and docstring of one name."""
    function = function_of(value)
    has_signature = inspect.isfunction(function) and not isinstance(value, property)
    parts = [f"{level} {name}()" if has_signature else f"{level} {name}"]
    if has_signature:
        parts.append(f"```python\n{name}{inspect.signature(function)}\n```")
    return "\n\n".join([*parts, *blocks(inspect.getdoc(function) or "")])


def blocks(doc: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring as Markdown; `Args:` and others become lists."""
    for block in re.split(r"\n\n(?=\S)", doc):
        title, _, rest = block.partition(":\n")
        if title in SECTIONS:
            yield f"**{SECTIONS[title]}**"
            yield "\n".join(items(inspect.cleandoc(rest)))
        else:
            yield block


def items(text: str) -> Iterator[str]:
    """Yield a list item per `name: text` of a section; text without a name is one item."""
    for item in re.split(r"\n(?=\S)", text):
        flat = " ".join(item.split())
        name, colon, about = flat.partition(": ")
        is_named = bool(colon) and re.fullmatch(r"[\w*., ]+", name) is not None
        yield f"- `{name}`: {about}" if is_named else f"- {flat}"
