// The rollouts of a run: steps, problems, groups side by side, one problem followed over the run, search.
import { ask } from "./api.js";
import { Axis, Chart } from "./chart.js";
import { choice, fill, h, later, select } from "./dom.js";
import { number } from "./format.js";
import { runLink } from "./runs.js";
import { colorings, columnTitle, hideTip, legend, scale, tokenBlock } from "./tokens.js";

const FILTERS = [["all", "all"], ["right", "right"], ["wrong", "wrong"], ["truncated", "truncated"], ["failed", "not judged"], ["given", "not by the policy"]];
const SORTS = [["order", "as drawn"], ["longest", "longest first"], ["shortest", "shortest first"], ["reward", "highest reward first"], ["advantage", "biggest advantage first"]];
const CLASSMATE = ["classmate_texts", "classmate_scores", "cot"];  // shown together, under the response
const TAIL = 160;  // characters of a thought before its continuations
const FINISH = { stop: "ended by itself", length: "cut at the length limit", given: "given, not sampled" };

export class Rollouts {
  constructor(body, live, params, signal) {
    Object.assign(this, { body, live, signal, color: null, full: false });
    this.list = h("div", { class: "grouplist" });
    this.detail = h("section", { class: "detail", "aria-label": "Group" });
    this.bar = h("div", { class: "controls steps" });
    this.filters = h("div", { class: "controls" });
    this.empty = h("p", { class: "empty" }, "No rollouts have been written yet. They appear with the first step.");
    fill(body, this.bar, this.filters, this.split = h("div", { class: "split" }, this.list, this.detail), this.empty);
    this.keys = (event) => this.key(event);
    addEventListener("keydown", this.keys);
    this.follow(params);
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
    const latest = this.place && this.place.step === null && this.place.uid === null && this.place.words === null;
    this.known = this.steps.length;
    if (latest && !this.place.group) this.follow(this.params);
    else this.drawBar();
  }

  /** Go where the address says. */
  follow(params) {
    hideTip();
    this.params = params;
    this.known = this.steps.length;
    const whole = (key) => (params.get(key) === null || params.get(key) === "" || Number.isNaN(Number(params.get(key))) ? null : Number(params.get(key)));
    this.place = { step: whole("step"), group: whole("group"), keep: params.get("keep") || "all", sort: params.get("sort") || "order", search: params.get("search") || "",
      uid: params.get("uid"), words: params.get("words") };
    this.empty.hidden = this.steps.length > 0;
    this.split.hidden = this.bar.hidden = this.filters.hidden = !this.steps.length;
    if (!this.steps.length) return;
    const last = this.steps[this.steps.length - 1];
    this.step = this.place.step === null ? last : this.steps.reduce((a, b) => (Math.abs(b - this.place.step) < Math.abs(a - this.place.step) ? b : a));
    this.drawBar();
    this.split.classList.toggle("chosen", this.place.group !== null || this.place.uid !== null || this.place.words !== null);
    const work = this.place.words !== null ? this.showSearch() : this.place.uid !== null ? this.showProblem() : this.showStep();
    work.catch((error) => {
      if (error.name !== "AbortError" && !this.signal.aborted) fill(this.detail, h("p", { class: "trouble", role: "alert" }, error.message));
    });
  }

  /** The address with some parts changed; going there is what every control does. */
  link(changes) {
    const now = { step: this.place.step, group: this.place.group, keep: this.place.keep, sort: this.place.sort, search: this.place.search, uid: null, words: null, ...changes };
    const kept = Object.fromEntries(Object.entries(now).filter(([key, value]) => value !== null && value !== "" && !(key === "keep" && value === "all") && !(key === "sort" && value === "order")));
    return runLink(this.live.name, "rollouts", kept);
  }

  go(changes) {
    location.hash = this.link(changes);
  }

