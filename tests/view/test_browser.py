"""The page in a real Chromium. One browser for all tests; skipped, visibly, where there is none.

`pytest tests/view/test_browser.py --screenshots docs/view --screenshot-runs RUNS` also photographs the main views of RUNS.
"""

import shutil
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from view_world import HOSTILE, Server, Written, serving

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
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no Chromium with chromedriver on this machine (apt install chromium chromium-driver)",
)

# Nodes a screen reader would meet without a name.
NAMELESS = """
const named = (e) => (e.getAttribute('aria-label') || e.title || e.textContent || e.placeholder || e.alt || '').trim()
  || [...(e.labels || [])].map((l) => l.textContent).join('').trim() || [...e.querySelectorAll('img[alt]')].map((i) => i.alt).join('');
const wanted = 'a[href], button, input, select, summary, progress, [role=img], [role=group], table, section, [tabindex="0"]';
return [...document.querySelectorAll(wanted)]
  .filter((e) => e.checkVisibility() && !named(e)).map((e) => e.outerHTML.slice(0, 200));
"""


class Eyes:
    """A browser with a few words for what the tests do."""

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
        """Whatever the condition gives, once it is true; the page may be drawing meanwhile."""
        end = time.monotonic() + limit_s
        while True:
            try:
                if found := condition():
                    return found
            except selenium.common.exceptions.StaleElementReferenceException:
                pass
            assert time.monotonic() < end, f"waited for {what}; the page says: {self.text()[:1500]}"
            time.sleep(0.05)

    def text(self, css: str = "main") -> str:
        return self.run(
            "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", css
        )

    def says(self, words: str, css: str = "main") -> None:
        self.until(lambda: words in self.text(css), words)

    def run(self, script: str, *values):
        return self.driver.execute_script(script, *values)

    def click(self, css: str, words: str = "") -> None:
        self.until(lambda: [e for e in self.all(css) if words in e.text], f"{css} {words}")[
            0
        ].click()

    def chart(self, title: str):
        return self.until(
            lambda: next(
                (
                    c
                    for c in self.all("figure.chart")
                    if c.find_element(By.TAG_NAME, "h3").text == title
                ),
                None,
            ),
            title,
        )

    def complaints(self) -> list[str]:
        """What the browser's console has to say, failed loads and refused scripts included."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]


@pytest.fixture(scope="session")
def eyes(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eyes]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--window-size=1280,900",
    ):
        options.add_argument(word)
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
    eyes = Eyes(driver, server)
    eyes.downloads = downloads
    yield eyes
    driver.quit()


@pytest.fixture(autouse=True)
def quiet(eyes: Eyes):
    """Every test ends without a complaint of the browser: no error, no refused script, no missing file."""
    eyes.complaints()
    yield
    assert eyes.complaints() == []


@pytest.mark.slow
def test_a_live_run_is_seen_moving_and_keeps_its_zoom(eyes, tmp_path):
    import fcntl

    written = Written(tmp_path / "live", steps=40).steps(12)
    with serving(tmp_path) as server:
        with (written.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            eyes.open("#/run/live/curves", server)
            eyes.says("step 12 of 40")
            eyes.says("running", ".runhead")
            plot = eyes.chart("Reward").find_element(By.CSS_SELECTOR, "svg.plot")
            eyes.until(lambda: plot.get_attribute("data-to") == "12", "the first drawing")
            ActionChains(eyes.driver).move_to_element_with_offset(
                plot, -60, 0
            ).click_and_hold().move_by_offset(90, 10).release().perform()
            eyes.until(lambda: plot.get_attribute("data-from") not in ("0", "1"), "the zoom")
            zoom = plot.get_attribute("data-from"), plot.get_attribute("data-to")
            eyes.run("window.here = 'the same page'")
            written.steps(6)
            eyes.says("step 18 of 40")
            eyes.says("0.46", ".facts")
            eyes.says("18", ".tabs")
            assert (plot.get_attribute("data-from"), plot.get_attribute("data-to")) == zoom, (
                "new steps must not move what one looks at"
            )
            assert eyes.run("return window.here") == "the same page"
            eyes.click("button", "Show everything")
            eyes.until(lambda: plot.get_attribute("data-to") == "18", "everything again")
            assert "about" in eyes.text(".facts") and len(eyes.all(".mark.checkpoint")) >= 3
            written.events.number = 18
            written.events.write("failed", "step 19, stage update: out of memory")
        eyes.says("failed", ".runhead")
        eyes.says("out of memory", ".runhead")
        eyes.driver.get("about:blank")


def test_a_chart_tells_its_values_to_mouse_keyboard_and_reader(eyes):
    eyes.open("#/run/finished/curves")
    chart = eyes.chart("Response length (tokens)")
    plot = chart.find_element(By.CSS_SELECTOR, "svg.plot")
    eyes.until(lambda: plot.get_attribute("data-points") == "20", "the curve")
    ActionChains(eyes.driver).move_to_element(plot).perform()
    eyes.until(lambda: "at step" in chart.text, "the hovered step")
    assert "at step" in eyes.chart("Loss").text, "all charts show the same step"
    assert "from 31 to 50" in plot.accessible_name
    plot.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    eyes.until(lambda: eyes.text("#said").startswith("Step "), "what the reader hears")
    plot.send_keys("+")
    eyes.until(lambda: float(plot.get_attribute("data-from")) > 1, "the zoom by key")
    plot.send_keys(Keys.ESCAPE)
    eyes.until(lambda: plot.get_attribute("data-from") == "1", "everything")
    eyes.click(".choice button", "time")
    eyes.until(lambda: plot.get_attribute("data-from") == "0", "the time axis")
    assert eyes.chart("Time of a step by stage (s)").find_elements(By.CSS_SELECTOR, "path.area")


def test_charts_and_tables_can_be_saved(eyes):
    eyes.open("#/run/finished/curves")
    chart = eyes.chart("Reward")
    for kind in ("SVG", "PNG", "CSV"):
        eyes.run(
            "arguments[0].click()",
            chart.find_element(By.CSS_SELECTOR, f"button[aria-label$='as {kind}']"),
        )
    files = [eyes.downloads / f"finished-Reward.{kind}" for kind in ("svg", "png", "csv")]
    eyes.until(lambda: all(file.is_file() for file in files), "the saved files")
    tree = ElementTree.fromstring(files[0].read_text())
    lines = [
        e
        for e in tree.iter("{http://www.w3.org/2000/svg}path")
        if e.get("stroke", "none") not in ("none", "")
    ]
    assert lines and "Reward" in "".join(tree.itertext())
    assert files[1].read_bytes().startswith(b"\x89PNG") and files[1].stat().st_size > 3000
    rows = files[2].read_text().splitlines()
    assert rows[0] == "series,step,seconds,value" and len(rows) == 1 + 2 * 20, (
        "reward and its one part that differs"
    )
    eyes.open("#/runs")
    eyes.click("button[aria-label^='Save the table']")
    table = eyes.downloads / "runs.csv"
    eyes.until(table.is_file, "the saved table")
    assert table.read_text().startswith("Run,State,") and "group/failed" in table.read_text()


def test_the_list_filters_sorts_and_compares(eyes):
    eyes.open("#/runs")
    eyes.says("group/failed")
    assert "90% could not be judged" in eyes.text("table.runs")
    eyes.one("input[type=search]").send_keys("failed")
    eyes.until(lambda: len(eyes.all("table.runs tbody tr")) == 1, "one run")
    eyes.one("input[type=search]").send_keys(Keys.CONTROL, "a")
    eyes.one("input[type=search]").send_keys(Keys.DELETE)
    eyes.until(lambda: len(eyes.all("table.runs tbody tr")) >= 5, "all runs")
    eyes.click("th button.sort", "Step")
    eyes.until(
        lambda: eyes.all("table.runs tbody tr")[0].text.startswith("finished"),
        "the longest run first",
    )
    for name in ("finished", "group/failed"):
        eyes.one(f"input[aria-label='Compare {name}']").click()
    eyes.click("a.button.primary", "Compare 2 runs")
    eyes.says("2 runs")
    chart = eyes.chart("Reward: mean")
    eyes.until(
        lambda: len(chart.find_elements(By.CSS_SELECTOR, "path.line:not(.faint)")) == 2, "two lines"
    )
    assert "group/failed" in chart.text and "finished" in chart.text
    rows = {
        row.find_element(By.TAG_NAME, "th").text: row.text
        for row in eyes.all("table.differences tbody tr")
    }
    assert (
        list(rows) == ["optimizer.lr"]
        and "0.001" in rows["optimizer.lr"]
        and "0.003" in rows["optimizer.lr"]
    )
    eyes.click("label.field", "also those that are equal")
    eyes.until(lambda: len(eyes.all("table.differences tbody tr")) > 4, "all settings")


def colors(eyes) -> list[str]:
    return eyes.run(
        "return [...document.querySelectorAll('.card .t')].map((e) => getComputedStyle(e).backgroundColor)"
    )


def test_a_rollout_is_opened_colored_and_explained(eyes):
    eyes.open("#/run/finished/rollouts?step=4&group=1")
    eyes.says("Problem 2 of 3")
    assert len(eyes.all("article.card")) == 3
    by_logprob = colors(eyes)
    assert len(set(by_logprob)) > 4, "tokens have different shades"
    shades = [float(c.rstrip(")").split("/")[-1].split(",")[-1]) for c in by_logprob[:5]]
    assert shades == sorted(shades), "each token here is less likely than the one before"
    picker = Select(eyes.one(".detail .controls select"))
    assert [o.text for o in picker.options] == [
        "log-prob",
        "advantage",
        "entropy",
        "who wrote it",
        "nothing",
    ]
    picker.select_by_visible_text("advantage")
    eyes.until(lambda: colors(eyes) != by_logprob, "other colors")
    assert eyes.all(".gradient.signed")
    Select(eyes.one(".detail .controls select")).select_by_visible_text("who wrote it")
    eyes.until(lambda: len(eyes.all(".tokens .from-tool")) > 3, "tool tokens")
    assert (
        len(eyes.all(".tokens .from-demonstration")) > 3 and len(eyes.all(".tokens .masked")) == 3
    )
    text = eyes.text(".detail")
    for words in (
        "Not judged: timeout: 5 s were not enough",
        "cut at the length limit",
        "given, not sampled",
        "not in the loss",
        "then 7 it is",
        "format",
    ):
        assert words in text, words
    block = eyes.one(".tokens")
    block.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    eyes.says("token 2, id 2", ".tip")
    assert "not in the loss" in eyes.text(".tip") and "-0.4" in eyes.text(".tip")


def real_run(tmp_path: Path, recipe: str, *words: str) -> Path:
    """A step of a real run on a tiny model that is paid for threes; its folder of runs."""
    from world import config_of

    from postgrad.model.tiny import make_tiny
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
    train(
        config_of(
            recipe, make_tiny(tmp_path / "model", seed=0, layers=2, width=32), *small, *own, *words
        ),
        Reporter(),
    )
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "updates", [1, 2], ids=["by the update's own passes", "by the pass before it"]
)
def test_a_real_run_is_colored_by_entropy(eyes, tmp_path, updates):
    with serving(real_run(tmp_path, "grpo", f"training.updates_per_step={updates}")) as server:
        eyes.open("#/run/test/rollouts?step=1&sort=advantage", server)
        Select(eyes.one(".detail .controls select")).select_by_visible_text("entropy")
        eyes.until(lambda: eyes.all(".gradient.amount"), "the scale of entropy")
        assert any(color not in ("rgba(0, 0, 0, 0)", "transparent") for color in colors(eyes))
        eyes.driver.get("about:blank")


def test_classmates_continue_under_the_thought_they_were_shown(eyes, tmp_path):
    import pyarrow.parquet as pq

    words = (
        "method.classmates=['fake:37','fake:5']",
        "method.keep_unit=tokens",
        "method.condition=always",
    )
    runs = real_run(tmp_path, "classmate", *words)
    table = pq.read_table(runs / "test" / "rollouts" / "step-000001.parquet").to_pylist()
    row = next(i for i, line in enumerate(table) if line["classmate_texts"] == ["37", "5"])
    group = table[row]["group"]
    with serving(runs) as server:
        eyes.open(f"#/run/test/rollouts?step=1&group={group}", server)
        eyes.says("Continued by classmates from this thought", ".detail")
        inside = [line for line in table if line["group"] == group]
        card = eyes.all(".detail article.card")[[id(line) for line in inside].index(id(table[row]))]
        found = card.find_elements(By.CSS_SELECTOR, ".continuation")
        assert [one.find_element(By.CSS_SELECTOR, ".said").text for one in found] == ["37", "5"]
        tokens = card.find_elements(By.CSS_SELECTOR, ".tokens .t")
        shown = "".join(
            t.text for t, seen in zip(tokens, table[row]["cot_mask"], strict=True) if seen
        )
        assert shown and all(
            one.find_element(By.CSS_SELECTOR, ".thought").text == shown for one in found
        )
        assert (
            "continuation 1, ✓ score 0.333" in found[0].text
            and "continuation 2, ✕ score 0" in found[1].text
        )
        assert [e.text for e in card.find_elements(By.CSS_SELECTOR, ".others summary")] == [
            "More about this response"
        ]
        assert eyes.run(NAMELESS) == []
        eyes.driver.get("about:blank")


def test_rollouts_are_filtered_searched_and_followed(eyes):
    eyes.open("#/run/finished/rollouts?step=4")
    eyes.says("3 problems, 9 of 9 responses")
    eyes.click(".choice button", "wrong 5")
    eyes.says("5 of 9 responses")
    eyes.run("document.activeElement.blur()")
    eyes.one("body").send_keys("]")
    eyes.until(lambda: "step=5" in eyes.driver.current_url, "the next step by key")
    eyes.says("Problem 1 of 3")
    eyes.one("body").send_keys("j")
    eyes.says("Problem 2 of 3")
    eyes.click("a.button", "Follow this problem")
    eyes.says("One problem over the run")
    eyes.until(lambda: "Looked through" not in eyes.text(".grouplist"), "the whole run")
    eyes.says("Visited 12 times.", ".grouplist")
    assert eyes.chart("Reward at each visit")
    eyes.open("#/run/finished/rollouts?step=4")
    eyes.one("input[aria-label='Search the responses of this step']").send_keys("2 + 17?")
    eyes.says("Nothing passes the filter.")
    eyes.click("button", "search all steps")
    eyes.says("3 responses", ".detail")
    eyes.click(".hits a.group")
    eyes.until(
        lambda: "step=17" in eyes.driver.current_url and "Problem 3 of 3" in eyes.text(),
        "the hit's group",
    )


def test_an_evaluation_is_filtered_and_two_are_laid_side_by_side(eyes):
    eyes.open("#/evaluations")
    eyes.says("75.0%")
    eyes.says("25.0%")
    eyes.open("#/run/finished/evaluations")
    eyes.click("table a", "before")
    eyes.says("8 problems")
    eyes.click(".choice button", "wrong 6")
    eyes.says("6 problems")
    Select(
        eyes.until(
            lambda: [e for e in eyes.all("select") if "nothing beside it" in e.text],
            "the choice of B",
        )[0]
    ).select_by_index(1)
    eyes.says("two models")
    eyes.says("B is 50.0 points ahead")
    eyes.click(".choice button", "B better than A 4")
    eyes.says("4 problems of 8 that both answered")
    assert len(eyes.all(".grouplist a.group")) == 4
    assert len(eyes.all(".two .card.wrong")) == 2 and len(eyes.all(".two .card.right")) == 2
    assert "read as" not in eyes.text(".two") and "form" in eyes.text(".two")


def test_the_entropy_flow_of_several_analyzes_is_drawn(eyes):
    eyes.open("#/entropy")
    eyes.says("Entropy flow")
    flow = eyes.chart("Entropy through the depth (nats)").find_element(By.CSS_SELECTOR, "svg.plot")
    eyes.until(lambda: flow.get_attribute("data-points") == "13", "3 L + 1 points")
    assert "to 0.7" in flow.accessible_name, "the last point is the full policy's"
    change = eyes.chart("Change by FFN (nats)")
    assert (
        len(change.find_elements(By.CSS_SELECTOR, "path.line")) == 2
        and "group/failed" in change.text
    )


@pytest.mark.slow
def test_hostile_words_do_nothing_anywhere(eyes):
    places = [
        "#/runs",
        "#/run/hostile/curves",
        "#/run/hostile/rollouts?step=1&group=2",
        "#/run/group%2Ffailed/events",
        "#/entropy",
        "#/evaluations/responses?a=finished%2Feval%2Fafter&set=sums",
        f"#/run/hostile/rollouts?words={quote('script')}",
        f"#/run/{quote(HOSTILE, safe='')}/curves",
        f"#/{quote(HOSTILE, safe='')}",
        f"#/run/hostile/rollouts?uid={quote(HOSTILE, safe='')}",
    ]
    for place in places:
        eyes.open(place)
        eyes.until(lambda: "Loading" not in eyes.text() and len(eyes.text()) > 10, place)
        if "rollouts?step" in place:
            eyes.says("<script>window.pwned=1</script>", ".card .tokens")
            eyes.says(HOSTILE, ".others")
            ActionChains(eyes.driver).move_to_element(eyes.all(".tokens .t")[6]).perform()
        time.sleep(0.1)
        assert eyes.run("return window.pwned") is None, place
        assert (
            eyes.run(
                "return document.querySelectorAll('main script, main img, main iframe, main b:empty').length"
            )
            == 0
        ), place
        assert not [
            link
            for link in eyes.run("return [...document.links].map((a) => a.getAttribute('href'))")
            if link.startswith("javascript")
        ]
    complaints = eyes.complaints()
    assert all("404" in words for words in complaints), (
        "only the run that is not there may be complained of"
    )
    with pytest.raises(selenium.common.exceptions.JavascriptException, match="TrustedHTML"):
        eyes.run("document.querySelector('main').innerHTML = '<p>markup from a string</p>'")
    eyes.complaints()


@pytest.mark.slow
def test_every_control_has_a_name_and_nothing_is_wider_than_a_phone(eyes):
    places = [
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

    def width(pixels: int) -> None:
        size = {"width": pixels, "height": 844, "deviceScaleFactor": 1, "mobile": pixels < 500}
        eyes.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    for place in places:
        width(1280)
        eyes.open(place)
        eyes.until(lambda: "Loading" not in eyes.text() and len(eyes.text()) > 20, place)
        assert eyes.run("return document.querySelectorAll('h1').length") >= 1, place
        for pixels in (1280, 390):
            width(pixels)
            assert eyes.run(NAMELESS) == [], (place, pixels)
            eyes.until(
                lambda p=pixels: eyes.run("return document.documentElement.scrollWidth") <= p,
                f"{place} to fit {pixels}",
                3,
            )
    eyes.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_empty_and_missing_things_say_so(eyes, tmp_path):
    with serving(tmp_path) as server:
        eyes.open("#/runs", server)
        eyes.says("No runs here yet.")
        eyes.open("#/evaluations", server)
        eyes.says("No evaluations here yet.")
        eyes.open("#/entropy", server)
        eyes.says("No analysis here yet.")
        eyes.open("#/nonsense", server)
        eyes.says("There is no such page.")
    eyes.open("#/run/broken/rollouts")
    eyes.says("could not be read")
    eyes.open("#/run/broken/settings")
    eyes.says("no config.yaml that can be read")
    eyes.complaints()


def test_screenshots(eyes, request):
    """Photographs of the main views, when asked for."""
    target, runs = (
        request.config.getoption("--screenshots"),
        request.config.getoption("--screenshot-runs"),
    )
    if not target:
        pytest.skip("only with --screenshots FOLDER")
    with serving(Path(runs) if runs else eyes.server.root) as server:
        photograph(eyes, server, Path(target))


def photograph(eyes: Eyes, server: Server, target: Path) -> None:
    target.mkdir(exist_ok=True)
    runs = server.json("/api/runs")["runs"]
    last = max(
        (run for run in runs if run["main"] == "reward/mean"),
        key=lambda run: (run["step"], run["name"]),
    )
    name, middle = quote(last["name"], safe=""), last["step"] * 4 // 7
    others = [
        run["name"]
        for run in runs
        if run["main"] == "reward/mean" and run["steps"] == last["steps"]
    ][:2]
    pairs = server.json("/api/evaluations")["evaluations"]
    shots = [
        ("runs", "light", (1280, 560), "#/runs"),
        ("curves", "light", (1280, 1010), f"#/run/{name}/curves"),
        ("rollouts", "light", (1280, 820), f"#/run/{name}/rollouts?step={middle}&sort=advantage"),
        (
            "compare",
            "dark",
            (1280, 760),
            "#/compare?" + "&".join(f"run={quote(other, safe='')}" for other in others),
        ),
        ("phone", "dark", (390, 780), f"#/run/{name}/curves"),
    ]
    if len(pairs) > 1:
        a, b = (quote(pair["name"], safe="") for pair in pairs[:2])
        shots.append(
            (
                "evaluations",
                "light",
                (1280, 720),
                f"#/evaluations/responses?a={a}&b={b}&set={quote(pairs[0]['sets'][0])}&keep=b",
            )
        )
    if server.json("/api/entropies")["entropies"]:
        shots.append(("entropy", "light", (1280, 760), "#/entropy"))
    if mates := [run for run in runs if run["method"].startswith("classmate")]:
        shots.append(
            (
                "classmates",
                "light",
                (1280, 820),
                f"#/run/{quote(mates[0]['name'], safe='')}/rollouts?sort=advantage",
            )
        )
    for shot, theme, (width, height), place in shots:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        eyes.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        eyes.open("", server)
        eyes.run("localStorage.setItem('theme', arguments[0])", theme)
        eyes.open(place, server)
        time.sleep(1.5)
        if shot == "rollouts":
            picker = Select(eyes.one(".detail .controls select"))
            if "entropy" in [option.text for option in picker.options]:
                picker.select_by_visible_text("entropy")
        if shot == "classmates":
            eyes.run(
                "scrollTo(0, document.querySelector('.side').getBoundingClientRect().top - 70)"
            )
        eyes.run("document.getElementById('folder').textContent = 'runs'")
        eyes.driver.save_screenshot(str(target / f"{shot}.png"))
    eyes.run("localStorage.removeItem('theme')")
    eyes.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
