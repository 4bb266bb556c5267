"""`postgrad serve --train` with the official tinker client, on a tiny model."""

import threading

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker_server import datum, supervised, train_step, training_server
from tiny_runs import END, stock_model, stock_row

PROMPT = [1, 10, 2, 15]  # "1+2="
ANSWER = [3, END]


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    with training_server(tiny, tmp_path_factory.mktemp("tinker") / "saved") as running:
        yield running


@pytest.fixture
def service(server):
    with server.connect() as client:
        yield client


def new_client(service, seed=1, **options):
    return service.create_lora_training_client("tiny", rank=4, seed=seed, **options)


def logprobs_of(client, tokens):
    result = client.forward([datum(tokens)], "cross_entropy").result(60)
    return result.loss_fn_outputs[0]["logprobs"].to_numpy()


# ---- what the server says of itself


def test_capabilities_info_and_tokenizer(service, tiny):
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == ("tiny", 512, True)
    client = new_client(service)
    info = client.get_info()
    assert (info.model_id, info.is_lora, info.lora_rank) == (client.model_id, True, 4)
    assert client.get_tokenizer().encode("1+2=") == PROMPT


# ---- losses


LOGPROBS = [-1.0, -0.5, -2.0, -1.5, -0.25]  # of the sampling policy
ADVANTAGES = [0.0, 1.0, -2.0, 0.5, -1.0]
MASK = [0.0, 1.0, 1.0, 0.0, 1.0]
TOKENS = [*PROMPT, *ANSWER]


def by_hand(name, p, options):
    """The documented formula, summed over tokens; p are torch log-probs."""
    q, a = torch.tensor(LOGPROBS), torch.tensor(ADVANTAGES)
    ratio = (p - q).exp()
    if name == "cross_entropy":
        return -(torch.tensor(MASK) * p).sum()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "dro":
        return -(p * a - 0.5 * options.get("beta", 0.05) * (p - q) ** 2).sum()
    if name == "cispo":
        low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 4.0)
        return -(ratio.clamp(low, high).detach() * p * a).sum()
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    if name == "gspo":
        mean = (p.detach() - q)[torch.tensor(MASK) != 0].mean()
        ratio = (mean + p - p.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", CLIP),
        ("cispo", {}),
        ("gspo", CLIP),
        ("dro", {}),
    ],
)
def test_loss_and_update_equal_those_of_peft_and_torch(service, server, tiny, name, options):
    """Loss, gradient and AdamW step against a stock model with the same adapter."""
    peft = pytest.importorskip("peft")
    client = new_client(service)
    # The second matrices of a new adapter are zero; a first step makes both matrices matter.
    train_step(client, [supervised(PROMPT, [7, END])])
    path = (
        client.save_state(f"start-{name}-{len(options)}-{options.get('beta', 0)}").result(60).path
    )
    folder = server.service.checkpoints.find(path).folder
    stock = peft.PeftModel.from_pretrained(
        stock_model(tiny, torch.float32), folder, is_trainable=True
    )
    if name == "cross_entropy":
        inputs = {"weights": MASK}
    else:
        inputs = {"logprobs": LOGPROBS, "advantages": ADVANTAGES}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = MASK
    given = datum(TOKENS, **inputs)
    fresh = service.create_training_client_from_state(path)
    result = fresh.forward_backward([given, given], name, options or None).result(60)

    p = stock_row(stock, TOKENS[:1], TOKENS[1:])[0]
    loss = by_hand(name, p, options)
    returned = result.loss_fn_outputs[1]["logprobs"].to_numpy()
    np.testing.assert_allclose(returned, p.detach().numpy(), atol=2e-5)
    assert result.metrics["loss:sum"] == pytest.approx(2 * loss.item(), rel=1e-4)

    settings = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}
    step = types.AdamParams(learning_rate=0.01, grad_clip_norm=0.5, **settings)
    grad_norm = fresh.optim_step(step).result(60).metrics["grad_norm:mean"]
    parameters = [one for one in stock.parameters() if one.requires_grad]
    (2 * loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    assert grad_norm == pytest.approx(float(norm), rel=1e-3)
    torch.optim.AdamW(parameters, 0.01, (0.8, 0.9), 1e-6, 0.1).step()
    expected = stock_row(stock, TOKENS[:1], TOKENS[1:])[0].detach().numpy()
    assert np.abs(expected - returned).max() > 1e-3  # the step did something
    np.testing.assert_allclose(logprobs_of(fresh, TOKENS), expected, atol=5e-5)


def test_several_targets_per_position(service, tiny):
    client = new_client(service)
    targets, weights = [[3, 4], [END, 5]], [[0.25, 0.75], [1.0, 0.0]]
    inputs = {"target_tokens": np.array(targets), "weights": np.array(weights, np.float32)}
    given = types.Datum(types.ModelInput.from_ints([1, 10]), inputs)
    result = client.forward_backward([given], "cross_entropy").result(60)
    stock = stock_model(tiny, torch.float32)
    logits = stock(input_ids=torch.tensor([[1, 10]])).logits[0].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(targets)).detach().numpy()
    np.testing.assert_allclose(
        result.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=2e-5
    )
    assert result.metrics["loss:sum"] == pytest.approx(-(expected * weights).sum(), rel=1e-4)


