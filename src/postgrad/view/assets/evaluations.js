// Evaluations: a table of models and data sets, responses with scores, two models side by side.
import { request } from "./api.js";
import { choice, fill, h, debounce, s, select } from "./dom.js";
import { number, percent } from "./format.js";
import { pictures } from "./pictures.js";
import { pivotSection } from "./pivot.js";
import { Table } from "./table.js";

const CLASSES = [
  ["11", "format and answer correct"],
  ["10", "format correct, answer wrong"],
  ["01", "answer correct, format wrong"],
  ["00", "format and answer wrong"],
];
const FILTERS = [
  ["all", "all"],
  ["correct", "correct"],
  ["mixed", "sometimes correct"],
  ["wrong", "wrong"],
  ["failed", "not scored"],
  ["truncated", "truncated"],
  ...CLASSES.map(([key, text]) => [key, text]),
];

export function evaluationLink(params) {
  const kept = Object.entries(params).filter(
    ([, value]) => value !== null && value !== undefined && value !== "" && value !== "all",
  );
  return `#/evaluations/responses?${new URLSearchParams(kept)}`;
}

export async function showEvaluations(container, route, signal) {
  document.title = "Evaluations · Postgrad";
  const { evaluations } = await request("evaluations", {}, signal);
  if (route.path[0] === "responses") return showResponses(container, route, evaluations, signal);
  fill(
    container,
    h("div", { class: "heading" }, h("h1", {}, "Evaluations")),
    evaluations.length > 1 ? pivotSection(signal) : null,
    overview(evaluations),
  );
  return (next) => next.path[0] !== "responses";
}

/** The tab Evaluations of a run. */
export function showEvaluationsOf(body, live) {
  fill(body, overview(live.evaluations, live.name));
  return { showRoute() {} };
}

function overview(evaluations, run = null) {
  const rows = evaluations.flatMap((one) =>
    setsOf(one).map((set) => ({ one, set, result: resultOf(one, set) })),
  );
  const problems = evaluations
    .filter((one) => one.problem)
    .map((one) => h("p", { class: "failure" }, h("b", {}, `${one.name}: `), one.problem));
  if (!rows.length && problems.length) return h("div", {}, problems);
  if (!rows.length) {
    return h(
      "div",
      { class: "empty" },
      h("p", {}, run ? "This run has no evaluations yet." : "No evaluations yet."),
      h(
        "pre",
        {},
        run
          ? `postgrad eval RUNS/${run} data=FILE n=16`
          : "postgrad eval MODEL data=FILE n=16 out=RUNS/NAME",
      ),
    );
  }
  const several = rows.some((row) => row.result?.classes),
    compared = rows.some((row) => row.result?.win);
  const right = (row) => (row.result?.win ? null : row.result?.avg),
    bar = (row) => row.result?.win?.rate || right(row);
  const columns = [
    {
      key: "name",
      label: "Evaluation",
      header: true,
      value: (row) => row.one.name,
      cell: (row) =>
        h(
          "a",
          {
            class: "twolines",
            href: evaluationLink({ a: row.one.name, set: row.set }),
            title: row.one.name,
          },
          h("b", {}, row.one.run || row.one.name),
          row.one.run ? h("span", {}, row.one.name.split("/").pop()) : null,
        ),
    },
    {
      key: "model",
      label: "Model",
      value: (row) => String(row.one.summary.model || ""),
      cell: (row) =>
        row.one.finished
          ? String(row.one.summary.model || "–")
          : h(
              "span",
              {},
              String(row.one.summary.model || ""),
              h("span", { class: "badge running" }, "not finished"),
            ),
    },
    { key: "set", label: "Data set", value: (row) => row.set },
    {
      key: "problems",
      label: "Problems",
      numeric: true,
      value: (row) => row.result?.problems ?? null,
      cell: (row) => number(row.result?.problems),
    },
    {
      key: "samples",
      label: "Samples",
      numeric: true,
      value: (row) => row.result?.samples ?? null,
      cell: (row) => number(row.result?.samples),
    },
    {
      key: "avg",
      label: "Accuracy",
      numeric: true,
      value: (row) => value(right(row)),
      cell: (row) => interval(right(row)),
    },
    {
      key: "bar",
      label: "95% interval",
      plain: true,
      skip: true,
      cell: (row) => whisker(bar(row)),
    },
    {
      key: "low",
      label: "Low",
      numeric: true,
      hidden: true,
      value: (row) => bar(row)?.low ?? null,
    },
    {
      key: "high",
      label: "High",
      numeric: true,
      hidden: true,
      value: (row) => bar(row)?.high ?? null,
    },
    ...(compared
      ? [
          ["rate", "Win rate"],
          ["length_controlled", "Length-controlled"],
        ].map(([key, label]) => ({
          key,
          label,
          numeric: true,
          value: (row) => value(row.result?.win?.[key]),
          cell: (row) => interval(row.result?.win?.[key]),
        }))
      : []),
    {
      key: "pass",
      label: "Pass@k",
      numeric: true,
      value: (row) => value(last(row.result?.pass)?.[1]),
      cell: (row) => largest(row.result?.pass, row.result?.samples),
    },
    {
      key: "maj",
      label: "Maj@k",
      numeric: true,
      value: (row) => value(last(row.result?.maj)?.[1]),
      cell: (row) => largest(row.result?.maj, row.result?.samples),
    },
    {
      key: "length",
      label: "Length",
      numeric: true,
      value: (row) => row.result?.length?.mean ?? null,
      cell: (row) => number(row.result?.length?.mean),
    },
    {
      key: "truncated",
      label: "Truncated",
      numeric: true,
      value: (row) => row.result?.truncated ?? null,
      cell: (row) => percent(row.result?.truncated),
    },
    {
      key: "failures",
      label: "Not scored",
      numeric: true,
      value: (row) => failures(row.result),
      cell: (row) => failures(row.result) ?? "–",
    },
    ...(several
      ? CLASSES.map(([key, text]) => ({
          key,
          label: text,
          numeric: true,
          value: (row) => row.result?.classes?.[key] ?? null,
          cell: (row) => number(row.result?.classes?.[key]),
        }))
      : []),
  ];
  const shown = columns.filter((column) => !column.hidden);
  const table = new Table(shown, {
    label: "Evaluations",
    name: "evaluations",
    class: "cards",
    sort: ["name", false],
  });
  const csv = new Table(
    columns.filter((column) => !column.skip),
    { label: "Evaluations", name: "evaluations" },
  );
  table.set(rows);
  csv.set(rows);
  const text = rows.map((row) => row.one.summary.interval).find(Boolean);
  return h(
    "div",
    {},
    h(
      "div",
      { class: "controls" },
      h(
        "span",
        { class: "dim" },
        "Open an evaluation to read its responses and to compare it with another.",
      ),
      h("span", { class: "grow" }),
      csv.button(),
    ),
    table.element,
    problems,
    text ? h("p", { class: "dim note" }, `Intervals: ${text}.`) : null,
  );
}

