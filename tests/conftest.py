"""Fixtures for all tests: one thread, no network, and a tiny model on disk."""

import os
import random
import re
import shutil
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from attack_areas import area_of
from hypothesis import settings

from postgrad.problem import Problem
from postgrad.processes import child
from postgrad.verifiers.pool import VerifierPool

pytest_plugins = ["cpu_seconds"]
LONG = (
    "cluster",
    "test_demo.py",
    "test_fit.py",
    "test_resume.py",
    "view",
    "test_captured.py",
    "test_real_files.py",
    "test_paged.py",
    "test_paged_families.py",
    "test_api_docs.py",
)
# Markers of tests that run only with an option of the same name.
OPTIONAL = {
    "nightly": "slow or rare: make test-nightly runs it",
    "long": "takes minutes: make test-long runs it",
    "scale": "every family or method on several ranks: make test-scale runs it",
}
EXIT_STATUS = pytest.StashKey[int]()
# Settings of the developer's shell do not reach the tests.
for name in ("API_KEY", "ENVIRONMENT_TOKEN", "LOG", "SANDBOX", "SANDBOX_TOKEN"):
    os.environ.pop(f"POSTGRAD_{name}", None)
os.environ.pop("RAY_ADDRESS", None)
# What tests break on purpose must not reach the user's cache. Other processes inherit this one.
IS_FIRST_PROCESS = "PYTEST_XDIST_WORKER" not in os.environ
if IS_FIRST_PROCESS:
    os.environ["POSTGRAD_CACHE"] = tempfile.mkdtemp(prefix="postgrad-tests-")
# The same examples each time, at any speed of the machine: a test fails always or never.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seeds the global generators, so that no test depends on those that ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def forked_children() -> Iterator[None]:
    """Child processes of runs start at once: see preloaded.py."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            patch.setattr(child, "start_process", preloaded.start_process)
        yield


@pytest.fixture
def real_children(forked_children: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes of runs start as the product starts them."""
    monkeypatch.setattr(child, "start_process", preloaded.START_PROCESS)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-block Qwen3 of width 32 with tied embeddings and grouped heads, made in code."""
    from tiny_runs import sharpened

    from postgrad.model.load.tiny import make_tiny

    return sharpened(
        make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0, layers=2, width=32)
    )


@pytest.fixture(scope="session")
def prompts(tiny: Path) -> Any:
    """The tiny model's tokenizer, plain prompts."""
    from tiny_runs import config_of

    from postgrad.data.encode.encoder import Encoder
    from postgrad.model.load.load import load_tokenizer

    return Encoder(load_tokenizer(config_of("grpo", tiny).model), "plain")


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model of three blocks with an untied head, for tests of views."""
    from tiny_runs import sharpened

    from postgrad.model.load.tiny import make_tiny

    return sharpened(
        make_tiny(
            tmp_path_factory.mktemp("models") / "untied", seed=1, layers=3, width=32, tied=False
        )
    )


def make_problem(truth: str, source: str = "math", **fields: object) -> Problem:
    return Problem(
        uid="p1",
        messages=({"role": "user", "content": "?"},),
        ground_truth=truth,
        data_source=source,
        **fields,
    )  # type: ignore[arg-type]


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(scope="session")
def math_pool() -> Iterator[VerifierPool]:
    """One pool for all tests of maths, so that sympy loads once."""
    with VerifierPool(workers=1, timeout_s=30) as pool:
        yield pool


@pytest.fixture(scope="session")
def grade(math_pool: VerifierPool) -> Callable[..., list[float]]:
    """Values of (response, truth) pairs by a verifier that runs in the pool."""

    def values(verifier: str, pairs: list[tuple[str, str]]) -> list[float]:
        results = math_pool.verify(
            [(response, make_problem(truth)) for response, truth in pairs], [verifier] * len(pairs)
        )
        return [result.value for result in results]  # type: ignore[union-attr]

    return values


@pytest.fixture
def hostile() -> Callable[[str], str]:
    """The name of a function in hostile_verifiers.py as a user would give it."""
    return lambda name: f"{Path(__file__).parent / 'verifiers' / 'hostile_verifiers.py'}:{name}"


def living_children(pid: int | None = None) -> list[int]:
    """Returns the child processes of a process, including zombies."""
    tasks = Path(f"/proc/{pid or os.getpid()}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.fixture
def children() -> Callable[..., list[int]]:
    return living_children


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs", action="store_true", help="write the tables of docs/ that tests compare"
    )
    parser.addoption(
        "--nightly", action="store_true", help="also run the tests that are marked nightly"
    )
    parser.addoption("--long", action="store_true", help="also run the tests that are marked long")
    parser.addoption(
        "--scale", action="store_true", help="run every model family on several ranks, too"
    )
    parser.addoption(
        "--screenshots",
        default="",
        help="folder that tests/view/test_browser.py writes pictures of the page into",
    )
    parser.addoption(
        "--screenshot-runs",
        default="",
        help="folder of runs that are photographed; the tests' own unless given",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (pytest -n 2) the tests of a file stay in one process.

    So do all tests of cluster/ and of view/. Tests whose id ends with a family and a size, such as
    [captured-llama-wide], stay with their family.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if family := re.search(r"(\w+)-(small|wide)\]$", nodeid):
                return family[1]
            file = Path(nodeid.split("::", 1)[0])
            return str(file.parent) if file.parent.name in ("cluster", "view") else str(file)

    config.option.loadscopereorder = False  # the order below, not that of the files with most tests
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the slowest files first, so that no process waits for one of them at the end."""
    for item in items:
        if area_of(str(item.path)):
            item.add_marker(pytest.mark.attack)
    for marker, reason in OPTIONAL.items():
        if not config.getoption(f"--{marker}"):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(
        key=lambda item: next(
            (n for n, name in enumerate(LONG) if name in item.path.parts), len(LONG)
        )
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus != pytest.ExitCode.USAGE_ERROR:  # pytest prints the mistake after this
        session.config.stash[EXIT_STATUS] = int(session.exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Exits at once: a server thread inside torch would abort Python's shutdown."""
    if IS_FIRST_PROCESS:
        shutil.rmtree(os.environ["POSTGRAD_CACHE"], ignore_errors=True)
    if (status := config.stash.get(EXIT_STATUS, None)) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
