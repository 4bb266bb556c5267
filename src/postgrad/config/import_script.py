"""Translates launch scripts of verl and its forks, and of TRL.

`read_settings` finds the program and the settings of a script, `translate` turns them into a recipe
and overrides and lists what has no equivalent. Nothing of a script is executed. Each project has a
table of names and a file that translates.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from postgrad.config.import_hydra import read_hydra_file, read_trl_file
from postgrad.config.import_names import TRL_COMMANDS, TRL_SCRIPTS
from postgrad.config.import_python import read_trl_python
from postgrad.config.import_result import Translation
from postgrad.config.import_shell import Command, Script, read_script
from postgrad.config.import_trl import read_trl_yaml, translate_trl
from postgrad.config.import_verl import translate_verl
from postgrad.config.import_verl_sft import translate_verl_sft
from postgrad.errors import ConfigError

VERL = "verl"
VERL_SFT = "verl_sft"
# Programs of verl and its forks whose training is the one of the recipes here.
_KNOWN_MAINS = ("main_ppo", "main_dapo", "main_mix_ppo")
_ASYNC = ("fully_async_policy", "one_step_off_policy")
_PARSER = re.compile(r"\b(?:TrlParser|HfArgumentParser)\(")
# Sections of verl's configuration that only RL has.
_RL_SECTIONS = ("actor_rollout_ref.", "algorithm.")


def read_settings(
    text: str, is_python: bool = False, folder: Path | None = None
) -> tuple[str, dict[str, str], list[str]]:
    """(kind, settings, notes) of a script.

    The kind is `verl` or `verl_sft` for key=value scripts, or the class of TRL's config. Notes say
    what of the script is not in the settings.

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
        raise ConfigError(
            "the script takes its config from its command line; put the command that starts it "
            "(accelerate launch ...py --learning_rate ...) into a .sh file and import that"
        )
    script = read_script(text)
    trainers: list[tuple[str, Command]] = []
    for command in script.commands:
        kind = _kind_of(command.program) or _trl_script(script, command)
        in_file, notes = read_hydra_file(command, script.variables, folder)
        is_rl = _has_rl(in_file | script.settings(command.program)) or notes
        if kind and (kind != VERL or is_rl):
            trainers.append((kind, command))
    if len(trainers) > 1:
        names = ", ".join(command.program for _, command in trainers)
        raise ConfigError(
            f"the script starts {len(trainers)} trainings ({names}); keep one of them in a file"
        )
    if trainers:
        return _read_command(script, *trainers[0], folder)
    return _read_without_program(text, script)


def _kind_of(program: str) -> str:
    """The kind of training that a program does; "" if it does none that is known."""
    if program.startswith("trl "):
        return TRL_COMMANDS[program.removeprefix("trl ")]
    name = program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if "sft_trainer" in name:
        return VERL_SFT
    is_training = "main" in name and "generation" not in name and "eval" not in name
    return VERL if is_training else ""


def _trl_script(script: Script, command: Command) -> str:
    """The class of TRL's config if the program is one of TRL's scripts with its flags; else ""."""
    name = command.program.rpartition("/")[2].removesuffix(".py")
    is_trl = set(script.flags(command)) & {"config", "model_name_or_path", "dataset_name"}
    return TRL_SCRIPTS.get(name, "") if is_trl else ""


def _has_rl(settings: dict[str, str]) -> bool:
    return any(key.startswith(_RL_SECTIONS) for key in settings)


def _read_command(
    script: Script, kind: str, command: Command, folder: Path | None
) -> tuple[str, dict[str, str], list[str]]:
    notes = script.notes()
    if kind not in (VERL, VERL_SFT):
        flags, unread = read_trl_file(script.flags(command), folder)
        return kind, flags, notes + unread
    program = command.program
    in_file, unread = read_hydra_file(command, script.variables, folder)
    settings = in_file | script.settings(program)
    notes += unread
    if not settings:
        raise ConfigError(f"the command has no settings but those of a file: {'; '.join(unread)}")
    if ".vla." in program:
        raise ConfigError(f"{program} trains models of vision and action; here models read text")
    name = program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if name.startswith("qwen_"):  # of Classmate-CoT
        settings["trainer.project_name"] = "classmate_cot"
    if kind == VERL and any(part in program for part in _ASYNC):
        notes.append(
            f"{program}: rollouts run while the policy trains; add rollout.staleness=1 "
            "(rollout.stream=true for rollouts without pauses)"
        )
    elif kind == VERL and not name.endswith(_KNOWN_MAINS):
        notes.append(f"{program}: what this program does differently from verl's main_ppo")
    return kind, settings, notes


def _read_without_program(text: str, script: Script) -> tuple[str, dict[str, str], list[str]]:
    """The settings of a text that starts no known program: a part of a script, or a YAML file."""
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
        raise ConfigError(
            f"the script starts {others}, which is no training that is known here; for evaluation "
            "see postgrad eval --help and postgrad generate --help"
        )
    raise ConfigError(
        "no settings found: neither section.key=value arguments (verl and its forks), flags of "
        "trl NAME, nor a call such as GRPOConfig(...) or a YAML file "
        "with its arguments (TRL)"
    )


def translate(kind: str, settings: dict[str, str], notes: Sequence[str] = ()) -> Translation:
    """The recipe and overrides that equal a script's settings, and what has no equivalent."""
    if kind == VERL:
        result = translate_verl(settings)
    elif kind == VERL_SFT:
        result = translate_verl_sft(settings)
    else:
        result = Translation(*translate_trl(kind, settings))
    result.missing += notes
    return result
