// Several runs in the same charts, and where their settings differ.
import { ask } from "./api.js";
import { Curves, loadPanels } from "./curves.js";
import { fill, h } from "./dom.js";
import { badge, runLink } from "./runs.js";
import { Store } from "./store.js";
import { Table } from "./table.js";

const EVERY_MS = 5000;

/** Names without what all of them share at the front: enough to tell them apart. */
export function shortNames(names) {
  const parts = names.map((name) => name.split("/"));
  let shared = 0;
  while (parts.every((p) => p.length > shared + 1 && p[shared] === parts[0][shared])) shared++;
  return parts.map((p) => p.slice(shared).join("/"));
}

export async function showCompare(holder, place, signal) {
  const names = place.params.getAll("run");
  document.title = "Compare · Postgrad";
  if (names.length < 2) throw new Error("Tick two runs or more in the list to compare them.");
  const [found] = await Promise.all([ask("compare", { run: names }, signal), loadPanels()]);
  const short = shortNames(names);
  const runs = names.map((name, i) => ({ name, label: short[i], store: new Store(), events: [] }));
  const take = async (run) => run.store.take(await ask("metrics", { run: run.name }, signal));
  const going = runs.filter((_, i) => found.overviews[i].state === "running");
  const reload = () => Promise.all(going.map(take));
  await Promise.all(runs.map(take));
  if (signal.aborted) return null;
  const curves = new Curves(runs);
  let all = false;
  const table = new Table([
    { key: "key", label: "Setting", header: true, value: (row) => row, cell: (row) => h("code", {}, row) },
    ...names.map((name, i) => ({ key: name, label: short[i], value: (row) => text(found.values[name][row]), cell: (row) => h("code", {}, text(found.values[name][row])) })),
  ], { label: "Settings of the runs", name: "differences", class: "differences" });
  const none = h("p", { class: "empty" }, "All settings are equal.");
  const draw = () => {
    table.set(all ? found.keys : found.different.filter((key) => key !== "name" && key !== "runs"));
    table.element.hidden = !(none.hidden = table.rows.length > 0);
  };
  const every = h("input", { type: "checkbox", on: { change: () => { all = every.checked; draw(); } } });
  draw();
  fill(holder, h("div", { class: "heading" }, h("h1", {}, `${names.length} runs`), h("span", { class: "grow" }), h("a", { class: "button", href: "#/runs" }, "Choose others")),
    h("ul", { class: "compared" }, found.overviews.map((run, i) =>
      h("li", {}, h("span", { class: `swatch c${i % 8}` }), h("a", { href: runLink(run.name) }, run.name), badge(run.state), h("span", { class: "dim" }, `step ${run.step}`)))),
    curves.element,
    h("div", { class: "heading" }, h("h2", {}, "Settings"), h("span", { class: "grow" }), h("label", { class: "field" }, every, h("span", {}, "also those that are equal")), table.button()),
    table.element, none);
  curves.update();
  const timer = setInterval(() => reload().then(() => curves.update(), () => {}), EVERY_MS);
  signal.addEventListener("abort", () => {
    clearInterval(timer);
    curves.remove();
  });
  return (next) => next.params.getAll("run").join() === names.join();
}

function text(value) {
  return value === undefined ? "–" : value === null ? "null" : String(value);
}
