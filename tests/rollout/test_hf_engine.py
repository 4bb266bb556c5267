"""The hf engine: its log-probs equal the stock model's, whatever its generation settings are."""

import pytest
import torch
from tiny_runs import config_of, stock_model, stock_row

from postgrad.cluster.host import build_host
from postgrad.rollout.engine import Request, Sampling


@pytest.fixture(scope="module")
def host(tiny):
    return build_host(config_of("grpo", tiny, "rollout.engine=hf", "rollout.max_rows=2"))


def test_log_probs_are_the_stock_models_at_any_temperature(host, tiny):
    stock = stock_model(tiny)
    for temperature in (1.0, 0.5):
        for done in host.engine.generate(
            [Request([1, 2, 3], [1, 2, 3, 4, 5])], Sampling(temperature, 9)
        )[0]:
            expected, _ = stock_row(stock, [1, 2, 3], done.tokens, temperature)
            assert done.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_models_own_generation_settings_are_set_aside_and_kept(host):
    request, sampling = [Request([1, 2, 3], [1, 2, 3])], Sampling(1.0, 9)
    before, own = host.engine.generate(request, sampling), host.engine.model.generation_config
    own.repetition_penalty, own.top_k = 5.0, 1
    try:
        assert host.engine.generate(request, sampling) == before
        assert (
            host.engine.model.generation_config is own
            and own.repetition_penalty == 5.0
            and host.engine.model.training
        )
    finally:
        own.repetition_penalty, own.top_k = 1.0, None


def test_it_samples_from_the_trainers_own_parameters(host):
    request, sampling = [Request([1, 2, 3], [1])], Sampling(0.0, 4)
    before = host.engine.generate(request, sampling)
    weights = {name: w.clone() for name, w in host.policy.weights().items()}
    with torch.no_grad():
        host.policy.model.get_input_embeddings().weight.mul_(-1)
    assert host.engine.generate(request, sampling) != before and host.engine.shares_weights
    host.engine.publish(weights)
    assert host.engine.generate(request, sampling) == before
