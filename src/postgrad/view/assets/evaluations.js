// Evaluations: a table over models and sets, every response with its grade and why, two models on the same problems.
import { ask } from "./api.js";
import { choice, fill, h, later, s, select } from "./dom.js";
import { number, percent } from "./format.js";
import { Table } from "./table.js";

const CLASSES = [["11", "form and answer right"], ["10", "form right, answer wrong"], ["01", "answer right, form wrong"], ["00", "neither"]];
const KEEP_ONE = [["all", "all"], ["right", "right"], ["mixed", "sometimes right"], ["wrong", "wrong"], ["failed", "not judged"], ["truncated", "truncated"],
  ...CLASSES.map(([key, text]) => [key, text])];

export function evaluationLink(params) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "all");
  return `#/evaluations/responses?${new URLSearchParams(kept)}`;
}

export async function showEvaluations(holder, place, signal) {
  document.title = "Evaluations · Postgrad";
  const { evaluations } = await ask("evaluations", {}, signal);
  if (place.path[0] === "responses") return showResponses(holder, place, evaluations, signal);
  fill(holder, h("div", { class: "heading" }, h("h1", {}, "Evaluations")), overview(evaluations));
  return (next) => next.path[0] !== "responses";
}

/** The tab of a run. */
export function showEvaluationsOf(body, live) {
  fill(body, overview(live.evaluations, live.name));
  return { follow() {} };
}

function overview(evaluations, run = null) {
  const rows = evaluations.flatMap((one) => setsOf(one).map((set) => ({ one, set, found: one.summary.sets?.[set] || null })));
  if (!rows.length) {
    return h("div", { class: "empty" }, h("p", {}, run ? "This run has no evaluation yet." : "No evaluations here yet."),
      h("pre", {}, run ? `postgrad eval RUNS/${run} data=FILE n=16` : "postgrad eval MODEL data=FILE n=16 out=RUNS/NAME"));
  }
  const several = rows.some((row) => row.found?.classes), compared = rows.some((row) => row.found?.win);
  const right = (row) => row.found?.win ? null : row.found?.avg, bar = (row) => row.found?.win?.rate || right(row);
  const columns = [
    { key: "name", label: "Evaluation", header: true, value: (row) => row.one.name, cell: (row) => h("a", { class: "twolines", href: evaluationLink({ a: row.one.name, set: row.set }), title: row.one.name }, h("b", {}, row.one.run || row.one.name), row.one.run ? h("span", {}, row.one.name.split("/").pop()) : null) },
    { key: "model", label: "Model", value: (row) => String(row.one.summary.model || ""), cell: (row) => row.one.done ? String(row.one.summary.model || "–") : h("span", {}, String(row.one.summary.model || ""), h("span", { class: "badge running" }, "not finished")) },
    { key: "set", label: "Set", value: (row) => row.set },
    { key: "problems", label: "Problems", numeric: true, value: (row) => row.found?.problems ?? null, cell: (row) => number(row.found?.problems) },
    { key: "samples", label: "Samples", numeric: true, value: (row) => row.found?.samples ?? null, cell: (row) => number(row.found?.samples) },
    { key: "avg", label: "Right", numeric: true, value: (row) => value(right(row)), cell: (row) => interval(right(row)) },
    { key: "bar", label: "95 % interval", plain: true, skip: true, cell: (row) => whisker(bar(row)) },
    { key: "low", label: "Low", numeric: true, hidden: true, value: (row) => bar(row)?.low ?? null },
    { key: "high", label: "High", numeric: true, hidden: true, value: (row) => bar(row)?.high ?? null },
    ...(compared ? [["rate", "Win rate"], ["length_controlled", "Length-controlled"]].map(([key, label]) => ({ key, label, numeric: true, value: (row) => value(row.found?.win?.[key]), cell: (row) => interval(row.found?.win?.[key]) })) : []),
    { key: "pass", label: "Pass@k", numeric: true, value: (row) => value(last(row.found?.pass)?.[1]), cell: (row) => most(row.found?.pass, row.found?.samples) },
    { key: "maj", label: "Maj@k", numeric: true, value: (row) => value(last(row.found?.maj)?.[1]), cell: (row) => most(row.found?.maj, row.found?.samples) },
    { key: "length", label: "Length", numeric: true, value: (row) => row.found?.length?.mean ?? null, cell: (row) => number(row.found?.length?.mean) },
    { key: "truncated", label: "Truncated", numeric: true, value: (row) => row.found?.truncated ?? null, cell: (row) => percent(row.found?.truncated) },
    { key: "failures", label: "Not judged", numeric: true, value: (row) => failures(row.found), cell: (row) => failures(row.found) ?? "–" },
    ...(several ? CLASSES.map(([key, text]) => ({ key, label: text, numeric: true, value: (row) => row.found?.classes?.[key] ?? null, cell: (row) => number(row.found?.classes?.[key]) })) : []),
  ];
  const shown = columns.filter((column) => !column.hidden);
  const table = new Table(shown, { label: "Evaluations", name: "evaluations", class: "cards", sort: ["name", false] });
  const csv = new Table(columns.filter((column) => !column.skip), { label: "Evaluations", name: "evaluations" });
  table.set(rows);
  csv.set(rows);
  const text = rows.map((row) => row.one.summary.interval).find(Boolean);
  return h("div", {}, h("div", { class: "controls" }, h("span", { class: "dim" }, "Open one to read its responses, and to put another beside it."), h("span", { class: "grow" }), csv.button()),
    table.element, text ? h("p", { class: "dim note" }, `Intervals: ${text}.`) : null);
}

