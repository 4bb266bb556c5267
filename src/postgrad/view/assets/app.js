// Shows the page of the address; theme and keyboard shortcuts.
import { request } from "./api.js";
import { fill, h } from "./dom.js";
import { showCompare } from "./compare.js";
import { showEntropy } from "./entropy.js";
import { showEvaluations } from "./evaluations.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";

const PAGES = {
  runs: showRuns,
  run: showRun,
  compare: showCompare,
  evaluations: showEvaluations,
  entropy: showEntropy,
};
const main = document.getElementById("main");
let controller = new AbortController();
let current = { page: null, path: null };

/** The address #/page/part/part?key=value as {page, path: [...], params}. */
export function parseRoute() {
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

/** Shows the page of the address. A page with an `update` function draws its own changes. */
async function showPage() {
  const route = parseRoute();
  if (current.page === route.page && current.update && current.update(route)) return;
  controller.abort();
  controller = new AbortController();
  const signal = controller.signal;
  const show = Object.hasOwn(PAGES, route.page) ? PAGES[route.page] : null;
  for (const link of document.querySelectorAll("nav [data-page]")) {
    const on =
      link.dataset.page === route.page ||
      (["run", "compare"].includes(route.page) && link.dataset.page === "runs");
    if (on) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  current = { page: route.page };
  const container = h("div", { class: `page ${route.page}` });
  fill(main, container);
  scrollTo(0, 0);
  try {
    if (!show) throw new Error("This page does not exist.");
    const update = await show(container, route, signal);
    if (!signal.aborted) current.update = update;
  } catch (error) {
    if (!signal.aborted) showError(container, error);
  }
}

function showError(container, error) {
  fill(
    container,
    h(
      "div",
      { class: "error", role: "alert" },
      h("h1", {}, "This page could not be loaded"),
      h("p", {}, error.message),
      h("p", {}, h("a", { href: "#/runs" }, "Back to all runs")),
    ),
  );
}

addEventListener("hashchange", showPage);

// Theme: that of the system, unless one is chosen

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

// Keyboard shortcuts

const KEYS = [
  ["/", "search or filter"],
  ["j  k", "next or previous problem of a step"],
  ["[  ]", "previous or next step"],
  ["← →", "in a chart: move the cursor; in a response: move by token"],
  ["+ −", "in a chart: zoom"],
  ["Esc", "in a chart: reset the zoom; close a window"],
  ["Enter", "in a chart: open the rollouts of the step"],
  ["?", "show this list"],
];

function help() {
  const box = h(
    "dialog",
    { class: "help", "aria-label": "Keyboard shortcuts" },
    h("h2", {}, "Keyboard shortcuts"),
    h(
      "dl",
      {},
      KEYS.flatMap(([key, text]) => [h("dt", {}, key), h("dd", {}, text)]),
    ),
    h(
      "form",
      { method: "dialog" },
      h("button", { type: "button", on: { click: () => box.close() } }, "Close"),
    ),
  );
  box.addEventListener("close", () => box.remove());
  box.addEventListener("click", (event) => event.target === box && box.close());
  document.body.append(box);
  box.showModal();
}

document.getElementById("help").addEventListener("click", help);

addEventListener("keydown", (event) => {
  if (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)
  )
    return;
  if (event.key === "?") help();
  else if (event.key === "/") {
    const box = main.querySelector("input[type=search]");
    if (!box) return;
    box.focus();
    event.preventDefault();
  }
});

useTheme();
showPage();
request("about").then(
  ({ folder }) => {
    document.getElementById("folder").textContent = folder;
    document.getElementById("folder").title = folder;
  },
  () => {},
);
