// Models by data sets: one number of every evaluation, with bars, as a table to read and to save.
import { request } from "./api.js";
import { download, fill, h, select } from "./dom.js";
import { number, percent } from "./format.js";
import { Table } from "./table.js";

const METRICS = [
  ["avg", "accuracy (avg@k)"],
  ["best", "pass@k"],
  ["maj", "maj@k"],
  ["format", "format"],
  ["answer", "answer"],
  ["score", "score"],
  ["length", "length (tokens)"],
];
const NUMBERS = new Set(["score", "length"]); // the other metrics are shares

/** A section with the table; it loads when it is created and when another metric is chosen. */
export function pivotSection(signal) {
  const body = h("div", {}),
    buttons = h("span", {});
  async function show(metric) {
    const pivot = await request("pivot", { metric }, signal);
    fill(buttons, saveButton("CSV", pivot.csv), saveButton("Markdown", pivot.markdown));
    fill(body, pivotTable(pivot, metric));
  }
  show("avg").catch((error) => {
    if (error.name !== "AbortError") fill(body, h("p", { class: "dim" }, error.message));
  });
  return h(
    "section",
    { "aria-label": "Models by data set" },
    h(
      "div",
      { class: "controls" },
      h("h2", {}, "Models by data set"),
      select("Show", METRICS, "avg", show),
      h("span", { class: "grow" }),
      buttons,
    ),
    body,
  );
}

function pivotTable(pivot, metric) {
  const values = pivot.rows.flatMap((row) => row.values).filter((value) => value !== null);
  const top = NUMBERS.has(metric) ? Math.max(...values, 0) : 1;
  const columns = pivot.sets.map((set, i) => ({
    key: `set ${i}`,
    label: set,
    numeric: true,
    value: (row) => row.values[i],
    cell: (row) => bar(row.values[i], top, metric),
  }));
  const name = { key: "model", label: "Model", header: true, value: (row) => row.model };
  const table = new Table([name, ...columns], { label: "Models by data set", class: "pivot" });
  table.set(pivot.rows);
  return table.element;
}

/** The number, and below it a bar of its share of `top`. */
function bar(value, top, metric) {
  if (value === null) return "–";
  const share = top > 0 ? Math.min(Math.max(value / top, 0), 1) : 0;
  return h(
    "span",
    { class: "barcell" },
    NUMBERS.has(metric) ? number(value) : percent(value),
    h("meter", { "aria-hidden": "true", min: 0, max: 1, value: share }),
  );
}

function saveButton(kind, text) {
  const ending = kind === "CSV" ? "csv" : "md";
  return h(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-label": `Save models by data set as ${kind}`,
      on: { click: () => download(`models-by-set.${ending}`, text, "text/plain") },
    },
    kind,
  );
}