def test_custom_loss_of_the_client(service):
    """forward_backward_custom sends the gradient of a client's own loss as weights."""
    client, plain = new_client(service), new_client(service)

    def own_loss(data, logprobs):
        return -sum(one.sum() for one in logprobs), {"own": 1.0}

    result = client.forward_backward_custom([datum(TOKENS)], own_loss).result(60)
    assert result.metrics["own"] == 1.0
    client.optim_step(types.AdamParams(learning_rate=0.01)).result(60)
    train_step(plain, [datum(TOKENS)], lr=0.01)
    assert (logprobs_of(client, TOKENS) == logprobs_of(plain, TOKENS)).all()


def test_gradients_of_several_calls_add_up(service):
    data = [supervised(PROMPT, [n, END]) for n in range(6)]
    together, apart = new_client(service), new_client(service)
    for part in (data[:2], data[2:]):
        apart.forward_backward(part, "cross_entropy").result(60)
    apart.optim_step(types.AdamParams(learning_rate=0.01)).result(60)
    train_step(together, data, lr=0.01)
    first, second = logprobs_of(together, TOKENS), logprobs_of(apart, TOKENS)
    np.testing.assert_allclose(first, second, atol=1e-6)


# ---- learning


@pytest.mark.slow
def test_supervised_loop_learns(service):
    client = new_client(service)
    data = [supervised(PROMPT, ANSWER), supervised([4, 10, 4, 15], [8, END])]
    losses = [train_step(client, data) for _ in range(35)]
    assert losses[-1] < 1 < 4 < losses[0], losses
    sampler = client.save_weights_and_get_sampling_client()
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    sample = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, greedy).result(60)
    assert sample.sequences[0].tokens == ANSWER
    assert sample.sequences[0].stop_reason == "stop"


@pytest.mark.slow
def test_rl_loop_learns(service):
    """Sample, reward, importance_sampling: the loop of Tinker's own cookbook."""
    client = new_client(service)
    prompt = types.ModelInput.from_ints(PROMPT)
    rewards = []
    for step in range(20):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=1000 * step)
        samples = sampler.sample(prompt, 32, params).result(60).sequences
        scores = np.array([float(one.tokens[0] == 3) for one in samples])
        rewards.append(scores.mean())
        if scores.std() == 0:
            continue
        data = []
        for one, advantage in zip(samples, scores - scores.mean(), strict=True):
            padding = [0.0] * (len(PROMPT) - 1)
            inputs = {"logprobs": [*padding, *one.logprobs], "advantages": [*padding, advantage]}
            data.append(datum([*PROMPT, *one.tokens], **inputs))
        result = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=0.05)).result(60)
        first = result.result(60).loss_fn_outputs[0]["logprobs"].to_numpy()[-1]
        assert first == pytest.approx(samples[0].logprobs[0], abs=1e-4)  # the same policy
    assert np.mean(rewards[-3:]) > 0.7 > 0.3 > np.mean(rewards[:2]), rewards


