"""`postgrad doctor --fit` shows which passes and which decoding a model gets, and why."""

from types import SimpleNamespace

import pytest
import torch
from families import make_family
from tiny_runs import config_of

from postgrad.config.schema import RolloutConfig
from postgrad.doctor.rehearsal import describe_paths
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import prepare_for_training
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.native.engine import NativeEngine
from postgrad.sizing.simulate import NO_OBJECTIVE

# model type -> training passes and decoding on a CPU
EXPECTED = {
    "gemma3_text": ("packed", "native, contiguous cache"),
    "gpt_oss": ("shared", "native, contiguous cache"),
    "lfm2": ("rows", "transformers' generate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXPECTED)
def test_the_report_names_the_passes_and_the_decoding(model_type, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    config = config_of("grpo", tiny)
    model = make_family(model_type)
    prepare_for_training(model, config.model, torch.device("cpu"))
    loaded = Loaded(model, SimpleNamespace(eos_token_id=0))
    engine = NativeEngine(loaded, RolloutConfig(max_rows=8))
    rows = describe_paths(LocalPolicy(config, loaded, NO_OBJECTIVE), engine)
    named = dict(row for row in rows if row[0])
    assert (named["passes"], named["decoding"]) == EXPECTED[model_type]
    reasons = [value for name, value in rows if not name]
    assert bool(reasons) == (named["passes"] != "packed")


def test_models_elsewhere_have_no_rows():
    assert describe_paths(object(), object()) == []
