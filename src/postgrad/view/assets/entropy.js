// BuPO's entropy flow: the entropy of the next token after each part of each layer.
import { request } from "./api.js";
import { Axis, Chart } from "./chart.js";
import { shortNames } from "./compare.js";
import { fill, h, select } from "./dom.js";
import { number } from "./format.js";
import { Table } from "./table.js";

const MODULES = [
  ["layer", "Layer input and output"],
  ["attention", "Attention"],
  ["ffn", "FFN"],
];

export async function showEntropy(container, route, signal) {
  document.title = "Entropy · Postgrad";
  const { entropies } = await request("entropies", {}, signal);
  const usable = entropies.filter(
    (one) => Array.isArray(one.data?.layers) && one.data.layers.length,
  );
  const problems = entropies
    .filter((one) => one.problem)
    .map((one) => h("p", { class: "failure" }, h("b", {}, `${one.name}: `), one.problem));
  if (!usable.length) {
    fill(
      container,
      h("div", { class: "heading" }, h("h1", {}, "Entropy flow")),
      problems,
      h(
        "div",
        { class: "empty" },
        h("p", {}, "No entropy analyses yet."),
        h("pre", {}, "postgrad analyze entropy RUNS/NAME data=RUNS/NAME"),
      ),
    );
    return () => true;
  }
  const short = shortNames(usable.map((one) => one.name.replace(/\/[^/]*$/, "")));
  const charts = [];
  const addChart = (title, unit) => {
    const axis = new Axis();
    const chart = new Chart(axis, { title, unit, name: "entropy" });
    charts.push(chart);
    return chart;
  };
  const flow = addChart("Entropy by layer (nats)", "layer");
  const changes = MODULES.map(([key, label]) => [
    key,
    addChart(`Change by ${key === "ffn" ? "FFN" : key} (nats)`, "layer"),
  ]);
  let selected = Math.min(
    usable.length - 1,
    Math.max(
      0,
      usable.findIndex((one) => one.name === route.params.get("of")),
    ),
  );
  const shownData = h("p", { class: "dim note" });
  const drawFlow = () => {
    const { model, rows, tokens } = usable[selected].data;
    fill(shownData, `${model ?? "–"}: ${number(rows)} responses with ${number(tokens)} tokens.`);
    flow.set(flowSeries(usable[selected].data));
  };
  const table = new Table(
    [
      {
        key: "name",
        label: "Analysis",
        header: true,
        value: (row) => row.name,
        cell: (row) => h("span", { title: row.name }, short[row.i]),
      },
      { key: "model", label: "Model", value: (row) => String(row.data.model ?? "") },
      {
        key: "rows",
        label: "Responses",
        numeric: true,
        value: (row) => row.data.rows ?? null,
        cell: (row) => number(row.data.rows),
      },
      {
        key: "tokens",
        label: "Tokens",
        numeric: true,
        value: (row) => row.data.tokens ?? null,
        cell: (row) => number(row.data.tokens),
      },
      {
        key: "mean",
        label: "Full policy (mean)",
        numeric: true,
        value: (row) => row.data.full_policy?.mean ?? null,
        cell: (row) => number(row.data.full_policy?.mean),
      },
      {
        key: "std",
        label: "Std",
        numeric: true,
        value: (row) => row.data.full_policy?.std ?? null,
        cell: (row) => number(row.data.full_policy?.std),
      },
      {
        key: "boundary",
        label: "Boundary layer",
        numeric: true,
        value: (row) => row.data.boundary_layer ?? null,
        cell: (row) => row.data.boundary_layer ?? "none",
      },
      {
        key: "ceiling",
        label: "Ceiling",
        numeric: true,
        value: (row) => row.data.ceiling ?? null,
        cell: (row) => number(row.data.ceiling),
      },
    ],
    { label: "Entropy analyses", name: "entropy", class: "cards" },
  );
  table.set(usable.map((one, i) => ({ ...one, i })));
  fill(
    container,
    h(
      "div",
      { class: "heading" },
      h("h1", {}, "Entropy flow"),
      h("span", { class: "grow" }),
      table.button(),
    ),
    h(
      "p",
      { class: "dim note" },
      "Mean entropy of the next token when the model's output head is applied after each part of " +
        "each layer. Layers count from 1. The last point is the full policy. A change is output " +
        "minus input: above 0 the part adds entropy.",
    ),
    usable.length > 1
      ? h(
          "div",
          { class: "controls" },
          select(
            "Analysis",
            usable.map((one, i) => [String(i), short[i]]),
            String(selected),
            (value) => {
              selected = Number(value);
              drawFlow();
            },
          ),
        )
      : null,
    shownData,
    flow.element,
    h(
      "div",
      { class: "grid gap" },
      changes.map(([, chart]) => chart.element),
    ),
    h("div", { class: "gap" }, table.element),
    problems,
  );
  drawFlow();
  for (const [key, chart] of changes) {
    chart.set(
      usable.map((one, i) => {
        const layers = one.data.layers.filter((layer) => Number.isFinite(layer[key]?.change?.mean));
        const x = layers.map((layer) => layer.number);
        return {
          name: one.name,
          label: usable.length > 1 ? short[i] : "mean",
          color: i,
          x: { step: x, time: x },
          y: layers.map((layer) => layer[key].change.mean),
        };
      }),
    );
  }
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.remove()));
  return () => true;
}

/** One series per module. Layer n spans x = n - 1 to n; the full policy is the last point. */
function flowSeries(report) {
  const points = Object.fromEntries(MODULES.map(([key]) => [key, { x: [], y: [] }]));
  const addPoint = (key, x, y) => {
    if (!Number.isFinite(y)) return;
    points[key].x.push(Number(x.toFixed(2)));
    points[key].y.push(y);
  };
  for (const layer of report.layers) {
    addPoint("layer", layer.number - 1, layer.layer?.input?.mean);
    addPoint("attention", layer.number - 2 / 3, layer.attention?.output?.mean);
    addPoint("ffn", layer.number - 1 / 3, layer.ffn?.output?.mean);
  }
  addPoint("layer", report.layers.length, report.full_policy?.mean);
  return MODULES.map(([key, label], i) => ({
    name: key,
    label,
    color: [4, 1, 0][i],
    x: { step: points[key].x, time: points[key].x },
    y: points[key].y,
  }));
}