  drawBar() {
    const at = this.steps.indexOf(this.step), last = this.steps.length - 1;
    if (this.bar.contains(document.activeElement) && this.slider) {  // a control in use stays
      this.slider.max = last;
      this.slider.value = at;
      this.box.value = this.step;
      this.latest.setAttribute("aria-pressed", String(this.place.step === null));
      return;
    }
    const move = (by) => this.go({ step: this.steps[Math.max(0, Math.min(last, this.steps.indexOf(this.step) + by))], group: null });
    this.slider = h("input", { type: "range", min: 0, max: last, "aria-label": "Step", "aria-valuetext": `step ${this.step}`,
      on: { input: later(() => this.go({ step: this.steps[this.slider.value], group: null }), 120) } });
    this.slider.value = at;
    this.box = h("input", { type: "number", min: this.steps[0], max: this.steps[last], value: this.step, "aria-label": "Number of the step",
      on: { change: () => this.go({ step: Number(this.box.value), group: null }) } });
    this.latest = h("button", { type: "button", "aria-pressed": String(this.place.step === null), title: "Stay with the newest step while the run goes on",
      on: { click: () => this.go({ step: null, group: null }) } }, "newest");
    fill(this.bar, h("button", { type: "button", "aria-label": "Previous step", on: { click: () => move(-1) } }, "‹"), this.slider,
      h("button", { type: "button", "aria-label": "Next step", on: { click: () => move(1) } }, "›"),
      h("label", { class: "field" }, h("span", {}, "Step"), this.box, h("span", { class: "dim" }, `of ${this.steps[last]}`)), this.latest);
  }

  drawFilters(counts) {
    const search = h("input", { type: "search", value: this.place.search, placeholder: "Search this step …", "aria-label": "Search the responses of this step",
      on: { input: later(() => this.go({ search: search.value, group: null }), 350),
        keydown: (event) => event.key === "Enter" && event.shiftKey && this.go({ words: search.value }) } });
    const whole = h("button", { type: "button", class: "quiet", on: { click: () => search.value && this.go({ words: search.value }) } }, "search all steps");
    const focused = this.filters.contains(document.activeElement) && document.activeElement.type === "search";
    const typed = focused ? document.activeElement.value : null;
    const known = FILTERS.filter(([key]) => key === "all" || counts[key] || key === this.place.keep).map(([key, text]) => [key, `${text} ${counts[key]}`]);
    fill(this.filters, search, whole, choice("Show", known, this.place.keep, (keep) => this.go({ keep, group: null })),
      select("Order", SORTS, this.place.sort, (sort) => this.go({ sort, group: null })));
    if (focused) {
      search.value = typed;
      search.focus();
    }
  }

