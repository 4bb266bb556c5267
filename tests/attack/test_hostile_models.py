"""Model folders of an attacker are refused with one line, and nothing in them runs."""

import shutil

import pytest
import torch
from hostile_models import FOLDERS, GGUF, TEMPLATES, with_code, with_template
from tiny_runs import overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.config.schema import ModelConfig
from postgrad.data.encode import template_limits
from postgrad.data.encode.template_limits import check_template_limits
from postgrad.model.load.load import load


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "model")


def refuse(model, tmp_path, capsys, *overrides):
    """Train; assert exit code 2, one line and nothing written; return the line."""
    overrides = (*toy_run(), f"runs={tmp_path / 'runs'}", *overrides)
    code = main(["train", "grpo", *overrides_of(model, *overrides)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("postgrad: "), lines
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "marker").exists(), "a program of the folder ran"
    return lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_folder_is_refused(name, folder, tmp_path, capsys):
    if "adapter" in name:
        pytest.importorskip("peft")
    FOLDERS[name](folder, tmp_path / "marker")
    line = refuse(folder, tmp_path, capsys)
    assert str(folder) in line or "model.path" in line


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template_is_refused(name, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(template_limits, "CPU_LIMIT_S", 1)
    check_template_limits.cache_clear()
    with_template(TEMPLATES[name])(folder, tmp_path / "marker")
    assert "template" in refuse(folder, tmp_path, capsys, "data.template=chat")


@pytest.mark.parametrize("name", GGUF)
def test_gguf_file_is_refused(name, tmp_path, capsys):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(GGUF[name])
    assert "model.gguf" in refuse(tmp_path / "model.gguf", tmp_path, capsys)


def test_code_beside_a_known_model_type_does_not_run(folder, tmp_path):
    with_code(auto_map={"AutoModelForCausalLM": "evil.Evil"})(folder, tmp_path / "marker")
    config = ModelConfig(path=str(folder), dtype="float32", device="cpu", threads=1)
    assert load(config, torch.device("cpu")).model.num_parameters() > 0
    assert not (tmp_path / "marker").exists()


def test_pickle_beside_safetensors_is_not_read(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04broken")
    config = ModelConfig(path=str(folder), dtype="float32", device="cpu", threads=1)
    assert load(config, torch.device("cpu")).model.num_parameters() > 0


def test_links_of_the_download_cache_are_followed(tiny, tmp_path):
    """A snapshot of the hub's cache consists of links to its blobs."""
    cache = tmp_path / "models--a--b"
    shutil.copytree(tiny, cache / "blobs")
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    config = ModelConfig(path=str(snapshot), dtype="float32", device="cpu", threads=1)
    assert load(config, torch.device("cpu")).model.num_parameters() > 0
