"""What each request does: sessions, training clients and samplers.

All methods run in the event loop. Work on the model goes to the worker as a call; its result is
polled for (futures.py). Request ids follow from the client's own numbers, so that a request that
is sent again after a lost response is not run twice.
"""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from postgrad.errors import did_you_mean
from postgrad.serving.tinker import requests
from postgrad.serving.tinker.adapters import LoraShape
from postgrad.serving.tinker.checkpoints import Checkpoint, Checkpoints, RunInfo, check_name
from postgrad.serving.tinker.futures import JSON, PROTOBUF, Encoded, Results, failure, to_json
from postgrad.serving.tinker.messages import (
    ForwardBackwardRequest,
    encode_forward_backward,
    encode_samples,
)
from postgrad.serving.tinker.records import ClientSession, Limits, Sampler, TrainingClient
from postgrad.serving.tinker.sampling import make_sample_call
from postgrad.serving.tinker.trained_model import AdamStep, SampleResult, TrainedModel
from postgrad.serving.tinker.worker import USER_ERRORS, Call, SampleCall, Worker
from postgrad.web import HttpError

NO_UNEMBED = (
    "this server puts LoRA adapters on attention and MLP layers only; train_unembed has no effect"
)
EXPIRE_EVERY_S = 1.0


class Service:
    """The state of the server.

    Args:
        name: the model's name in requests.
        source: the model's path or hub id, from which clients load the tokenizer.
        model: the model.
        worker: its thread.
        checkpoints: saved adapters.
        limits: limits of the server.
    """

    def __init__(
        self,
        name: str,
        source: str,
        model: TrainedModel,
        worker: Worker,
        checkpoints: Checkpoints,
        limits: Limits,
    ) -> None:
        self.name = name
        self.source = source
        self.model = model
        self.worker = worker
        self.checkpoints = checkpoints
        self.limits = limits
        self.results = Results()
        self.sessions: dict[str, ClientSession] = {}
        self.clients: dict[str, TrainingClient] = {}
        self.samplers: OrderedDict[str, Sampler] = OrderedDict()  # least recently used first
        self._expired_at = 0.0

    # ---- sessions

    def create_session(self, body: requests.CreateSession) -> dict[str, Any]:
        self._drop_idle()
        session_id = f"session-{secrets.token_hex(8)}"
        self.sessions[session_id] = ClientSession(
            session_id, body.user_metadata, body.display_name, time.monotonic()
        )
        return {
            "type": "create_session",
            "session_id": session_id,
            "warning_message": NO_UNEMBED,
        }

    def heartbeat(self, body: requests.Heartbeat) -> dict[str, Any]:
        if body.session_id not in self.sessions:
            raise HttpError(410, f"no session {body.session_id[:200]!r}; it has ended")
        self._touch(body.session_id)
        return {"type": "session_heartbeat"}

    def _touch(self, session_id: str) -> ClientSession:
        """Return a session, and count this as a sign of life. Raises HttpError: 404."""
        self._drop_idle()
        session = self.sessions.get(session_id)
        if session is None:
            raise HttpError(
                404,
                f"no session {session_id[:200]!r}; a session without a heartbeat for "
                f"{self.limits.idle_s:g} s is dropped, and so are all at a restart",
            )
        session.seen_at = time.monotonic()
        return session

    def _drop_idle(self) -> None:
        """Drop the sessions that gave no sign of life, with their clients and samplers."""
        now = time.monotonic()
        if now - self._expired_at < min(EXPIRE_EVERY_S, self.limits.idle_s):
            return
        self._expired_at = now
        for session in list(self.sessions.values()):
            if now - session.seen_at > self.limits.idle_s:
                self.finish_session(session.session_id)

    def finish_session(self, session_id: str) -> None:
        """Drop a session with its clients and samplers; one that is gone stays so."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.training_ids:
            self.clients.pop(model_id, None)
        for sampler_id in session.sampler_ids:
            self.samplers.pop(sampler_id, None)

    # ---- training clients

    def create_model(self, body: requests.CreateModel) -> dict[str, Any]:
        session = self._touch(body.session_id)
        self._check_base(body.base_model)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"
        if model_id in self.clients:  # sent again
            return {"request_id": f"{model_id}:0", "model_id": model_id}
        self._check_waiting()
        if len(self.clients) >= self.limits.clients:
            raise HttpError(
                403,
                f"all {self.limits.clients} training clients are in use; close one, or start the "
                "server with --clients N",
            )
        lora = body.lora_config
        shape = LoraShape(lora.rank, lora.train_attn, lora.train_mlp)
        info = RunInfo(
            self.name, lora.rank, lora.train_attn, lora.train_mlp, _now(), body.user_metadata
        )
        client = TrainingClient(model_id, session.session_id, shape, info)
        self.clients[model_id] = client  # create() removes it if it fails
        seed = secrets.randbits(31) if lora.seed is None else lora.seed % 2**63

        def create() -> dict[str, Any]:
            try:
                client.trained = self.model.new_adapter(shape, seed)
                self.checkpoints.write_run(model_id, info)
            except BaseException:
                self.clients.pop(model_id, None)
                raise
            return {"type": "create_model", "model_id": model_id}

        response = self._submit(f"{model_id}:0", create)
        session.training_ids.append(model_id)
        return {**response, "model_id": model_id}

    def _check_base(self, base_model: str) -> None:
        if base_model != self.name:
            shown = base_model[:200]
            raise HttpError(404, f"no model {shown!r} here; {did_you_mean(shown, [self.name])}")

    def find_client(self, model_id: str) -> TrainingClient:
        """Return a training client, and count this as a sign of life. Raises HttpError: 404."""
        client = self.clients.get(model_id)
        if client is None:
            raise HttpError(
                404,
                f"no training client {model_id[:200]!r}; clients end with their session and with "
                "the server; continue from a checkpoint with create_training_client_from_state",
            )
        self._touch(client.session_id)
        client.info.last_request_time = _now()
        return client

    def unload_model(self, body: requests.ModelRequest) -> dict[str, Any]:
        client = self.find_client(body.model_id)
        del self.clients[client.model_id]
        return self._submit(
            f"{client.model_id}:unload",
            lambda: {"type": "unload_model", "model_id": client.model_id},
        )

    def get_info(self, body: requests.ModelRequest) -> dict[str, Any]:
        client = self.find_client(body.model_id)
        config = self.model.loaded.model.config
        return {
            "type": "get_info",
            "model_id": client.model_id,
            "is_lora": True,
            "lora_rank": client.shape.rank,
            "model_name": self.name,
            "model_data": {
                "arch": config.model_type,
                "model_name": self.name,
                "tokenizer_id": self.source,
            },
        }

    def forward_backward(self, request: ForwardBackwardRequest) -> dict[str, Any]:
        client = self.find_client(request.model_id)

        def run() -> Encoded:
            outputs = self.model.forward_backward(
                client.adapter(), request.data, request.loss, request.options, request.forward_only
            )
            return Encoded(encode_forward_backward(*outputs), PROTOBUF)

        return self._submit(f"{client.model_id}:{request.seq_id}", run)

    def optim_step(self, body: requests.OptimStep) -> dict[str, Any]:
        client = self.find_client(body.model_id)
        step = AdamStep(**body.adam_params.model_dump(exclude={"type"}))
        return self._submit(
            f"{client.model_id}:{body.seq_id}",
            lambda: {"metrics": self.model.optim_step(client.adapter(), step)},
        )

    # ---- checkpoints

    def save_weights(self, body: requests.SaveWeights) -> dict[str, Any]:
        return self._save(body, "weights", "save_weights")

    def save_weights_external(self, body: requests.SaveWeights) -> dict[str, Any]:
        return self._save(body, "external_weights", "save_weights_external")

    def save_weights_for_sampler(self, body: requests.SaveWeights) -> dict[str, Any]:
        if body.path is not None:
            return self._save(body, "sampler_weights", "save_weights_for_sampler")
        client = self.find_client(body.model_id)
        session_id = client.session_id
        sampler = Sampler(f"{session_id}:sample:{body.sampling_session_seq_id}", session_id)

        def snapshot() -> dict[str, Any]:
            sampler.weights = self.model.snapshot(client.adapter())
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler.sampler_id}

        response = self._submit(f"{client.model_id}:{body.seq_id}", snapshot)
        self._add_sampler(sampler)
        return response

    def _save(self, body: requests.SaveWeights, kind: str, answer: str) -> dict[str, Any]:
        client = self.find_client(body.model_id)
        name = f"step-{body.seq_id}" if body.path is None else body.path
        check_name(name)

        def save() -> dict[str, Any]:
            saved = self.checkpoints.save(
                client.model_id,
                kind,
                name,
                lambda folder: self.model.save(client.adapter(), folder, kind == "weights"),
                ttl_s=body.ttl_seconds,
                user_metadata=body.user_metadata,
                overwrite=body.overwrite,
            )
            return {"type": answer, "path": saved.path}

        return self._submit(f"{client.model_id}:{body.seq_id}", save)

    def load_weights(self, body: requests.LoadWeights) -> dict[str, Any]:
        client = self.find_client(body.model_id)
        checkpoint, _ = self.find_checkpoint(body.path)
        if body.optimizer and checkpoint.kind != "weights":
            raise HttpError(400, f"{body.path} has no optimizer state; save it with save_state")

        def load() -> dict[str, Any]:
            self.model.load(client.adapter(), checkpoint.folder, body.optimizer)
            return {"type": "load_weights", "path": body.path, "model_id": client.model_id}

        return self._submit(f"{client.model_id}:{body.seq_id}", load)

    def find_checkpoint(self, path: str) -> tuple[Checkpoint, RunInfo]:
        """Return a checkpoint of this base model and its run. Raises HttpError: 400, 404."""
        checkpoint = self.checkpoints.find(path)
        info = self.checkpoints.read_run(checkpoint.run_id)
        if info.base_model != self.name:
            raise HttpError(400, f"{path} is of {info.base_model}; this server has {self.name}")
        return checkpoint, info

    # ---- samplers

    def create_sampling_session(self, body: requests.CreateSamplingSession) -> dict[str, Any]:
        session = self._touch(body.session_id)
        if body.base_model is not None:
            self._check_base(body.base_model)
        elif body.model_path is None:
            raise HttpError(422, "create_sampling_session needs model_path or base_model")
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        sampler = Sampler(sampler_id, session.session_id)
        if body.model_path is not None:
            sampler.checkpoint, info = self.find_checkpoint(body.model_path)
            sampler.shape = LoraShape(info.lora_rank, info.train_attn, info.train_mlp)
        self._add_sampler(sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _add_sampler(self, sampler: Sampler) -> None:
        """Add a sampler; the least recently used adapters leave the memory.

        A saved one is read again when it is needed; one that was not saved is dropped.
        """
        self.samplers[sampler.sampler_id] = sampler
        self.sessions[sampler.session_id].sampler_ids.append(sampler.sampler_id)
        for old in list(self.samplers.values())[: -self.limits.samplers]:
            old.weights = None
            if old.checkpoint is None:
                del self.samplers[old.sampler_id]

    def find_sampler(self, sampler_id: str) -> Sampler:
        """Return a sampler, and count this as a use. Raises HttpError: 404."""
        sampler = self.samplers.get(sampler_id)
        if sampler is None:
            raise HttpError(
                404,
                f"no sampler {sampler_id[:200]!r}; unsaved samplers are dropped when there are "
                f"more than {self.limits.samplers}, and with their session; save one with "
                "save_weights_for_sampler",
            )
        self._touch(sampler.session_id)
        self.samplers.move_to_end(sampler_id)
        return sampler

    def get_sampler(self, sampler_id: str) -> dict[str, Any]:
        sampler = self.find_sampler(sampler_id)
        path = sampler.checkpoint.path if sampler.checkpoint else None
        return {"sampler_id": sampler_id, "base_model": self.name, "model_path": path}

    def sample(self, body: requests.SampleBody) -> dict[str, Any]:
        sampler = self.find_sampler(body.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{body.seq_id}"
        sampling, request = make_sample_call(body, self.model)

        def encode(result: SampleResult) -> Encoded:
            parts = (result.samples, result.prompt_logprobs, result.top_prompt)
            return Encoded(encode_samples(*parts), PROTOBUF)

        def make_call(on_done: Callable[[Any, BaseException | None], None]) -> SampleCall:
            return SampleCall(
                request_id,
                lambda: sampler.load(self.model),
                sampling,
                request,
                on_done,
                sampler.sampler_id,
            )

        response = self._queue(request_id, make_call, encode)
        ids = [f"{request_id}:{i}" for i in range(body.num_samples)]
        return {**response, "sample_sequence_ids": ids}

    # ---- results

    def _submit(self, request_id: str, function: Callable[[], Any]) -> dict[str, Any]:
        """Queue a function of the model; return the response that names its result."""
        return self._queue(request_id, lambda on_done: Call(request_id, function, on_done))

    def _queue(
        self,
        request_id: str,
        make_call: Callable[[Callable[[Any, BaseException | None], None]], Call | SampleCall],
        encode: Callable[[Any], Any] = lambda value: value,
    ) -> dict[str, Any]:
        if self.results.find(request_id) is not None:  # sent again
            return {"request_id": request_id}
        self._check_waiting()
        result = self.results.add(request_id)
        loop = asyncio.get_running_loop()

        def finish(value: Any, error: BaseException | None) -> None:
            if error is not None:
                body = failure(error, isinstance(error, USER_ERRORS))
                self.results.finish(result, body, JSON)
                return
            encoded = encode(value)
            if not isinstance(encoded, Encoded):
                encoded = Encoded(to_json(encoded), JSON)
            self.results.finish(result, *encoded)

        def on_done(value: Any, error: BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, value, error)

        self.worker.submit(make_call(on_done))
        return {"request_id": request_id}

    def _check_waiting(self) -> None:
        if self.results.num_pending >= self.limits.waiting:
            raise HttpError(429, f"{self.limits.waiting} requests wait already; try again later")


def _now() -> str:
    return datetime.now(UTC).isoformat()
