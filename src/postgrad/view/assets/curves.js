// The charts of one run or of several runs; `postgrad plot` draws the same panels.
import { Axis, Chart } from "./chart.js";
import { choice, fill, h } from "./dom.js";

let panels = null;

export async function loadPanels() {
  panels ||= await (await fetch("/assets/panels.json")).json();
  return panels;
}

function matcher(pattern) {
  const expression = new RegExp(
    `^${pattern
      .split("*")
      .map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"))
      .join(".*")}$`,
  );
  return (name) => expression.test(name);
}

/** Each metric goes to the first panel that matches; the others are grouped by their prefix. */
export function arrange(names) {
  const remaining = new Set(names.filter((name) => name !== "epoch"));
  const out = [];
  for (const panel of panels) {
    const panelNames = [];
    for (const pattern of panel.metrics) {
      const matches = matcher(pattern);
      for (const name of [...remaining]) {
        if (matches(name) && !(panel.except || []).some((other) => matcher(other)(name))) {
          panelNames.push(name);
          remaining.delete(name);
        }
      }
    }
    if (panelNames.length) out.push({ ...panel, names: panelNames });
  }
  const rest = new Map();
  for (const name of [...remaining].sort()) {
    const prefix = name.includes("/") ? name.split("/")[0] : name;
    rest.set(prefix, [...(rest.get(prefix) || []), name]);
  }
  return {
    main: out,
    rest: [...rest].map(([title, panelNames]) => ({ title, names: panelNames })),
  };
}

export function label(name) {
  return (
    name.split("/").slice(1).join("/").replace(/_s$/, "").replaceAll("_", " ") ||
    name.replace(/_s$/, "").replaceAll("_", " ")
  );
}

export class Curves {
  /** runs: [{name, store, events}] */
  constructor(runs) {
    this.runs = runs;
    this.axis = new Axis();
    this.axis.smoothing = runs.some((run) => run.store.count > 60) ? 0.6 : 0;
    this.charts = new Map();
    this.grid = h("div", { class: "grid" });
    this.restGrid = h("div", { class: "grid" });
    this.rest = h(
      "details",
      { class: "rest", on: { toggle: () => this.update() } },
      h("summary", {}, "Other metrics"),
      this.restGrid,
    );
    this.picked = h("span", { class: "pickedstep" });
    this.element = h("div", {}, this.controls(), this.grid, this.rest);
  }

  controls() {
    const slider = h("input", {
      type: "range",
      min: 0,
      max: 0.98,
      step: 0.02,
      value: this.axis.smoothing,
      "aria-label": "Smoothing",
      on: {
        input: () => {
          this.axis.set({ smoothing: Number(slider.value) });
        },
      },
    });
    const reset = h(
      "button",
      { type: "button", hidden: true, on: { click: () => this.axis.set({ zoom: null }) } },
      "Reset zoom",
    );
    const set = this.axis.set.bind(this.axis);
    this.axis.set = (changes) => {
      set(changes);
      reset.hidden = this.axis.zoom === null;
    };
    return h(
      "div",
      { class: "controls" },
      choice(
        "Axis",
        [
          ["step", "steps"],
          ["time", "time"],
        ],
        "step",
        (mode) => this.axis.set({ mode }),
      ),
      h("label", { class: "field" }, h("span", {}, "Smoothing"), slider),
      reset,
      this.picked,
      h("span", { class: "grow" }),
      h(
        "span",
        { class: "dim hint" },
        this.runs.length > 1
          ? "Drag to zoom, double-click to reset"
          : "Drag to zoom, double-click to reset, click to open the rollouts of a step",
      ),
    );
  }

  update() {
    const names = [...new Set(this.runs.flatMap((run) => run.store.names()))];
    const { main, rest } = arrange(names);
    const specs =
      this.runs.length > 1
        ? this.specsOfSeveralRuns(main)
        : main.map((panel) => this.specOfOneRun(panel));
    this.drawCharts(this.grid, specs);
    this.rest.hidden = !rest.length;
    const others =
      this.runs.length > 1
        ? this.specsOfSeveralRuns(rest)
        : rest.map((panel) => this.specOfOneRun(panel));
    if (this.rest.open) this.drawCharts(this.restGrid, others);
  }

  specOfOneRun(panel) {
    const { store, events, name } = this.runs[0];
    const startTime = store.startTime;
    const marked = events
      .filter((event) => event.step > 0 && event.event !== "started")
      .map((event) => ({
        ...event,
        time: event.time && startTime ? event.time - startTime : null,
      }));
    const hasSeveral = panel.names.length > 1;
    const series = panel.names.map((metric, i) => ({
      name: metric,
      label: hasSeveral || metric.includes("/") ? label(metric) : metric.replaceAll("_", " "),
      color: i,
      ...store.series(metric),
    }));
    const first = series[0].y; // a curve that equals the first, as with one verifier, would hide it
    return {
      key: panel.title,
      title: panel.title,
      kind: panel.kind,
      name,
      events: marked,
      series: series.filter(
        (one, i) =>
          !i ||
          panel.kind === "band" ||
          one.y.length !== first.length ||
          one.y.some((value, j) => value !== first[j]),
      ),
    };
  }

  /** One chart per metric, one line per run; of stacked bands the sum, which is the step time. */
  specsOfSeveralRuns(list) {
    const titles = list.flatMap((panel) => {
      if (panel.kind === "band") return [["Step time (s)", "step_s"]];
      const same = (run, name) =>
        run.store.series(name).y.join() === run.store.series(panel.names[0]).y.join();
      const names = panel.names.filter(
        (name, i) => !i || !this.runs.every((run) => same(run, name)),
      );
      return names.map((name) => [
        names.length > 1 ? `${panel.title}: ${label(name)}` : panel.title,
        name,
      ]);
    });
    return [...new Map(titles.map(([title, name]) => [name, title]))].map(([metric, title]) => ({
      key: metric,
      title,
      name: "compare",
      events: [],
      series: this.runs
        .map((run, i) => ({
          name: run.name,
          label: run.label || run.name,
          color: i,
          ...run.store.series(metric),
        }))
        .filter((one) => one.y.length),
    }));
  }

  drawCharts(grid, specs) {
    const specsWithData = specs.filter((spec) => spec.series.length);
    for (const spec of specsWithData) {
      let chart = this.charts.get(spec.key);
      if (!chart) {
        chart = new Chart(this.axis, { title: spec.title, kind: spec.kind, name: spec.name });
        this.charts.set(spec.key, chart);
      }
      if (chart.element.parentNode !== grid) grid.append(chart.element);
      chart.set(spec.series, spec.events);
    }
  }

  remove() {
    for (const chart of this.charts.values()) chart.remove();
  }

  onPick(handler) {
    this.axis.onPick = (step) => {
      this.axis.set({ picked: step });
      fill(this.picked, handler(step));
    };
  }
}
