"""`postgrad init NAME [--KIND]`: writes a method, loss, environment or verifier, and its test."""

import importlib.util
import keyword
from pathlib import Path

from postgrad.errors import Conflict, Unwritable, WrongValue

# In these files NAME is the module's name and TITLE the one of its class.
TEMPLATES = Path(__file__).parent / "templates"
# What can be written, and the setting that uses it.
KINDS = {
    "method": "method=NAME.py:TITLE",
    "loss": "method.loss=NAME.py:NAME",
    "environment": "environment=NAME.py:TITLE",
    "verifier": "reward.verifier=NAME.py:NAME",
}


def init(
    name: str, *, loss: bool = False, environment: bool = False, verifier: bool = False
) -> int:
    """Write NAME.py with a method of your own (or a loss, an environment, a verifier) and
    test_NAME.py with its test to the current folder. It never overwrites files. Both work as they
    are: run the test, then change them.

    Args:
        name: name of the module, e.g. my_method
        --loss: write a loss instead of a method
        --environment: write an environment instead of a method
        --verifier: write a verifier instead of a method
    """
    options = {"loss": loss, "environment": environment, "verifier": verifier}
    chosen = [kind for kind, is_chosen in options.items() if is_chosen]
    if len(chosen) > 1:
        raise Conflict(f"--{chosen[0]} and --{chosen[1]} are two files; write one at a time")
    kind = chosen[0] if chosen else "method"
    files = {Path(f"{name}.py"): f"{kind}.py.txt", Path(f"test_{name}.py"): f"{kind}_test.py.txt"}
    check_name(name, list(files))
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))

    def fill(text: str) -> str:
        return text.replace("NAME", name).replace("TITLE", title)

    try:
        for file, template in files.items():
            with file.open("x") as stream:
                stream.write(fill((TEMPLATES / template).read_text()))
    except OSError as error:
        raise Unwritable(
            f"{name}.py cannot be written: {error.strerror}; choose another folder"
        ) from error
    print(f"wrote {' and '.join(str(file) for file in files)}; run the test, then a training run:")
    print(f"  python -m pytest test_{name}.py")
    data = "seeds:1000" if kind == "environment" else "FILE"
    print(f"  postgrad train grpo {fill(KINDS[kind])} model.path=MODEL data.train={data}")
    return 0


def check_name(name: str, files: list[Path]) -> None:
    """Raise ConfigError if Python cannot import the name, a module has it, or a file exists."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.strip("_"):
        raise WrongValue(
            f"{name} is not a valid name of a Python module; use letters, digits and _, "
            "e.g. my_method",
            at="NAME",
        )
    for file in files:
        if file.exists():
            raise Unwritable(f"{file} exists; choose another name, or move the file")
    if importlib.util.find_spec(name) is not None:
        raise Conflict(
            f"{name} is the name of an installed module, which {files[0]} would hide; "
            f"choose another name, e.g. my_{name}",
            at="NAME",
        )
