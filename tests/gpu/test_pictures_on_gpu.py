"""Pictures on a GPU: what the engine samples has the trainer's log-probs, over pages and slots."""

import pytest
import torch
from tiny_runs import config_of
from vision_models import FAMILIES, load_vision_model, requests_with_pictures

from postgrad.config.schema import RolloutConfig
from postgrad.model.policy import FrozenPolicy
from postgrad.rollout.engine import Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.types import Batch, Trajectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
IN_PAGES = ("qwen3_vl", "smolvlm", "idefics3")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sampled_tokens_have_the_log_probs_of_the_trainer(model_type, tmp_path):
    loaded = load_vision_model(tmp_path, model_type, "cuda")
    engine = NativeEngine(loaded, RolloutConfig(cache_gib=1))
    assert (engine.stock_engine is None) == (model_type != "qwen3_5")
    assert (engine.decoder is not None) == (model_type in IN_PAGES)
    requests = requests_with_pictures(loaded)
    groups = engine.generate(requests, Sampling(1.0, 40))
    rows = [
        Trajectory(str(number), request.prompt, completion.tokens, number, images=request.images)
        for number, (request, group) in enumerate(zip(requests, groups, strict=True))
        for completion in group
    ]
    sampled = torch.tensor([p for group in groups for one in group for p in one.logprobs])
    policy = FrozenPolicy(config_of("grpo", tmp_path, "model.device=cuda"), loaded)
    trained = policy.logprobs(Batch.of(rows))["logprobs"]
    torch.testing.assert_close(sampled, trained.cpu(), atol=2e-4, rtol=0)
    assert [c.logprobs for c in groups[0]] != [c.logprobs for c in groups[1]]  # other pictures