  async showStep() {
    this.filters.hidden = false;
    const asked = { run: this.live.name, step: this.step, keep: this.place.keep, sort: this.place.sort, search: this.place.search };
    const key = JSON.stringify(asked);
    if (this.listKey !== key) {
      const found = await ask("groups", asked, this.signal);
      this.listKey = key;
      this.found = found;
      this.drawFilters(found.counts);
      this.drawList(found.groups, found.total);
    }
    const group = this.place.group !== null ? this.place.group : this.found.groups[0]?.group;
    for (const link of this.list.querySelectorAll("a.group")) {
      if (link.dataset.group === String(group)) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    if (group === undefined) {
      fill(this.detail, h("p", { class: "empty" }, this.place.search || this.place.keep !== "all" ? "Nothing passes the filter." : "This step has no rows."));
      return;
    }
    await this.showGroup(group);
  }

  drawList(groups, total) {
    const rows = groups.map((group) => this.groupLink(group));
    const more = h("button", { type: "button", hidden: groups.length >= total, on: { click: async () => {
      const next = await ask("groups", { run: this.live.name, step: this.step, keep: this.place.keep, sort: this.place.sort, search: this.place.search, start: this.found.groups.length }, this.signal);
      this.found.groups.push(...next.groups);
      more.before(...next.groups.map((group) => this.groupLink(group)));
      more.hidden = this.found.groups.length >= total;
    } } }, "Show more");
    fill(this.list, h("p", { class: "dim count" }, `${total} problem${total === 1 ? "" : "s"}, ${this.found.passing} of ${this.found.rows} responses`), rows, more);
  }

  groupLink(group) {
    const marks = group.rows.map((row) => h("span", { class: `mark ${verdict(row)}${row.passes ? "" : " out"}`, title: `${verdictText(row)}, ${row.length} tokens` }));
    const rewards = group.rows.map((row) => row.reward).filter((value) => value !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const first = group.rows.find((row) => row.passes) || group.rows[0];
    return h("a", { class: "group", href: this.link({ step: this.step, group: group.group }), "data-group": group.group },
      h("span", { class: "question" }, oneLine(group.question) || group.uid),
      h("span", { class: "snippet" }, oneLine(first.snippet) || "(empty response)"),
      h("span", { class: "marks" }, marks, h("span", { class: "dim" }, mean === null ? "" : ` mean reward ${number(mean)}`)));
  }

  async showGroup(number_) {
    const found = await ask("group", { run: this.live.name, step: this.step, group: number_, full: this.full ? 1 : 0 }, this.signal);
    this.group = found;
    this.drawGroup();
  }

  drawGroup() {
    const found = this.group;
    const names = colorings(found.rows);
    if (!names.includes(this.color)) this.color = names[0] || "none";
    const made = this.color === "none" ? { kind: "none", color: () => "" } : scale(this.color, found.rows);
    const masked = found.rows.some((row) => (row.tokens.loss_mask || []).includes(0));
    const cut = found.rows.some((row) => row.ids.length < row.length);
    const step = (to, text, label) => h("a", { class: "button", "aria-label": label, "aria-disabled": String(to === null), href: to === null ? null : this.link({ step: this.step, group: to }) }, text);
    fill(this.detail,
      h("div", { class: "heading" }, h("a", { class: "back", href: this.link({ step: this.step, group: null }) }, "‹ all problems"),
        h("h2", {}, `Problem ${found.position[0]} of ${found.position[1]}`), step(found.before, "‹", "Previous problem"), step(found.after, "›", "Next problem"),
        h("span", { class: "grow" }), h("a", { class: "button", href: this.link({ step: this.step, uid: found.uid }) }, "Follow this problem")),
      h("details", { class: "prompt", open: true }, h("summary", {}, "Prompt ", h("code", { class: "dim" }, found.uid)),
        h("div", { class: "text" }, found.prompt.texts ? found.prompt.texts.join("") : found.question || found.prompt.ids.join(" "))),
      h("div", { class: "controls" },
        select("Color by", [...names.map((name) => [name, columnTitle(name)]), ["none", "nothing"]], this.color, (name) => { this.color = name; this.drawGroup(); }),
        this.color === "none" ? null : legend(this.color, made),
        masked ? h("span", {}, h("span", { class: "t masked" }, "like this"), h("span", { class: "dim" }, " not in the loss")) : null,
        cut ? h("button", { type: "button", on: { click: () => { this.full = true; this.showGroup(found.group); } } }, "Show whole responses") : null,
        found.rows[0].texts ? null : h("span", { class: "dim" }, "No tokenizer of this run lies below the folder: token ids are shown.")),
      h("div", { class: "side" }, found.rows.map((row) => this.card(row, made))));
  }

  card(row, made) {
    const parts = Object.entries(row.parts).filter(([, value]) => value !== null);
    const advantages = row.tokens.advantages || [];
    const mean = advantages.length ? advantages.reduce((a, b) => a + (b || 0), 0) / advantages.length : null;
    const facts = [
      row.reward === null ? null : ["reward", number(row.reward)],
      ...(parts.length > 1 || (parts.length && parts[0][1] !== row.reward) ? parts.map(([name, value]) => [name, number(value)]) : []),
      mean === null ? null : ["advantage", number(mean)], ["tokens", number(row.length)],
    ].filter(Boolean);
    const continued = Array.isArray(row.others.classmate_texts);
    const others = Object.entries(row.others).filter(([name]) => !(continued && CLASSMATE.includes(name)));
    const theirs = !continued && others.some(([name]) => name.includes("classmate"));
    return h("article", { class: `card ${verdict(row)}`, "aria-label": `Response ${row.index + 1}, ${verdictText(row)}` },
      h("header", {}, h("span", { class: `verdict ${verdict(row)}` }, verdictText(row)),
        h("span", { class: `source from-${row.source}` }, row.source || ""), h("span", { class: "grow" }), h("span", { class: "dim" }, FINISH[row.finish] || row.finish)),
      h("dl", { class: "facts small" }, facts.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value)))),
      row.failure ? h("p", { class: "failure" }, h("b", {}, "Not judged: "), row.failure) : null,
      row.ids.length ? tokenBlock(row, this.color, made, `Tokens of response ${row.index + 1}; arrow keys read them one by one`) : h("p", { class: "empty" }, "Empty response."),
      row.ids.length < row.length ? h("p", { class: "dim" }, `… ${row.length - row.ids.length} more tokens`) : null,
      continued ? classmates(row) : null,
      others.length ? h("details", { class: "others", open: theirs }, h("summary", {}, theirs ? "Continued by classmates" : "More about this response"),
        others.map(([name, value]) => other(name, value))) : null);
  }

  async showProblem() {
    const asked = { run: this.live.name, uid: this.place.uid };
    this.filters.hidden = true;
    let found = await ask("follow", asked, this.signal);
    this.listKey = null;
    const draw = () => {
      const axis = new Axis();
      this.chart?.remove();
      const visits = found.visits.filter((visit) => visit.reward !== null);
      const x = { step: visits.map((visit) => visit.step), time: visits.map((visit) => visit.step) };
      const looked = found.looked < found.steps ? ` Looked through ${found.looked} of ${found.steps} steps so far …` : "";
      fill(this.list, h("p", { class: "dim count" }, `Visited ${found.visits.length} time${found.visits.length === 1 ? "" : "s"}.${looked}`),
        found.visits.map((visit) => h("a", { class: "group", href: this.link({ step: visit.step, uid: this.place.uid }), "aria-current": visit.step === this.step ? "true" : null },
          h("span", { class: "question" }, `step ${visit.step}`), h("span", { class: "marks" }, h("span", { class: "dim" }, `${visit.rows} responses, mean reward ${number(visit.reward)}`)))));
      const at = found.visits.find((visit) => visit.step === this.step) || found.visits[found.visits.length - 1];
      const head = h("div", {}, h("div", { class: "heading" }, h("a", { class: "button", href: this.link({ step: this.step }) }, "‹ all problems of this step"), h("h2", {}, "One problem over the run"), h("code", { class: "dim" }, found.uid)));
      if (visits.length > 1) {
        this.chart = new Chart(axis, { title: "Reward at each visit", name: found.uid });
        axis.onPick = (step) => this.go({ step, uid: this.place.uid });
        axis.picked = at ? at.step : null;
        this.chart.set([{ name: "mean", label: "mean", x, y: visits.map((visit) => visit.reward), color: 0 }, { name: "best", label: "best", x, y: visits.map((visit) => visit.best), color: 2 }]);
        head.append(this.chart.element);
      }
      return [head, at];
    };
    for (;;) {
      const [head, at] = draw();
      if (!at) fill(this.detail, head, h("p", { class: "empty" }, found.looked < found.steps ? "Looking …" : "No step visited this problem."));
      else if (!this.group || this.group.step !== at.step || this.group.group !== at.group || !this.detail.querySelector(".followed")) {
        this.step = at.step;
        this.drawBar();
        await this.showGroup(at.group);
        this.detail.querySelector(".heading").replaceWith(h("div", { class: "heading followed" }, h("h2", {}, `Step ${at.step}`)));
        this.detail.prepend(head);
      } else this.detail.firstChild.replaceWith(head);
      if (found.looked >= found.steps || this.signal.aborted || this.place.uid !== asked.uid) return;
      await new Promise((done) => setTimeout(done, 300));
      found = await ask("follow", asked, this.signal);
      if (this.place.uid !== asked.uid) return;
    }
  }

  async showSearch() {
    this.filters.hidden = true;
    this.listKey = null;
    const words = this.place.words;
    const hits = h("div", { class: "hits" }), status = h("p", { class: "dim", role: "status" });
    fill(this.list, h("a", { class: "button", href: this.link({ step: this.step }) }, "‹ back to the step"));
    fill(this.detail, h("div", { class: "heading" }, h("h2", {}, `“${words}” in all steps`)), status, hits);
    let start = 0, count = 0;
    while (!this.signal.aborted && this.place.words === words) {
      const found = await ask("search", { run: this.live.name, words, start }, this.signal);
      count += found.hits.length;
      hits.append(...found.hits.map((hit) => h("a", { class: "group", href: this.link({ step: hit.step, group: hit.group, search: "", keep: "all" }) },
        h("span", { class: "question" }, oneLine(hit.question)), h("span", { class: "snippet" }, oneLine(hit.snippet)),
        h("span", { class: "marks" }, h("span", { class: `mark ${verdict(hit)}` }), h("span", { class: "dim" }, ` step ${hit.step}, reward ${number(hit.reward)}`)))));
      const enough = count >= 100 || found.next === null;
      status.textContent = `${count}${count >= 100 ? " or more" : ""} responses${enough ? "" : `, at step ${found.next} of ${found.last} …`}`;
      if (enough) return;
      start = found.next;
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || !this.steps.length || !this.place) return;
    const at = this.steps.indexOf(this.step);
    if (event.key === "]" && at < this.steps.length - 1) this.go({ step: this.steps[at + 1], group: null });
    else if (event.key === "[" && at > 0) this.go({ step: this.steps[at - 1], group: null });
    else if ((event.key === "j" || event.key === "k") && this.found && this.place.uid === null && this.place.words === null) {
      const order = this.found.groups.map((group) => group.group);
      const next = order[order.indexOf(this.group?.group) + (event.key === "j" ? 1 : -1)];
      if (next !== undefined) this.go({ step: this.step, group: next });
    }
  }
}