function resultOf(one, set) {
  const sets = one.summary.sets || {};
  return Object.hasOwn(sets, set) ? sets[set] : null;
}

function setsOf(one) {
  return [...new Set([...Object.keys(one.summary.sets || {}), ...one.sets])];
}

function value(result) {
  return typeof result === "number" ? result : (result?.value ?? null);
}

function last(result) {
  const entries = Object.entries(result || {});
  return entries.length ? entries[entries.length - 1] : null;
}

function largest(result, samples) {
  const entry = last(result);
  if (!entry || samples === 1) return "–";
  return h(
    "span",
    {
      title: Object.entries(result)
        .map(([k, v]) => `@${k}: ${percent(value(v))}`)
        .join("\n"),
    },
    percent(value(entry[1])),
    h("span", { class: "dim" }, ` @${entry[0]}`),
  );
}

function failures(result) {
  return result ? Object.values(result.failures || {}).reduce((a, b) => a + b, 0) : null;
}

function interval(result) {
  if (!result) return "–";
  return typeof result === "number"
    ? percent(result)
    : h(
        "span",
        {},
        h("b", {}, percent(result.value)),
        h(
          "span",
          { class: "dim range" },
          ` ${(result.low * 100).toFixed(1)} to ${(result.high * 100).toFixed(1)}`,
        ),
      );
}

/** A share between 0 and 1 and its interval, as a dot on a line. */
function whisker(result) {
  if (!result || typeof result === "number") return "–";
  const x = (v) => 4 + v * 112;
  return s(
    "svg",
    {
      class: "whisker",
      width: 120,
      height: 18,
      viewBox: "0 0 120 18",
      role: "img",
      "aria-label": `${percent(result.value)}, between ${percent(result.low)} and ${percent(result.high)}`,
    },
    s("line", { class: "track", x1: 4, x2: 116, y1: 9, y2: 9 }),
    s("line", { class: "span", x1: x(result.low), x2: x(result.high), y1: 9, y2: 9 }),
    s("circle", { cx: x(result.value), cy: 9, r: 3 }),
  );
}

