"""Launch scripts of verl and its forks, and of TRL: which training they start, with what settings.

`read_settings` finds the settings of a script, `translate` turns them into a recipe and overrides
and lists what has no equivalent. Nothing of a script is executed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.errors import Conflict, Missing, Unsupported
from postgrad.translate.python import read_trl_python
from postgrad.translate.result import Translation
from postgrad.translate.shell import Command, Script, read_script
from postgrad.translate.trl import RECIPES, read_trl_yaml, read_yaml, texts, translate_trl
from postgrad.translate.verl import translate_verl, translate_verl_sft

VERL = "verl"
VERL_SFT = "verl_sft"
# Programs of verl and its forks whose training is the one of the recipes here.
_KNOWN_MAINS = ("main_ppo", "main_dapo", "main_mix_ppo")
_ASYNC = ("fully_async_policy", "one_step_off_policy")
_PARSER = re.compile(r"\b(?:TrlParser|HfArgumentParser)\(")
# Sections of verl's configuration that only RL has.
_RL_SECTIONS = ("actor_rollout_ref.", "algorithm.")
# Commands of TRL and its scripts that train with the flags of their config.
_TRL_PROGRAMS = {kind.removesuffix("Config").lower(): kind for kind in RECIPES} | {
    "reward_modeling": "RewardConfig"
}
# Files of verl and its forks, which have the defaults of the table or of the recipes.
_VERL_FILE = re.compile(
    r"((ppo|dapo|mix_ppo|fully_async_ppo|one_step_off_ppo)(_megatron)?_trainer|sft_trainer(_engine)?)"
)
_NOT_READ = "the settings of this file are not read; add them by hand"
_FILE_OPTION = re.compile(
    r"(?<!\S)(--config-name|--config-path|--config-dir|-cn|-cp|-cd)[=\s]\s*(\"[^\"]*\"|'[^']*'|\S+)"
)


def translate(kind: str, settings: Mapping[str, str], notes: Sequence[str] = ()) -> Translation:
    """Return the recipe and overrides that equal a script's settings, and what has no equivalent.

    Args:
        kind: `verl`, `verl_sft`, or the class of TRL's config.
        settings: the script's settings as text.
        notes: lines about the script, which are listed too.
    """
    if kind == VERL:
        result = translate_verl(settings)
    elif kind == VERL_SFT:
        result = translate_verl_sft(settings)
    else:
        result = translate_trl(kind, settings)
    result.missing += notes
    return result


def read_settings(
    text: str, is_python: bool = False, folder: Path | None = None
) -> tuple[str, dict[str, str], list[str]]:
    """Return (kind, settings, notes) of a script, as `translate` takes them.

    Args:
        is_python: whether the script must be Python, since its file is called so.
        folder: where the script is, to read the files that it names.

    Raises:
        ConfigError: the text has no settings of a known kind, starts several trainings, or is
            Python that cannot be parsed.
    """
    trl = read_trl_python(text, is_python)
    if trl is not None:
        return trl
    if is_python and _PARSER.search(text):
        raise Missing(
            "the script takes its config from its command line; put the command that starts it "
            "(accelerate launch ...py --learning_rate ...) into a .sh file and import that"
        )
    script = read_script(text)
    trainings: list[tuple[str, Command]] = []
    for command in script.commands:
        kind = _kind_of(script, command)
        is_rl = _has_rl(script.settings(command.program)) or _unread_file(command)
        if kind and (kind != VERL or is_rl):
            trainings.append((kind, command))
    if len(trainings) > 1:
        names = ", ".join(command.program for _, command in trainings)
        raise Conflict(
            f"the script starts {len(trainings)} trainings ({names}); keep one of them in a file"
        )
    if not trainings:
        return _read_without_program(text, script)
    kind, command = trainings[0]
    if kind in (VERL, VERL_SFT):
        return _read_verl(script, kind, command)
    flags, notes = _read_trl_flags(script.flags(command), folder)
    return kind, flags, script.notes() + notes


def _kind_of(script: Script, command: Command) -> str:
    """Return the kind of training that a program does; "" if it does none that is known."""
    if command.program.startswith("trl "):
        return _TRL_PROGRAMS[command.program.removeprefix("trl ")]
    name = _module(command.program)
    if "sft_trainer" in name:
        return VERL_SFT
    if "main" in name and "generation" not in name and "eval" not in name:
        return VERL
    is_trl = set(script.flags(command)) & {"config", "model_name_or_path", "dataset_name"}
    return _TRL_PROGRAMS.get(name, "") if is_trl else ""


def _module(program: str) -> str:
    return program.removesuffix(".py").replace("/", ".").rpartition(".")[2]


def _has_rl(settings: Mapping[str, str]) -> bool:
    return any(key.startswith(_RL_SECTIONS) for key in settings)


def _read_verl(
    script: Script, kind: str, command: Command
) -> tuple[str, dict[str, str], list[str]]:
    program = command.program
    settings = script.settings(program)
    notes = script.notes() + _unread_file(command)
    if not settings:
        raise Missing(f"the command has no settings but those of a file: {'; '.join(notes)}")
    if ".vla." in program:
        raise Unsupported(f"{program} trains models of vision and action; here models read text")
    if _module(program).startswith("qwen_"):  # of Classmate-CoT
        settings["trainer.project_name"] = "classmate_cot"
    if kind == VERL and any(part in program for part in _ASYNC):
        notes.append(
            f"{program}: rollouts run while the policy trains; add rollout.staleness=1 "
            "(rollout.stream=true for rollouts without pauses)"
        )
    elif kind == VERL and not _module(program).endswith(_KNOWN_MAINS):
        notes.append(f"{program}: what this program does differently from verl's main_ppo")
    return kind, settings, notes


def _read_without_program(text: str, script: Script) -> tuple[str, dict[str, str], list[str]]:
    """Read a text that starts no known program: a part of a script, or a YAML file."""
    settings = script.settings("")
    if _has_rl(settings):
        return VERL, settings, script.notes()
    if "model.partial_pretrain" in settings:
        return VERL_SFT, settings, script.notes()
    trl = read_trl_yaml(text)
    if trl is not None:
        return (*trl, [])
    others = ", ".join(dict.fromkeys(command.program for command in script.commands))
    if settings and others:
        raise Unsupported(
            f"the script starts {others}, which is no training that is known here; for evaluation "
            "see postgrad eval --help and postgrad generate --help"
        )
    raise Missing(
        "no settings found: neither section.key=value arguments (verl and its forks), flags of "
        "trl NAME, nor a call such as GRPOConfig(...) or a YAML file with its arguments (TRL)"
    )


# ---- files that commands name


def _read_trl_flags(flags: dict[str, str], folder: Path | None) -> tuple[dict[str, str], list[str]]:
    """Return (flags with the settings of --config's file, notes); the flags go first."""
    file = flags.pop("config", "")
    values = _load(Path(file), folder) if file else {}
    if values is None:
        return flags, [f"--config={file}: {_NOT_READ}"]
    return texts(values) | flags, []


def _unread_file(command: Command) -> list[str]:
    """Return a line about the file of --config-name, unless it has verl's own defaults."""
    options = {
        match[1].lstrip("-"): match[2].strip("\"'")
        for match in _FILE_OPTION.finditer(command.arguments)
    }
    name = options.get("config-name", options.get("cn", "ppo_trainer")).removesuffix(".yaml")
    if _VERL_FILE.fullmatch(name):
        return []
    given = " ".join(f"--{key}={value}" for key, value in options.items())
    return [f"{given}: {_NOT_READ}"]


def _load(path: Path, folder: Path | None) -> dict[str, Any] | None:
    """Return the content of a YAML file that a script in a folder names; None if it has none."""
    for base in [Path.cwd(), folder] if folder else []:
        try:
            values = read_yaml((base / path).read_text())
        except (OSError, UnicodeDecodeError):
            continue
        if values is not None:
            return values
    return None