/** right, wrong or failed, by the reward. */
export function verdict(row) {
  if (row.failure) return "failed";
  return row.reward === null || row.reward === undefined ? "unjudged" : row.reward > 0 ? "right" : "wrong";
}

function verdictText(row) {
  return { right: "✓ right", wrong: "✕ wrong", failed: "! not judged", unjudged: "no reward" }[verdict(row)];
}

/** What classmates made of the thought they were shown: its end, then each continuation with what it earned. */
function classmates(row) {
  const { classmate_texts: texts, classmate_scores: scores, cot } = row.others;
  const seen = row.tokens.cot_mask || [];
  const shown = row.texts ? row.texts.filter((_, i) => seen[i]).join("") : typeof cot === "string" ? cot : "";
  const tail = shown.length > TAIL ? `…${shown.slice(-TAIL)}` : shown;
  const asked = texts.some((text) => text !== null);
  const title = asked ? `Continued by classmates from ${shown.length > TAIL ? "the end of " : ""}this thought` : "Classmates were not asked: there was no thought to show";
  return h("section", { class: "classmates", "aria-label": title }, h("h4", {}, title),
    texts.map((text, i) => {
      const score = Array.isArray(scores) ? scores[i] : null;
      const kind = text === null || score === null || score === undefined ? "unjudged" : score > 0 ? "right" : "wrong";
      if (text === null) return asked ? h("p", { class: "dim" }, `continuation ${i + 1}: no answer, the thought filled its context`) : null;
      return h("div", { class: `continuation ${kind}` },
        h("div", { class: "dim" }, `continuation ${i + 1}`, kind === "unjudged" ? "" : `, ${kind === "right" ? "✓" : "✕"} score ${number(score)}`),
        h("div", { class: "text" }, h("span", { class: "thought" }, tail), h("span", { class: "said" }, text || "(said nothing)")));
    }));
}

function other(name, value) {
  const texts = flatTexts(value);
  if (texts) return h("div", { class: "other" }, h("h4", {}, name.replaceAll("_", " ")), texts.map((text) => h("div", { class: "text" }, text)));
  return h("div", { class: "other" }, h("h4", {}, name.replaceAll("_", " ")), h("code", {}, typeof value === "number" ? number(value) : JSON.stringify(value)));
}

/** Texts in a column of any nesting, or null when there are none worth a block. */
function flatTexts(value) {
  const all = Array.isArray(value) ? value.flat(3) : [value];
  return all.length && all.every((one) => typeof one === "string" || one === null) ? all.map((one) => one ?? "(none)") : null;
}

function oneLine(text) {
  return (text || "").replace(/\s+/g, " ").trim();
}
