"""New weights for a server that samples the rollouts of a training run.

The trainer's weights are written as safetensors to a folder that the server can read too; then a
call names the folder. `postgrad serve`, SGLang and vLLM (with VLLM_SERVER_DEV_MODE=1) each have
such a call. A server without one would sample from old weights, so training refuses it.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from postgrad.errors import RunError, Unreachable, Unsupported
from postgrad.net.client import read_json
from postgrad.rollout import http_client
from postgrad.rollout.http_client import Address, ModelClient, RequestRefused

# Statuses that answer a reload call without arguments, on a server that has the call.
MISSING_ARGUMENTS = (400, 422)
FORBIDDEN = (401, 403)


@dataclass(frozen=True)
class ReloadApi:
    """How one kind of server loads weights from a folder; paths start at the server's root."""

    server: str
    path: str
    body: Callable[[str, str], dict[str, Any]]  # (folder, model name) -> JSON body
    # Calls that drop what was computed with the old weights: keys and values; features of pictures.
    reset_path: str = ""
    reset_pictures_path: str = ""


SGLANG_RELOAD = ReloadApi(
    "SGLang",
    "/update_weights_from_disk",
    lambda folder, model: {"model_path": folder, "flush_cache": True},
)
RELOAD_APIS = (
    ReloadApi(
        "postgrad serve",
        "/v1/reload",
        lambda folder, model: {"folder": folder, "model": model},
    ),
    SGLANG_RELOAD,
    ReloadApi(
        "vLLM",
        "/collective_rpc",
        lambda folder, model: {"method": "reload_weights", "kwargs": {"weights_path": folder}},
        "/reset_prefix_cache",
        "/reset_encoder_cache",
    ),
)


class ServerWeights:
    """Gives a server new weights, through a folder that the server sees under the same path.

    Raises ConfigError if the server has none of the calls `apis`, which are tried in order.
    """

    def __init__(
        self,
        address: Address,
        folder: Path,
        wait_s: float,
        apis: Sequence[ReloadApi],
        reads_pictures: bool = False,
    ) -> None:
        self.model = address.model
        self.folder = folder.absolute()
        self.num_published = 0
        self.reads_pictures = reads_pictures
        self.client = ModelClient(address.root, wait_s, 1)
        self.api = self._find_api(apis)

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Write the weights and let the server load them; returns when it samples from them."""
        folder = self._write(weights)
        deadline = time.monotonic() + self.client.wait_s
        api = self.api
        url = self.client.address.url
        try:
            answer = self._call(api.path, api.body(str(folder), self.model), deadline)
            if _failed(answer):
                raise RunError(
                    f"{url}{api.path} did not load the new weights: {answer.get('message', answer)}"
                )
            for path in (api.reset_path, api.reset_pictures_path if self.reads_pictures else ""):
                if path and _failed(self._call(path, {}, deadline)):
                    raise RunError(f"{url}{path} kept keys and values of the old weights")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _call(self, path: str, body: dict[str, Any], deadline: float) -> Any:
        try:
            return self.client.call("POST", path, body, deadline, _read_answer)
        except RequestRefused as error:
            raise RunError(
                f"{self.client.address.url}{path} refused new weights with {error.status}: {error}"
            ) from error

    def _write(self, weights: dict[str, Tensor]) -> Path:
        self.num_published += 1
        folder = self.folder / f"weights-{self.num_published}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise RunError(
                f"weights for the server could not be written to {folder}: "
                f"{error.strerror or error}"
            ) from error
        return folder

    def _find_api(self, apis: Sequence[ReloadApi]) -> ReloadApi:
        """Call each kind's path without arguments: a server that has it reports what is missing."""
        url = self.client.address.url
        for api in apis:
            deadline = time.monotonic() + min(http_client.START_S, self.client.wait_s)
            try:
                self.client.call("POST", api.path, {}, deadline)
            except RequestRefused as error:
                if error.status in MISSING_ARGUMENTS:
                    return api
                if error.status in FORBIDDEN:
                    raise Unreachable(
                        f"rollout.url: {url}{api.path} answers {error.status}: {error}"
                    ) from error
            except RunError as error:
                raise Unreachable(f"rollout.url: {url} {error}") from error
        raise Unsupported(
            f"rollout.url: {url} has no call that loads new weights, so training would sample from "
            "old ones; start vLLM with VLLM_SERVER_DEV_MODE=1, use SGLang or postgrad serve "
            "--reload-below, or rollout.engine=vllm"
        )


def _read_answer(status: int, raw: bytes) -> Any:
    """Return the JSON of an answer, or None: vLLM answers some calls with nothing."""
    return read_json(status, raw) if raw else None


def _failed(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("success") is False
