"""The page in a real Chromium. One browser for all tests; they are skipped if there is none.

`pytest tests/view/test_browser.py --screenshots docs/view --screenshot-runs RUNS` also takes
screenshots of the main pages of RUNS.
"""

import json
import shutil
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest
from view_runs import HOSTILE, Server, WrittenRun, batch_of, drawn, metrics_of, serving
from vision_models import save_vision_model, square

import postgrad

selenium = pytest.importorskip(
    "selenium", reason="selenium is not installed (it is in the extra dev)"
)
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.select import Select  # noqa: E402

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="no Chromium with chromedriver here (apt install chromium chromium-driver)",
    ),
]

# Returns the visible elements that have no name for a screen reader.
FIND_UNNAMED = Path(__file__).with_name("find_unnamed.js").read_text()


class Browser:
    """A browser with the few actions that the tests need."""

    def __init__(self, driver, server: Server) -> None:
        self.driver, self.server = driver, server

    def open(self, path: str, server: Server | None = None) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{(server or self.server).address}/{path}")

    def all(self, css: str):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str):
        return self.until(lambda: next(iter(self.all(css)), None), css)

    def until(self, condition, what: str = "", limit_s: float = 60):
        """Waits for the condition and returns its value; the page may redraw meanwhile."""
        end = time.monotonic() + limit_s
        while True:
            try:
                if value := condition():
                    return value
            except selenium.common.exceptions.StaleElementReferenceException:
                pass
            assert time.monotonic() < end, (
                f"waited for {what}; the page shows: {self.text()[:1500]}"
            )
            time.sleep(0.05)

    def text(self, css: str = "main") -> str:
        return self.run(
            "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", css
        )

    def texts(self, css: str, inside) -> list[str]:
        return [e.text for e in inside.find_elements(By.CSS_SELECTOR, css)]

    def wait_for(self, text: str, css: str = "main") -> None:
        self.until(lambda: text in self.text(css), text)

    def run(self, script: str, *values):
        return self.driver.execute_script(script, *values)

    def click(self, css: str, text: str = "") -> None:
        matches = self.until(lambda: [e for e in self.all(css) if text in e.text], f"{css} {text}")
        matches[0].click()

    def saved(self, *names: str) -> list[Path]:
        """Wait for downloads. Chromium reserves a name with an empty file, then replaces it."""
        files = [self.downloads / name for name in names]
        self.until(lambda: all(f.is_file() and f.stat().st_size for f in files), str(names))
        return files

    def chart(self, title: str):
        def find():
            for chart in self.all("figure.chart"):
                if chart.find_element(By.TAG_NAME, "h3").text == title:
                    return chart
            return None

        return self.until(find, title)

    def console_errors(self) -> list[str]:
        """Errors and warnings of the console, with failed loads and refused scripts."""
        entries = self.driver.get_log("browser")
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="session")
def browser(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    downloads = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option(
        "prefs",
        {
            "download.default_directory": str(downloads),
            "profile.default_content_setting_values.automatic_downloads": 1,
        },
    )
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    browser = Browser(driver, server)
    browser.downloads = downloads
    yield browser
    driver.quit()


@pytest.fixture(autouse=True)
def no_console_errors(browser: Browser):
    """Every test ends without a console error: no exception, refused script or missing file."""
    browser.console_errors()
    yield
    assert browser.console_errors() == []


def test_a_live_run_updates_and_keeps_its_zoom(browser, tmp_path):
    import fcntl

    written = WrittenRun(tmp_path / "live", steps=40).steps(12)
    with serving(tmp_path) as server:
        with (written.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            browser.open("#/run/live/curves", server)
            browser.wait_for("step 12 of 40")
            browser.wait_for("running", ".runhead")
            plot = browser.chart("Reward").find_element(By.CSS_SELECTOR, "svg.plot")
            browser.until(lambda: plot.get_attribute("data-to") == "12", "the first drawing")
            ActionChains(browser.driver).move_to_element_with_offset(
                plot, -60, 0
            ).click_and_hold().move_by_offset(90, 10).release().perform()
            browser.until(lambda: plot.get_attribute("data-from") not in ("0", "1"), "the zoom")
            zoom = plot.get_attribute("data-from"), plot.get_attribute("data-to")
            browser.run("window.here = 'the same page'")
            written.steps(6)
            browser.wait_for("step 18 of 40")
            browser.wait_for("0.46", ".facts")
            browser.wait_for("18", ".tabs")
            assert (plot.get_attribute("data-from"), plot.get_attribute("data-to")) == zoom
            assert browser.run("return window.here") == "the same page"
            browser.click("button", "Reset zoom")
            browser.until(lambda: plot.get_attribute("data-to") == "18", "the zoom reset")
            assert "about" in browser.text(".facts") and len(browser.all(".mark.checkpoint")) >= 3
            written.events.number = 18
            written.events.write("failed", "step 19, stage update: out of memory")
        browser.wait_for("failed", ".runhead")
        browser.wait_for("out of memory", ".runhead")
        browser.driver.get("about:blank")


def test_metrics_with_the_names_of_properties_are_metrics(browser, tmp_path):
    names = ("constructor", "__proto__", "hasOwnProperty", "toString/valueOf")
    for run in ("a", "constructor"):
        (tmp_path / run).mkdir()
        lines = [{"step": i, "time": i} | dict.fromkeys(names, float(i)) for i in range(1, 6)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / run / "metrics.jsonl").write_text(text)
    (tmp_path / "a" / "config.yaml").write_text("constructor: 1\n__proto__: {toString: 2}\n")
    (tmp_path / "constructor" / "config.yaml").write_text("constructor: 3\n")
    with serving(tmp_path) as server:
        for page in ("#/run/constructor/curves", "#/compare?run=a&run=constructor"):
            browser.open(page, server)
            browser.click("details.rest summary")
            for title in ("constructor", "__proto__", "hasOwnProperty", "toString"):
                plot = browser.chart(title).find_element(By.CSS_SELECTOR, "svg.plot")
                browser.until(
                    lambda plot=plot: plot.get_attribute("data-points") in ("5", "10"), title
                )
        table = browser.text("table.differences")
        assert "__proto__.toString" in table and "constructor" in table
        browser.open("#/constructor", server)
        browser.wait_for("This page does not exist")
        browser.driver.get("about:blank")


def test_the_table_of_runs_needs_no_sideways_scroll_bar(browser, tmp_path):
    for name in ("luffy_small-openr1-math-46k-8192-seed1-lr1e-6", "group/grpo-smollm2-gsm8k"):
        written = WrittenRun(tmp_path / name).steps(12)
        file = written.folder / "config.yaml"
        file.write_text(file.read_text().replace("path: ", "path: Qwen/Qwen2.5-Math-7B-16k-"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("[" * 9999)
    browser.driver.set_window_size(1300, 900)
    try:
        with serving(tmp_path) as server:
            browser.open("#/runs", server)
            browser.wait_for("cannot be read")
            sizes = (
                "const e = document.querySelector('.scroll'); return e.scrollWidth - e.clientWidth"
            )
            assert browser.run(sizes) == 0
            browser.driver.get("about:blank")
    finally:
        browser.driver.set_window_size(1280, 900)


def test_chart_values_by_mouse_keyboard_and_screen_reader(browser):
    browser.open("#/run/finished/curves")
    chart = browser.chart("Response length (tokens)")
    plot = chart.find_element(By.CSS_SELECTOR, "svg.plot")
    browser.until(lambda: plot.get_attribute("data-points") == "20", "the curve")
    ActionChains(browser.driver).move_to_element(plot).perform()
    browser.until(lambda: "at step" in chart.text, "the hovered step")
    assert "at step" in browser.chart("Loss").text, "all charts show the same step"
    assert "from 31 to 50" in plot.accessible_name
    plot.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    browser.until(lambda: browser.text("#announcement").startswith("Step "), "the announcement")
    plot.send_keys("+")
    browser.until(lambda: float(plot.get_attribute("data-from")) > 1, "the zoom by keyboard")
    plot.send_keys(Keys.ESCAPE)
    browser.until(lambda: plot.get_attribute("data-from") == "1", "the zoom reset")
    browser.click(".choice button", "time")
    browser.until(lambda: plot.get_attribute("data-from") == "0", "the time axis")
    assert browser.chart("Step time by stage (s)").find_elements(By.CSS_SELECTOR, "path.area")


def test_a_smoothed_constant_is_drawn(browser, tmp_path):
    """Its values differ by rounding; runs of more than 60 steps are smoothed at first."""
    log = WrittenRun(tmp_path / "run", steps=300).log
    for step in range(1, 301):
        log.write(step, {"reward/mean": step / 300, "grad_norm": 0.3})
    with serving(tmp_path) as server:
        browser.open("#/run/run/curves", server)
        plot = browser.chart("Gradient norm").find_element(By.CSS_SELECTOR, "svg.plot")
        browser.until(lambda: plot.find_elements(By.CSS_SELECTOR, "line.grid"), "the grid")


def line_pieces(browser, title: str) -> list[int]:
    """Return the number of points of each connected piece of a chart's first line."""
    plot = browser.chart(title).find_element(By.CSS_SELECTOR, "svg.plot")
    line = browser.until(
        lambda: plot.find_elements(By.CSS_SELECTOR, "path.line:not(.faint)"), "the line"
    )[0]
    return [1 + piece.count("L") for piece in line.get_attribute("d").split("M")[1:]]


@pytest.mark.parametrize("steps", [20, 300, 8000])  # dots, no dots, more steps than pixels
def test_missing_values_are_gaps(browser, tmp_path, steps):
    """A tenth is NaN, a tenth is absent, with one point between; validations are no gaps."""
    log = WrittenRun(tmp_path / "run", steps=steps).log
    part = steps // 10
    for step in range(1, steps + 1):
        metrics = {"reward/mean": step / steps, "response/length": 9.0 + step / steps}
        if 3 * part < step <= 4 * part:
            metrics["reward/mean"] = float("nan")
        elif 4 * part + 1 < step <= 5 * part + 1:
            del metrics["reward/mean"]
        log.write(step, metrics)
        if step % part == 0:
            log.write(step, {"validation/accuracy": 0.5, "watch/reward_rise": 0.2})
    with serving(tmp_path) as server:
        browser.open("#/run/run/curves", server)
        first, point, last = line_pieces(browser, "Reward")
        assert point == 1 and first > 1 and last > 1
        dots = browser.chart("Reward").find_elements(By.CSS_SELECTOR, "svg.plot circle.dot")
        assert len(dots) == (steps - 2 * part if steps <= 40 else 1)
        assert len(line_pieces(browser, "Response length (tokens)")) == 1
        assert line_pieces(browser, "Validation") == [10]


def test_charts_and_tables_can_be_saved(browser):
    browser.open("#/run/finished/curves")
    chart = browser.chart("Reward")
    for kind in ("SVG", "PNG", "CSV"):
        browser.run(
            "arguments[0].click()",
            chart.find_element(By.CSS_SELECTOR, f"button[aria-label$='as {kind}']"),
        )
    files = browser.saved(*(f"finished-Reward.{kind}" for kind in ("svg", "png", "csv")))
    tree = ElementTree.fromstring(files[0].read_text())
    lines = [
        e
        for e in tree.iter("{http://www.w3.org/2000/svg}path")
        if e.get("stroke", "none") not in ("none", "")
    ]
    assert lines and "Reward" in "".join(tree.itertext())
    assert files[1].read_bytes().startswith(b"\x89PNG") and files[1].stat().st_size > 3000
    rows = files[2].read_text().splitlines()
    assert rows[0] == "series,step,seconds,value"
    assert len(rows) == 1 + 2 * 20, "the reward, and the one part that differs from it"
    browser.open("#/runs")
    browser.click("button[aria-label^='Save the table']")
    (table,) = browser.saved("runs.csv")
    assert table.read_text().startswith("Run,State,") and "group/failed" in table.read_text()


def test_list_filters_sorts_and_compares(browser):
    browser.open("#/runs")
    browser.wait_for("group/failed")
    assert "90% could not be judged" in browser.text("table.runs")
    browser.one("input[type=search]").send_keys("failed")
    browser.until(lambda: len(browser.all("table.runs tbody tr")) == 1, "one run")
    browser.one("input[type=search]").send_keys(Keys.CONTROL, "a")
    browser.one("input[type=search]").send_keys(Keys.DELETE)
    browser.until(lambda: len(browser.all("table.runs tbody tr")) >= 5, "all runs")
    browser.click("th button.sort", "Step")
    browser.until(
        lambda: browser.all("table.runs tbody tr")[0].text.startswith("finished"),
        "the longest run first",
    )
    for name in ("finished", "group/failed"):
        browser.one(f"input[aria-label='Compare {name}']").click()
    browser.click("a.button.primary", "Compare 2 runs")
    browser.wait_for("2 runs")
    chart = browser.chart("Reward: mean")
    browser.until(
        lambda: len(chart.find_elements(By.CSS_SELECTOR, "path.line:not(.faint)")) == 2, "two lines"
    )
    assert "group/failed" in chart.text and "finished" in chart.text
    rows = {
        row.find_element(By.TAG_NAME, "th").text: row.text
        for row in browser.all("table.differences tbody tr")
    }
    assert list(rows) == ["optimizer.lr"]
    assert "0.001" in rows["optimizer.lr"] and "0.003" in rows["optimizer.lr"]
    browser.click("label.field", "show equal settings too")
    browser.until(lambda: len(browser.all("table.differences tbody tr")) > 4, "all settings")


def colors(browser) -> list[str]:
    return browser.run(
        "return [...document.querySelectorAll('.card .t')]"
        ".map((e) => getComputedStyle(e).backgroundColor)"
    )


def test_tokens_of_a_rollout_are_colored_and_described(browser):
    browser.open("#/run/finished/rollouts?step=4&group=1")
    browser.wait_for("Problem 2 of 3")
    assert len(browser.all("article.card")) == 3
    by_logprob = colors(browser)
    assert len(set(by_logprob)) > 4, "tokens have different shades"
    shades = [float(c.rstrip(")").split("/")[-1].split(",")[-1]) for c in by_logprob[:5]]
    assert shades == sorted(shades), "each token here is less likely than the one before"
    picker = Select(browser.one(".detail .controls select"))
    assert [o.text for o in picker.options] == [
        "log-prob",
        "advantage",
        "entropy",
        "token source",
        "none",
    ]
    picker.select_by_visible_text("advantage")
    browser.until(lambda: colors(browser) != by_logprob, "other colors")
    assert browser.all(".gradient.signed")
    Select(browser.one(".detail .controls select")).select_by_visible_text("token source")
    browser.until(lambda: len(browser.all(".tokens .from-tool")) > 3, "tool tokens")
    assert len(browser.all(".tokens .from-demonstration")) > 3
    assert len(browser.all(".tokens .masked")) == 3
    text = browser.text(".detail")
    for part in (
        "Not scored: timeout: 5 s were not enough",
        "truncated at the length limit",
        "given, not sampled",
        "not in the loss",
        "then 7 it is",
        "format",
    ):
        assert part in text, part
    block = browser.one(".tokens")
    block.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    browser.wait_for("token 2, id 2", ".tip")
    assert "not in the loss" in browser.text(".tip") and "-0.4" in browser.text(".tip")


CALL = '<tool_call>{"name": "look", "arguments": {"at": "map"}}</tool_call>'
MESSAGES = [
    {"role": "assistant", "content": f"I look at the map first. {CALL}"},
    {"role": "tool", "content": "a river to the north"},
    {"role": "assistant", "content": '{"name": "look", "parameters": {}}'},
    {"role": "tool", "content": "a bridge"},
    {"role": "assistant", "content": "```go north```"},
    {"role": "user", "content": f"You are wet. {HOSTILE}"},
    {"role": "assistant", "content": ""},
]
REWARDS = [0.0, 0.1, -0.25, 1.5]
EPISODE = {"reward": 1.35, "parts": {}, "rewards": REWARDS, "done": True, "state": None}


def write_conversations(folder: Path) -> None:
    """A run whose first response of each group is a conversation of four turns.

    The second is one turn that ended an episode, the third one turn without an environment.
    """
    run = WrittenRun(folder, steps=1)
    batch = batch_of(1)
    rows = range(len(batch))
    is_long = [i % 3 == 0 for i in rows]
    batch.rows["messages"] = [json.dumps(MESSAGES if long else MESSAGES[:1]) for long in is_long]
    batch.rows["turn_rewards"] = [REWARDS if long else [0.0] for long in is_long]
    batch.rows["turn_states"] = [["a", "b", "c", "d"] if long else ["a"] for long in is_long]
    batch.rows["environment"] = ["" if i % 3 == 2 else json.dumps(EPISODE) for i in rows]
    run.log.write_rollouts(1, [batch])
    run.events.step(run.log.write(1, metrics_of(1)), batch)


def shown_pictures(browser: Browser, count: int):
    """Wait until the page has loaded so many pictures; returns them."""

    def loaded():
        images = browser.all(".pictures img")
        has_all = len(images) == count and all(i.get_property("naturalWidth") for i in images)
        return images if has_all else None

    return browser.until(loaded, "the pictures")


def test_an_evaluation_shows_the_pictures_of_its_problems(browser, tmp_path):
    model = save_vision_model(tmp_path / "model", "qwen3_vl")
    pictures = [square("red", 48), square("blue", 64), square("green", 80)]
    rows = [
        {"prompt": "1+2=", "images": [one.data for one in shown], "ground_truth": "3"}
        for shown in (pictures[:1], pictures[1:])
    ]
    options = {"model.device": "cpu", "model.dtype": "float32", "max_response_tokens": 4}
    given = {"reward": "exact", "out": tmp_path / "runs" / "pictured", "progress": False}
    result = postgrad.evaluate(str(model), rows, **given, **options)
    (name,) = result.summary["sets"]
    with serving(tmp_path / "runs") as server:
        browser.open(f"#/evaluations/responses?a=pictured&set={quote(name)}", server)
        for number, widths in enumerate(([48], [64, 80])):
            browser.until(lambda: len(browser.all(".grouplist a.group")) == 2, "the problems")
            browser.all(".grouplist a.group")[number].click()
            shown = shown_pictures(browser, len(widths))
            assert [image.get_property("naturalWidth") for image in shown] == widths
            assert all(image.is_displayed() for image in shown)


def test_pictures_are_beside_the_prompt(browser, tmp_path):
    written = WrittenRun(tmp_path / "seen")
    pictures = ((drawn("red"), drawn("blue")), (drawn("green"),), ())
    written.log.write_rollouts(1, [batch_of(1, pictures=pictures)])
    written.log.write(1, metrics_of(1))
    with serving(tmp_path) as server:
        browser.open("#/run/seen/rollouts?step=1&group=0", server)
        shown = shown_pictures(browser, 2)
        assert [image.get_attribute("alt")[:9] for image in shown] == ["Picture 1", "Picture 2"]
        sizes = [(image.get_property("width"), image.get_property("height")) for image in shown]
        assert sizes == [(60, 40), (60, 40)]
        browser.open("#/run/seen/rollouts?step=1&group=2", server)
        browser.wait_for("What is 2 + 1?")
        assert not browser.one(".pictures").is_displayed()


def test_turns_tools_and_observations_are_told_apart(browser, tmp_path):
    write_conversations(tmp_path / "talk")
    with serving(tmp_path) as server:
        browser.open("#/run/talk/rollouts?step=1&group=0", server)
        browser.wait_for("Conversation, 4 turns of the policy")
        assert browser.texts(".conversation summary", browser.one(".side")) == [
            "Conversation, 4 turns of the policy",
            "Conversation, 1 turn of the policy",
        ], "a single turn without an environment is no conversation"
        turns = browser.all(".card:first-child .turn")
        kinds = [turn.get_attribute("class").split("said-by-")[1] for turn in turns]
        assert kinds == [
            "prompt",
            *("policy", "tool", "policy", "tool", "policy", "environment", "policy"),
        ]
        labels = [" ".join(browser.texts(".speaker *", turn)) for turn in turns]
        assert labels == [
            "Prompt",
            "Policy, turn 1, calls a tool reward 0",
            "Tool result",
            "Policy, turn 2, calls a tool reward 0.1",
            "Tool result",
            "Policy, turn 3 reward -0.25",
            "Environment",
            "Policy, turn 4 reward 1.5",
        ]
        texts = [turn.find_element(By.CSS_SELECTOR, ".text").text for turn in turns]
        assert texts[0].startswith("What is") and texts[-1] == "(empty)"
        assert [text.split() for text in texts[1:-1]] == [
            message["content"].split() for message in MESSAGES[:-1]
        ]
        assert browser.texts("code.call", turns[1]) == [CALL], "the call, not the words before it"
        assert browser.texts("code.call", turns[3]) == [MESSAGES[2]["content"]], "the whole turn"
        assert not browser.texts("code.call", turns[5]), "fenced text without an answer by a tool"
        fills = {
            kind: turn.value_of_css_property("background-color")
            for kind, turn in zip(kinds, turns, strict=True)
        }
        assert len(set(fills.values())) == 4, "prompt, policy, tool, environment: four colors"
        assert "The environment ended the episode here." in browser.text(".conversation")
        assert not browser.run("return window.pwned"), "a message is text, not markup"
        tokens = browser.one(".tokensbelow")
        assert not tokens.get_attribute("open")
        browser.click(".tokensbelow summary")
        browser.until(lambda: browser.one(".tokensbelow .tokens").is_displayed(), "the tokens")
        browser.driver.get("about:blank")


def real_run(tmp_path: Path, recipe: str, *overrides: str) -> Path:
    """Trains a tiny model for one step, with a reward for threes; returns the folder of runs."""
    from tiny_runs import config_of

    from postgrad.model.load.tiny import make_tiny
    from postgrad.training.driver import train
    from postgrad.training.report import Reporter

    (tmp_path / "mine.py").write_text(
        "def threes(response, problem):\n    return response.count('3') / 3\n"
    )
    small = (
        "rollout.samples=8",
        "rollout.max_response_tokens=6",
        "training.problems_per_step=4",
        "reward.workers=1",
    )
    own = (
        "training.steps=1",
        f"reward.verifier={tmp_path / 'mine.py'}:threes",
        f"runs={tmp_path / 'runs'}",
    )
    model = make_tiny(tmp_path / "model", seed=0, layers=2, width=32)
    train(config_of(recipe, model, *small, *own, *overrides), Reporter())
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "updates", [1, 2], ids=["entropy of the update", "entropy of the pass before it"]
)
def test_a_real_run_is_colored_by_entropy(browser, tmp_path, updates):
    with serving(real_run(tmp_path, "grpo", f"training.updates_per_step={updates}")) as server:
        browser.open("#/run/test/rollouts?step=1&sort=advantage", server)
        Select(browser.one(".detail .controls select")).select_by_visible_text("entropy")
        browser.until(lambda: browser.all(".gradient.amount"), "the scale of entropy")
        assert any(color not in ("rgba(0, 0, 0, 0)", "transparent") for color in colors(browser))
        browser.driver.get("about:blank")


def run_with_classmates(tmp_path: Path, texts: tuple[str, ...]) -> Path:
    """Train for one step with classmates that always answer these texts; return the runs."""
    from fake_engine import FakeEngine
    from openai_server import MODEL, serve
    from tiny_runs import config_of

    from postgrad.data.encode.encoder import Encoder
    from postgrad.model.load.load import load_tokenizer
    from postgrad.model.load.tiny import make_tiny

    mate = make_tiny(tmp_path / "mate", seed=0, layers=1, width=32)
    prompts = Encoder(load_tokenizer(config_of("grpo", mate).model), "plain")
    with ExitStack() as stack:
        addresses: list[str] = []
        for text in texts:
            tokens = prompts.encode_response(text)
            engine = FakeEngine(lambda prompt, seed, tokens=tokens: tokens)
            served = stack.enter_context(serve(engine=engine, prompts=prompts))
            addresses.append(f"'{served.url}?tokenizer={mate}#{MODEL}'")
        return real_run(
            tmp_path,
            "classmate",
            f"method.classmates=[{','.join(addresses)}]",
            "method.keep_unit=tokens",
            "method.condition=always",
        )


def test_continuations_of_classmates_are_shown_with_their_thought(browser, tmp_path):
    import pyarrow.parquet as pq

    runs = run_with_classmates(tmp_path, ("37", "5"))
    table = pq.read_table(runs / "test" / "rollouts" / "step-000001.parquet").to_pylist()
    row = next(i for i, line in enumerate(table) if line["classmate_texts"] == ["37", "5"])
    group = table[row]["group"]
    with serving(runs) as server:
        browser.open(f"#/run/test/rollouts?step=1&group={group}", server)
        browser.wait_for("Continued by classmates from this thought", ".detail")
        inside = [line for line in table if line["group"] == group]
        card = browser.all(".detail article.card")[
            [id(line) for line in inside].index(id(table[row]))
        ]
        cards = card.find_elements(By.CSS_SELECTOR, ".continuation")
        texts = [one.find_element(By.CSS_SELECTOR, ".continued").text for one in cards]
        assert texts == ["37", "5"]
        tokens = card.find_elements(By.CSS_SELECTOR, ".tokens .t")
        pairs = zip(tokens, table[row]["cot_mask"], strict=True)
        thought = "".join(token.text for token, is_thought in pairs if is_thought)
        assert thought
        for one in cards:
            assert one.find_element(By.CSS_SELECTOR, ".thought").text == thought
        assert "continuation 1, ✓ score 0.333" in cards[0].text
        assert "continuation 2, ✕ score 0" in cards[1].text
        assert [e.text for e in card.find_elements(By.CSS_SELECTOR, ".others summary")] == [
            "More about this response"
        ]
        assert browser.run(FIND_UNNAMED) == []
        browser.driver.get("about:blank")


def test_rollouts_are_filtered_searched_and_followed_over_steps(browser):
    browser.open("#/run/finished/rollouts?step=4")
    browser.wait_for("3 problems, 9 of 9 responses")
    browser.click(".choice button", "wrong 5")
    browser.wait_for("5 of 9 responses")
    browser.run("document.activeElement.blur()")
    browser.one("body").send_keys("]")
    browser.until(lambda: "step=5" in browser.driver.current_url, "the next step by keyboard")
    browser.wait_for("Problem 1 of 3")
    browser.one("body").send_keys("j")
    browser.wait_for("Problem 2 of 3")
    browser.click("a.button", "Follow this problem")
    browser.wait_for("One problem over all steps")
    browser.until(lambda: "Indexed" not in browser.text(".grouplist"), "the whole run")
    browser.wait_for("Sampled in 12 groups.", ".grouplist")
    assert browser.chart("Reward of this problem by step")
    browser.open("#/run/finished/rollouts?step=4")
    browser.one("input[aria-label='Search the responses of this step']").send_keys("2 + 17?")
    browser.wait_for("No response matches the filter.")
    browser.click("button", "search all steps")
    browser.wait_for("3 responses", ".detail")
    browser.click(".hits a.group")
    browser.until(
        lambda: "step=17" in browser.driver.current_url and "Problem 3 of 3" in browser.text(),
        "the hit's group",
    )


def test_evaluations_are_filtered_and_compared(browser):
    browser.open("#/evaluations")
    browser.wait_for("75.0%")
    browser.wait_for("25.0%")
    browser.open("#/run/finished/evaluations")
    browser.click("table a", "before")
    browser.wait_for("8 problems")
    browser.click(".choice button", "wrong 6")
    browser.wait_for("6 problems")
    pickers = browser.until(
        lambda: [e for e in browser.all("select") if e.text.startswith("none")], "the choice of B"
    )
    Select(pickers[0]).select_by_index(1)
    browser.wait_for("comparison")
    browser.wait_for("B is 50.0 points higher")
    browser.click(".choice button", "B better than A 4")
    browser.wait_for("4 problems of 8 that both answered")
    assert len(browser.all(".grouplist a.group")) == 4
    browser.until(lambda: len(browser.all(".two .card.wrong")) == 2, "both models' wrong responses")
    assert len(browser.all(".two .card.right")) == 2
    assert "parsed answer" not in browser.text(".two") and "format" in browser.text(".two")


def test_models_by_data_set_are_shown_with_bars_and_saved(browser):
    browser.open("#/evaluations")
    cells = browser.until(lambda: browser.all("table.pivot tbody td"), "the table")
    texts = [row.text.split() for row in browser.all("table.pivot tbody tr")]
    assert ["after", "75.0%"] in texts and ["before", "25.0%"] in texts
    widths = [cell.find_element(By.TAG_NAME, "meter").get_attribute("value") for cell in cells]
    assert sorted(map(float, widths))[-1] == 0.75
    browser.click("button[aria-label$='as Markdown']")
    browser.click("button[aria-label='Save models by data set as CSV']")
    files = browser.saved("models-by-set.md", "models-by-set.csv")
    assert "| after | 75.0% |" in files[0].read_text()
    assert "after,0.75" in files[1].read_text()
    Select(browser.one("section[aria-label='Models by data set'] select")).select_by_value("best")
    browser.until(lambda: "pass@k" in browser.text("section select"), "the metric")
    browser.until(lambda: browser.all("table.pivot tbody td"), "the table again")


def test_entropy_flow_of_several_analyses_is_drawn(browser):
    browser.open("#/entropy")
    browser.wait_for("Entropy flow")
    flow = browser.chart("Entropy by layer (nats)").find_element(By.CSS_SELECTOR, "svg.plot")
    browser.until(lambda: flow.get_attribute("data-points") == "13", "3 L + 1 points")
    assert "to 0.7" in flow.accessible_name, "the last point is the full policy"
    change = browser.chart("Change by FFN (nats)")
    assert len(change.find_elements(By.CSS_SELECTOR, "path.line")) == 2
    assert "group/failed" in change.text


def test_hostile_text_is_never_run(browser):
    pages = [
        "#/runs",
        "#/run/hostile/curves",
        "#/run/hostile/rollouts?step=1&group=2",
        "#/run/group%2Ffailed/events",
        "#/entropy",
        "#/evaluations/responses?a=finished%2Feval%2Fafter&set=sums",
        f"#/run/hostile/rollouts?find={quote('script')}",
        f"#/run/{quote(HOSTILE, safe='')}/curves",
        f"#/{quote(HOSTILE, safe='')}",
        f"#/run/hostile/rollouts?uid={quote(HOSTILE, safe='')}",
    ]
    for page in pages:
        browser.open(page)
        browser.until(lambda: "Loading" not in browser.text() and len(browser.text()) > 10, page)
        if "rollouts?step" in page:
            browser.wait_for("<script>window.pwned=1</script>", ".card .tokens")
            browser.wait_for(HOSTILE, ".others")
            ActionChains(browser.driver).move_to_element(browser.all(".tokens .t")[6]).perform()
        time.sleep(0.1)
        assert browser.run("return window.pwned") is None, page
        markup = "main script, main img, main iframe, main b:empty"
        count = browser.run("return document.querySelectorAll(arguments[0]).length", markup)
        assert count == 0, page
        links = browser.run("return [...document.links].map((a) => a.getAttribute('href'))")
        assert not any(link.startswith("javascript") for link in links)
    errors = browser.console_errors()
    assert all("404" in error for error in errors), "the only error is the missing run"
    with pytest.raises(selenium.common.exceptions.JavascriptException, match="TrustedHTML"):
        browser.run("document.querySelector('main').innerHTML = '<p>markup from a string</p>'")
    browser.console_errors()


def set_width(browser: Browser, pixels: int) -> None:
    size = {"width": pixels, "height": 844, "deviceScaleFactor": 1, "mobile": pixels < 500}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def test_every_control_has_a_name_and_pages_fit_a_phone(browser):
    pages = [
        "#/runs",
        "#/run/finished/curves",
        "#/run/finished/rollouts?step=4&group=1",
        "#/run/finished/events",
        "#/run/finished/settings",
        "#/compare?run=finished&run=group%2Ffailed",
        "#/evaluations",
        "#/evaluations/responses?a=finished%2Feval%2Fafter&b=finished%2Feval%2Fbefore&set=sums",
        "#/entropy",
    ]

    for page in pages:
        set_width(browser, 1280)
        browser.open(page)
        browser.until(lambda: "Loading" not in browser.text() and len(browser.text()) > 20, page)
        assert browser.run("return document.querySelectorAll('h1').length") >= 1, page
        for pixels in (1280, 390):
            set_width(browser, pixels)
            assert browser.run(FIND_UNNAMED) == [], (page, pixels)
            browser.until(
                lambda p=pixels: browser.run("return document.documentElement.scrollWidth") <= p,
                f"{page} to fit {pixels}",
                3,
            )
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_messages_for_empty_and_missing_things(browser, tmp_path):
    with serving(tmp_path) as server:
        browser.open("#/runs", server)
        browser.wait_for("No runs yet.")
        browser.open("#/evaluations", server)
        browser.wait_for("No evaluations yet.")
        browser.open("#/entropy", server)
        browser.wait_for("No entropy analyses yet.")
        for page in ("runs", "evaluations", "entropy"):
            set_width(browser, 360)
            browser.open(f"#/{page}", server)
            browser.one(".empty pre")
            assert browser.run("return document.documentElement.scrollWidth") <= 360, page
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.open("#/nonsense", server)
        browser.wait_for("This page does not exist.")
    browser.open("#/run/broken/rollouts")
    browser.wait_for("could not be read")
    browser.open("#/run/broken/settings")
    browser.wait_for("no readable config.yaml")
    browser.console_errors()


def test_screenshots(browser, request):
    """Takes the pictures of docs/view if --screenshots is given."""
    target = request.config.getoption("--screenshots")
    runs = request.config.getoption("--screenshot-runs")
    if not target:
        pytest.skip("only with --screenshots FOLDER")
    with serving(Path(runs) if runs else browser.server.root) as server:
        Path(target).mkdir(exist_ok=True)
        browser.open("", server)
        browser.run("localStorage.setItem('theme', 'light')")
        for shot, (height, page) in list_shots(server).items():
            size = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.open(page, server)
            time.sleep(1.5)
            if shot == "rollouts":
                picker = Select(browser.one(".detail .controls select"))
                if "entropy" in [option.text for option in picker.options]:
                    picker.select_by_visible_text("entropy")
            if shot == "conversation":
                top = "document.querySelector('.side').getBoundingClientRect().top"
                browser.one(".side")  # waits for it
                browser.run(f"scrollTo(0, {top} - 70)")
            browser.run("document.getElementById('folder').textContent = 'runs'")
            browser.driver.save_screenshot(str(Path(target) / f"{shot}.png"))
    browser.run("localStorage.removeItem('theme')")
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def list_shots(server: Server) -> dict[str, tuple[int, str]]:
    """Height and page of each picture for which the runs have content."""
    runs = server.json("/api/runs")["runs"]
    rewarded = [run for run in runs if run["metric"] == "reward/mean"]
    last = max(rewarded, key=lambda run: (run["step"], run["name"]))
    name, middle = quote(last["name"], safe=""), last["step"] * 4 // 7
    shots = {
        "curves": (1010, f"#/run/{name}/curves"),
        "rollouts": (820, f"#/run/{name}/rollouts?step={middle}&sort=advantage"),
    }
    pairs = server.json("/api/evaluations")["evaluations"]
    if len(pairs) > 1:
        a, b = (quote(pair["name"], safe="") for pair in pairs[:2])
        page = f"#/evaluations/responses?a={a}&b={b}&set={quote(pairs[0]['sets'][0])}&filter=b"
        shots["evaluations"] = (720, page)
    for run in runs:
        if (
            "\nenvironment:\n  name: ''"
            not in (server.root / run["name"] / "config.yaml").read_text()
        ):
            page = f"#/run/{quote(run['name'], safe='')}/rollouts?sort=advantage"
            shots.setdefault("conversation", (900, page))
    return shots


def test_a_notebook_shows_the_page_in_a_frame(browser, server):
    """What `run.view()` gives to a notebook, on a page of another port."""
    import http.server
    import threading

    from postgrad.api.page import Page

    page = Page(server.root)

    class Notebook(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f"<link rel=icon href=data:,>{page._repr_html_()}".encode())

        def log_message(self, *_) -> None: ...

    notebook = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Notebook)
    threading.Thread(target=notebook.serve_forever, daemon=True).start()
    try:
        browser.driver.get(f"http://localhost:{notebook.server_address[1]}/")
        browser.driver.switch_to.frame(browser.one("iframe"))
        browser.until(lambda: browser.all("main a"), "the list of runs in the frame")
    finally:
        browser.driver.switch_to.default_content()
        browser.driver.get("about:blank")
        notebook.shutdown()
        notebook.server_close()
        page.stop()