function setsOf(one) {
  return [...new Set([...Object.keys(one.summary.sets || {}), ...one.sets])];
}

function value(found) {
  return typeof found === "number" ? found : found?.value ?? null;
}

function last(found) {
  const entries = Object.entries(found || {});
  return entries.length ? entries[entries.length - 1] : null;
}

function most(found, samples) {
  const entry = last(found);
  if (!entry || samples === 1) return "–";
  return h("span", { title: Object.entries(found).map(([k, v]) => `@${k}: ${percent(value(v))}`).join("\n") }, percent(value(entry[1])), h("span", { class: "dim" }, ` @${entry[0]}`));
}

function failures(found) {
  return found ? Object.values(found.failures || {}).reduce((a, b) => a + b, 0) : null;
}

function interval(found) {
  if (!found) return "–";
  return typeof found === "number" ? percent(found) : h("span", {}, h("b", {}, percent(found.value)), h("span", { class: "dim range" }, ` ${(found.low * 100).toFixed(1)} to ${(found.high * 100).toFixed(1)}`));
}

/** A share between 0 and 1 with its interval as a dot on a line. */
function whisker(found) {
  if (!found || typeof found === "number") return "–";
  const x = (v) => 4 + v * 112;
  return s("svg", { class: "whisker", width: 120, height: 18, viewBox: "0 0 120 18", role: "img", "aria-label": `${percent(found.value)}, between ${percent(found.low)} and ${percent(found.high)}` },
    s("line", { class: "track", x1: 4, x2: 116, y1: 9, y2: 9 }), s("line", { class: "span", x1: x(found.low), x2: x(found.high), y1: 9, y2: 9 }),
    s("circle", { cx: x(found.value), cy: 9, r: 3 }));
}