async function showResponses(container, route, evaluations, signal) {
  const list = h("div", { class: "grouplist" }),
    detail = h("section", { class: "detail", "aria-label": "Responses" });
  const head = h("div", { class: "heading" }),
    bar = h("div", { class: "controls" }),
    split = h("div", { class: "split" }, list, detail),
    verdict = h("p", { class: "verdictline" });
  let selection = null,
    result = null,
    listKey = "";
  fill(container, head, bar, verdict, split);

  async function showRoute(params) {
    selection = {
      a: params.get("a"),
      b: params.get("b"),
      set: params.get("set"),
      filter: params.get("filter") || "all",
      search: params.get("search") || "",
      uid: params.get("uid"),
    };
    document.title = `${selection.set} · Postgrad`;
    const others = evaluations.filter(
      (one) => one.name !== selection.a && setsOf(one).includes(selection.set),
    );
    const sets = setsOf(
      evaluations.find((one) => one.name === selection.a) || { summary: {}, sets: [] },
    );
    fill(
      head,
      h("a", { href: "#/evaluations" }, "Evaluations"),
      h("span", { class: "dim" }, "/"),
      h("h1", {}, selection.b ? `${selection.set}: comparison` : selection.set),
    );
    const query = { set: selection.set, filter: selection.filter, search: selection.search };
    const key = JSON.stringify({ ...query, a: selection.a, b: selection.b });
    if (key !== listKey) {
      result = selection.b
        ? await request("pairs", { ...query, a: selection.a, b: selection.b }, signal)
        : await request("responses", { ...query, eval: selection.a }, signal);
      listKey = key;
      drawBar(others, sets);
      drawList();
    }
    const uid = selection.uid || result.problems[0]?.uid;
    split.classList.toggle("chosen", !!selection.uid);
    for (const link of list.querySelectorAll("a.group")) {
      if (link.dataset.uid === uid) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    if (!uid) return fill(detail, h("p", { class: "empty" }, "No problem matches the filter."));
    return drawDetail(uid);
  }

  function link(changes) {
    return evaluationLink({ ...selection, uid: null, ...changes });
  }

  function drawBar(others, sets) {
    const names = evaluations
      .filter((one) => setsOf(one).includes(selection.set))
      .map((one) => [one.name, one.name]);
    const one = result.samples === 1;
    const pairs = [
      ["all", "all"],
      ["a", one ? "A correct, B wrong" : "A better than B"],
      ["b", one ? "B correct, A wrong" : "B better than A"],
      ["both", "both correct"],
      ["neither", "both wrong"],
    ];
    const known = (selection.b ? pairs : FILTERS)
      .filter(
        ([key]) =>
          key === "all" ||
          result.counts[key] ||
          key === selection.filter ||
          (selection.b && key !== "all"),
      )
      .map(([key, text]) => [key, `${text} ${result.counts[key] ?? 0}`]);
    const search = h("input", {
      type: "search",
      value: selection.search,
      placeholder: "Search the problems …",
      "aria-label": "Search the problems",
      on: {
        input: debounce(() => {
          location.hash = link({ search: search.value });
        }, 350),
      },
    });
    const focused =
      bar.contains(document.activeElement) && document.activeElement.type === "search"
        ? document.activeElement.value
        : null;
    fill(
      bar,
      sets.length > 1
        ? select(
            "Set",
            sets.map((set) => [set, set]),
            selection.set,
            (set) => {
              location.hash = link({ set });
            },
          )
        : null,
      select("A", names, selection.a, (a) => {
        location.hash = link({ a, b: a === selection.b ? null : selection.b });
      }),
      others.length
        ? select(
            "B",
            [["", "none"], ...others.map((other) => [other.name, other.name])],
            selection.b || "",
            (b) => {
              location.hash = link({ b, filter: "all" });
            },
          )
        : h("span", { class: "dim" }, "No other evaluation has this data set."),
      choice("Show", known, selection.filter, (filter) => {
        location.hash = link({ filter });
      }),
      search,
    );
    if (focused !== null) {
      search.value = focused;
      search.focus();
    }
    const c = result.comparison;
    verdict.hidden = !c;
    if (c) {
      const points = Math.abs(c.difference.value * 100).toFixed(1);
      fill(
        verdict,
        h("b", {}, `A ${percent(c.a)}, B ${percent(c.b)}`),
        `: B is ${points} points ${c.difference.value < 0 ? "lower" : "higher"}, `,
        `95% interval ${signed(c.difference.low)} to ${signed(c.difference.high)}; `,
        `A is better on ${c.a_right_b_wrong}, B on ${c.b_right_a_wrong} of ${c.problems} problems `,
        `(sign test p = ${number(c.sign_test)}).`,
      );
    }
  }

  function drawList() {
    const more = h(
      "button",
      {
        type: "button",
        hidden: result.problems.length >= result.total,
        on: {
          click: async () => {
            const query = {
              set: selection.set,
              filter: selection.filter,
              search: selection.search,
              start: result.problems.length,
            };
            const next = selection.b
              ? await request("pairs", { ...query, a: selection.a, b: selection.b }, signal)
              : await request("responses", { ...query, eval: selection.a }, signal);
            result.problems.push(...next.problems);
            more.before(...next.problems.map(problemLink));
            more.hidden = result.problems.length >= result.total;
          },
        },
      },
      "Show more",
    );
    fill(
      list,
      h(
        "p",
        { class: "dim count" },
        `${result.total} problem${result.total === 1 ? "" : "s"}${result.shared !== undefined ? ` of ${result.shared} that both answered` : ""}`,
      ),
      result.problems.map(problemLink),
      more,
    );
  }

  function problemLink(problem) {
    const share = (one) =>
      h(
        "span",
        {
          class: `share ${one.correct === one.responses ? "right" : one.correct ? "mixed" : "wrong"}`,
        },
        one.responses === 1
          ? one.correct
            ? "✓ correct"
            : one.failures
              ? "! not scored"
              : "✕ wrong"
          : `${one.correct} of ${one.responses} correct`,
      );
    return h(
      "a",
      { class: "group", "data-uid": problem.uid, href: link({ uid: problem.uid }) },
      h("span", { class: "question" }, problem.question.replace(/\s+/g, " ").trim() || problem.uid),
      h(
        "span",
        { class: "marks" },
        problem.other ? ["A ", share(problem), " B ", share(problem.other)] : share(problem),
      ),
    );
  }

  async function drawDetail(uid) {
    const names = selection.b ? [selection.a, selection.b] : [selection.a];
    const sides = await Promise.all(
      names.map((name) => request("response", { eval: name, set: selection.set, uid }, signal)),
    );
    const first = sides[0].responses[0] || {};
    fill(
      detail,
      h(
        "div",
        { class: "heading" },
        h("a", { class: "back", href: link({}) }, "‹ all problems"),
        h("h2", {}, "Problem"),
        h("code", { class: "dim" }, uid),
      ),
      h(
        "details",
        { class: "prompt", open: true },
        h("summary", {}, "Prompt"),
        h("div", { class: "text" }, String(first.prompt ?? sides[0].question)),
        pictures(sides[0].pictures, first.images),
      ),
      first.ground_truth
        ? h(
            "p",
            { class: "truth" },
            h("span", { class: "dim" }, "Ground truth "),
            h("code", {}, String(first.ground_truth)),
          )
        : null,
      h(
        "div",
        { class: names.length > 1 ? "two" : "" },
        sides.map((side, i) =>
          h(
            "div",
            { class: "column" },
            names.length > 1 ? h("h3", {}, `${"AB"[i]}: ${names[i]}`) : null,
            h(
              "div",
              { class: names.length > 1 ? "stack" : "side" },
              side.responses.map(answerCard),
            ),
          ),
        ),
      ),
    );
  }

  await showRoute(route.params);
  return (next) => {
    if (next.path[0] !== "responses") return false;
    showRoute(next.params).catch(
      (error) =>
        error.name !== "AbortError" &&
        fill(detail, h("p", { class: "error", role: "alert" }, error.message)),
    );
    return true;
  };
}

function signed(share) {
  return `${share < 0 ? "−" : "+"}${Math.abs(share * 100).toFixed(1)}`;
}

function answerCard(line) {
  const kind = line.failure
    ? "failed"
    : line.right === true || (line.right === undefined && line.score >= 1)
      ? "right"
      : "wrong";
  const text = { right: "✓ correct", wrong: "✕ wrong", failed: "! not scored" }[kind];
  const parts = Object.entries(line.parts || {});
  const facts = [
    ["score", number(line.score)],
    ...parts.map(([name, part]) => [name, number(part)]),
    ...Object.entries(line.log || {}).map(([name, value]) => [
      name,
      typeof value === "number"
        ? number(value)
        : typeof value === "string"
          ? value
          : JSON.stringify(value),
    ]),
    line.answer !== undefined && line.answer !== null
      ? ["parsed answer", String(line.answer)]
      : null,
    ["verifier", line.verifier],
    ["tokens", number(line.length)],
  ].filter((fact) => fact && fact[1] !== undefined);
  const failure =
    typeof line.failure === "object" && line.failure
      ? `${line.failure.kind}: ${line.failure.reason}`
      : line.failure;
  return h(
    "article",
    { class: `card ${kind}`, "aria-label": `Response ${(line.sample ?? 0) + 1}, ${text}` },
    h(
      "header",
      {},
      h("span", { class: `verdict ${kind}` }, text),
      h("span", { class: "grow" }),
      h("span", { class: "dim" }, line.finish === "length" ? "truncated at the length limit" : ""),
    ),
    h(
      "dl",
      { class: "facts small" },
      facts.map(([key, part]) => h("div", {}, h("dt", {}, key), h("dd", {}, part))),
    ),
    failure ? h("p", { class: "failure" }, h("b", {}, "Not scored: "), failure) : null,
    h("div", { class: "text answer" }, line.response || "(empty response)"),
  );
}
