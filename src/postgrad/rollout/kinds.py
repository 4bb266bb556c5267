"""The kinds of engines: one table with how each is built, checked, and where its weights are.

`rollout.engine` names an entry of ENGINES, or the user's own class by its path: `file.py:Class` or
`package.module:Class`. Nothing else in the package compares engine names. Heavy engines are
imported by the function that builds them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.config.schema import EngineConfig
from postgrad.errors import Conflict, Missing, UnknownName, did_you_mean
from postgrad.rollout.engine import Engine
from postgrad.user_code import is_path, load_object

if TYPE_CHECKING:
    from postgrad.model.load.formats import Loaded
    from postgrad.rollout.http import HttpEngine

EXAMPLE_URL = "http://host:8000/v1#model"
MAX_HTTP_CALLS = 256  # calls to a server at the same time
ENGINE_MEMBERS = ("generate", "publish", "shares_weights")

# Arguments: the settings; the model (see EngineKind.shares_weights); the folder for new weights of
# a remote engine, None when nothing is trained.
BuildEngine = Callable[[EngineConfig, "Loaded", Path | None], Engine]


def _check_nothing(config: EngineConfig) -> None:
    """Accept every configuration."""


@dataclass(frozen=True)
class EngineKind:
    """What the rest of the package needs to know about one kind of engine.

    Attributes:
        build: makes the engine.
        shares_weights: the engine samples from the model object that `build` gets. In the trainer's
            process that is the trained model itself. False: the engine keeps its own weights, and
            `build` may get a model without weights (only its configuration and tokenizer).
        remote: a server samples. The driver's process holds the engine, and no worker builds it.
        records_kept: completions can have the ids that top-p, top-k and min-p kept.
        streams: weights can change between two tokens of a response (rollout.stream).
        check: raises ConfigError for settings that cannot work, before anything is loaded.
    """

    build: BuildEngine
    shares_weights: bool
    remote: bool = False
    records_kept: bool = False
    streams: bool = False
    check: Callable[[EngineConfig], None] = _check_nothing


def _build_native(config: EngineConfig, loaded: "Loaded", weights_folder: Path | None) -> Engine:
    from postgrad.rollout.native.engine import NativeEngine

    return NativeEngine(loaded, config.rollout)


def _build_hf(config: EngineConfig, loaded: "Loaded", weights_folder: Path | None) -> Engine:
    from postgrad.rollout.hf import HfEngine

    return HfEngine(loaded, config.rollout)


def _build_vllm(config: EngineConfig, loaded: "Loaded", weights_folder: Path | None) -> Engine:
    from postgrad.rollout.vllm import VllmEngine

    return VllmEngine(loaded, config)


def _check_vllm(config: EngineConfig) -> None:
    from postgrad.rollout.vllm import check_vllm

    check_vllm()


def _build_http(config: EngineConfig, loaded: "Loaded", weights_folder: Path | None) -> Engine:
    from postgrad.rollout.http import HttpEngine

    return _connect(HttpEngine, config, loaded, weights_folder)


def _build_sglang(config: EngineConfig, loaded: "Loaded", weights_folder: Path | None) -> Engine:
    from postgrad.rollout.sglang import SglangEngine

    return _connect(SglangEngine, config, loaded, weights_folder)


def _connect(
    engine: "type[HttpEngine]", config: EngineConfig, loaded: "Loaded", weights_folder: Path | None
) -> Engine:
    from postgrad.data.encode.encoder import Encoder
    from postgrad.model.load.load import stop_ids
    from postgrad.rollout.http_client import Address

    return engine(
        Address.parse(config.rollout.url),
        Encoder(loaded.tokenizer),
        config.cluster.wait_s,
        min(MAX_HTTP_CALLS, config.rollout.max_rows or MAX_HTTP_CALLS),
        stop_ids=stop_ids(loaded),
        weights_folder=weights_folder,
        reads_pictures=hasattr(loaded.model.config, "vision_config"),
    )


def _check_http(config: EngineConfig) -> None:
    from postgrad.rollout.http_client import Address

    if not config.rollout.url:
        raise Missing(
            f"rollout.engine={config.rollout.engine} needs the server's address; "
            f"add rollout.url={EXAMPLE_URL}"
        )
    Address.parse(config.rollout.url)


ENGINES = {
    "native": EngineKind(_build_native, shares_weights=True, records_kept=True, streams=True),
    "hf": EngineKind(_build_hf, shares_weights=True, records_kept=True),
    "vllm": EngineKind(_build_vllm, shares_weights=False, check=_check_vllm),
    "http": EngineKind(_build_http, shares_weights=False, remote=True, check=_check_http),
    "sglang": EngineKind(
        _build_sglang,
        shares_weights=False,
        remote=True,
        records_kept=True,
        check=_check_http,
    ),
}


def find_engine(name: str) -> EngineKind:
    """Return the kind of a built-in engine's name, or of a class given by its path.

    A user's engine is built as `Class(config, loaded)`; EngineKind describes both arguments.

    Raises:
        ConfigError: there is no such engine, module, file or class, or the class is no engine.
    """
    if name in ENGINES:
        return ENGINES[name]
    if not is_path(name):
        raise UnknownName(
            f"rollout.engine={name} is not an engine; {did_you_mean(name, ENGINES)} "
            "Your own: rollout.engine=file.py:Class or package.module:Class"
        )
    engine_class = load_object(name, f"rollout.engine={name}", _is_engine, "engine class")

    def build(config: EngineConfig, loaded: "Loaded", weights_folder: Path | None) -> Engine:
        return engine_class(config, loaded)

    return EngineKind(
        build,
        shares_weights=bool(engine_class.shares_weights),
        streams=hasattr(engine_class, "open_stream"),
    )


def _is_engine(value: Any) -> bool:
    """Return whether a value is a class with the members of the Engine protocol."""
    return isinstance(value, type) and all(hasattr(value, name) for name in ENGINE_MEMBERS)


def check_engine(config: EngineConfig) -> None:
    """Refuse an engine that cannot be used, before anything is loaded. Raises ConfigError."""
    rollout = config.rollout
    kind = find_engine(rollout.engine)
    size, cluster = rollout.tensor_parallel, config.cluster
    if cluster.backend == "ray" and not cluster.engines and cluster.workers % size:
        raise Conflict(
            f"rollout.tensor_parallel={size} does not divide cluster.workers={cluster.workers}; "
            "change one of them, or add cluster.engines=1 for an engine on devices of its own"
        )
    kind.check(config)
