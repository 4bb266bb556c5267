"""The folder of a run or an evaluation: its lock, and whether a command continues what it holds.

Runs keep their settings in config.yaml, evaluations in settings.json; both read them as nested
dictionaries. Imports no torch.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.config.compose import differences
from postgrad.errors import Changed, Unwritable
from postgrad.files import acquire_lock, disk_error

LOCK_FILE = ".lock"
# A process that tests whether the job is alive holds the lock for a moment.
LOCK_WAIT_S = 0.2

Auto = tuple[str, str, Any]  # section, key, and the value that takes what the machine offers


@dataclass(frozen=True)
class JobFolder:
    """A folder that one process at a time writes.

    Attributes:
        path: the folder; it may not exist yet.
        other: the setting that names another one, as the user types it.
        elsewhere: the setting that puts it on another disk.
    """

    path: Path
    other: str
    elsewhere: str

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and hold its lock; it ends with the process, also after a kill.

        Raises ConfigError if another process holds it, or if the folder cannot be written.
        """
        try:
            with self.writing():
                self.path.mkdir(parents=True, exist_ok=True)
                lock = acquire_lock(self.path / LOCK_FILE, LOCK_WAIT_S)
        except BlockingIOError as error:
            raise Unwritable(
                f"{self.path} is in use by another process; wait for it, or use another "
                f"{self.other}"
            ) from error
        with lock:
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise ConfigError if the disk refuses what the block writes to the folder."""
        try:
            yield
        except BlockingIOError:  # the lock is taken
            raise
        except Exception as error:
            reason = disk_error(error)
            if not reason:
                raise
            raise Unwritable(
                f"{self.path} cannot be written: {reason}; choose another {self.elsewhere}"
            ) from error

    def check_same(
        self, stored: dict[str, Any], given: dict[str, Any], may_change: Collection[str] = ()
    ) -> None:
        """Raise ConfigError if a setting differs from the stored one, unless it `may_change`."""
        prefixes = tuple(f"{key}." for key in may_change)  # keys inside settings that are dicts
        changed = []
        for key in differences(stored, given):
            if key not in may_change and not key.startswith(prefixes):
                changed.append(key)
        if not changed:
            return
        key = changed[0]
        others = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise Changed(
            f"{self.path} has results of other settings ({key} was {_value(stored, key)}, "
            f"now {_value(given, key)}{others}); use another {self.other}, "
            "or the same settings to continue it",
            at=key,
        )


def restore_auto(settings: Any, stored: dict[str, Any], autos: Iterable[Auto]) -> None:
    """Replace each automatic setting by the value that the folder's results began with."""
    for section, key, auto in autos:
        stored_section = stored.get(section)
        target = getattr(settings, section)
        if getattr(target, key) == auto and isinstance(stored_section, dict):
            setattr(target, key, stored_section.get(key, auto))


def _value(values: Any, key: str) -> Any:
    """Return the value of a dotted key, or "not set"."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return "not set"
        values = values[part]
    return values
