// One run: a live header and the tabs below it.
import { request, listen } from "./api.js";
import { Curves, loadPanels } from "./curves.js";
import { fill, h } from "./dom.js";
import { showEvaluationsOf } from "./evaluations.js";
import { age, duration, moment, number, percent, shortPath } from "./format.js";
import { Rollouts } from "./rollouts.js";
import { badge, runLink } from "./runs.js";
import { Store } from "./store.js";
import { Table } from "./table.js";

const TABS = [
  ["curves", "Curves"],
  ["rollouts", "Rollouts"],
  ["evaluations", "Evaluations"],
  ["events", "Events"],
  ["settings", "Settings"],
];

export async function showRun(container, route, signal) {
  const name = route.path[0] || "";
  const [run, metrics] = await Promise.all([
    request("run", { run: name }, signal),
    request("metrics", { run: name }, signal),
    loadPanels(),
  ]);
  if (signal.aborted) return null;
  document.title = `${name} · Postgrad`;
  const store = new Store();
  store.add(metrics);
  const live = {
    name,
    store,
    events: run.events,
    steps: run.steps,
    overview: run.overview,
    config: run.config,
    evaluations: run.evaluations,
  };
  const head = h("div", { class: "runhead" });
  const tabs = h("nav", { class: "tabs", "aria-label": "Tabs of the run" });
  const body = h("div", { class: "tab" });
  const disconnected = h(
    "p",
    { class: "lost", role: "status", hidden: true },
    "The server does not respond. The page reconnects when the server is back.",
  );
  fill(container, head, disconnected, tabs, body);

  let tab = null,
    shown = null;
  function open(next) {
    const nextTab = TABS.some(([key]) => key === next.path[1]) ? next.path[1] : "curves";
    fill(
      tabs,
      TABS.map(([key, text]) =>
        h(
          "a",
          {
            href: runLink(name, key),
            "aria-current": key === nextTab ? "page" : null,
            "data-tab": key,
          },
          text,
          countBadge(live, key),
        ),
      ),
    );
    if (tab === nextTab && shown.showRoute) return shown.showRoute(next.params);
    if (shown && shown.remove) shown.remove();
    tab = nextTab;
    fill(body);
    shown = TAB_BUILDERS[nextTab](body, live, next.params, signal);
    return null;
  }

  drawHead(head, live);
  open(route);
  const refresh = setInterval(() => drawHead(head, live), 5000);
  signal.addEventListener("abort", () => {
    clearInterval(refresh);
    if (shown && shown.remove) shown.remove();
  });
  listen(
    () => ({ run: name, from: store.count, generation: store.generation }),
    {
      metrics: (message) => {
        store.add(message);
        drawHead(head, live);
        if (shown.update) shown.update();
      },
      status: (message) => {
        Object.assign(live, message);
        drawHead(head, live);
        tabs.querySelector("[data-tab=rollouts] .count").textContent = live.steps.length;
        if (shown.update) shown.update();
      },
      disconnected: (is) => {
        disconnected.hidden = !is;
      },
      ended: ({ reason }) => {
        disconnected.hidden = false;
        disconnected.textContent = reason;
      },
    },
    signal,
  );
  return (next) => {
    if (next.path[0] !== name) return false;
    open(next);
    return true;
  };
}

function countBadge(live, key) {
  const count = { rollouts: live.steps.length, evaluations: live.evaluations.length }[key];
  return count === undefined ? null : h("span", { class: "count" }, count);
}

