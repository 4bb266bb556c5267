"""Publishes a model folder on a hub, with huggingface_hub.

Large files are sent first, and the hub keeps them by their hash; the commit comes last. So a
repository never has half a model, and a retry does not send again what arrived.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.errors import Conflict, Missing, RunError, Unreachable, WrongValue
from postgrad.publish.card import model_card
from postgrad.training.checkpoint import saved_steps

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]{0,95}")
CARD = "README.md"
PAUSES_S = (1.0, 4.0, 15.0)  # between attempts if the hub does not answer
# The packages that huggingface_hub sends requests with; their errors are network errors.
HTTP_CLIENTS = ("httpx", "httpx2", "requests", "urllib3")
SKIPPED_SUFFIXES = (".partial", ".lock", ".tmp")
RETRIED_STATUSES = (408, 409, 425, 429)  # the client errors that another attempt may change


@dataclass(frozen=True)
class Upload:
    """A folder to push, with the run and the step that it comes from, if any."""

    folder: Path
    run: Path | None = None
    step: int | None = None


def find_upload(source: str, step: str, lora: str) -> Upload:
    """Return what to push for `source`: a run, a checkpoint or a model folder.

    Args:
        source: its path.
        step: of a run: latest, best or a number.
        lora: "keep" pushes the adapter, "merge" the whole model.

    Raises ConfigError if there is nothing to push.
    """
    path = Path(source).expanduser()
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        if step != "latest":
            raise Conflict(
                f"step={step} chooses among the checkpoints of a run; {path} is a model folder"
            )
        is_in_checkpoint = (path.parent / "state.json").is_file()
        if path.name in ("policy", "adapter") and is_in_checkpoint:
            return _upload_of_checkpoint(path.parent, path)
        return Upload(path)
    from postgrad.publish.export import find_folder

    checkpoint = find_folder(source, step)
    folder = checkpoint / ("adapter" if lora == "keep" else "policy")
    if folder.is_dir():
        return _upload_of_checkpoint(checkpoint, folder)
    if lora == "keep" and (checkpoint / "policy").is_dir():
        raise Conflict(
            f"lora=keep: {checkpoint} has no adapter, because it was not trained with "
            "model.lora.rank; use lora=merge"
        )
    raise WrongValue(
        f"{path} is not a run, a checkpoint or a model folder; "
        "postgrad export makes a model folder of verl's shards"
    )


def _upload_of_checkpoint(checkpoint: Path, folder: Path) -> Upload:
    checkpoint = checkpoint.resolve()
    run = checkpoint.parent.parent
    number = checkpoint.name.removeprefix("step-")
    return Upload(
        folder,
        run=run if (run / "config.yaml").is_file() else None,
        step=int(number) if number.isdigit() else None,
    )


def find_uploads(source: str, lora: str) -> list[Upload]:
    """Return what to push for every checkpoint of a run, by step. Raises ConfigError."""
    steps = saved_steps(Path(source).expanduser())
    if not steps:
        raise Missing(f"step=all needs a run folder with checkpoints; {source} has none")
    return [find_upload(source, str(step), lora) for step in steps]


def push(
    upload: Upload, name: str, private: bool, note: Callable[[str], None], branch: str = ""
) -> str:
    """Upload the folder as `user/name` and return its address.

    With `branch` it goes to that branch, which is created if it does not exist. A README.md
    in the folder is kept; otherwise a card is written from the run.

    Raises:
        ConfigError: the name, the token or its rights are wrong.
        RunError: the hub does not answer.
    """
    if not NAME.fullmatch(name):
        raise WrongValue(
            f"{name!r} is not a name on a hub; write user/name with letters, digits, - _ and .",
            at="name",
        )
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    token = get_token()
    if not token:
        raise Missing("no token for the hub; set HF_TOKEN, or run: hf auth login", at="HF_TOKEN")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
    files = _files(upload.folder)
    card = None
    if not any(file.name == CARD for file in files):
        card = model_card(name, upload.folder, upload.run, upload.step)
    size = sum(file.stat().st_size for file in files) / 2**30
    visibility = "private" if private else "public"
    note(
        f"{upload.folder}: {len(files)} files, {size:.2f} GiB, "
        f"to {api.endpoint}/{name} ({visibility})"
    )

    def send() -> Any:
        api.create_repo(name, private=private, exist_ok=True)
        # An operation stores that it was committed, so each attempt makes new ones.
        operations = []
        for file in files:
            path = file.relative_to(upload.folder).as_posix()
            operations.append(CommitOperationAdd(path, str(file)))
        if card is not None:
            operations.append(CommitOperationAdd(CARD, card.encode()))
        message = "Postgrad" if upload.run is None else f"{upload.run.name}, step {upload.step}"
        if branch:
            api.create_branch(name, branch=branch, exist_ok=True)
        return api.create_commit(name, operations, commit_message=message, revision=branch or None)

    _send_with_retries(send, name, note)
    return f"{api.endpoint}/{name}" + (f"/tree/{branch}" if branch else "")


def _files(folder: Path) -> list[Path]:
    """Return the files below the folder, without temporary ones and locks."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.endswith(SKIPPED_SUFFIXES):
            files.append(path)
    return files


def _send_with_retries(send: Callable[[], Any], name: str, note: Callable[[str], None]) -> None:
    """Call `send`; call it again after a pause if the hub does not answer or has an error.

    Raises ConfigError or RunError for what another attempt does not change.
    """
    for pause in (*PAUSES_S, None):
        try:
            send()
            return
        except Exception as error:
            reason = _network_error(error, name)
        if pause is None:
            raise RunError(
                f"{name} was not pushed: {reason}; repeat the same command: "
                "files that arrived are not sent again"
            )
        note(f"{reason}; trying again in {pause:g} s")
        time.sleep(pause)


def _network_error(error: Exception, name: str) -> str:
    """Return why an attempt failed if another may succeed; raise otherwise."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        raise Conflict("HF_HUB_OFFLINE=1 turns the hub off; unset it to push") from error
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 0
        _check_status(status, name, str(error))
        return f"the hub answered {status}"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    if isinstance(error, ValueError):
        raise RunError(f"the hub's answer cannot be read: {reason}") from error
    package = type(error).__module__.partition(".")[0]
    if not isinstance(error, OSError) and package not in HTTP_CLIENTS:
        raise error
    return reason


def _check_status(status: int, name: str, message: str) -> None:
    """Raise ConfigError for a status that another attempt does not change."""
    if status == 401:
        raise Unreachable(
            "the hub refuses the token (401); "
            "make a new one, then set HF_TOKEN or run: hf auth login",
            at="HF_TOKEN",
        )
    if status == 403:
        raise Unreachable(
            f"the token may not write to {name} (403); "
            "use one with write access, or a name of your own",
            at="HF_TOKEN",
        )
    if 400 <= status < 500 and status not in RETRIED_STATUSES:
        reason = next((line.strip() for line in message.splitlines() if line.strip()), "")
        raise Unreachable(f"the hub refuses {name} ({status}): {reason[:200]}")
