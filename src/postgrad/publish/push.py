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

from postgrad.errors import (
    ConfigError,
    Conflict,
    Missing,
    RunError,
    Unreachable,
    WrongValue,
    first_line,
)
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
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    token = get_token()
    if not token:
        raise Missing("no token for the hub; set HF_TOKEN, or run: hf auth login", at="HF_TOKEN")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
    address = f"{api.endpoint}/{name}"
    visibility = "private" if private else "public"
    note(f"{upload.folder}: to {address} ({visibility})")
    for pause in (*PAUSES_S, None):
        try:
            _send(api, upload, name, private, branch)
            break
        except Exception as error:
            problem = _problem(error, name)
            if pause is None or isinstance(problem, ConfigError):
                raise problem from error
        note(f"{problem}; trying again in {pause:g} s")
        time.sleep(pause)
    return f"{address}/tree/{branch}" if branch else address


def _send(api: Any, upload: Upload, name: str, private: bool, branch: str) -> None:
    """Send the folder in one commit, with a card if it has no README.md."""
    from huggingface_hub import CommitOperationAdd

    files = [path for path in sorted(upload.folder.rglob("*")) if path.is_file()]
    operations = [
        CommitOperationAdd(path.relative_to(upload.folder).as_posix(), str(path))
        for path in files
        if not path.name.endswith(SKIPPED_SUFFIXES)
    ]
    if not any(operation.path_in_repo == CARD for operation in operations):
        card = model_card(name, upload.folder, upload.run, upload.step)
        operations.append(CommitOperationAdd(CARD, card.encode()))
    message = "Postgrad" if upload.run is None else f"{upload.run.name}, step {upload.step}"
    api.create_repo(name, private=private, exist_ok=True)
    if branch:
        api.create_branch(name, branch=branch, exist_ok=True)
    api.create_commit(name, operations, commit_message=message, revision=branch or None)


def _problem(error: Exception, name: str) -> ConfigError | RunError:
    """Return what an attempt met: a RunError if another one may succeed. Raises other errors."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return Conflict("HF_HUB_OFFLINE=1 turns the hub off; unset it to push")
    reason = first_line(error, max_chars=200)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 0
        refused = {401: "the hub refuses the token", 403: f"the token may not write to {name}"}
        if status in refused:
            return Unreachable(
                f"{refused[status]} ({status}); set HF_TOKEN to one with write access, run hf auth "
                "login, or use a name of your own",
                at="HF_TOKEN",
            )
        if 400 <= status < 500 and status not in RETRIED_STATUSES:
            return Unreachable(f"the hub refuses {name} ({status}): {reason}")
        reason = f"the hub answered {status}"
    is_http = type(error).__module__.partition(".")[0] in HTTP_CLIENTS
    if not (is_http or isinstance(error, HfHubHTTPError | OSError | ValueError)):
        raise error
    return RunError(
        f"{name} was not pushed: {reason}; repeat the same command: files that arrived are not "
        "sent again"
    )
