// The rollouts of a run: steps, groups side by side, one problem over all steps, search.
import { request } from "./api.js";
import { Axis, Chart } from "./chart.js";
import { conversation, isShownHere, parseMessages } from "./conversation.js";
import { choice, fill, h, debounce, select } from "./dom.js";
import { number } from "./format.js";
import { pictures } from "./pictures.js";
import { runLink } from "./runs.js";
import { colorings, columnTitle, hideTip, legend, scale, tokenBlock } from "./tokens.js";

const FILTERS = [
  ["all", "all"],
  ["correct", "correct"],
  ["wrong", "wrong"],
  ["truncated", "truncated"],
  ["failed", "not scored"],
  ["given", "not from the policy"],
];
const SORTS = [
  ["order", "as sampled"],
  ["longest", "longest first"],
  ["shortest", "shortest first"],
  ["reward", "highest reward first"],
  ["advantage", "largest advantage first"],
];
const CLASSMATE = ["classmate_texts", "classmate_scores", "cot"]; // shown together, below the response
const TAIL = 160; // characters of the thought that are shown before its continuations
const FINISH = {
  stop: "ended normally",
  length: "truncated at the length limit",
  given: "given, not sampled",
};

export class Rollouts {
  constructor(body, live, params, signal) {
    Object.assign(this, { body, live, signal, color: null, full: false, tokensOpen: false });
    this.list = h("div", { class: "grouplist" });
    this.detail = h("section", { class: "detail", "aria-label": "Group" });
    this.bar = h("div", { class: "controls steps" });
    this.filters = h("div", { class: "controls" });
    this.empty = h(
      "p",
      { class: "empty" },
      "No rollouts yet. They appear here after the first step.",
    );
    fill(
      body,
      this.bar,
      this.filters,
      (this.split = h("div", { class: "split" }, this.list, this.detail)),
      this.empty,
    );
    this.keys = (event) => this.key(event);
    addEventListener("keydown", this.keys);
    this.showRoute(params);
  }

  remove() {
    removeEventListener("keydown", this.keys);
    hideTip();
    this.chart?.remove();
  }

  get steps() {
    return this.live.steps;
  }

  update() {
    if (this.known === this.steps.length) return;
    const latest =
      this.route && this.route.step === null && this.route.uid === null && this.route.find === null;
    this.known = this.steps.length;
    if (latest && !this.route.group) this.showRoute(this.params);
    else this.drawBar();
  }

  /** Shows the step, group, problem or search of the address. */
  showRoute(params) {
    hideTip();
    this.params = params;
    this.known = this.steps.length;
    const whole = (key) =>
      params.get(key) === null || params.get(key) === "" || Number.isNaN(Number(params.get(key)))
        ? null
        : Number(params.get(key));
    this.route = {
      step: whole("step"),
      group: whole("group"),
      filter: params.get("filter") || "all",
      sort: params.get("sort") || "order",
      search: params.get("search") || "",
      uid: params.get("uid"),
      find: params.get("find"),
    };
    this.empty.hidden = this.steps.length > 0;
    this.split.hidden = this.bar.hidden = this.filters.hidden = !this.steps.length;
    if (!this.steps.length) return;
    const last = this.steps[this.steps.length - 1];
    this.step =
      this.route.step === null
        ? last
        : this.steps.reduce((a, b) =>
            Math.abs(b - this.route.step) < Math.abs(a - this.route.step) ? b : a,
          );
    this.drawBar();
    this.split.classList.toggle(
      "chosen",
      this.route.group !== null || this.route.uid !== null || this.route.find !== null,
    );
    const work =
      this.route.find !== null
        ? this.showSearch()
        : this.route.uid !== null
          ? this.showProblem()
          : this.showStep();
    work.catch((error) => {
      if (error.name !== "AbortError" && !this.signal.aborted)
        fill(this.detail, h("p", { class: "error", role: "alert" }, error.message));
    });
  }

