"""Which passes and which decoding a run of this model uses here, and why not faster ones.

The numeric gate runs on a few blocks of the model with random weights and a small vocabulary, so
that no weights are loaded.
"""

import io
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

from postgrad.config.schema import Config, RolloutConfig
from postgrad.doctor.report import Report
from postgrad.errors import ConfigError
from postgrad.model.device import choose_device, supports_graph_capture
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import prepare_for_training
from postgrad.model.lora import add_adapters
from postgrad.model.passes.captured import uncaptured_reason
from postgrad.model.passes.support import support_of
from postgrad.rollout.native.engine import NativeEngine
from postgrad.sizing.simulate import build_model

VOCABULARY = 256
END = 0  # token id that ends a response


def describe_paths(report: Report, config: Config, model_config: Any, samples: bool) -> None:
    """Add how training and, if the run samples with the native engine, decoding is computed."""
    try:
        model = _prepared_model(config, model_config)
    except ConfigError as error:
        report.add("passes", "none", str(error))
        return
    _describe_passes(report, model)
    if samples and config.rollout.engine == "native":
        _describe_decoding(report, Loaded(model, SimpleNamespace(eos_token_id=END)))


def _prepared_model(config: Config, model_config: Any) -> Any:
    """Return some blocks of the model, every type of layer once, as load() prepares a model."""
    types = list(getattr(model_config.get_text_config(), "layer_types", None) or [])
    num_blocks = max([1, *(types.index(kind) + 1 for kind in set(types))])
    device = choose_device(config.model.device)
    with device:
        model = build_model(config, model_config, num_blocks, VOCABULARY, stock=True)
    prepare_for_training(model, config.model, device)
    if config.model.lora.rank:
        add_adapters(model, config.model.lora, config.seed)
    return model


def _describe_passes(report: Report, model: Any) -> None:
    support = support_of(model)
    passes = str(support.passes)
    reasons = list(support.reasons)
    if supports_graph_capture(next(model.parameters()).device):
        reason = uncaptured_reason(model)
        passes += ", kernel by kernel" if reason else ", captured as graphs"
        reasons += [f"captured: {reason}"] if reason else []
    report.add("passes", passes)
    for reason in reasons:
        report.add("", f"not {reason}")


def _describe_decoding(report: Report, loaded: Loaded) -> None:
    notes = io.StringIO()
    with redirect_stderr(notes):
        engine = NativeEngine(loaded, RolloutConfig(max_rows=8))
    decoding = "native, contiguous cache"
    if engine.stock_engine is not None:
        decoding = "transformers' generate"
    elif engine.decoder is not None:
        graphs = "captured as graphs" if engine.decoder.captures else "kernel by kernel"
        decoding = f"native, paged cache, {graphs}"
    report.add("decoding", decoding)
    for note in notes.getvalue().splitlines():
        report.add("", note)
