"""What the client's REST interface lists: training runs, checkpoints, sessions, downloads."""

import hashlib
import hmac
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from postgrad.serving.tinker.checkpoints import INFO_FILE, Checkpoint
from postgrad.serving.tinker.service import Service
from postgrad.web import HttpError

DOWNLOAD_S = 3600  # a download address is valid this long
OWNER = "local"


class Listings:
    """Answers from the checkpoint folder and the service's sessions."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.checkpoints = service.checkpoints
        self._secret = secrets.token_bytes(32)  # signs download addresses

    def training_run(self, run_id: str) -> dict[str, Any]:
        """Return one training run. Raises HttpError: 404."""
        info = self.checkpoints.read_run(run_id)
        client = self.service.clients.get(run_id)
        saved = self.checkpoints.list(run_id)
        by_type = {entry["checkpoint_type"]: entry for entry in saved}  # the last one of each
        metadata = info.user_metadata or {}
        return {
            "training_run_id": run_id,
            "base_model": info.base_model,
            "model_owner": OWNER,
            "is_lora": True,
            "lora_rank": info.lora_rank,
            "last_request_time": (client.info if client else info).last_request_time,
            "last_checkpoint": by_type.get("training"),
            "last_sampler_checkpoint": by_type.get("sampler"),
            "user_metadata": {key: str(value) for key, value in metadata.items()},
        }

    def training_runs(self, offset: int, limit: int) -> dict[str, Any]:
        ids = self.checkpoints.run_ids()
        runs = [self.training_run(run_id) for run_id in ids[offset : offset + limit]]
        return {"training_runs": runs, "cursor": _cursor(offset, limit, len(ids))}

    def run_checkpoints(self, run_id: str) -> dict[str, Any]:
        self.checkpoints.read_run(run_id)
        return {"checkpoints": self.checkpoints.list(run_id)}

    def all_checkpoints(self, offset: int, limit: int) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        for run_id in self.checkpoints.run_ids():
            found += self.checkpoints.list(run_id)
        found.sort(key=lambda entry: entry["time"], reverse=True)
        cursor = _cursor(offset, limit, len(found))
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    def weights_info(self, path: str) -> dict[str, Any]:
        checkpoint = self.checkpoints.find(path)
        info = self.checkpoints.read_run(checkpoint.run_id)
        return {
            "base_model": info.base_model,
            "is_lora": True,
            "lora_rank": info.lora_rank,
            "train_unembed": False,
            "train_mlp": info.train_mlp,
            "train_attn": info.train_attn,
        }

    def sessions(self, offset: int, limit: int) -> dict[str, Any]:
        return {"sessions": list(self.service.sessions)[offset : offset + limit]}

    def session(self, session_id: str) -> dict[str, Any]:
        session = self.service.sessions.get(session_id)
        if session is None:
            raise HttpError(404, f"no session {session_id[:200]!r}")
        metadata = session.user_metadata or {}
        return {
            "training_run_ids": session.training_ids,
            "sampler_ids": session.sampler_ids,
            "user_metadata": {key: str(value) for key, value in metadata.items()},
            "display_name": session.display_name,
        }

    # ---- downloads

    def download_urls(self, checkpoint: Checkpoint, address: str) -> dict[str, Any]:
        """Return one address per file, which needs no token; `address` is http://host:port."""
        expires = int(time.time()) + DOWNLOAD_S
        urls: dict[str, str] = {}
        for file in sorted(checkpoint.folder.iterdir()):
            if file.name != INFO_FILE:
                place = f"{checkpoint.run_id}/{checkpoint.kind}/{checkpoint.name}/{file.name}"
                signature = self._sign(f"{expires}/{place}")
                urls[file.name] = f"{address}/download/{signature}/{expires}/{place}"
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}

    def find_download(self, signature: str, expires: str, place: str) -> Path:
        """Return the file of a download address. Raises HttpError: 403, 404."""
        if not hmac.compare_digest(signature, self._sign(f"{expires}/{place}")):
            raise HttpError(403, "the download address is not valid")
        if int(expires) < time.time():
            raise HttpError(403, "the download address has expired")
        run_id, kind, name, file_name = place.split("/")
        file = self.checkpoints.get(run_id, kind, name).folder / file_name
        if not file.is_file():
            raise HttpError(404, f"no file {file_name}")
        return file

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}