  /** The address with some parameters changed; every control goes to such an address. */
  link(changes) {
    const now = {
      step: this.route.step,
      group: this.route.group,
      filter: this.route.filter,
      sort: this.route.sort,
      search: this.route.search,
      uid: null,
      find: null,
      ...changes,
    };
    const kept = Object.fromEntries(
      Object.entries(now).filter(
        ([key, value]) =>
          value !== null &&
          value !== "" &&
          !(key === "filter" && value === "all") &&
          !(key === "sort" && value === "order"),
      ),
    );
    return runLink(this.live.name, "rollouts", kept);
  }

  go(changes) {
    location.hash = this.link(changes);
  }

  drawBar() {
    const at = this.steps.indexOf(this.step),
      last = this.steps.length - 1;
    if (this.bar.contains(document.activeElement) && this.slider) {
      // do not redraw a control in use
      this.slider.max = last;
      this.slider.value = at;
      this.box.value = this.step;
      this.latest.setAttribute("aria-pressed", String(this.route.step === null));
      return;
    }
    const move = (by) =>
      this.go({
        step: this.steps[Math.max(0, Math.min(last, this.steps.indexOf(this.step) + by))],
        group: null,
      });
    this.slider = h("input", {
      type: "range",
      min: 0,
      max: last,
      "aria-label": "Step",
      "aria-valuetext": `step ${this.step}`,
      on: {
        input: debounce(() => this.go({ step: this.steps[this.slider.value], group: null }), 120),
      },
    });
    this.slider.value = at;
    this.box = h("input", {
      type: "number",
      min: this.steps[0],
      max: this.steps[last],
      value: this.step,
      "aria-label": "Step number",
      on: { change: () => this.go({ step: Number(this.box.value), group: null }) },
    });
    this.latest = h(
      "button",
      {
        type: "button",
        "aria-pressed": String(this.route.step === null),
        title: "Show the newest step as the run continues",
        on: { click: () => this.go({ step: null, group: null }) },
      },
      "newest",
    );
    fill(
      this.bar,
      h(
        "button",
        { type: "button", "aria-label": "Previous step", on: { click: () => move(-1) } },
        "‹",
      ),
      this.slider,
      h("button", { type: "button", "aria-label": "Next step", on: { click: () => move(1) } }, "›"),
      h(
        "label",
        { class: "field" },
        h("span", {}, "Step"),
        this.box,
        h("span", { class: "dim" }, `of ${this.steps[last]}`),
      ),
      this.latest,
    );
  }

  drawFilters(counts) {
    const search = h("input", {
      type: "search",
      value: this.route.search,
      placeholder: "Search this step …",
      "aria-label": "Search the responses of this step",
      on: {
        input: debounce(() => this.go({ search: search.value, group: null }), 350),
        keydown: (event) =>
          event.key === "Enter" && event.shiftKey && this.go({ find: search.value }),
      },
    });
    const whole = h(
      "button",
      {
        type: "button",
        class: "quiet",
        on: { click: () => search.value && this.go({ find: search.value }) },
      },
      "search all steps",
    );
    const focused =
      this.filters.contains(document.activeElement) && document.activeElement.type === "search";
    const typed = focused ? document.activeElement.value : null;
    const known = FILTERS.filter(
      ([key]) => key === "all" || counts[key] || key === this.route.filter,
    ).map(([key, text]) => [key, `${text} ${counts[key]}`]);
    fill(
      this.filters,
      search,
      whole,
      choice("Show", known, this.route.filter, (filter) => this.go({ filter, group: null })),
      select("Order", SORTS, this.route.sort, (sort) => this.go({ sort, group: null })),
    );
    if (focused) {
      search.value = typed;
      search.focus();
    }
  }

