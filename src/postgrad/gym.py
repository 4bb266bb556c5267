"""The generators of the package reasoning-gym, for data and verifiers."""

import inspect
from functools import lru_cache
from typing import Any

from postgrad.errors import NotInstalled, UnknownName, WrongValue, did_you_mean

DEFAULT_SIZE = 1000
LEVEL = "level"  # sets all attributes of the generator's curriculum


def make_dataset(name: str, settings: dict[str, Any]) -> Any:
    """Return a data set of reasoning-gym; it is the same for the same settings.

    Args:
        name: a generator, such as countdown.
        settings: its options; also `size`, `seed`, and `level` of its curriculum.

    Raises:
        ConfigError: the package is missing, or does not have this generator or option.
    """
    return _make_dataset(name, tuple(sorted(settings.items())))


@lru_cache(maxsize=64)
def _make_dataset(name: str, items: tuple[tuple[str, Any], ...]) -> Any:
    factory = _load_factory()
    source = f"reasoning_gym:{name}"
    if name not in factory.DATASETS:
        raise UnknownName(
            f"{source}: there is no such generator; {did_you_mean(name, factory.DATASETS)}"
        )
    settings = {"size": DEFAULT_SIZE, "seed": 0, **dict(items)}
    dataset_class, config_class = factory.DATASETS[name]
    known = list(inspect.signature(config_class).parameters)
    for key in settings:
        if key not in known and key != LEVEL:
            hint = did_you_mean(key, [*known, LEVEL])
            raise UnknownName(f"{source} has no option {key}; {hint}")
    try:
        config = _make_config(factory, name, config_class, settings)
        config.validate()
        return dataset_class(config=config)
    except (AssertionError, ValueError, TypeError) as error:
        raise WrongValue(f"{source}: {' '.join(str(error).split())[:200]}") from error


def _make_config(factory: Any, name: str, config_class: Any, settings: dict[str, Any]) -> Any:
    level = settings.pop(LEVEL, None)
    if level is None:
        return config_class(**settings)
    if not factory.has_curriculum(name):
        raise ValueError(f"it has no curriculum; remove {LEVEL}={level}")
    curriculum = factory.create_curriculum(name)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= highest:
        raise ValueError(f"{LEVEL}={level} is out of range; it must be 0 to {highest}")
    curriculum.set_global_level(level)
    return curriculum.generate_configuration(settings)


def _load_factory() -> Any:
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise NotInstalled(
            f"reasoning_gym needs the package reasoning-gym ({error}); pip install 'postgrad[gym]'",
            at="reasoning_gym",
        ) from error
    return factory
