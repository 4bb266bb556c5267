"""Which passes and which decoding the models of a run use, and why not faster ones."""

from typing import Any

from postgrad.model.device import supports_graph_capture
from postgrad.model.passes.captured import uncaptured_reason
from postgrad.model.passes.support import support_of
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.native.engine import NativeEngine


def describe_paths(policy: Any, engine: Any) -> list[tuple[str, str]]:
    """Return rows about models in this process; none about others."""
    rows: list[tuple[str, str]] = []
    if isinstance(policy, LocalPolicy):
        rows += _describe_passes(policy.model)
    if isinstance(engine, NativeEngine):
        rows.append(("decoding", _describe_decoding(engine)))
    return rows


def _describe_passes(model: Any) -> list[tuple[str, str]]:
    support = support_of(model)
    passes = str(support.passes)
    reasons = list(support.reasons)
    if supports_graph_capture(next(model.parameters()).device):
        reason = uncaptured_reason(model)
        passes += ", kernel by kernel" if reason else ", captured as graphs"
        reasons += [f"captured: {reason}"] if reason else []
    return [("passes", passes), *(("", f"not {reason}") for reason in reasons)]


def _describe_decoding(engine: NativeEngine) -> str:
    if engine.stock_engine is not None:
        return "transformers' generate"
    if engine.decoder is not None:
        graphs = "captured as graphs" if engine.decoder.captures else "kernel by kernel"
        return f"native, paged cache, {graphs}"
    return "native, contiguous cache"