# ---- sampling


def test_prompt_logprobs_equal_the_stock_model(service, tiny):
    sampler = service.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput.from_ints(TOKENS)
    expected = stock_row(stock_model(tiny, torch.float32), TOKENS[:1], TOKENS[1:])[0].detach()
    scored = sampler.compute_logprobs(prompt).result(60)
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], expected.numpy(), atol=2e-5)
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result(60)
    assert last[:4] == [None] * 4
    assert last[4:] == scored[4:]
    params = types.SamplingParams(max_tokens=2, temperature=0.0)
    result = sampler.sample(
        prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=18,
        topk_sample_logprobs=2,
    ).result(60)  # fmt: skip
    assert result.topk_prompt_logprobs[0] is None
    for position in range(1, len(TOKENS)):
        table = dict(result.topk_prompt_logprobs[position])
        assert table[TOKENS[position]] == pytest.approx(scored[position], abs=1e-5)
    (sequence,) = result.sequences
    for token, logprob, top in zip(
        sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True
    ):
        assert top[0] == (token, pytest.approx(logprob, abs=1e-4))
    assert sampler.get_base_model() == "tiny"


@pytest.mark.slow
def test_samples_follow_their_seed_and_end_at_stops(service):
    sampler = service.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput.from_ints(PROMPT)

    def sample(**options):
        params = types.SamplingParams(max_tokens=12, seed=5, **options)
        return sampler.sample(prompt, 3, params).result(60).sequences

    free = sample()
    assert [one.tokens for one in sample()] == [one.tokens for one in free]
    assert len({tuple(one.tokens) for one in free}) == 3
    tokens = free[0].tokens
    stop = tokens[2]
    for option in ([stop], _text_of(stop)):
        ended = sample(stop=option)[0]
        assert ended.tokens == tokens[: tokens.index(stop) + 1]
        assert ended.stop_reason == "stop"
    with pytest.raises(tinker.BadRequestError, match="stop"):
        sample(stop=[])


def _text_of(token):
    return "0123456789+-*()="[token] if token < 16 else "<end>"


@pytest.mark.slow
def test_a_sampler_keeps_its_weights_while_training_goes_on(service):
    client = new_client(service)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TOKENS)
    before = sampler.compute_logprobs(prompt).result(60)
    train_step(client, [supervised(PROMPT, ANSWER)], lr=0.1)
    assert sampler.compute_logprobs(prompt).result(60) == before
    later = client.save_weights_and_get_sampling_client()
    assert later.compute_logprobs(prompt).result(60) != before
    named = client.save_weights_for_sampler("named").result(60).path
    saved = service.create_sampling_client(model_path=named)
    assert saved.compute_logprobs(prompt).result(60) == later.compute_logprobs(prompt).result(60)


# ---- several clients


@pytest.mark.slow
def test_two_clients_at_once_do_not_disturb_each_other(server):
    """Interleaved clients of other ranks and layers compute what each computes alone."""
    kinds = [
        {"rank": 2, "seed": 3},
        {"rank": 8, "seed": 4, "train_mlp": False},
    ]
    data = [[supervised(PROMPT, ANSWER)], [supervised([4, 10, 4, 15], [8, END])]]

    def train(number, losses):
        with server.connect() as service:
            client = service.create_lora_training_client("tiny", **kinds[number])
            for _ in range(4):
                losses.append(train_step(client, data[number]))
                sampler = client.save_weights_and_get_sampling_client()
                scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS))
                losses.append(scored.result(60)[1])

    alone = [[], []]
    for number in (0, 1):
        train(number, alone[number])
    together = [[], []]
    threads = [threading.Thread(target=train, args=(n, together[n])) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone
    assert alone[0] != alone[1]


def test_layers_of_an_adapter(service, server):
    client = new_client(service, train_mlp=False)
    path = client.save_state("attention").result(60).path
    names = server.service.checkpoints.find(path).folder / "adapter_config.json"
    assert "self_attn" in names.read_text()
    assert "mlp" not in names.read_text()
