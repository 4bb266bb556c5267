"""The arguments of train() and Trainer() become a checked configuration and files to write."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.api.models import as_model, save_once
from postgrad.api.rewards import as_verifier_setting
from postgrad.api.rows import HELD_OUT, Row, as_source, to_jsonl
from postgrad.api.settings import Settings, full_key, importable_path, object_name
from postgrad.config.compose import compose, known_keys
from postgrad.config.schema import Config
from postgrad.data.problems import problems_of_rows
from postgrad.errors import Changed, ConfigError, Conflict, Missing, WrongValue
from postgrad.files import atomic_write_text, is_locked
from postgrad.job_folder import LOCK_FILE
from postgrad.methods import find_method
from postgrad.methods.method import Method
from postgrad.model.load.formats import Loaded
from postgrad.training.run import job_folder
from postgrad.user_code import PythonObject

TRAIN_FILE = "train.jsonl"
MODEL_FOLDER = "model"
IN_FOLDER = "run folder:"  # before the name of a file that is written into the run folder


@dataclass
class Request:
    """A configuration, and the rows and model in memory that the run folder stores as files."""

    config: Config
    files: dict[str, str] = field(default_factory=dict)  # name in the run folder -> text
    model: Loaded | None = None

    @property
    def folder(self) -> Path:
        return job_folder(self.config).path

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Hold rows and model in the run folder; remove them if the run could not start.

        Raises ConfigError if the folder has a run with other rows, or cannot be written.
        """
        existed = self.folder.exists()
        written: list[Path] = []
        try:
            self._write(written)
            yield
        finally:
            if not (self.folder / "config.yaml").is_file():
                self._remove(written, existed)

    def _write(self, written: list[Path]) -> None:
        """Write what the folder does not have yet; `written` gets the paths."""
        for name, text in self.files.items():
            file = self.folder / name
            if not file.is_file():
                written.append(file)
                with job_folder(self.config).writing():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write_text(file, text)
            elif file.read_text() != text:
                raise Changed(
                    f"{self.folder} holds a run with other rows in {name}; use another name=..., "
                    "or the same rows to continue it",
                    at="name",
                )
        model_folder = self.folder / MODEL_FOLDER
        if self.model is not None and not model_folder.is_dir():
            written.append(model_folder)
            with job_folder(self.config).writing():
                save_once(self.model, model_folder)

    def _remove(self, written: Sequence[Path], existed: bool) -> None:
        """Remove what this call wrote, unless another process starts the run with it."""
        lock = self.folder / LOCK_FILE
        if lock.is_file() and is_locked(lock):
            return
        for path in written if existed else [self.folder]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def make_request(
    recipe: str,
    *,
    model: Any,
    tokenizer: Any,
    data: Any,
    validation: Any,
    reward: Any,
    reward_weights: Any,
    method: Any,
    settings: Mapping[str, Any] | None,
    named: Mapping[str, Any],
) -> Request:
    """Return the request of a training run. Raises ConfigError; nothing is written.

    Args:
        settings: settings by their full names, dotted or nested.
        named: settings by their short names; None leaves the recipe's value.
    """
    if not isinstance(recipe, str):
        raise WrongValue(
            f"the recipe is {recipe!r}, not a text; give its name first, such as "
            'postgrad.train("grpo", ...); the command postgrad recipes lists them',
            at="recipe",
        )
    method_class, given = _find_class(recipe, method)
    known = known_keys(method_class.Settings)
    all_settings = Settings()
    if given:
        all_settings.add("method.name", given)
    files = _add_data(all_settings, data, validation)
    loaded = _add_model(all_settings, model, tokenizer)
    verifier = as_verifier_setting(reward, reward_weights)
    if verifier is not None:
        all_settings.add("reward.verifier", verifier)
    given_names = {name: value for name, value in named.items() if value is not None}
    for name, value in [*(settings or {}).items(), *given_names.items()]:
        all_settings.add(full_key(name, known), value)
    try:
        config = compose(recipe, all_settings.overrides, lambda _: method_class.Settings)
    except ConfigError as error:
        raise _with_argument_names(error) from error
    rows = ["data" if file == TRAIN_FILE else "validation" for file in files]
    in_memory = [*dict.fromkeys(rows), *(["model"] if loaded else []), *all_settings.objects]
    if in_memory and "name" not in all_settings.values:
        raise Missing(
            f"{' and '.join(in_memory)}: given as Python objects, from which no name of a run can "
            'be made; add name="..."',
            at="name",
        )
    all_settings.attach(config)
    _refuse_elsewhere(config, all_settings.objects)
    request = Request(config, files, loaded)
    _set_paths(request)
    return request


