"""What `postgrad import` makes of a script: its translation, and the command that it prints."""

import shlex
from pathlib import Path

from postgrad.cli.main import main
from postgrad.translate import Translation, read_settings, translate


def script(name: str) -> str:
    """Return a script of the folder scripts."""
    return (Path(__file__).with_name("scripts") / f"{name}.sh").read_text()


def translated(text: str, folder=None) -> Translation:
    """Return the translation of a script's text."""
    return translate(*read_settings(text, folder=folder))


def printed(text: str, tmp_path, capsys, name: str = "run.sh") -> str:
    """Return what the command prints about a script; the printed command passes all checks."""
    script = tmp_path / name
    script.write_text(text)
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("postgrad train ")
    assert "needs a change" not in out, out
    assert shlex.split(out.partition("\n#")[0])
    return out


def keys(lines: list[str]) -> list[str]:
    """Return the names of the settings that lines of a translation are about, sorted."""
    names = [line.removeprefix("set it: ").partition(": ")[0] for line in lines]
    return sorted(name.partition(" (")[0].partition("=")[0] for name in names)
