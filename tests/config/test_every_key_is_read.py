"""Every setting is read somewhere in the source, found by walking the syntax trees."""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import postgrad
from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.losses import LOSSES
from postgrad.config.compose import known_keys
from postgrad.config.schema import Config
from postgrad.methods import METHODS, find_method
from postgrad.methods.grpo import Grpo
from postgrad.methods.method import MethodSettings
from postgrad.training.run import MAY_CHANGE

SOURCE = Path(postgrad.__file__).parent
# What only shows or measures settings does not count as reading them.
APART = ("config", "cli")

SECTIONS = {
    field.name: field.type
    for field in dataclasses.fields(Config)
    if dataclasses.is_dataclass(field.type)
}
SECTIONS |= {
    inner.name: inner.type
    for kind in SECTIONS.values()
    for inner in dataclasses.fields(kind)
    if dataclasses.is_dataclass(inner.type)
}
CLASS_TO_SECTION = {kind.__name__: name for name, kind in SECTIONS.items()} | {"Config": ""}


def files() -> Iterator[Path]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] not in APART:
            yield path


def annotated(function: ast.FunctionDef) -> dict[str, str]:
    """Returns parameters annotated with a section's class: name -> section ('' is Config)."""
    return {
        argument.arg: CLASS_TO_SECTION[argument.annotation.id]
        for argument in function.args.args
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id in CLASS_TO_SECTION
    }


class Reads(ast.NodeVisitor):
    """Collects (section, leaf) of every attribute that is read, e.g. config.training.steps."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self.names: list[dict[str, str]] = [{}]
        self.own: list[dict[str, str]] = [{}]  # what self.config is, by class

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        own: dict[str, str] = {}
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                own = annotated(item)
        self.own.append(own)
        self.generic_visit(node)
        self.own.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.append({**self.names[-1], **annotated(node)})
        self.generic_visit(node)
        self.names.pop()

    def section(self, base: ast.expr) -> str | None:
        if isinstance(base, ast.Name):
            if base.id in self.names[-1]:
                return self.names[-1][base.id]
            return (
                base.id
                if base.id in {*SECTIONS, "settings"}
                else ("" if base.id == "config" else None)
            )
        if isinstance(base, ast.Attribute):
            if base.attr in {*SECTIONS, "settings", "method"}:
                return "settings" if base.attr == "method" else base.attr
            if base.attr == "config":
                owner = getattr(base.value, "attr", getattr(base.value, "id", "")).removesuffix("s")
                return owner if owner in SECTIONS else self.own[-1].get("config", "")
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self.section(node.value)
        if isinstance(node.ctx, ast.Load) and section is not None:
            self.found.add((section, node.attr))
        self.generic_visit(node)


def reads_of(paths: Iterator[Path]) -> set[tuple[str, str]]:
    visitor = Reads()
    for path in paths:
        visitor.visit(ast.parse(path.read_text()))
    return visitor.found


LEAVES = [(name, leaf.name) for name, kind in SECTIONS.items() for leaf in dataclasses.fields(kind)]
LEAVES += [("", field.name) for field in dataclasses.fields(Config) if field.name not in SECTIONS]


@pytest.fixture(scope="module")
def reads() -> set[tuple[str, str]]:
    return reads_of(files())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "leaf"), LEAVES, ids=[".".join(filter(None, leaf)) for leaf in LEAVES]
)
def test_every_setting_is_read_somewhere(section, leaf, reads):
    assert (section, leaf) in reads, f"nobody reads {section}.{leaf}: remove the key, or use it"


def in_methods(value) -> bool:
    return inspect.isfunction(value) and value.__module__.startswith("postgrad.methods")


def in_methods_package(value) -> bool:
    return inspect.ismodule(value) and value.__name__.startswith("postgrad.methods")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_method_is_read_by_it(name, reads):
    method = find_method(name)
    modules = {
        sys.modules[kind.__module__]
        for kind in (*method.__mro__, *method.Objective.__mro__)
        if kind.__module__.startswith("postgrad.methods")
    }
    helpers = {
        sys.modules[f.__module__]
        for m in modules
        for f in vars(m).values()
        if callable(f) and in_methods(f)
    }
    helpers |= {f for m in modules for f in vars(m).values() if in_methods_package(f)}
    own = {Path(module.__file__) for module in modules | helpers}
    read_here = {leaf for section, leaf in reads_of(iter(own)) if section == "settings"}
    if issubclass(method, Grpo):  # advantages and losses declare the settings that they read
        read_here |= {option for one in ADVANTAGES.values() for option in one.options}
        read_here |= {option for one in LOSSES.values() for option in one.options}
    for field in dataclasses.fields(method.Settings):
        assert field.name in read_here, f"method {name} never reads settings.{field.name}"


def test_the_walk_can_fail(tmp_path):
    """The walk must not take any attribute of the same name for a reading of the setting."""
    file = tmp_path / "x.py"
    file.write_text(
        "def f(config, other):\n"
        "    other.steps\n"
        "    config.training.steps = 3\n"
        "    return config.data.train\n"
    )
    found = reads_of(iter([file]))
    assert ("data", "train") in found and ("training", "steps") not in found


def test_settings_do_not_grow_in_number():
    """A new one replaces another, or has a reason that a user gave: the bound only falls."""
    schemas = [find_method(name).Settings for name in METHODS]
    of_methods = {field.name for schema in schemas for field in dataclasses.fields(schema)}
    of_run = [key for key in known_keys(MethodSettings) if key.rpartition(".")[0] != "method"]
    sections = {".".join(filter(None, key.split(".")[:-1])) for key in of_run}
    assert len(of_methods) + len([key for key in of_run if key not in sections]) - 1 <= 212


def test_every_setting_has_a_help_text():
    for kind in [*SECTIONS.values(), *(find_method(name).Settings for name in METHODS)]:
        for field in dataclasses.fields(kind):
            assert field.metadata.get("help") or field.name == "name", (
                f"{kind.__name__}.{field.name}"
            )


def test_what_may_change_on_resume_are_settings():
    assert {tuple(key.split(".")) if "." in key else ("", key) for key in MAY_CHANGE} <= set(LEAVES)