async function showResponses(holder, place, evaluations, signal) {
  const list = h("div", { class: "grouplist" }), detail = h("section", { class: "detail", "aria-label": "Responses" });
  const head = h("div", { class: "heading" }), bar = h("div", { class: "controls" }), split = h("div", { class: "split" }, list, detail), said = h("p", { class: "verdictline" });
  let now = null, found = null, listKey = "";
  fill(holder, head, bar, said, split);

  async function follow(params) {
    now = { a: params.get("a"), b: params.get("b"), set: params.get("set"), keep: params.get("keep") || "all", search: params.get("search") || "", uid: params.get("uid") };
    document.title = `${now.set} · Postgrad`;
    const others = evaluations.filter((one) => one.name !== now.a && setsOf(one).includes(now.set));
    const sets = setsOf(evaluations.find((one) => one.name === now.a) || { summary: {}, sets: [] });
    fill(head, h("a", { href: "#/evaluations" }, "Evaluations"), h("span", { class: "dim" }, "/"), h("h1", {}, now.b ? `${now.set}: two models` : now.set));
    const ask_ = { set: now.set, keep: now.keep, search: now.search };
    const key = JSON.stringify({ ...ask_, a: now.a, b: now.b });
    if (key !== listKey) {
      found = now.b ? await ask("pairs", { ...ask_, a: now.a, b: now.b }, signal) : await ask("responses", { ...ask_, eval: now.a }, signal);
      listKey = key;
      drawBar(others, sets);
      drawList();
    }
    const uid = now.uid || found.problems[0]?.uid;
    split.classList.toggle("chosen", !!now.uid);
    for (const link of list.querySelectorAll("a.group")) {
      if (link.dataset.uid === uid) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    if (!uid) return fill(detail, h("p", { class: "empty" }, "No problem passes the filter."));
    return drawDetail(uid);
  }

  function link(changes) {
    return evaluationLink({ ...now, uid: null, ...changes });
  }

  function drawBar(others, sets) {
    const names = evaluations.filter((one) => setsOf(one).includes(now.set)).map((one) => [one.name, one.name]);
    const one = found.samples === 1;
    const pairs = [["all", "all"], ["a", one ? "A right, B wrong" : "A better than B"], ["b", one ? "B right, A wrong" : "B better than A"], ["both", "both right"], ["neither", "both wrong"]];
    const known = (now.b ? pairs : KEEP_ONE).filter(([key]) => key === "all" || found.counts[key] || key === now.keep || (now.b && key !== "all")).map(([key, text]) => [key, `${text} ${found.counts[key] ?? 0}`]);
    const search = h("input", { type: "search", value: now.search, placeholder: "Search the problems …", "aria-label": "Search the problems", on: { input: later(() => { location.hash = link({ search: search.value }); }, 350) } });
    const focused = bar.contains(document.activeElement) && document.activeElement.type === "search" ? document.activeElement.value : null;
    fill(bar, sets.length > 1 ? select("Set", sets.map((set) => [set, set]), now.set, (set) => { location.hash = link({ set }); }) : null,
      select("A", names, now.a, (a) => { location.hash = link({ a, b: a === now.b ? null : now.b }); }),
      others.length ? select("B", [["", "nothing beside it"], ...others.map((other) => [other.name, other.name])], now.b || "", (b) => { location.hash = link({ b, keep: "all" }); })
        : h("span", { class: "dim" }, "No other evaluation has this set."),
      choice("Show", known, now.keep, (keep) => { location.hash = link({ keep }); }), search);
    if (focused !== null) {
      search.value = focused;
      search.focus();
    }
    const c = found.comparison;
    said.hidden = !c;
    if (c) {
      fill(said, h("b", {}, `A ${percent(c.a)}, B ${percent(c.b)}`), `: B is ${Math.abs(c.difference.value * 100).toFixed(1)} points ${c.difference.value < 0 ? "behind" : "ahead"}, 95 % interval ${signed(c.difference.low)} to ${signed(c.difference.high)}; `,
        `A is better on ${c.a_right_b_wrong}, B on ${c.b_right_a_wrong} of ${c.problems} problems (sign test p = ${number(c.sign_test)}).`);
    }
  }

  function drawList() {
    const more = h("button", { type: "button", hidden: found.problems.length >= found.total, on: { click: async () => {
      const asked = { set: now.set, keep: now.keep, search: now.search, start: found.problems.length };
      const next = now.b ? await ask("pairs", { ...asked, a: now.a, b: now.b }, signal) : await ask("responses", { ...asked, eval: now.a }, signal);
      found.problems.push(...next.problems);
      more.before(...next.problems.map(problemLink));
      more.hidden = found.problems.length >= found.total;
    } } }, "Show more");
    fill(list, h("p", { class: "dim count" }, `${found.total} problem${found.total === 1 ? "" : "s"}${found.shared !== undefined ? ` of ${found.shared} that both answered` : ""}`), found.problems.map(problemLink), more);
  }

  function problemLink(problem) {
    const share = (one) => h("span", { class: `share ${one.right === one.responses ? "right" : one.right ? "mixed" : "wrong"}` }, one.responses === 1 ? (one.right ? "✓ right" : one.failures ? "! not judged" : "✕ wrong") : `${one.right} of ${one.responses} right`);
    return h("a", { class: "group", "data-uid": problem.uid, href: link({ uid: problem.uid }) }, h("span", { class: "question" }, problem.question.replace(/\s+/g, " ").trim() || problem.uid),
      h("span", { class: "marks" }, problem.other ? ["A ", share(problem), " B ", share(problem.other)] : share(problem)));
  }

  async function drawDetail(uid) {
    const names = now.b ? [now.a, now.b] : [now.a];
    const sides = await Promise.all(names.map((name) => ask("response", { eval: name, set: now.set, uid }, signal)));
    const first = sides[0].responses[0] || {};
    fill(detail, h("div", { class: "heading" }, h("a", { class: "back", href: link({}) }, "‹ all problems"), h("h2", {}, "Problem"), h("code", { class: "dim" }, uid)),
      h("details", { class: "prompt", open: true }, h("summary", {}, "Prompt"), h("div", { class: "text" }, String(first.prompt ?? sides[0].question))),
      first.ground_truth ? h("p", { class: "truth" }, h("span", { class: "dim" }, "Right answer "), h("code", {}, String(first.ground_truth))) : null,
      h("div", { class: names.length > 1 ? "two" : "" }, sides.map((side, i) => h("div", { class: "column" },
        names.length > 1 ? h("h3", {}, `${"AB"[i]}: ${names[i]}`) : null, h("div", { class: names.length > 1 ? "stack" : "side" }, side.responses.map(answerCard))))));
  }

  await follow(place.params);
  return (next) => {
    if (next.path[0] !== "responses") return false;
    follow(next.params).catch((error) => error.name !== "AbortError" && fill(detail, h("p", { class: "trouble", role: "alert" }, error.message)));
    return true;
  };
}

function signed(share) {
  return `${share < 0 ? "−" : "+"}${Math.abs(share * 100).toFixed(1)}`;
}

function answerCard(line) {
  const kind = line.failure ? "failed" : line.right === true || (line.right === undefined && line.score >= 1) ? "right" : "wrong";
  const text = { right: "✓ right", wrong: "✕ wrong", failed: "! not judged" }[kind];
  const parts = Object.entries(line.parts || {});
  const facts = [["score", number(line.score)], ...parts.map(([name, part]) => [name, number(part)]), line.answer !== undefined && line.answer !== null ? ["read as", String(line.answer)] : null, ["verifier", line.verifier], ["tokens", number(line.length)]]
    .filter((fact) => fact && fact[1] !== undefined);
  const failure = typeof line.failure === "object" && line.failure ? `${line.failure.kind}: ${line.failure.reason}` : line.failure;
  return h("article", { class: `card ${kind}`, "aria-label": `Response ${(line.sample ?? 0) + 1}, ${text}` },
    h("header", {}, h("span", { class: `verdict ${kind}` }, text), h("span", { class: "grow" }), h("span", { class: "dim" }, line.finish === "length" ? "cut at the length limit" : "")),
    h("dl", { class: "facts small" }, facts.map(([key, part]) => h("div", {}, h("dt", {}, key), h("dd", {}, part)))),
    failure ? h("p", { class: "failure" }, h("b", {}, "Not judged: "), failure) : null,
    h("div", { class: "text answer" }, line.response || "(empty response)"));
}