def _with_argument_names(error: ConfigError) -> ConfigError:
    """Return an error about missing settings with the names of the arguments of `train`."""
    message = str(error)
    for key, argument in (("model.path", "model"), ("data.train", "data")):
        message = message.replace(
            f"{key} is not set; add {key}=VALUE", f"{argument}= is not given; add {argument}=VALUE"
        )
    return error.reworded(message)


def _find_class(recipe: str, method: Any) -> tuple[Any, Any]:
    """Return the class of the method, and the value of method.name if the caller gave one."""
    if method is None:
        shown = compose(recipe, [], lambda name: find_method(name).Settings, complete=False)
        return find_method(shown.method.name), None
    if isinstance(method, str):
        return find_method(method), method
    if not isinstance(method, type) or not issubclass(method, Method):
        given = (
            f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
        )
        raise WrongValue(
            f"method is {given}; give the name of a method, or a class derived from one, such as "
            "postgrad.methods.grpo.Grpo",
            at="method",
        )
    name = importable_path(method) or PythonObject(object_name(method), method)
    return find_method(name), name


def _add_data(settings: Settings, data: Any, validation: Any) -> dict[str, str]:
    """Add data.train and data.validation; return the files of rows in memory."""
    files: dict[str, str] = {}
    if data is not None:
        source = as_source(data)
        settings.add("data.train", _placeholder(files, TRAIN_FILE, source, "data"))
    if validation is None:
        return files
    sets = validation if isinstance(validation, Mapping) else {"": validation}
    texts: list[str] = []
    for name, one in sets.items():
        label = f"validation[{name!r}]" if name else "validation"
        file = f"validation-{name}.jsonl" if name else "validation.jsonl"
        text = _placeholder(files, file, as_source(one, label, HELD_OUT), label)
        texts.append(f"{name}={text}" if name else text)
    settings.add("data.validation", ",".join(texts))
    return files


def _placeholder(files: dict[str, str], file: str, source: str | list[Row], label: str) -> str:
    """Return a source as text; rows in memory become a file."""
    if isinstance(source, str):
        return source
    problems_of_rows(source, label)  # raises before anything is written
    files[file] = to_jsonl(source)
    return f"{IN_FOLDER}{file}"


def _add_model(settings: Settings, model: Any, tokenizer: Any) -> Loaded | None:
    if model is None:
        return None
    found = as_model(model, tokenizer)
    if isinstance(found, str):
        settings.add("model.path", found)
        return None
    settings.add("model.path", f"{IN_FOLDER}{MODEL_FOLDER}")
    return found


def _set_paths(request: Request) -> None:
    """Replace the names of what is in memory by paths in the run folder."""
    config = request.config
    folder = f"{request.folder}/"
    config.data.train = config.data.train.replace(IN_FOLDER, folder)
    config.data.validation = config.data.validation.replace(IN_FOLDER, folder)
    if request.model is not None:
        config.model.path = str((request.folder / MODEL_FOLDER).absolute())


def _refuse_elsewhere(config: Config, objects: Mapping[str, Any]) -> None:
    """Refuse objects that processes other than this one would need. Raises ConfigError."""
    if config.cluster.backend == "local":
        return
    for key, value in objects.items():
        in_workers = key.startswith("method.") or key == "rollout.engine"
        is_pooled = key == "reward.verifier" and "verifier" in config.cluster.pools
        if in_workers or is_pooled:
            raise Conflict(
                f"{key}={value} is defined in this process, and cluster.backend="
                f"{config.cluster.backend} needs it in others; put it into a file and give "
                "'file.py:NAME', or import it from a module"
            )
