"""Loading and saving: every bad path is one line, every saved folder is a stock one."""

import io
import os
import shutil
from pathlib import Path

import pytest
import torch
from world import config_of, random_batch, stock_model

from postgrad.cluster.host import build_host
from postgrad.config.schema import ModelConfig
from postgrad.errors import ConfigError
from postgrad.model.load import (
    hub_is_reachable,
    load,
    load_tokenizer,
    model_hidden_size,
    resolve_path,
    stop_ids,
)

CPU = torch.device("cpu")


def settings(path, **more) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1, **more)


def test_a_local_folder_loads_with_model_and_tokenizer(tiny):
    loaded = load(settings(tiny), CPU)
    assert loaded.tokenizer.decode([3, 10, 4]) == "3+4" and stop_ids(loaded) == [17]
    assert model_hidden_size(settings(tiny)) == 32
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_bfloat16_is_honoured(tiny):
    config = settings(tiny)
    config.dtype = "bfloat16"
    assert {p.dtype for p in load(config, CPU).model.parameters()} == {torch.bfloat16}


def test_dropout_is_off_while_the_model_trains(tmp_path):
    """The trainer and the engine must see one policy."""
    import transformers

    from postgrad.model.tiny import tiny_tokenizer

    config = transformers.LlamaConfig(
        vocab_size=18,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.5,
        eos_token_id=17,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    policy = build_host(config_of("grpo", tmp_path)).policy
    batch = random_batch(1)
    assert torch.equal(policy.logprobs(batch)["logprobs"], policy.logprobs(batch)["logprobs"])


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/no/such/folder", "no such folder"),
        ("./no-such-folder", "no such folder"),
        ("~/no-such-folder-here", "no such folder"),
        ("/no/such/model.gguf", "no such file"),
        ("model.gguf", "no such file"),
        ("no-such-org/no-such-model", "cannot be loaded"),
        ("no-such-model", "cannot be loaded"),
    ],
)
def test_a_bad_path_is_one_line_that_names_it(path, part):
    for use in (load_tokenizer, model_hidden_size, lambda config: load(config, CPU)):
        with pytest.raises(ConfigError) as caught:
            use(settings(path))
        assert (
            part in str(caught.value)
            and path in str(caught.value)
            and "\n" not in str(caught.value)
        )


def test_a_word_that_is_no_model_says_so_at_once_where_no_hub_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("postgrad.model.load.hub_is_reachable", lambda: False)
    lookups = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: lookups.append(address))
    (tmp_path / "my-model").mkdir()
    for word, hint in (
        ("smolm2", "; did you mean smollm2?"),
        ("my-modl", "; did you mean my-model?"),
        ("qwxzj", "not downloaded before"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(settings(word), CPU)
        assert (
            f"model.path={word} cannot be loaded: there is no such folder, no model hub is reachable"
            in str(caught.value)
        )
        assert str(caught.value).endswith(hint)
    assert lookups == []


def test_a_run_or_a_checkpoint_is_answered_with_its_model(tiny, tmp_path):
    policy = tmp_path / "run" / "checkpoints" / "step-3" / "policy"
    shutil.copytree(tiny, policy)
    (policy.parent.parent / "latest").write_text("step-3\n")
    for given, said in (
        (tmp_path / "run", "it is a run; its trained model is"),
        (policy.parent, "it is a checkpoint; its model is"),
    ):
        for use in (load_tokenizer, model_hidden_size, lambda config: load(config, CPU)):
            with pytest.raises(ConfigError) as caught:
                use(settings(given))
            assert str(caught.value).endswith(f"{said} {policy}")
    assert load(settings(policy), CPU)


def test_what_a_folder_lacks_is_named(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(settings(tmp_path / "empty"), CPU)
    shutil.copytree(tiny, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigError, match=r"tokenizer.*copy the tokenizer's files into the folder"):
        load_tokenizer(settings(tmp_path / "mute"))


@pytest.mark.parametrize("reachable", [True, False])
def test_whether_a_hub_answers_is_asked_at_its_own_port_or_at_the_proxy(reachable, monkeypatch):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        if not reachable:
            raise ConnectionRefusedError
        return io.BytesIO()

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://mirror:8080")
    assert hub_is_reachable() is reachable
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    assert hub_is_reachable() is reachable
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert hub_is_reachable() is reachable
    assert asked == [("mirror", 8080), ("huggingface.co", 443), ("proxy", 3128)]


@pytest.mark.parametrize(
    "broken", ["empty folder", "no weights", "cut weights", "no tokenizer", "cut config"]
)
def test_a_broken_folder_is_one_line(tiny, tmp_path, broken):
    if broken != "empty folder":
        for file in tiny.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if broken == "no weights":
        (tmp_path / "model.safetensors").unlink()
    if broken == "cut weights":
        os.truncate(tmp_path / "model.safetensors", 1000)
    if broken == "cut config":
        os.truncate(tmp_path / "config.json", 50)
    if broken == "no tokenizer":
        for file in tmp_path.glob("tokenizer*"):
            file.unlink()
    with pytest.raises(ConfigError) as caught:
        load(settings(tmp_path), CPU)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_tiny_is_made_once_into_the_cache_and_differs_by_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    first = resolve_path("tiny", 0)
    stamp = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert (
        resolve_path("tiny", 0) == first
        and (Path(first) / "model.safetensors").stat().st_mtime_ns == stamp
    )
    assert resolve_path("tiny", 1) != first
    a, b = (stock_model(tmp_path / f"tiny-{seed}") for seed in (0, 1))
    assert not torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-0", "tiny-1"], (
        "nothing half-written stays"
    )


@pytest.mark.parametrize("folder", ["tiny", "tiny_untied"])
def test_a_saved_checkpoint_is_a_stock_folder_with_equal_logits(folder, request, tmp_path):
    from transformers import AutoTokenizer

    source = request.getfixturevalue(folder)
    policy = build_host(config_of("grpo", source, "optimizer.lr=1e-2")).policy
    policy.update(random_batch(1), 1)
    policy.save(str(tmp_path))
    ids = torch.arange(12)[None]
    again = stock_model(tmp_path / "policy", torch.float32)
    with torch.no_grad():
        mine = policy.model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(
            again(input_ids=ids, use_cache=False).logits, mine, rtol=1e-5, atol=1e-5
        )
        assert not torch.allclose(
            stock_model(source, torch.float32)(input_ids=ids).logits, mine, atol=1e-3
        ), "the update must show"
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").decode([3, 10, 4]) == "3+4"
