"""For all tests: one thread, no network, and a tiny model on disk."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import Any

import pytest

LONG = ("cluster", "test_demo.py", "test_fit.py", "test_resume.py", "test_recorded.py", "test_real_files.py", "test_paged.py")
EXIT_STATUS = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-block Qwen3 of width 32 with tied embeddings and grouped heads, made in code."""
    from world import sharpened

    from postgrad.model.tiny import make_tiny

    return sharpened(make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0, layers=2, width=32))


@pytest.fixture(scope="session")
def prompts(tiny: Path) -> Any:
    """The tiny model's tokenizer, plain prompts."""
    from world import config_of

    from postgrad.data.render import Prompts
    from postgrad.model.load import load_tokenizer

    return Prompts(load_tokenizer(config_of("grpo", tiny).model), "plain")


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks and a head of its own: what is tested of views needs blocks above and below."""
    from world import sharpened

    from postgrad.model.tiny import make_tiny

    return sharpened(make_tiny(tmp_path_factory.mktemp("models") / "untied", seed=1, layers=3, width=32, tied=False))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", default="", help="folder that tests/view/test_browser.py writes pictures of the page into")
    parser.addoption("--screenshot-runs", default="", help="folder of runs that are photographed; the tests' own unless given")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (pytest -n 2) a file's tests stay together, and so do all of Ray and all of the browser."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.split("::", 1)[0])
            return str(file.parent) if file.parent.name in ("cluster", "view") else str(file)

    config.option.loadscopereorder = False  # the order below, not that of the files with most tests
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first: at the end no process waits for another's long test."""
    items.sort(key=lambda item: next((n for n, name in enumerate(LONG) if name in item.path.parts), len(LONG)))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = int(exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave at once: a test server's thread that is still inside torch when Python winds down aborts the process, all tests passed."""
    if (status := config.stash.get(EXIT_STATUS, None)) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
