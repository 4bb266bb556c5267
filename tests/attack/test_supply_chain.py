"""The bill of materials, and the check of installed files against recorded hashes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "supply_chain.py"
PURE = "py3-none-any.whl"


@pytest.fixture(scope="module")
def supply_chain():
    spec = importlib.util.spec_from_file_location("supply_chain", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("postgrad") is None, reason="not installed")
def test_bill_of_materials_has_direct_and_indirect_packages(supply_chain):
    if supply_chain.installed("postgrad") is None:
        pytest.skip("postgrad is not installed as a package")
    document = json.loads(supply_chain.sbom())
    assert document["bomFormat"] == "CycloneDX" and document["specVersion"] == "1.6"
    references = {component["bom-ref"] for component in document["components"]}
    names = {component["name"] for component in document["components"]}
    assert {"torch", "transformers", "antlr4-python3-runtime"} <= names
    for entry in document["dependencies"]:
        assert set(entry["dependsOn"]) <= references
    (project,) = [d for d in document["dependencies"] if d["ref"].startswith("pkg:pypi/postgrad@")]
    assert any(name.startswith("pkg:pypi/torch@") for name in project["dependsOn"])


def report_of(folder: Path, name: str, version: str, digest: str, url: str) -> str:
    item = {
        "metadata": {"name": name, "version": version},
        "download_info": {"url": url, "archive_info": {"hashes": {"sha256": digest}}},
    }
    (folder / "report.json").write_text(json.dumps({"install": [item]}))
    return str(folder / "report.json")


def test_changed_file_of_a_recorded_version_fails(supply_chain, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(supply_chain, "RECORDED_PYTHONS", (sys.version_info[:2],))
    (name, version), hashes = next(iter(supply_chain.recorded().items()))
    good = next(iter(hashes)).removeprefix("sha256:")
    url = "https://index/file.whl"
    assert supply_chain.check([report_of(tmp_path, name, version, good, url)]) == 0
    assert supply_chain.check([report_of(tmp_path, name, version, "0" * 64, url)]) == 1
    assert name in capsys.readouterr().out
    assert supply_chain.check([report_of(tmp_path, name, "0.0.0", "0" * 64, url)]) == 0
    assert supply_chain.check([report_of(tmp_path, name, version, "0" * 64, "file:///a.whl")]) == 0


@pytest.mark.parametrize(
    ("file", "used"),
    [
        (f"my_name-1.0-{PURE}", True),
        (f"my_name-1.1-{PURE}", False),
        (f"other-1.0-{PURE}", False),
        ("my_name-1.0.tar.gz", True),
        ("my_name-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", True),
        ("my_name-1.0-cp39-abi3-manylinux2014_x86_64.whl", True),
        ("my_name-1.0-cp39-cp39-manylinux2014_x86_64.whl", False),
        ("my_name-1.0-cp311-cp311-macosx_11_0_arm64.whl", False),
    ],
)
def test_which_files_are_recorded(supply_chain, file, used):
    assert supply_chain.is_used(file, "my-name", "1.0") == used