  async showStep() {
    this.filters.hidden = false;
    const query = {
      run: this.live.name,
      step: this.step,
      filter: this.route.filter,
      sort: this.route.sort,
      search: this.route.search,
    };
    const key = JSON.stringify(query);
    if (this.listKey !== key) {
      const result = await request("groups", query, this.signal);
      this.listKey = key;
      this.result = result;
      this.drawFilters(result.counts);
      this.drawList(result.groups, result.total);
    }
    const group = this.route.group !== null ? this.route.group : this.result.groups[0]?.group;
    for (const link of this.list.querySelectorAll("a.group")) {
      if (link.dataset.group === String(group)) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    if (group === undefined) {
      fill(
        this.detail,
        h(
          "p",
          { class: "empty" },
          this.route.search || this.route.filter !== "all"
            ? "No response matches the filter."
            : "This step has no responses.",
        ),
      );
      return;
    }
    await this.showGroup(group);
  }

  drawList(groups, total) {
    const rows = groups.map((group) => this.groupLink(group));
    const more = h(
      "button",
      {
        type: "button",
        hidden: groups.length >= total,
        on: {
          click: async () => {
            const next = await request(
              "groups",
              {
                run: this.live.name,
                step: this.step,
                filter: this.route.filter,
                sort: this.route.sort,
                search: this.route.search,
                start: this.result.groups.length,
              },
              this.signal,
            );
            this.result.groups.push(...next.groups);
            more.before(...next.groups.map((group) => this.groupLink(group)));
            more.hidden = this.result.groups.length >= total;
          },
        },
      },
      "Show more",
    );
    fill(
      this.list,
      h(
        "p",
        { class: "dim count" },
        `${total} problem${total === 1 ? "" : "s"}, ${this.result.passing} of ${this.result.rows} responses`,
      ),
      rows,
      more,
    );
  }

  groupLink(group) {
    const marks = group.rows.map((row) =>
      h("span", {
        class: `mark ${verdict(row)}${row.passes ? "" : " out"}`,
        title: `${verdictText(row)}, ${row.length} tokens`,
      }),
    );
    const rewards = group.rows.map((row) => row.reward).filter((value) => value !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const first = group.rows.find((row) => row.passes) || group.rows[0];
    return h(
      "a",
      {
        class: "group",
        href: this.link({ step: this.step, group: group.group }),
        "data-group": group.group,
      },
      h("span", { class: "question" }, oneLine(group.question) || group.uid),
      h("span", { class: "snippet" }, oneLine(first.snippet) || "(empty response)"),
      h(
        "span",
        { class: "marks" },
        marks,
        h("span", { class: "dim" }, mean === null ? "" : ` mean reward ${number(mean)}`),
      ),
    );
  }

  async showGroup(groupNumber) {
    const result = await request(
      "group",
      { run: this.live.name, step: this.step, group: groupNumber, full: this.full ? 1 : 0 },
      this.signal,
    );
    this.group = result;
    this.drawGroup();
  }

  drawGroup() {
    const result = this.group;
    const names = colorings(result.rows);
    if (!names.includes(this.color)) this.color = names[0] || "none";
    const colorScale =
      this.color === "none" ? { kind: "none", color: () => "" } : scale(this.color, result.rows);
    const masked = result.rows.some((row) => (row.tokens.loss_mask || []).includes(0));
    const cut = result.rows.some((row) => row.ids.length < row.length);
    const step = (to, text, label) =>
      h(
        "a",
        {
          class: "button",
          "aria-label": label,
          "aria-disabled": String(to === null),
          href: to === null ? null : this.link({ step: this.step, group: to }),
        },
        text,
      );
    fill(
      this.detail,
      h(
        "div",
        { class: "heading" },
        h(
          "a",
          { class: "back", href: this.link({ step: this.step, group: null }) },
          "‹ all problems",
        ),
        h("h2", {}, `Problem ${result.position[0]} of ${result.position[1]}`),
        step(result.before, "‹", "Previous problem"),
        step(result.after, "›", "Next problem"),
        h("span", { class: "grow" }),
        h(
          "a",
          { class: "button", href: this.link({ step: this.step, uid: result.uid }) },
          "Follow this problem",
        ),
      ),
      h(
        "details",
        { class: "prompt", open: true },
        h("summary", {}, "Prompt ", h("code", { class: "dim" }, result.uid)),
        h(
          "div",
          { class: "text" },
          result.prompt.texts
            ? result.prompt.texts.join("")
            : result.question || result.prompt.ids.join(" "),
        ),
        pictures(this.live.name, result.images),
      ),
      h(
        "div",
        { class: "controls" },
        select(
          "Color by",
          [...names.map((name) => [name, columnTitle(name)]), ["none", "none"]],
          this.color,
          (name) => {
            this.color = name;
            this.tokensOpen = true;
            this.drawGroup();
          },
        ),
        this.color === "none" ? null : legend(this.color, colorScale),
        masked
          ? h(
              "span",
              {},
              h("span", { class: "t masked" }, "masked"),
              h("span", { class: "dim" }, " = not in the loss"),
            )
          : null,
        cut
          ? h(
              "button",
              {
                type: "button",
                on: {
                  click: () => {
                    this.full = true;
                    this.showGroup(result.group);
                  },
                },
              },
              "Show full responses",
            )
          : null,
        result.rows[0].texts
          ? null
          : h(
              "span",
              { class: "dim" },
              "Token ids are shown because the folder has no tokenizer for this run.",
            ),
      ),
      h(
        "div",
        { class: "side" },
        result.rows.map((row) => this.card(row, colorScale)),
      ),
    );
  }

  card(row, colorScale) {
    const parts = Object.entries(row.parts).filter(([, value]) => value !== null);
    const advantages = row.tokens.advantages || [];
    const mean = advantages.length
      ? advantages.reduce((a, b) => a + (b || 0), 0) / advantages.length
      : null;
    const facts = [
      row.reward === null ? null : ["reward", number(row.reward)],
      ...(parts.length > 1 || (parts.length && parts[0][1] !== row.reward)
        ? parts.map(([name, value]) => [name, number(value)])
        : []),
      mean === null ? null : ["advantage", number(mean)],
      ["tokens", number(row.length)],
    ].filter(Boolean);
    const hasContinuations = Array.isArray(row.others.classmate_texts);
    const messages = parseMessages(row);
    const others = Object.entries(row.others).filter(
      ([name, value]) =>
        !(hasContinuations && CLASSMATE.includes(name)) && !(messages && isShownHere(name, value)),
    );
    const fromClassmates = !hasContinuations && others.some(([name]) => name.includes("classmate"));
    return h(
      "article",
      {
        class: `card ${verdict(row)}`,
        "aria-label": `Response ${row.index + 1}, ${verdictText(row)}`,
      },
      h(
        "header",
        {},
        h("span", { class: `verdict ${verdict(row)}` }, verdictText(row)),
        h("span", { class: `source from-${row.source}` }, row.source || ""),
        h("span", { class: "grow" }),
        h("span", { class: "dim" }, (Object.hasOwn(FINISH, row.finish) && FINISH[row.finish]) || row.finish),
      ),
      h(
        "dl",
        { class: "facts small" },
        facts.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value))),
      ),
      row.failure ? h("p", { class: "failure" }, h("b", {}, "Not scored: "), row.failure) : null,
      messages ? conversation(this.group.question, messages, row) : null,
      messages ? this.tokensBelow(row, colorScale) : this.tokens(row, colorScale),
      hasContinuations ? classmates(row) : null,
      others.length
        ? h(
            "details",
            { class: "others", open: fromClassmates },
            h(
              "summary",
              {},
              fromClassmates ? "Continued by classmates" : "More about this response",
            ),
            others.map(([name, value]) => other(name, value)),
          )
        : null,
    );
  }

  tokens(row, colorScale) {
    if (!row.ids.length) return h("p", { class: "empty" }, "Empty response.");
    const label = `Tokens of response ${row.index + 1}; arrow keys move from token to token`;
    const numMore = row.length - row.ids.length;
    return [
      tokenBlock(row, this.color, colorScale, label),
      numMore > 0 ? h("p", { class: "dim" }, `… ${numMore} more tokens`) : null,
    ];
  }

  /** The tokens of a conversation: closed until they are wanted. */
  tokensBelow(row, colorScale) {
    return h(
      "details",
      {
        class: "tokensbelow",
        open: this.tokensOpen,
        on: { toggle: (event) => (this.tokensOpen = event.target.open) },
      },
      h("summary", {}, "Tokens, as the model read and wrote them"),
      this.tokens(row, colorScale),
    );
  }

  async showProblem() {
    const query = { run: this.live.name, uid: this.route.uid };
    this.filters.hidden = true;
    let result = await request("problem", query, this.signal);
    this.listKey = null;
    const draw = () => {
      const axis = new Axis();
      this.chart?.remove();
      const visits = result.visits.filter((visit) => visit.reward !== null);
      const x = {
        step: visits.map((visit) => visit.step),
        time: visits.map((visit) => visit.step),
      };
      const progress =
        result.indexed < result.steps
          ? ` Indexed ${result.indexed} of ${result.steps} steps so far …`
          : "";
      fill(
        this.list,
        h(
          "p",
          { class: "dim count" },
          `Sampled in ${result.visits.length} group${result.visits.length === 1 ? "" : "s"}.${progress}`,
        ),
        result.visits.map((visit) =>
          h(
            "a",
            {
              class: "group",
              href: this.link({ step: visit.step, uid: this.route.uid }),
              "aria-current": visit.step === this.step ? "true" : null,
            },
            h("span", { class: "question" }, `step ${visit.step}`),
            h(
              "span",
              { class: "marks" },
              h(
                "span",
                { class: "dim" },
                `${visit.rows} responses, mean reward ${number(visit.reward)}`,
              ),
            ),
          ),
        ),
      );
      const at =
        result.visits.find((visit) => visit.step === this.step) ||
        result.visits[result.visits.length - 1];
      const head = h(
        "div",
        {},
        h(
          "div",
          { class: "heading" },
          h(
            "a",
            { class: "button", href: this.link({ step: this.step }) },
            "‹ all problems of this step",
          ),
          h("h2", {}, "One problem over all steps"),
          h("code", { class: "dim" }, result.uid),
        ),
      );
      if (visits.length > 1) {
        this.chart = new Chart(axis, { title: "Reward of this problem by step", name: result.uid });
        axis.onPick = (step) => this.go({ step, uid: this.route.uid });
        axis.picked = at ? at.step : null;
        this.chart.set([
          { name: "mean", label: "mean", x, y: visits.map((visit) => visit.reward), color: 0 },
          { name: "best", label: "best", x, y: visits.map((visit) => visit.best), color: 2 },
        ]);
        head.append(this.chart.element);
      }
      return [head, at];
    };
    for (;;) {
      const [head, at] = draw();
      if (!at)
        fill(
          this.detail,
          head,
          h(
            "p",
            { class: "empty" },
            result.indexed < result.steps ? "Searching …" : "No step sampled this problem.",
          ),
        );
      else if (
        !this.group ||
        this.group.step !== at.step ||
        this.group.group !== at.group ||
        !this.detail.querySelector(".followed")
      ) {
        this.step = at.step;
        this.drawBar();
        await this.showGroup(at.group);
        this.detail
          .querySelector(".heading")
          .replaceWith(h("div", { class: "heading followed" }, h("h2", {}, `Step ${at.step}`)));
        this.detail.prepend(head);
      } else this.detail.firstChild.replaceWith(head);
      if (result.indexed >= result.steps || this.signal.aborted || this.route.uid !== query.uid)
        return;
      await new Promise((done) => setTimeout(done, 300));
      result = await request("problem", query, this.signal);
      if (this.route.uid !== query.uid) return;
    }
  }

  async showSearch() {
    this.filters.hidden = true;
    this.listKey = null;
    const find = this.route.find;
    const hits = h("div", { class: "hits" }),
      status = h("p", { class: "dim", role: "status" });
    fill(
      this.list,
      h("a", { class: "button", href: this.link({ step: this.step }) }, "‹ back to the step"),
    );
    fill(
      this.detail,
      h("div", { class: "heading" }, h("h2", {}, `“${find}” in all steps`)),
      status,
      hits,
    );
    let start = 0,
      count = 0;
    while (!this.signal.aborted && this.route.find === find) {
      const result = await request(
        "search",
        { run: this.live.name, search: find, start },
        this.signal,
      );
      count += result.hits.length;
      hits.append(
        ...result.hits.map((hit) =>
          h(
            "a",
            {
              class: "group",
              href: this.link({ step: hit.step, group: hit.group, search: "", filter: "all" }),
            },
            h("span", { class: "question" }, oneLine(hit.question)),
            h("span", { class: "snippet" }, oneLine(hit.snippet)),
            h(
              "span",
              { class: "marks" },
              h("span", { class: `mark ${verdict(hit)}` }),
              h("span", { class: "dim" }, ` step ${hit.step}, reward ${number(hit.reward)}`),
            ),
          ),
        ),
      );
      const enough = count >= 100 || result.next === null;
      const progress = enough ? "" : `, searched up to step ${result.next} of ${result.last} …`;
      status.textContent = `${count}${count >= 100 ? " or more" : ""} responses${progress}`;
      if (enough) return;
      start = result.next;
    }
  }

  key(event) {
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) ||
      !this.steps.length ||
      !this.route
    )
      return;
    const at = this.steps.indexOf(this.step);
    if (event.key === "]" && at < this.steps.length - 1)
      this.go({ step: this.steps[at + 1], group: null });
    else if (event.key === "[" && at > 0) this.go({ step: this.steps[at - 1], group: null });
    else if (
      (event.key === "j" || event.key === "k") &&
      this.result &&
      this.route.uid === null &&
      this.route.find === null
    ) {
      const order = this.result.groups.map((group) => group.group);
      const next = order[order.indexOf(this.group?.group) + (event.key === "j" ? 1 : -1)];
      if (next !== undefined) this.go({ step: this.step, group: next });
    }
  }
}

