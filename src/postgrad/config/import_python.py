"""Reads a Python script of TRL: the arguments of its config, in the order of the file.

Nothing of the script is executed. Names of literals and of dicts are followed, and so are later
assignments to the config. What cannot be read is said in a note.
"""

import ast
import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from postgrad.config.import_names import PEFT_NAMES, TRL_NAMES, TRL_NOT_NEEDED, TRL_RECIPES
from postgrad.config.import_python_objects import (
    POSITIONS,
    TRL_ARGUMENTS,
    hub_name,
    model_name,
    quantization,
)
from postgrad.config.import_python_values import (
    TrlConfig,
    ValueReader,
    dict_of,
    is_literal,
    text_of,
)
from postgrad.errors import ConfigError

UNREAD = "these settings could not be read; add them by hand"
# Sizes that are translated together: without one of them the others have no meaning.
SIZES = (
    "num_generations",
    "num_iterations",
    "num_mini_batches",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
_CONFIG_CALL = re.compile(rf"\b(?:{'|'.join(TRL_RECIPES)})\(")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PARTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def read_trl_python(
    text: str, is_python: bool = False
) -> tuple[str, dict[str, str], list[str]] | None:
    """(class, arguments, notes) of the TRL config of a script; None if there is none.

    Args:
        is_python: whether the text must be Python; else it may be a shell script.

    Raises:
        ConfigError: there are several configs, or the text is Python that cannot be parsed.
    """
    reader = _Reader()
    try:
        reader.read(ast.parse(text))
    except SyntaxError as error:
        if is_python or _CONFIG_CALL.search(text):
            raise ConfigError(
                f"the file cannot be parsed as Python: {error.msg} (line {error.lineno})"
            ) from error
        return None
    except (ValueError, RecursionError, MemoryError):
        return None
    configs = list(reader.configs.values())
    if len(configs) > 1:
        names = ", ".join(config.kind for config in configs)
        raise ConfigError(f"the file has {len(configs)} configs ({names}); keep one of them")
    return reader.result(configs[0]) if configs else None


@dataclass
class _Reader(ValueReader):
    """Follows the statements of a script.

    Attributes:
        returned: configs that functions of the script return.
        configs: calls of TRL's configs.
        trainer: arguments of the trainer; `lora` has those of its LoraConfig.
        objects: arguments of TRL's configs that the trainer's objects stand for.
        several: names that are set under a condition, with their values.
        sources: names that the value of a name was made of.
        used: names whose value became part of an argument.
    """

    returned: dict[str, TrlConfig] = field(default_factory=dict)
    configs: dict[ast.Call, TrlConfig] = field(default_factory=dict)
    trainer: dict[str, ast.expr] = field(default_factory=dict)
    lora: dict[str, str] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    several: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def read(self, tree: ast.Module) -> None:
        """Reads the statements of the module, then those of its functions and classes."""
        scopes: list[tuple[ast.AST, dict[str, ast.expr | TrlConfig]]] = [(tree, {})]
        while scopes:
            node, outer = scopes.pop(0)
            self.names = dict(outer)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for argument in ast.walk(node.args):
                    if isinstance(argument, ast.arg):
                        self.names.pop(argument.arg, None)
            inner: list[ast.AST] = []
            for child in ast.iter_child_nodes(node):
                if isinstance(child, _PARTS):
                    self._statement(child, inner, is_conditional=False)
                if isinstance(child, ast.Return) and child.value is not None:
                    value = self._new_value(child.value)
                    if isinstance(value, TrlConfig) and isinstance(node, _FUNCTIONS):
                        self.returned[node.name] = value
            scopes += [(one, self.names) for one in inner]

    def result(self, config: TrlConfig) -> tuple[str, dict[str, str], list[str]]:
        """(class, arguments, notes) of a config, with those of the trainer."""
        settings: dict[str, str] = {}
        notes = [*config.notes, *self.notes]
        for key, value in config.arguments.items():
            if key == "model_init_kwargs":
                value = self._without_not_needed(value)
            if is_literal(value) or key in SIZES:
                settings[key] = text_of(value)
            elif key not in TRL_NOT_NEEDED:
                notes.append(f"{key}={text_of(value)}: its value could not be read; set it by hand")
        for key, name in self.objects.items():
            settings.setdefault(key, name)
        for key, reason in TRL_ARGUMENTS.items():
            value = self.trainer.get(key)
            if value is not None and text_of(value) != "None":
                notes.append(f"{key}={text_of(value)}: {reason}")
        return config.kind, settings | self.lora, notes + self._notes_of_several()

    def _without_not_needed(self, value: ast.expr) -> ast.expr:
        """A dict without the entries that change nothing, such as dtype=torch.bfloat16."""
        unread: list[str] = []
        items = self.items_of(value, unread)
        if items is None or unread:
            return value
        return dict_of({key: one for key, one in items.items() if key not in TRL_NOT_NEEDED}, [])

    def _notes_of_several(self) -> list[str]:
        used: set[str] = set()
        more = self.used
        while more:
            used |= more
            more = set().union(*(self.sources.get(name, set()) for name in more)) - used
        return [
            f"{name}: the script sets it to {', then to '.join(values)}; "
            "the last value is used here"
            for name, values in self.several.items()
            if name in used
        ]

    def _take_lookups(self, name: str = "") -> None:
        """Notes that the names looked up are part of the value of `name`, or of an argument."""
        users = self.sources.setdefault(name, set()) if name else self.used
        users |= self.lookups
        self.lookups = set()

    # ---- statements

    def _statement(self, node: ast.AST, inner: list[ast.AST], is_conditional: bool) -> None:
        if isinstance(node, _FUNCTIONS):
            inner.append(node)
            return
        if isinstance(node, ast.For | ast.AsyncFor):
            self._forget(node.target)
        always_runs = isinstance(node, ast.With | ast.AsyncWith) or _is_main_guard(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _PARTS):
                self._statement(child, inner, is_conditional or not always_runs)
                continue
            for call in ast.walk(child):
                if isinstance(call, ast.Call):
                    self._call(call, is_conditional)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, is_conditional)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, is_conditional)
        elif isinstance(node, ast.AugAssign):
            old = copy.copy(node.target)
            self._assign(node.target, ast.BinOp(old, node.op, node.value), is_conditional)

    def _assign(self, target: ast.expr, value: ast.expr, is_conditional: bool) -> None:
        if isinstance(target, ast.Attribute) and self._set_argument(
            target.value, target.attr, value, is_conditional
        ):
            return
        if isinstance(target, ast.Subscript):
            items = self.value_of(target.value)
            if isinstance(items, ast.Dict):
                name = ast.unparse(target.value)
                self._add_items(items, name, [(target.slice, value)], is_conditional)
            return
        if not isinstance(target, ast.Name | ast.Attribute):
            self._forget(target)
            return
        name = ast.unparse(target)
        names = self.names if isinstance(target, ast.Name) else self.attributes
        old = names.get(name)
        new = self._new_value(value)
        if is_conditional and isinstance(old, ast.expr) and isinstance(new, ast.expr):
            texts = [text_of(old), text_of(new)]
            if texts[0] != texts[1]:
                self.several.setdefault(name, texts[:1]).append(texts[1])
        names[name] = new
        self._take_lookups(name)

    def _forget(self, target: ast.expr) -> None:
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self.names.pop(name.id, None)

    def _new_value(self, value: ast.expr) -> ast.expr | TrlConfig:
        """What a name means after an assignment of the value."""
        if isinstance(value, ast.Call) and value in self.configs:
            return self.configs[value]
        if isinstance(value, ast.Call) and ast.unparse(value.func) in self.returned:
            return self.returned[ast.unparse(value.func)]
        known = self.value_of(value)
        if isinstance(known, TrlConfig | ast.Dict) and isinstance(value, ast.Name | ast.Attribute):
            return known  # another name of the same object
        unread: list[str] = []
        items = self.items_of(value, unread)
        if items is None:
            return self.resolve(value)
        return dict_of(items, unread)

    def _set_argument(
        self, owner: ast.expr, key: str, value: ast.expr, is_conditional: bool
    ) -> bool:
        """Sets an argument of a config after its call; False if the owner is not a config."""
        config = self.value_of(owner)
        if not isinstance(config, TrlConfig):
            is_unknown = isinstance(owner, ast.Name) and owner.id not in ("self", "cls")
            if is_unknown and key in TRL_NAMES:
                name = f"{ast.unparse(owner)}.{key}"
                self.notes.append(
                    f"{name}={text_of(self.resolve(value))}: not known to be a config"
                )
            return False
        new = self.resolve(value)
        if is_conditional:
            config.notes.append(
                f"{key}={text_of(new)}: set under a condition (line {owner.lineno}), and used here"
            )
        config.arguments[key] = new
        self._take_lookups()
        return True

    # ---- calls

    def _call(self, call: ast.Call, is_conditional: bool) -> None:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in TRL_RECIPES:
            unread: list[str] = []
            arguments = self._keywords(call, unread)
            for i, value in enumerate(call.args):
                if i == 0 and not isinstance(value, ast.Starred):
                    arguments.setdefault("output_dir", self.resolve(value))
                else:
                    unread.append(ast.unparse(value))
            notes = [f"{text}: {UNREAD}" for text in dict.fromkeys(unread)]
            self.configs[call] = TrlConfig(name, arguments, notes)
            self._take_lookups()
        elif name.removesuffix("Trainer") + "Config" in TRL_RECIPES:
            self._read_trainer(call, name.removesuffix("Trainer"))
        elif name == "get_peft_model" and call.args[1:]:
            self._read_lora(call.args[1])
        elif name == "setattr" and len(call.args) == 3:
            key = self.resolve(call.args[1])
            if isinstance(key, ast.Constant):
                self._set_argument(call.args[0], str(key.value), call.args[2], is_conditional)
        elif name == "update" and isinstance(call.func, ast.Attribute):
            items = self.value_of(call.func.value)
            if isinstance(items, ast.Dict):
                given = [(ast.Constant(word.arg), word.value) for word in call.keywords if word.arg]
                rest = [*call.args, *(word.value for word in call.keywords if not word.arg)]
                added = [(None, value) for value in rest] + given
                self._add_items(items, ast.unparse(call.func.value), added, is_conditional)

    def _read_trainer(self, call: ast.Call, kind: str) -> None:
        unread: list[str] = []
        self.trainer |= self._keywords(call, unread)
        if "peft_config" in self.trainer:
            self._read_lora(self.trainer.pop("peft_config"))
        self.notes += [f"{text}: {UNREAD}" for text in unread]
        for name, value in zip(POSITIONS.get(kind, ("model",)), call.args, strict=False):
            self.trainer.setdefault(name, self.resolve(value))
        for key, argument in (
            ("train_dataset", "dataset_name"),
            ("eval_dataset", "eval_dataset_name"),
        ):
            name = hub_name(self.trainer.get(key), self.value_of)
            if name:
                self.objects[argument] = name
                del self.trainer[key]
        if "model" in self.trainer:
            found, notes = model_name(self.trainer["model"], self.value_of, self.resolve)
            self.objects |= found
            self.notes += notes
            if found:
                del self.trainer["model"]
        found = quantization(self.trainer.get("quantization_config"), self.value_of)
        if found:
            self.objects |= found
            del self.trainer["quantization_config"]
        self._take_lookups()

    def _add_items(
        self,
        items: ast.Dict,
        name: str,
        added: Sequence[tuple[ast.expr | None, ast.expr]],
        is_conditional: bool,
    ) -> None:
        """Adds entries to a dict of the script; a key of None adds those of another dict."""
        before = text_of(items)
        unread: list[str] = []
        more = (
            self.items_of(ast.Dict(*map(list, zip(*added, strict=True))), unread) if added else {}
        )
        new = dict_of(more or {}, unread)
        items.keys += new.keys
        items.values += new.values
        if is_conditional:
            self.several.setdefault(name, [before]).append(text_of(items))
        self._take_lookups(name)

    def _keywords(self, call: ast.Call, unread: list[str]) -> dict[str, ast.expr]:
        """The keyword arguments of a call; adds those that cannot be read to `unread`."""
        found: dict[str, ast.expr] = {}
        for word in call.keywords:
            if word.arg:
                found[word.arg] = self.resolve(word.value)
                continue
            items = self.items_of(word.value, unread)
            if items is None:
                unread.append(f"**{ast.unparse(word.value)}")
            else:
                found |= items
        return found

    # ---- LoRA

    def _read_lora(self, value: ast.expr) -> None:
        found = self.value_of(value)
        if isinstance(found, ast.Call) and ast.unparse(found.func).endswith("LoraConfig"):
            self.lora = self._lora(found, self.notes)
        else:
            self.trainer["peft_config"] = value
        self._take_lookups()

    def _lora(self, call: ast.Call, notes: list[str]) -> dict[str, str]:
        """The arguments of PEFT's LoraConfig by the names of TRL's ModelConfig."""
        unread: list[str] = [ast.unparse(value) for value in call.args]
        arguments = {key: text_of(one) for key, one in self._keywords(call, unread).items()}
        notes += [f"LoraConfig({text}): {UNREAD}" for text in unread]
        found = {"lora_r": "8", "lora_alpha": "8", "lora_dropout": "0"}  # PEFT's defaults
        for key, value in arguments.items():
            if key in PEFT_NAMES and value != "None":
                found[PEFT_NAMES[key]] = value
            elif key != "task_type" and value not in ("None", "False", "none"):
                notes.append(f"{key}={value} of LoraConfig")
        return found


def _is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
