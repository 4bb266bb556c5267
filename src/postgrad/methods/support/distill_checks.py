"""Checks of the settings of distillation, before a run writes anything. All raise ConfigError."""

from dataclasses import replace

from postgrad.errors import ConfigError
from postgrad.methods.method import Method
from postgrad.model.load.load import load_tokenizer
from postgrad.rollout.served_path import is_served, parse_served_path


def check_path(method: Method) -> None:
    """Refuses a teacher that gives no log-probs at the temperature of the rollouts."""
    teacher = method.settings.teacher
    if teacher.startswith("policy:"):
        raise ConfigError(
            f"method.teacher={teacher}: the teacher gives log-probs; give a path, a hub id or "
            "http://host:8000/v1?tokenizer=PATH#model"
        )
    temperature = method.config.rollout.temperature
    if is_served(teacher) and temperature != 1:
        raise ConfigError(
            f"rollout.temperature={temperature:g}: servers give log-probs of prompts at "
            "temperature 1; use rollout.temperature=1, or a teacher that this run loads"
        )


def check_tokenizer(method: Method) -> None:
    """Refuses a teacher that is missing, or whose tokens are not the student's."""
    path = method.settings.teacher
    if not path:
        raise ConfigError("method.teacher is missing; give the teacher's path or hub id")
    if is_served(path):
        _, path = parse_served_path(path)
    model = method.config.model
    student = load_tokenizer(model, method.config.seed).get_vocab()
    teacher = load_tokenizer(replace(model, path=path), method.config.seed).get_vocab()
    if student != teacher:
        raise ConfigError(
            f"method.teacher: {path} has another tokenizer than model.path={model.path} "
            f"({len(teacher)} and {len(student)} tokens); distillation compares token by "
            "token: use a teacher of the same family, or sft on the teacher's responses"
        )