function drawHead(head, live) {
  const { overview: run, store } = live;
  const running = run.state === "running";
  const secondsLeft = running ? store.secondsLeft(run.steps) : null;
  const times = store.columns.get("time") || [];
  const elapsed = times.length ? times[times.length - 1] - store.startTime : null;
  const facts = [
    ["Method", run.method || "–"],
    ["Model", h("span", { title: run.model }, shortPath(run.model) || "–")],
    ["Data", h("span", { title: run.data }, shortPath(run.data) || "–")],
    run.metric
      ? [
          { "reward/mean": "Reward", "sft/loss": "SFT loss" }[run.metric] || run.metric,
          number(store.last(run.metric)),
        ]
      : null,
    run.accuracy !== null ? ["Validation accuracy", percent(run.accuracy)] : null,
    ["Time", duration(elapsed)],
    running
      ? ["Time left", secondsLeft === null ? "–" : `about ${duration(secondsLeft)}`]
      : ["Last update", h("span", { title: moment(run.changed) }, age(run.changed))],
  ].filter(Boolean);
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  fill(
    head,
    h(
      "div",
      { class: "heading" },
      h("h1", {}, live.name),
      badge(run.state),
      run.reason ? h("span", { class: "reason" }, run.reason) : null,
    ),
    h(
      "div",
      { class: "bar" },
      h("progress", {
        max: run.steps || 1,
        value: run.steps ? run.step : 0,
        "aria-label": "Progress of the run",
      }),
      h(
        "span",
        { id: "stepnow" },
        run.steps
          ? `step ${run.step} of ${run.steps} (${Math.floor(share * 100)}%)`
          : `step ${run.step}`,
      ),
    ),
    h(
      "dl",
      { class: "facts" },
      facts.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value))),
    ),
  );
}

const TAB_BUILDERS = {
  curves(body, live) {
    const curves = new Curves([live]);
    curves.onPick((step) => {
      const nearest = live.steps.length
        ? live.steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a))
        : null;
      return nearest === null
        ? null
        : h(
            "a",
            { class: "button", href: runLink(live.name, "rollouts", { step: nearest }) },
            `Rollouts of step ${nearest}`,
          );
    });
    const empty = h(
      "p",
      { class: "empty" },
      "No step is finished yet. Curves appear here after the first one.",
    );
    body.append(curves.element, empty);
    const update = () => {
      curves.update();
      curves.element.hidden = !live.store.count;
      empty.hidden = live.store.count > 0;
    };
    update();
    return { update, remove: () => curves.remove(), showRoute: () => {} };
  },

  rollouts(body, live, params, signal) {
    return new Rollouts(body, live, params, signal);
  },

  evaluations(body, live, params, signal) {
    return showEvaluationsOf(body, live, params, signal);
  },

  events(body, live) {
    const table = new Table(
      [
        { key: "time", label: "Time", value: (e) => e.time || null, cell: (e) => moment(e.time) },
        { key: "step", label: "Step", numeric: true, value: (e) => e.step },
        {
          key: "event",
          label: "Event",
          value: (e) => e.event,
          cell: (e) => h("span", { class: `event ${e.event}` }, e.event),
        },
        { key: "text", label: "Message", value: (e) => e.text, class: "wide" },
      ],
      { label: "Events", name: "events", sort: ["time", true] },
    );
    const empty = h("p", { class: "empty" }, "This run has no events.");
    body.append(
      h("div", { class: "controls" }, h("span", { class: "grow" }), table.button()),
      table.element,
      empty,
    );
    const update = () => {
      table.set(live.events);
      table.element.hidden = !live.events.length;
      empty.hidden = !!live.events.length;
    };
    update();
    return { update, showRoute: () => {} };
  },

  settings(body, live) {
    const rows = Object.entries(live.config).map(([key, value]) => ({ key, value }));
    const table = new Table(
      [
        {
          key: "key",
          label: "Setting",
          header: true,
          value: (row) => row.key,
          cell: (row) => h("code", {}, row.key),
        },
        {
          key: "value",
          label: "Value",
          value: (row) => row.value,
          cell: (row) => h("code", {}, row.value === null ? "null" : String(row.value)),
          class: "wide",
        },
      ],
      { label: "Settings", name: "settings" },
    );
    const search = h("input", {
      type: "search",
      placeholder: "Filter …",
      "aria-label": "Filter the settings",
      on: {
        input: () =>
          table.set(
            rows.filter((row) =>
              `${row.key}=${row.value}`.toLowerCase().includes(search.value.toLowerCase()),
            ),
          ),
      },
    });
    table.set(rows);
    body.append(
      h("div", { class: "controls" }, search, h("span", { class: "grow" }), table.button()),
      rows.length
        ? table.element
        : h("p", { class: "empty" }, "The run folder has no readable config.yaml."),
    );
    return { showRoute: () => {} };
  },
};
