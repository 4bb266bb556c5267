"""Publishing a model folder on a hub, through huggingface_hub.

Large files go first and are kept by the hub under their hash, the commit comes last: a repository is never half a model, and what was sent
before a connection broke is not sent again.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError, RunError
from postgrad.publish.card import model_card

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]{0,95}")
CARD = "README.md"
WAITS_S = (1.0, 4.0, 15.0)  # between tries when the hub does not answer
CLIENTS = (
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
)  # whichever huggingface_hub speaks through: their errors are the network's
SKIPPED = (".partial", ".lock", ".tmp")


@dataclass(frozen=True)
class Upload:
    """What is pushed: a folder, and the run and step it comes from, if any."""

    folder: Path
    run: Path | None = None
    step: int | None = None


def find_parcel(source: str, step: str, lora: str) -> Upload:
    """The folder a word means: of a run or checkpoint its policy (or adapter), else the folder itself. Raises ConfigError."""
    path = Path(source).expanduser()
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        if step != "latest":
            raise ConfigError(
                f"step={step} chooses among the checkpoints of a run; {path} is a model folder"
            )
        parent = path.parent
        ours = path.name in ("policy", "adapter") and (parent / "state.json").is_file()
        return _of_checkpoint(parent, path) if ours else Upload(path)
    from postgrad.publish.export import find_folder

    found = find_folder(source, step)
    inside = found / ("adapter" if lora == "keep" else "policy")
    if not inside.is_dir():
        if lora == "keep" and (found / "policy").is_dir():
            raise ConfigError(
                f"lora=keep: {found} has no adapter; it was not trained with model.lora.rank, so use lora=merge"
            )
        raise ConfigError(
            f"{path} is no run, checkpoint or model folder; postgrad export makes one of verl's shards"
        )
    return _of_checkpoint(found, inside)


def _of_checkpoint(checkpoint: Path, folder: Path) -> Upload:
    run = checkpoint.resolve().parent.parent
    number = checkpoint.resolve().name.removeprefix("step-")
    return Upload(
        folder,
        run if (run / "config.yaml").is_file() else None,
        int(number) if number.isdigit() else None,
    )


def push(parcel: Upload, name: str, private: bool, note: Callable[[str], None]) -> str:
    """Upload the folder as `user/name` and return its address. A README.md of its own stays; else a card is written from the run.

    Raises: ConfigError for a name, a token or rights that do not do; RunError when the hub does not answer.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name on a hub; write user/name, letters, digits, - _ and . only"
        )
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    files = sorted(
        p for p in parcel.folder.rglob("*") if p.is_file() and not p.name.endswith(SKIPPED)
    )
    token = get_token()
    if not token:
        raise ConfigError("no token for the hub; set HF_TOKEN, or run: hf auth login")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
    card = None if any(p.name == CARD for p in files) else model_card(name, parcel.run, parcel.step)
    size = sum(p.stat().st_size for p in files)
    note(
        f"{parcel.folder}: {len(files)} files, {size / 2**30:.2f} GiB, to {api.endpoint}/{name} ({'private' if private else 'public'})"
    )

    def send() -> Any:
        api.create_repo(name, private=private, exist_ok=True)
        # An operation remembers that it was committed, so each try has its own.
        operations = [
            CommitOperationAdd(p.relative_to(parcel.folder).as_posix(), str(p)) for p in files
        ]
        operations += [CommitOperationAdd(CARD, card.encode())] if card is not None else []
        message = "Postgrad" if parcel.run is None else f"{parcel.run.name}, step {parcel.step}"
        return api.create_commit(name, operations, commit_message=message)

    _patiently(send, name, note)
    return f"{api.endpoint}/{name}"


def _patiently(send: Callable[[], Any], name: str, note: Callable[[str], None]) -> Any:
    """Do it, again after a while when the hub does not answer or is not well."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for wait in (*WAITS_S, None):
        try:
            return send()
        except OfflineModeIsEnabled as error:
            raise ConfigError(
                "HF_HUB_OFFLINE=1 keeps the hub out of reach; unset it to push"
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            _refuse(status, name, str(error))
            reason: Any = f"the hub answered {status}"
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
            if isinstance(error, ValueError):
                raise RunError(f"the hub's answer cannot be used: {said}") from error
            if (
                not isinstance(error, OSError)
                and type(error).__module__.partition(".")[0] not in CLIENTS
            ):
                raise
            reason = said
        if wait is None:
            raise RunError(
                f"{name} was not pushed: {reason}; the same command goes on, files that arrived are not sent again"
            )
        note(f"{reason}; trying again in {wait:g} s")
        time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _refuse(status: int, name: str, said: str) -> None:
    """Answers that another try would not change."""
    if status == 401:
        raise ConfigError(
            "the hub does not know the token (401); make a new one, then set HF_TOKEN or run: hf auth login"
        )
    if status == 403:
        raise ConfigError(
            f"the token may not write to {name} (403); use one with write access, or a name of your own"
        )
    if 400 <= status < 500 and status not in (408, 409, 425, 429):
        reason = next((line.strip() for line in said.splitlines() if line.strip()), "")
        raise ConfigError(f"the hub refuses {name} ({status}): {reason[:200]}")
