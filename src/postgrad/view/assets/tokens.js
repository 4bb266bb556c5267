// The tokens of a response: colored by one column, masked tokens marked, values in a tooltip.
import { fill, h } from "./dom.js";
import { number } from "./format.js";

export const SOURCES = ["policy", "demonstration", "replay", "classmate", "tool"];
const TITLES = {
  behavior_logprobs: "log-prob",
  old_logprobs: "old log-prob",
  advantages: "advantage",
  entropy: "entropy",
  token_source: "token source",
};
const ORDER = ["behavior_logprobs", "advantages", "entropy", "token_source"];

export function columnTitle(name) {
  return (Object.hasOwn(TITLES, name) && TITLES[name]) || name.replaceAll("_", " ");
}

function column(row, name) {
  return Object.hasOwn(row.tokens, name) ? row.tokens[name] : [];
}

/** Columns that can color the tokens, the standard ones first. */
export function colorings(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.tokens)))].filter(
    (name) => name !== "loss_mask",
  );
  return [
    ...ORDER.filter((name) => names.includes(name)),
    ...names.filter((name) => !ORDER.includes(name)).sort(),
  ];
}

/**
 * The color scale of one column: {color(value) -> css or "", kind, low, high}. The range is that of
 * the whole group.
 */
export function scale(name, rows) {
  if (name === "token_source") return { kind: "sources", color: () => "" };
  let low = Infinity,
    high = -Infinity;
  for (const row of rows)
    for (const value of column(row, name)) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  if (!(low <= high)) return { kind: "none", low: 0, high: 0, color: () => "" };
  if (name.endsWith("logprobs")) {
    const lowest = Math.min(-0.5, low);
    return {
      kind: "surprise",
      low: lowest,
      high: 0,
      color: (v) => tint("--surprise", Math.sqrt(Math.min(1, v / lowest))),
    };
  }
  if (name.includes("advantage") || low < 0) {
    const largest = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return {
      kind: "signed",
      low: -largest,
      high: largest,
      color: (v) => tint(v < 0 ? "--minus" : "--plus", Math.abs(v) / largest),
    };
  }
  return {
    kind: "amount",
    low: Math.min(0, low),
    high,
    color: (v) => tint("--amount", high > 0 ? v / high : 0),
  };
}

function tint(variable, share) {
  return share > 0.01
    ? `color-mix(in srgb, var(${variable}) ${Math.round(Math.min(1, share) * 70)}%, transparent)`
    : "";
}

/** The legend of a color scale. */
export function legend(name, colorScale) {
  if (colorScale.kind === "none") return h("span", { class: "dim" }, "no values");
  if (colorScale.kind === "sources")
    return h(
      "span",
      { class: "sources" },
      SOURCES.map((one) => h("span", { class: `t from-${one}` }, one)),
    );
  return h(
    "span",
    { class: "ramp" },
    h("span", {}, number(colorScale.low)),
    h("span", { class: `gradient ${colorScale.kind}`, "aria-hidden": "true" }),
    h("span", {}, number(colorScale.high)),
  );
}

let tip = null;

/** The tokens of a row in a block; arrow keys move from token to token. */
export function tokenBlock(row, name, colorScale, label) {
  const texts = row.texts || row.ids.map((id) => `⟨${id}⟩ `);
  const values = column(row, name);
  const mask = row.tokens.loss_mask || [];
  const sources = row.tokens.token_source || [];
  const block = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": label });
  const spans = texts.map((text, i) => {
    const span = document.createElement("span");
    span.className = "t";
    if (mask[i] === 0) span.className += " masked";
    if (colorScale.kind === "sources" && sources[i] !== undefined)
      span.className += ` from-${SOURCES[sources[i]] || "tool"}`;
    else if (values[i] !== null && values[i] !== undefined)
      span.style.backgroundColor = colorScale.color(values[i]);
    span.textContent = text === "\n" ? "⏎\n" : text;
    span.dataset.i = i;
    return span;
  });
  block.append(...spans);
  const show = (i) => {
    block.querySelector(".here")?.classList.remove("here");
    if (i === null) return hideTip();
    spans[i].classList.add("here");
    return showTip(spans[i], row, i, texts[i]);
  };
  let at = null;
  block.addEventListener(
    "pointerover",
    (event) => event.target.dataset.i && show(Number(event.target.dataset.i)),
  );
  block.addEventListener("pointerleave", () => show(null));
  block.addEventListener("blur", () => {
    at = null;
    show(null);
  });
  block.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") show((at = null));
    if (!move || !spans.length) return;
    at = Math.max(0, Math.min(spans.length - 1, at === null ? 0 : at + move));
    show(at);
    spans[at].scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });
  return block;
}

function showTip(span, row, i, text) {
  tip ||= h("div", { class: "tip", role: "status" });
  const lines = Object.entries(row.tokens).map(([name, values]) => {
    const value = values[i];
    const shown =
      name === "token_source"
        ? SOURCES[value] || value
        : name === "loss_mask"
          ? value
            ? "in the loss"
            : "not in the loss"
          : number(value);
    return h(
      "div",
      {},
      h("dt", {}, name === "loss_mask" ? "loss" : columnTitle(name)),
      h("dd", {}, shown),
    );
  });
  fill(
    tip,
    h("code", {}, JSON.stringify(text)),
    h("span", { class: "dim" }, ` token ${i + 1}, id ${row.ids[i]}`),
    h("dl", {}, lines),
  );
  document.body.append(tip);
  const box = span.getBoundingClientRect(),
    own = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - own.width - 8));
  const above = box.bottom + own.height + 10 > innerHeight;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above ? box.top - own.height - 6 : box.bottom + 6) + scrollY}px`;
}

export function hideTip() {
  if (tip) tip.remove();
}
