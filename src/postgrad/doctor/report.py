"""The result of `postgrad doctor`: rows to read, and problems with what to do about them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Rows of (name, value), and problems as lines that say what to do."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: str, problem: str = "") -> None:
        """Add a row, and a problem unless it is empty."""
        self.rows.append((name, value))
        if problem:
            self.problems.append(problem)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"rows": self.rows, "problems": self.problems}


def gib(size: float) -> str:
    """Return a number of bytes as text, in GiB or in MiB."""
    if size >= 0.01 * 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"
