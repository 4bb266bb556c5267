// Several runs in the same charts, and the settings in which they differ.
import { request } from "./api.js";
import { Curves, loadPanels } from "./curves.js";
import { fill, h } from "./dom.js";
import { badge, runLink } from "./runs.js";
import { Store } from "./store.js";
import { Table } from "./table.js";

const RELOAD_MS = 5000;

/** The names without the folders that all of them share. */
export function shortNames(names) {
  const parts = names.map((name) => name.split("/"));
  let shared = 0;
  while (parts.every((p) => p.length > shared + 1 && p[shared] === parts[0][shared])) shared++;
  return parts.map((p) => p.slice(shared).join("/"));
}

export async function showCompare(container, route, signal) {
  const names = route.params.getAll("run");
  document.title = "Compare · Postgrad";
  if (names.length < 2) throw new Error("Select at least two runs in the list to compare them.");
  const [comparison] = await Promise.all([
    request("compare", { run: names }, signal),
    loadPanels(),
  ]);
  const short = shortNames(names);
  const settings = new Map(
    Object.entries(comparison.values).map(([name, values]) => [
      name,
      new Map(Object.entries(values)),
    ]),
  );
  const runs = names.map((name, i) => ({ name, label: short[i], store: new Store(), events: [] }));
  const load = async (run) => run.store.add(await request("metrics", { run: run.name }, signal));
  const running = runs.filter((_, i) => comparison.overviews[i].state === "running");
  const reload = () => Promise.all(running.map(load));
  await Promise.all(runs.map(load));
  if (signal.aborted) return null;
  const curves = new Curves(runs);
  let includeEqual = false;
  const table = new Table(
    [
      {
        key: "key",
        label: "Setting",
        header: true,
        value: (row) => row,
        cell: (row) => h("code", {}, row),
      },
      ...names.map((name, i) => ({
        key: name,
        label: short[i],
        value: (row) => text(settings.get(name).get(row)),
        cell: (row) => h("code", {}, text(settings.get(name).get(row))),
      })),
    ],
    { label: "Settings of the runs", name: "differences", class: "differences" },
  );
  const noDifferences = h("p", { class: "empty" }, "All settings are equal.");
  const draw = () => {
    table.set(
      includeEqual
        ? comparison.keys
        : comparison.different.filter((key) => key !== "name" && key !== "runs"),
    );
    table.element.hidden = !(noDifferences.hidden = table.rows.length > 0);
  };
  const showEqual = h("input", {
    type: "checkbox",
    on: {
      change: () => {
        includeEqual = showEqual.checked;
        draw();
      },
    },
  });
  draw();
  fill(
    container,
    h(
      "div",
      { class: "heading" },
      h("h1", {}, `${names.length} runs`),
      h("span", { class: "grow" }),
      h("a", { class: "button", href: "#/runs" }, "Choose other runs"),
    ),
    h(
      "ul",
      { class: "compared" },
      comparison.overviews.map((run, i) =>
        h(
          "li",
          {},
          h("span", { class: `swatch c${i % 8}` }),
          h("a", { href: runLink(run.name) }, run.name),
          badge(run.state),
          h("span", { class: "dim" }, `step ${run.step}`),
        ),
      ),
    ),
    curves.element,
    h(
      "div",
      { class: "heading" },
      h("h2", {}, "Settings"),
      h("span", { class: "grow" }),
      h("label", { class: "field" }, showEqual, h("span", {}, "show equal settings too")),
      table.button(),
    ),
    table.element,
    noDifferences,
  );
  curves.update();
  const timer = setInterval(
    () =>
      reload().then(
        () => curves.update(),
        () => {},
      ),
    RELOAD_MS,
  );
  signal.addEventListener("abort", () => {
    clearInterval(timer);
    curves.remove();
  });
  return (next) => next.params.getAll("run").join() === names.join();
}

function text(value) {
  return value === undefined ? "–" : value === null ? "null" : String(value);
}