/** The CSS class of a response's verdict: right, wrong, failed or unscored. */
export function verdict(row) {
  if (row.failure) return "failed";
  return row.reward === null || row.reward === undefined
    ? "unscored"
    : row.reward > 0
      ? "right"
      : "wrong";
}

function verdictText(row) {
  return { right: "✓ correct", wrong: "✕ wrong", failed: "! not scored", unscored: "no reward" }[
    verdict(row)
  ];
}

/** The classmates' continuations of the thought, each with its score. */
function classmates(row) {
  const { classmate_texts: texts, classmate_scores: scores, cot } = row.others;
  const seen = row.tokens.cot_mask || [];
  const shown = row.texts
    ? row.texts.filter((_, i) => seen[i]).join("")
    : typeof cot === "string"
      ? cot
      : "";
  const tail = shown.length > TAIL ? `…${shown.slice(-TAIL)}` : shown;
  const query = texts.some((text) => text !== null);
  const title = query
    ? `Continued by classmates from ${shown.length > TAIL ? "the end of " : ""}this thought`
    : "No continuations: the response has no thought";
  return h(
    "section",
    { class: "classmates", "aria-label": title },
    h("h4", {}, title),
    texts.map((text, i) => {
      const score = Array.isArray(scores) ? scores[i] : null;
      const kind =
        text === null || score === null || score === undefined
          ? "unscored"
          : score > 0
            ? "right"
            : "wrong";
      if (text === null)
        return query
          ? h(
              "p",
              { class: "dim" },
              `continuation ${i + 1}: none, the thought filled the context window`,
            )
          : null;
      return h(
        "div",
        { class: `continuation ${kind}` },
        h(
          "div",
          { class: "dim" },
          `continuation ${i + 1}`,
          kind === "unscored" ? "" : `, ${kind === "right" ? "✓" : "✕"} score ${number(score)}`,
        ),
        h(
          "div",
          { class: "text" },
          h("span", { class: "thought" }, tail),
          h("span", { class: "continued" }, text || "(empty)"),
        ),
      );
    }),
  );
}

function other(name, value) {
  const texts = flatTexts(value);
  if (texts)
    return h(
      "div",
      { class: "other" },
      h("h4", {}, name.replaceAll("_", " ")),
      texts.map((text) => h("div", { class: "text" }, text)),
    );
  return h(
    "div",
    { class: "other" },
    h("h4", {}, name.replaceAll("_", " ")),
    h("code", {}, typeof value === "number" ? number(value) : JSON.stringify(value)),
  );
}

/** The texts in a nested column, or null if it holds anything else. */
function flatTexts(value) {
  const all = Array.isArray(value) ? value.flat(3) : [value];
  return all.length && all.every((one) => typeof one === "string" || one === null)
    ? all.map((one) => one ?? "(none)")
    : null;
}

function oneLine(text) {
  return (text || "").replace(/\s+/g, " ").trim();
}
