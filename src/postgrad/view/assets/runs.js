// The list of runs.
import { request, listen } from "./api.js";
import { sparkline } from "./chart.js";
import { choice, fill, h, debounce } from "./dom.js";
import { age, moment, number, percent, shortPath } from "./format.js";
import { Table } from "./table.js";

export const STATES = {
  running: "running",
  finished: "finished",
  stopped: "stopped",
  failed: "failed",
  unreadable: "cannot be read",
};

export function runLink(name, tab = "curves", params = {}) {
  const query = new URLSearchParams(params).toString();
  return `#/run/${encodeURIComponent(name)}/${tab}${query ? `?${query}` : ""}`;
}

/** The state of a run as a symbol and a word. */
export function badge(state) {
  const sign = { running: "●", finished: "✓", stopped: "‖", failed: "✕", unreadable: "!" }[state] || "";
  return h(
    "span",
    { class: `badge ${state}` },
    h("span", { "aria-hidden": "true" }, `${sign} `),
    STATES[state] || state,
  );
}

export function progress(run) {
  if (!run.steps) return h("span", {}, `${run.step}`);
  return h(
    "span",
    { class: "steps" },
    h("progress", {
      max: run.steps,
      value: run.step,
      "aria-label": `step ${run.step} of ${run.steps}`,
    }),
    h("span", {}, `${run.step}/${run.steps}`),
  );
}

const METRIC_NAMES = {
  "reward/mean": "reward",
  "sft/loss": "SFT loss",
  "dpo/accuracy": "preference accuracy",
  loss: "loss",
};

export async function showRuns(container, route, signal) {
  document.title = "Runs · Postgrad";
  const selected = new Set();
  let runs = [],
    state = "all",
    query = "";
  const columns = [
    {
      key: "chosen",
      label: "Compare",
      plain: true,
      hideLabel: true,
      skip: true,
      cell: (run) => box(run),
    },
    {
      key: "name",
      label: "Run",
      header: true,
      value: (run) => run.name,
      cell: (run) => h("a", { href: runLink(run.name), title: run.name }, run.name),
    },
    {
      key: "state",
      label: "State",
      value: (run) => run.state,
      cell: (run) =>
        h(
          "span",
          { title: run.reason || null },
          badge(run.state),
          run.reason ? h("span", { class: "reason" }, run.reason) : null,
        ),
    },
    { key: "method", label: "Method", value: (run) => run.method },
    {
      key: "model",
      label: "Model",
      value: (run) => run.model,
      cell: (run) => h("span", { class: "path", title: run.model }, shortPath(run.model) || "–"),
    },
    { key: "step", label: "Step", numeric: true, value: (run) => run.step, cell: progress },
    {
      key: "last",
      label: "Last value",
      numeric: true,
      value: (run) => run.last,
      cell: (run) =>
        run.metric
          ? h(
              "span",
              {},
              number(run.last),
              h("span", { class: "dim metric" }, METRIC_NAMES[run.metric] || run.metric),
            )
          : "–",
    },
    {
      key: "spark",
      label: "Trend",
      plain: true,
      skip: true,
      cell: (run) =>
        sparkline(
          run.sparkline,
          run.sparkline.length
            ? `${METRIC_NAMES[run.metric] || run.metric} from ${number(run.sparkline[0])} to ${number(run.last)}`
            : "no values",
        ),
    },
    {
      key: "accuracy",
      label: "Validation accuracy",
      numeric: true,
      value: (run) => run.accuracy,
      cell: (run) => percent(run.accuracy),
    },
    {
      key: "changed",
      label: "Last update",
      numeric: true,
      value: (run) => run.changed,
      cell: (run) => h("span", { title: moment(run.changed) }, age(run.changed)),
    },
  ];
  const table = new Table(columns, {
    label: "Runs",
    name: "runs",
    class: "runs cards",
    sort: ["changed", true],
  });
  const compare = h(
    "a",
    { class: "button primary", role: "link", "aria-disabled": "true" },
    "Compare",
  );
  const count = h("span", { class: "dim" });
  const states = h("div");
  const search = h("input", {
    type: "search",
    placeholder: "Filter by name, method, model …",
    "aria-label": "Filter the runs",
    on: {
      input: debounce(() => {
        query = search.value;
        draw();
      }, 120),
    },
  });
  const empty = h("div", { class: "empty" });
  fill(
    container,
    h(
      "div",
      { class: "heading" },
      h("h1", {}, "Runs"),
      count,
      h("span", { class: "grow" }),
      table.button(),
      compare,
    ),
    h("div", { class: "controls" }, search, states),
    table.element,
    empty,
  );

  function box(run) {
    return h("input", {
      type: "checkbox",
      checked: selected.has(run.name),
      "aria-label": `Compare ${run.name}`,
      on: {
        change: (event) => {
          event.target.checked ? selected.add(run.name) : selected.delete(run.name);
          updateCompareLink();
        },
      },
    });
  }

  function updateCompareLink() {
    const names = [...selected].filter((name) => runs.some((run) => run.name === name));
    compare.textContent = names.length
      ? `Compare ${names.length} run${names.length > 1 ? "s" : ""}`
      : "Compare";
    compare.setAttribute("aria-disabled", String(names.length < 2));
    compare.title = names.length < 2 ? "Select at least two runs" : "";
    if (names.length < 2) compare.removeAttribute("href");
    else
      compare.href = `#/compare?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
  }

  function draw() {
    const terms = query.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) =>
      `${run.name} ${run.method} ${run.model} ${run.data} ${run.state}`.toLowerCase();
    const shown = runs.filter(
      (run) =>
        (state === "all" || run.state === state) && terms.every((word) => text(run).includes(word)),
    );
    const focused =
      document.activeElement && table.element.contains(document.activeElement)
        ? document.activeElement.getAttribute("aria-label")
        : null;
    table.set(shown);
    if (focused)
      [...table.element.querySelectorAll("[aria-label]")]
        .find((node) => node.getAttribute("aria-label") === focused)
        ?.focus();
    count.textContent =
      runs.length === shown.length ? `${runs.length}` : `${shown.length} of ${runs.length}`;
    table.element.hidden = !shown.length;
    fill(
      empty,
      shown.length
        ? null
        : runs.length
          ? "No run matches the filter."
          : [
              h("p", {}, "No runs yet."),
              h("p", {}, "Start one and it appears here:"),
              h("pre", {}, "postgrad demo\npostgrad train grpo model.path=… data.train=…"),
            ],
    );
    updateCompareLink();
  }

  function update(response) {
    runs = response.runs;
    const counts = Object.keys(STATES)
      .map((key) => [key, runs.filter((run) => run.state === key).length])
      .filter(([, n]) => n);
    const key = JSON.stringify(counts);
    if (states.dataset.key !== key) {
      states.dataset.key = key;
      fill(
        states,
        counts.length > 1
          ? choice(
              "State",
              [["all", "all"], ...counts.map(([name, n]) => [name, `${name} ${n}`])],
              state,
              (value) => {
                state = value;
                draw();
              },
            )
          : null,
      );
    }
    draw();
  }

  update(await request("runs", {}, signal));
  listen(() => ({}), { runs: update }, signal);
  return () => true;
}
