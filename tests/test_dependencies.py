"""pyproject.toml declares every package that the source imports, and no unused one."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Distributions whose name differs from the name they are imported by.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
# Declared without an import in the source, with the reason.
NOT_IMPORTED = {
    "accelerate": "transformers needs it to read GGUF files",
    "gguf": "transformers needs it to read GGUF files",
    "httpx": "HTTP client of engines, judges and classmates",
    "pydantic": "checks requests to the servers",
    "tensorboard": "torch.utils.tensorboard needs it",
}


def names(requirements: list[str]) -> set[str]:
    """Returns the normalized names of the requirements, without extras, versions and markers."""
    return {re.split(r"[\[<>=!~; ]", text)[0].lower().replace("_", "-") for text in requirements}


def modules_in(source: str) -> Iterator[str]:
    """Yields the top-level name of each imported module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def imported_distributions() -> set[str]:
    """Returns the distributions that src imports, without the standard library."""
    modules: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        modules |= set(modules_in(path.read_text()))
    foreign = modules - sys.stdlib_module_names - {"postgrad"}
    return {DISTRIBUTIONS.get(name, name.lower().replace("_", "-")) for name in foreign}


@pytest.mark.slow
def test_every_imported_package_is_declared():
    declared = names(PROJECT["dependencies"])
    for requirements in EXTRAS.values():
        declared |= names(requirements)
    missing = imported_distributions() - declared
    assert not missing, f"add to pyproject.toml: {sorted(missing)}"


@pytest.mark.slow
def test_every_declared_package_is_used():
    declared = names(PROJECT["dependencies"])
    for extra, requirements in EXTRAS.items():
        if extra != "dev":
            declared |= names(requirements)
    unused = declared - imported_distributions() - NOT_IMPORTED.keys()
    assert not unused, f"remove from pyproject.toml, or say why it is there: {sorted(unused)}"


def test_modules_in_finds_nested_and_dotted_imports():
    source = "import a.b, c\ndef f():\n    from d.e import g\nfrom . import h\n"
    assert set(modules_in(source)) == {"a", "c", "d"}


def test_the_constraints_name_a_version_of_every_dependency():
    """They hold for every platform: no local versions, paths or packages of one platform."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(lines)
    known = {canonicalize_name(name): version for name, version in versions.items()}
    needed = [*PROJECT["dependencies"]]
    needed += [text for extra in ("dev", "gguf", "track", "cluster") for text in EXTRAS[extra]]
    for requirement in map(Requirement, needed):
        if requirement.marker is None:
            assert requirement.specifier.contains(known[canonicalize_name(requirement.name)])
    assert not [name for name in known if name.startswith(("nvidia", "cuda", "triton"))]
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in known.values())
