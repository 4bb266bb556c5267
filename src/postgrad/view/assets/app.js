// The door: which page the address means, the theme, the keys.
import { ask } from "./api.js";
import { fill, h } from "./dom.js";
import { showCompare } from "./compare.js";
import { showEntropy } from "./entropy.js";
import { showEvaluations } from "./evaluations.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";

const PAGES = { runs: showRuns, run: showRun, compare: showCompare, evaluations: showEvaluations, entropy: showEntropy };
const main = document.getElementById("main");
let leaving = new AbortController();
let current = { page: null, path: null };

/** #/page/part/part?key=value as {page, path: [...], params}. */
export function where() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/").map(decode);
  return { page: page || "runs", path: rest, params: new URLSearchParams(query || "") };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Show the page; one that knows how to follow a change of its own address is not drawn anew. */
async function go() {
  const place = where();
  if (current.page === place.page && current.follow && current.follow(place)) return;
  leaving.abort();
  leaving = new AbortController();
  const signal = leaving.signal;
  const show = PAGES[place.page];
  for (const link of document.querySelectorAll("nav [data-page]")) {
    const on = link.dataset.page === place.page || (["run", "compare"].includes(place.page) && link.dataset.page === "runs");
    if (on) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  current = { page: place.page };
  const holder = h("div", { class: `page ${place.page}` });
  fill(main, holder);
  scrollTo(0, 0);
  try {
    if (!show) throw new Error("There is no such page.");
    const follow = await show(holder, place, signal);
    if (!signal.aborted) current.follow = follow;
  } catch (error) {
    if (!signal.aborted) trouble(holder, error);
  }
}

function trouble(holder, error) {
  fill(holder, h("div", { class: "trouble", role: "alert" }, h("h1", {}, "This did not work"), h("p", {}, error.message),
    h("p", {}, h("a", { href: "#/runs" }, "Back to the runs"))));
}

addEventListener("hashchange", go);

// ---- theme: what the system says, unless chosen

const THEMES = ["system", "light", "dark"];
const themeButton = document.getElementById("theme");
let theme = localStorage.getItem("theme") || "system";

function useTheme() {
  if (theme === "system") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme;
  themeButton.textContent = { system: "◐", light: "☀", dark: "☾" }[theme];
  themeButton.setAttribute("aria-label", `Colors: ${theme}. Change`);
  themeButton.title = `Colors: ${theme}`;
}

themeButton.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % 3];
  localStorage.setItem("theme", theme);
  useTheme();
});

// ---- keys

const KEYS = [
  ["/", "search or filter"], ["j  k", "next, previous problem of a step"], ["[  ]", "previous, next step"],
  ["← →", "in a chart: read values; in a response: token by token"], ["+ −", "in a chart: zoom"], ["Esc", "show the whole chart, close a window"],
  ["Enter", "in a chart: go to the rollouts of that step"], ["?", "this list"],
];

function help() {
  const box = h("dialog", { class: "help", "aria-label": "Keys" }, h("h2", {}, "Keys"),
    h("dl", {}, KEYS.flatMap(([key, text]) => [h("dt", {}, key), h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", { type: "button", on: { click: () => box.close() } }, "Close")));
  box.addEventListener("close", () => box.remove());
  box.addEventListener("click", (event) => event.target === box && box.close());
  document.body.append(box);
  box.showModal();
}

document.getElementById("help").addEventListener("click", help);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "?") help();
  else if (event.key === "/") {
    const box = main.querySelector("input[type=search]");
    if (!box) return;
    box.focus();
    event.preventDefault();
  }
});

useTheme();
go();
ask("about").then(({ folder }) => {
  document.getElementById("folder").textContent = folder;
  document.getElementById("folder").title = folder;
}, () => {});
