"""A stream on a GPU whose weights change while rows decode in captured graphs."""

import pytest
import torch
from llama import make_llama
from tiny_runs import stock_model

from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.rollout.engine import Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NORM = "model.norm.weight"


def test_each_token_has_the_log_prob_of_its_version(tmp_path):
    """Only the last norm changes, so that keys and values are those of every version."""
    from postgrad.model.load.load import load
    from postgrad.rollout.continuous import ContinuousEngine
    from postgrad.rollout.native.engine import NativeEngine

    folder = make_llama(tmp_path / "llama", weight_scale=4.0)
    loaded = load(ModelConfig(path=str(folder), dtype="float32"), torch.device("cuda"), 0)
    rollout = RolloutConfig(max_rows=16, max_response_tokens=300)
    engine = NativeEngine(loaded, rollout)
    continuous = ContinuousEngine(engine, rollout, poll_s=0.0)
    assert continuous.stream.pages is not None
    prompts = {str(i): [20 + 13 * i + j for j in range(40 * i + 2)] for i in range(4)}
    added = {name: Request(prompt, [1, 2, 3, 4]) for name, prompt in prompts.items()}
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    norms = [weights[NORM] * (1 + 0.5 * version) for version in range(4)]
    rows = {}
    for number in range(100):
        version = min(number // 2, 3)
        continuous.publish({**weights, NORM: norms[version]})
        if number == 3:  # a validation between two polls uses other memory
            assert continuous.generate([Request([30, 31], [5], 4)], Sampling(1.0, 4))[0][0].tokens
        names = [name for name in prompts if added or name in continuous.unfinished]
        for name, index, completion in continuous.poll(version, names, added)["finished"]:
            rows[name, index] = completion
        added = {}
        if not continuous.unfinished:
            break
    assert len(rows) == 16
    assert any(len(set(row.versions)) > 2 for row in rows.values())
    stock = stock_model(folder, torch.float32).cuda()
    for (name, _), row in rows.items():
        ids = torch.tensor([[*prompts[name], *row.tokens]], device="cuda")
        targets = torch.tensor(row.tokens, device="cuda")[:, None]
        expected = []
        for norm in norms:
            with torch.no_grad():
                stock.get_parameter(NORM).copy_(norm)
                logits = stock(input_ids=ids, use_cache=False).logits[0]
            logprobs = logits[len(prompts[name]) - 1 : -1].float().log_softmax(-1)
            expected.append(logprobs.gather(1, targets)[:, 0].cpu())
        stacked = torch.stack(expected)
        own = stacked[torch.tensor(row.versions), torch.arange(len(row.tokens))]
        torch.testing.assert_close(torch.tensor(row.logprobs), own, atol=2e-3, rtol=0)
        assert (stacked[0] - stacked[3]).abs().mean() > 0.05, "the versions can be told apart"
