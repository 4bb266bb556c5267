"""Writes the golden files anew: python tests/golden/record.py [configs] [problems] [runs]

For configs it prints what changed. Recipes that are new, and commands and settings that the
documentation shows now, are added. Recipes that are gone drop out, and so do single commands that
are refused now. A set of overrides that is refused must be edited in configs.jsonl first.
"""

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / folder) for folder in ("golden", "config", "data", "methods", "")
]

import problems  # noqa: E402
import runs  # noqa: E402
from configs import (  # noqa: E402
    ERROR,
    METHOD_SET,
    PLAIN,
    Case,
    Golden,
    Values,
    report,
    resolve,
)
from test_docs_examples import EXCEPTIONS, find_commands  # noqa: E402
from test_examples import SCRIPTS, commands  # noqa: E402

from postgrad.config.compose import recipe_names  # noqa: E402

REQUIRED = ("model.path=tiny", "data.train=arithmetic:1")


def main(names: list[str]) -> int:
    """Record what the names say, or all."""
    names = names or ["configs", "problems", "runs"]
    if "problems" in names:
        problems.write_golden()
    if "runs" in names:
        runs.write_golden()
    return record_configs() if "configs" in names else 0


def record_configs() -> int:
    """Record all configurations; print those that changed."""
    golden = Golden.read()
    old = {case: golden.settings(case) for case in golden.changes}
    write_files(golden)
    values: dict[Case, Values] = {}
    for case in dict.fromkeys([*recipe_cases(golden), *old, *documented_cases()]):
        if case.command == "train" and case.recipe not in (*recipe_names(), *golden.files):
            continue
        settings = resolve(case.command, case.recipe, golden.overrides(case))
        if ERROR not in settings:
            values[case] = settings
        elif isinstance(case.overrides, str):
            print(f"edit the overrides of {case} in configs.jsonl: {settings[ERROR]}")
            return 1
        elif case in old:
            print(f"refused: {case}\n    {settings[ERROR]}")
    for case in old.keys() - values.keys():
        print(f"gone: {case}")
    print(report(old, {case: values[case] for case in values if case in old}))
    golden.record(values)
    golden.write()
    print(f"{len(values)} cases, {len(values.keys() - old.keys())} of them new")
    return 0


def write_files(golden: Golden) -> None:
    """Make the users' recipe files, in a folder that becomes the working directory."""
    os.chdir(tempfile.mkdtemp())
    for name, text in golden.files.items():
        Path(name).write_text(text)


def recipe_cases(golden: Golden) -> list[Case]:
    """Return the cases of every built-in recipe: the common sets, and the set of its method."""
    common = [name for name in golden.sets if not name.startswith(METHOD_SET)]
    cases: list[Case] = []
    for recipe in recipe_names():
        settings = resolve("train", recipe, golden.sets[PLAIN])
        own = f"{METHOD_SET}{settings.get('method.name')}"
        sets = [*common, own] if own in golden.sets else common
        cases += [Case("train", recipe, name) for name in sets]
    return cases


def documented_cases() -> list[Case]:
    """Return the cases of README, docs and examples: whole commands, and single settings."""
    found: list[Case] = []
    for command in ("train", "doctor --fit", "eval", "generate", "score", "analyze entropy"):
        for line in find_commands(f"postgrad {command}"):
            if not any(exception in line for exception in EXCEPTIONS):
                found += case_of(command.split()[0], re.sub(r" --device(-gib)? \S+", "", line))
    for line in find_commands("postgrad launch"):
        found += case_of("train", line.partition(" train ")[2])
    for script in SCRIPTS:
        for _, command, *words in commands(script):
            found += case_of(command, shlex.join(words))
    return [*found, *single_settings()]


def case_of(command: str, line: str) -> list[Case]:
    """Return the case of a command's words, or none for another command or without settings."""
    line = re.sub(r"\$\w+", "1", line)  # a variable of the shell
    words = [word for word in shlex.split(line) if word not in ("...", "…") and word[0] != "-"]
    if command not in ("train", "doctor", "eval", "generate", "score", "analyze") or not words:
        return []
    recipe, *overrides = words
    if command in ("train", "doctor"):
        if recipe not in recipe_names():
            return []
        overrides = [*required(overrides), *overrides]
        return [Case("train", recipe, tuple(overrides))]
    return [Case(command, recipe, tuple(overrides))] if overrides else []


def required(overrides: list[str]) -> list[str]:
    """Return the required settings that the overrides leave out."""
    keys = {text.partition("=")[0] for text in overrides}
    return [text for text in REQUIRED if text.partition("=")[0] not in keys]


def single_settings() -> list[Case]:
    """Return the settings that the text of the documentation shows, one or a few at a time.

    Each is composed with the first recipe of those below whose method accepts it.
    """
    cases: list[Case] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for text in re.findall(r"`(\+*[a-z_]+(?:\.[a-z_0-9]+)+=[^`\n]+)`", page.read_text()):
            overrides = re.split(r" (?=[a-z_]+(?:\.[a-z_0-9]+)*=)", text)
            for recipe in ("grpo", "ppo", "sft", "dpo", "bupo", "luffy", "classmate", "distill"):
                case = Case("train", recipe, (*required(overrides), *overrides))
                if ERROR not in resolve("train", recipe, case.overrides):
                    cases.append(case)
                    break
    return cases


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
