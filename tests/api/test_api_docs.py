"""Every name of the Python API has a docstring, from which the site's reference is made."""

import inspect
import subprocess
import sys
from pathlib import Path

import nbformat
import preloaded
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient

import postgrad

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import docs_site  # noqa: E402

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NAMES = (
    "train",
    "Trainer",
    "Run",
    "evaluate",
    "Evaluation",
    "generate",
    "score",
    "extract_answer",
    "Session",
    "Callback",
    "StepResult",
    "Batch",
    "Problem",
    "Score",
    "Failure",
    "ConfigError",
    "RunError",
)


def test_the_reference_of_the_site_has_every_name():
    page = docs_site.reference()
    for name in NAMES:
        assert f"\n## {name}" in page, name
    assert "### Trainer.stop()" in page and "- `callbacks`: " in page


def test_every_public_name_is_documented_and_help_teaches():
    assert set(NAMES) == set(postgrad.__all__) - {"__version__"}
    for name in NAMES:
        value = getattr(postgrad, name)
        assert inspect.getdoc(value), name
        for member, function in docs_site.members(value) if isinstance(value, type) else ():
            assert inspect.getdoc(function), f"{name}.{member}"
    lines = inspect.getdoc(postgrad.train) or ""
    for argument in inspect.signature(postgrad.train).parameters:
        shown = f"**{argument}" if argument == "more" else argument
        assert f"    {shown}: " in lines, argument


def test_importing_the_package_loads_no_heavy_module():
    program = (
        "import sys, postgrad; print(sorted({'torch', 'transformers', 'yaml'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


USER_SCRIPT = """
import postgrad
from postgrad import Batch, Callback, Problem, StepResult


def reward(response: str, problem: Problem) -> float:
    return float(response == problem.ground_truth)


class Log(Callback):
    def on_save(self, trainer, checkpoint):
        trainer.lr = trainer.lr / 2
        print(checkpoint.name, trainer.step)


rows = [{"prompt": "1+1=", "ground_truth": "2"}]
run = postgrad.train(model="tiny", data=rows, reward=reward, steps=1, callbacks=[Log(), print])
reveal: list[float] = run.metrics["reward/mean"].to_list()
with postgrad.Trainer(model="tiny", data=rows, reward=[reward, "exact"], kl_coef=0.1) as trainer:
    for step in trainer:
        one: StepResult = step
        print(one.number + 1, one.metrics["loss"], one.responses[0].upper(), one.rewards.mean())
session = postgrad.Session("tiny")
batch: Batch = session.sample(["1+1="], n=2)
session.forward_backward(batch, loss="ppo_clip", clip_low=0.2)
print(session.optim_step(lr=1e-6)["grad_norm"], postgrad.evaluate(run, rows, n=4).accuracy)
"""


@pytest.mark.slow
def test_a_type_checker_accepts_a_users_script(tmp_path):
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    wrong = USER_SCRIPT.replace("one.number + 1", 'one.number + "1"')
    (tmp_path / "wrong.py").write_text(wrong)
    (tmp_path / "pyrefly.toml").write_text(f'search-path = ["{ROOT / "src"}"]\n')
    command = [Path(sys.executable).parent / "pyrefly", "check", "--output-format", "min-text"]
    command += ["--python-interpreter-path", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert errors and all("wrong.py" in line for line in errors), done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])
def test_notebooks_run_and_show_a_panel(file, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(local_provisioner, "launch_kernel", preloaded.launch_kernel)
    notebook = nbformat.read(file, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    panels = [one for one in outputs if "step 10/10" in str(one) or "step 30/30" in str(one)]
    if file.stem.startswith(("1", "2")):
        assert any("text/html" in one.get("data", {}) for one in panels)
    errors = [one["text"] for one in outputs if one.get("name") == "stderr"]
    assert all("TqdmWarning" in text for text in errors)  # the environment has no ipywidgets


def test_there_are_three_notebooks_without_outputs():
    assert [file.stem[:1] for file in NOTEBOOKS] == ["1", "2", "3"]
    for file in NOTEBOOKS:
        cells = nbformat.read(file, as_version=4).cells
        assert all(not cell.get("outputs") for cell in cells), file
