// Line and band charts in SVG. The charts of a page share one Axis: zoom, cursor, smoothing, unit.
import { download, fileName, fill, h, s, announce } from "./dom.js";
import { duration, number } from "./format.js";
import { toCsv } from "./table.js";

const HEIGHT = 170;
const MARGIN = { left: 48, right: 10, top: 8, bottom: 24 };

let charts = 0;

/** The x axis that the charts of a page share. */
export class Axis {
  constructor() {
    this.mode = "step";
    this.smoothing = 0;
    this.zoom = null; // [from, to] in x units; null: no zoom
    this.cursor = null;
    this.picked = null;
    this.charts = new Set();
    this.onPick = () => {};
  }

  set(changes) {
    if ("mode" in changes && changes.mode !== this.mode) this.zoom = this.cursor = null;
    Object.assign(this, changes);
    for (const chart of this.charts) chart.draw();
  }

  point(x) {
    this.cursor = x;
    for (const chart of this.charts) chart.drawCursor();
  }
}

export class Chart {
  /** options: {title, kind: line|band, name (for files), xLabel} */
  constructor(axis, options) {
    this.axis = axis;
    this.options = options;
    this.series = [];
    this.events = [];
    this.hidden = new Set();
    this.width = 0;
    this.clip = `clip${++charts}`;
    this.legend = h("div", { class: "legend" });
    this.svg = s("svg", {
      class: "plot",
      height: HEIGHT,
      tabindex: 0,
      role: "img",
      "aria-roledescription": "chart",
    });
    const save = (kind) =>
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          "aria-label": `Save the chart ${options.title} as ${kind}`,
          on: { click: () => this.save(kind) },
        },
        kind,
      );
    this.element = h(
      "figure",
      { class: "chart" },
      h(
        "figcaption",
        {},
        h("h3", { title: options.title }, options.title),
        h("span", { class: "tools" }, save("SVG"), save("PNG"), save("CSV")),
        (this.position = h("span", { class: "position" })),
      ),
      this.legend,
      this.svg,
    );
    this.watch();
    axis.charts.add(this);
    this.size = new ResizeObserver(() => this.resize());
    this.size.observe(this.svg);
  }

  remove() {
    this.axis.charts.delete(this);
    this.size.disconnect();
  }

  /** series: [{name, label, x: {step, time}, y, gaps, color}]; gaps may be absent; events: [{step, time, event, text}] */
  set(series, events = []) {
    this.series = series;
    this.events = events;
    this.draw();
  }

  resize() {
    const width = Math.round(this.svg.getBoundingClientRect().width);
    if (width && width !== this.width) {
      this.width = width;
      this.draw();
    }
  }

  xs(series) {
    return series.x[this.axis.mode];
  }

  visible() {
    return this.series.filter((one) => !this.hidden.has(one.name));
  }

  extent() {
    let low = Infinity,
      high = -Infinity;
    for (const one of this.visible()) {
      const xs = this.xs(one);
      if (!xs.length) continue;
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
    return low <= high ? [low, high === low ? low + 1 : high] : [0, 1];
  }

  draw() {
    if (this.waiting || !this.width) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.drawNow();
    });
  }

  drawNow() {
    const [from, to] = this.axis.zoom || this.extent();
    const inner = {
      x: MARGIN.left,
      y: MARGIN.top,
      w: this.width - MARGIN.left - MARGIN.right,
      h: HEIGHT - MARGIN.top - MARGIN.bottom,
    };
    this.scale = { from, to, inner, x: (v) => inner.x + ((v - from) / (to - from)) * inner.w };
    this.layers = this.options.kind === "band" ? this.bands(from, to) : this.lines(from, to);
    const [low, high] = this.range();
    this.scale.low = low;
    this.scale.high = high;
    this.scale.y = (v) => inner.y + inner.h - ((v - low) / (high - low)) * inner.h;
    fill(
      this.svg,
      s(
        "clipPath",
        { id: this.clip },
        s("rect", { x: inner.x - 4, y: 0, width: inner.w + 8, height: inner.y + inner.h }),
      ),
      this.axes(),
      this.marks(),
      s("g", { "clip-path": `url(#${this.clip})` }, this.shapes()),
      (this.cursorLayer = s("g", { class: "cursor" })),
    );
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.describe());
    this.svg.dataset.points = String(this.layers.reduce((n, layer) => n + layer.xs.length, 0));
    this.svg.dataset.from = String(from);
    this.svg.dataset.to = String(to);
    this.drawCursor();
  }

  /** The points in view, and one more per side so that lines reach the edge; smoothed if set. */
  lines(from, to) {
    return this.visible().map((one) => {
      const xs = this.xs(one);
      let start = lowerBound(xs, from),
        end = lowerBound(xs, to);
      start = Math.max(0, start - 1);
      end = Math.min(xs.length, end + 2);
      const smooth =
        this.axis.smoothing > 0 && xs.length > 8 ? smoothed(one.y, this.axis.smoothing) : null;
      return {
        one,
        xs: xs.slice(start, end),
        raw: one.y.slice(start, end),
        ys: (smooth || one.y).slice(start, end),
        gaps: one.gaps ? one.gaps.slice(start, end) : [],
        smooth: !!smooth,
      };
    });
  }

  bands(from, to) {
    const layers = this.lines(from, to);
    const floor = new Map();
    for (const layer of layers) {
      layer.base = layer.xs.map((x) => floor.get(x) || 0);
      layer.top = layer.xs.map((x, i) => layer.base[i] + layer.ys[i]);
      layer.xs.forEach((x, i) => floor.set(x, layer.top[i]));
    }
    return layers;
  }

  range() {
    const band = this.options.kind === "band";
    let low = band ? 0 : Infinity,
      high = -Infinity;
    for (const layer of this.layers) {
      const values = band ? layer.top : layer.smooth ? trimmed(layer.raw, layer.ys) : layer.ys;
      for (const value of values) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (!(low <= high)) return [0, 1];
    // Smoothing a constant leaves rounding errors, between which there are no round numbers.
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high)))
      return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const padding = (high - low) * 0.06;
    return [low >= 0 && low - padding < 0 ? 0 : low - (band ? 0 : padding), high + padding];
  }

  axes() {
    const { inner, from, to, low, high } = this.scale;
    const group = s("g", { class: "axes" });
    for (const value of ticks(low, high, 4)) {
      const y = this.scale.y(value);
      group.append(
        s("line", { class: "grid", x1: inner.x, x2: inner.x + inner.w, y1: y, y2: y }),
        s("text", { x: inner.x - 6, y: y + 4, "text-anchor": "end" }, tickText(value)),
      );
    }
    const count = Math.max(2, Math.floor(inner.w / (this.axis.mode === "time" ? 90 : 55)));
    const time = this.axis.mode === "time";
    for (const value of time
      ? timeTicks(from, to, count)
      : ticks(from, to, count).filter((v) => Number.isInteger(v))) {
      const x = this.scale.x(value);
      group.append(
        s("line", {
          class: "tick",
          x1: x,
          x2: x,
          y1: inner.y + inner.h,
          y2: inner.y + inner.h + 4,
        }),
        s(
          "text",
          { x, y: HEIGHT - 6, "text-anchor": x > this.width - 30 ? "end" : "middle" },
          time ? duration(value) : String(value),
        ),
      );
    }
    group.append(
      s("line", {
        class: "base",
        x1: inner.x,
        x2: inner.x + inner.w,
        y1: inner.y + inner.h,
        y2: inner.y + inner.h,
      }),
    );
    return group;
  }

  marks() {
    const { inner, from, to } = this.scale;
    const base = inner.y + inner.h;
    const shown = this.events
      .map((event) => [event, event[this.axis.mode]])
      .filter(([, x]) => x !== null && x >= from && x <= to);
    return s(
      "g",
      { class: "events" },
      shown.map(([event, value]) => {
        const x = this.scale.x(value);
        const hasLine = event.event !== "checkpoint";
        return s(
          "g",
          { class: `mark ${event.event}`, "data-event": event.event },
          hasLine ? s("line", { x1: x, x2: x, y1: inner.y, y2: base }) : null,
          s("path", { d: `M${x - 4},${base + 5}L${x + 4},${base + 5}L${x},${base - 2}Z` }),
          s(
            "title",
            {},
            `${event.event} at step ${event.step}${event.text ? `: ${event.text}` : ""}`,
          ),
        );
      }),
    );
  }

  shapes() {
    const { x, y } = this.scale;
    const pixels = this.scale.inner.w;
    return this.layers.flatMap((layer) => {
      const color = `c${layer.one.color % 8}`;
      if (this.options.kind === "band")
        return [s("path", { class: `area ${color}`, d: area(layer, x, y) })];
      const out = [];
      const points = (ys) => linePoints(layer.xs, ys, layer.gaps, x, pixels);
      if (layer.smooth)
        out.push(s("path", { class: `line faint ${color}`, d: path(points(layer.raw), y) }));
      const drawn = points(layer.ys);
      out.push(s("path", { class: `line ${color}`, d: path(drawn, y) }));
      const dots = layer.xs.length <= 40 ? drawn : drawn.filter(isIsolated);
      out.push(
        ...dots.map(([px, value]) =>
          s("circle", {
            class: `dot ${color}`,
            cx: px,
            cy: y(value),
            r: layer.xs.length === 1 ? 3.5 : 2.5,
          }),
        ),
      );
      return out;
    });
  }

  drawCursor() {
    if (!this.cursorLayer || !this.scale) return;
    const { inner, from, to } = this.scale;
    const at = this.axis.cursor;
    const parts = [];
    const line = (value, name) =>
      s("line", {
        class: name,
        x1: this.scale.x(value),
        x2: this.scale.x(value),
        y1: inner.y,
        y2: inner.y + inner.h,
      });
    if (
      this.axis.picked !== null &&
      this.axis.mode === "step" &&
      this.axis.picked >= from &&
      this.axis.picked <= to
    )
      parts.push(line(this.axis.picked, "picked"));
    if (this.drag) {
      const [a, b] = [this.drag.from, this.drag.to].sort((p, q) => p - q);
      parts.push(s("rect", { class: "brush", x: a, width: b - a, y: inner.y, height: inner.h }));
    }
    if (at !== null && at >= from && at <= to) {
      parts.push(line(at, "hair"));
      for (const layer of this.layers) {
        const i = nearest(layer.xs, at);
        const value = layer.top ? layer.top[i] : layer.ys[i];
        if (i >= 0 && Number.isFinite(value))
          parts.push(
            s("circle", {
              class: `dot c${layer.one.color % 8}`,
              cx: this.scale.x(layer.xs[i]),
              cy: this.scale.y(value),
              r: 3.5,
            }),
          );
      }
    }
    fill(this.cursorLayer, parts);
    this.drawLegend();
  }

  drawLegend() {
    const at = this.axis.cursor;
    const entries = this.series.map((one) => {
      const xs = this.xs(one);
      const i = at === null ? xs.length - 1 : nearest(xs, at);
      return { one, value: i >= 0 ? number(one.y[i]) : "–", step: i >= 0 ? one.x.step[i] : null };
    });
    const step = entries.find((entry) => entry.step !== null)?.step;
    const key =
      entries.map((e) => e.one.name + e.value + this.hidden.has(e.one.name)).join("|") + step;
    if (this.legendKey === key) return;
    this.position.textContent = this.positionText(step, at);
    const same = this.legendNames === this.series.map((one) => one.name).join("|");
    this.legendKey = key;
    if (same) {
      // keep the buttons, so that a focused one keeps the focus
      entries.forEach((entry, i) => {
        this.legend.children[i].setAttribute(
          "aria-pressed",
          String(!this.hidden.has(entry.one.name)),
        );
        this.legend.children[i].lastChild.textContent = entry.value;
      });
      return;
    }
    this.legendNames = this.series.map((one) => one.name).join("|");
    fill(
      this.legend,
      entries.map((entry) =>
        h(
          "button",
          {
            type: "button",
            class: "key",
            "aria-pressed": String(!this.hidden.has(entry.one.name)),
            title: entry.one.name,
            on: { click: () => this.toggle(entry.one.name) },
          },
          h("span", { class: `swatch c${entry.one.color % 8}` }),
          h("span", { class: "label" }, entry.one.label),
          h("span", { class: "value" }, entry.value),
        ),
      ),
    );
  }

  positionText(step, at) {
    const word = this.options.unit || "step";
    return step === undefined ? "" : at === null ? `${word} ${step}` : `at ${word} ${step}`;
  }

  toggle(name) {
    if (this.hidden.has(name)) this.hidden.delete(name);
    else if (this.hidden.size < this.series.length - 1) this.hidden.add(name);
    this.legendKey = "";
    this.draw();
  }

  describe() {
    const parts = this.series.map((one) => {
      const last = one.y[one.y.length - 1];
      return one.y.length
        ? `${one.label}: from ${number(one.y[0])} to ${number(last)}`
        : `${one.label}: no values`;
    });
    const values = parts.join("; ") || "No values yet";
    const keys = "Arrow keys move the cursor, plus and minus zoom, Escape resets the zoom.";
    return `${this.options.title}. ${values}. ${keys}`;
  }

  // Mouse and keyboard

  watch() {
    const value = (event) => {
      const box = this.svg.getBoundingClientRect();
      const { inner, from, to } = this.scale;
      const px = Math.min(inner.x + inner.w, Math.max(inner.x, event.clientX - box.left));
      return { px, x: from + ((px - inner.x) / inner.w) * (to - from) };
    };
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.scale) return;
      const at = value(event);
      if (this.drag) this.drag.to = at.px;
      this.axis.point(this.snap(at.x));
    });
    this.svg.addEventListener("pointerleave", () => {
      if (!this.drag) this.axis.point(null);
    });
    this.svg.addEventListener("pointerdown", (event) => {
      if (!this.scale || event.button !== 0 || event.pointerType === "touch") return;
      const at = value(event);
      this.drag = { from: at.px, to: at.px, x: at.x };
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const drag = this.drag;
      this.drag = null;
      if (!drag || !this.scale) return;
      const at = value(event);
      if (Math.abs(at.px - drag.from) > 6)
        this.axis.set({ zoom: [drag.x, at.x].sort((a, b) => a - b) });
      else this.pick(this.snap(at.x));
    });
    this.svg.addEventListener("pointercancel", () => {
      this.drag = null;
    });
    this.svg.addEventListener("dblclick", () => this.axis.set({ zoom: null }));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.axis.point(null));
  }

  pick(x) {
    if (x === null) return;
    const one = this.visible().find((series) => this.xs(series).length);
    const i = one ? nearest(this.xs(one), x) : -1;
    if (i >= 0) this.axis.onPick(one.x.step[i]);
  }

  snap(x) {
    let best = null;
    for (const layer of this.layers) {
      const i = nearest(layer.xs, x);
      if (i >= 0 && (best === null || Math.abs(layer.xs[i] - x) < Math.abs(best - x)))
        best = layer.xs[i];
    }
    return best;
  }

  key(event) {
    const xs = this.layers && this.layers[0] ? this.layers[0].xs : [];
    if (!xs.length) return;
    const [from, to] = [this.scale.from, this.scale.to];
    const at = this.axis.cursor === null ? xs[xs.length - 1] : this.axis.cursor;
    const i = nearest(xs, at);
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const move = (event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 10 : 1);
      const next = this.axis.cursor === null ? i : Math.max(0, Math.min(xs.length - 1, i + move));
      this.axis.point(xs[next]);
      announce(
        `${this.options.unit === "layer" ? "Layer" : "Step"} ${this.layers[0].one.x.step[nearest(this.xs(this.layers[0].one), xs[next])]}: ` +
          this.layers
            .map((layer) => `${layer.one.label} ${number(layer.ys[nearest(layer.xs, xs[next])])}`)
            .join(", "),
      );
    } else if (event.key === "+" || event.key === "=") {
      this.axis.set({ zoom: [at - (at - from) / 2, at + (to - at) / 2] });
    } else if (event.key === "-") {
      const [low, high] = this.extent();
      const wider = [Math.max(low, at - (at - from) * 2), Math.min(high, at + (to - at) * 2)];
      this.axis.set({ zoom: wider[0] <= low && wider[1] >= high ? null : wider });
    } else if (event.key === "Escape") {
      this.axis.set({ zoom: null, cursor: null });
    } else if (event.key === "Enter") {
      this.pick(at);
    } else return;
    event.preventDefault();
  }

  // Saving

  save(kind) {
    const name = fileName(this.options.name || "chart", this.options.title);
    if (kind === "CSV") return download(`${name}.csv`, this.csv(), "text/csv");
    const text = this.svgText();
    if (kind === "SVG") return download(`${name}.svg`, text, "image/svg+xml");
    return this.png(text, 2).then((blob) => download(`${name}.png`, blob));
  }

  csv() {
    const lines = [["series", "step", "seconds", "value"]];
    for (const one of this.series)
      one.y.forEach((value, i) => lines.push([one.label, one.x.step[i], one.x.time[i], value]));
    return toCsv(lines);
  }

  /** The chart as a self-contained SVG file with title, legend and styles. */
  svgText() {
    const top = 40;
    const copy = this.svg.cloneNode(true);
    const shapes = [...this.svg.querySelectorAll("*")],
      copies = [...copy.querySelectorAll("*")];
    shapes.forEach((node, i) => {
      const style = getComputedStyle(node);
      for (const key of [
        "fill",
        "stroke",
        "stroke-width",
        "opacity",
        "fill-opacity",
        "font-family",
        "font-size",
        "stroke-dasharray",
      ]) {
        copies[i].setAttribute(key, style.getPropertyValue(key));
      }
      copies[i].removeAttribute("class");
    });
    const page = getComputedStyle(document.body);
    const ink = page.color,
      font = page.fontFamily;
    const out = s(
      "svg",
      {
        xmlns: "http://www.w3.org/2000/svg",
        width: this.width,
        height: HEIGHT + top,
        viewBox: `0 0 ${this.width} ${HEIGHT + top}`,
      },
      s("rect", { width: this.width, height: HEIGHT + top, fill: page.backgroundColor }),
      s(
        "text",
        { x: 10, y: 16, fill: ink, "font-family": font, "font-size": 13, "font-weight": 600 },
        this.options.title,
      ),
    );
    let x = 10;
    for (const one of this.visible()) {
      const swatch = this.legend.querySelectorAll(".swatch")[this.series.indexOf(one)];
      out.append(
        s("rect", {
          x,
          y: 26,
          width: 10,
          height: 3,
          fill: swatch ? getComputedStyle(swatch).backgroundColor : ink,
        }),
        s("text", { x: x + 14, y: 32, fill: ink, "font-family": font, "font-size": 11 }, one.label),
      );
      x += 30 + one.label.length * 6;
    }
    out.append(s("g", { transform: `translate(0 ${top})` }, [...copy.childNodes]));
    return new XMLSerializer().serializeToString(out);
  }

  async png(text, factor) {
    const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    try {
      const image = new Image();
      image.src = address;
      await image.decode();
      const canvas = h("canvas", { width: image.width * factor, height: image.height * factor });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      return await new Promise((done) => canvas.toBlob(done, "image/png"));
    } finally {
      URL.revokeObjectURL(address);
    }
  }
}

/** A small line without axes. */
export function sparkline(values, label) {
  if (values.length < 2) return h("span", { class: "dim" }, "–");
  const low = Math.min(...values),
    high = Math.max(...values),
    width = 96,
    height = 24;
  const y = (v) =>
    high === low ? height / 2 : height - 3 - ((v - low) / (high - low)) * (height - 6);
  const d = values
    .map(
      (v, i) =>
        `${i ? "L" : "M"}${((i / (values.length - 1)) * (width - 6) + 2).toFixed(1)},${y(v).toFixed(1)}`,
    )
    .join("");
  const last = values[values.length - 1];
  return s(
    "svg",
    {
      class: "spark",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": label,
    },
    s("path", { d }),
    s("circle", { cx: width - 4, cy: y(last), r: 2 }),
  );
}

/** Exponential moving average with bias correction. */
export function smoothed(values, weight) {
  let sum = 0,
    mass = 0;
  return values.map((value) => {
    sum = sum * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return sum / mass;
  });
}

/** Smoothed values and the raw ones without outliers, which would flatten the curve. */
function trimmed(raw, ys) {
  const sorted = [...raw].sort((a, b) => a - b);
  return [
    ...ys,
    sorted[Math.floor(sorted.length * 0.01)],
    sorted[Math.ceil(sorted.length * 0.99) - 1],
  ].filter((v) => v !== undefined);
}

function lowerBound(xs, value) {
  let low = 0,
    high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(xs, value) {
  if (!xs.length) return -1;
  const i = lowerBound(xs, value);
  if (i === 0) return 0;
  if (i === xs.length) return i - 1;
  return value - xs[i - 1] <= xs[i] - value ? i - 1 : i;
}

/**
 * The points of a line: [x in pixels, value, whether a gap is before it]. With more points than
 * pixels, each pixel keeps its lowest and highest value.
 */
function linePoints(xs, ys, gaps, x, pixels) {
  if (xs.length > pixels * 3) return thinned(xs, ys, gaps, x);
  return xs.map((v, i) => [x(v), ys[i], !!gaps[i]]);
}

/** An SVG path that starts anew after each gap. */
function path(points, y) {
  return points
    .map(([px, v, gap], i) => `${i && !gap ? "L" : "M"}${px.toFixed(1)},${y(v).toFixed(1)}`)
    .join("");
}

/** Whether no line leads to a point or from it. */
function isIsolated([, , gap], i, points) {
  return (gap || i === 0) && (i === points.length - 1 || points[i + 1][2]);
}

function thinned(xs, ys, gaps, x) {
  const out = [];
  let column = null,
    low = 0,
    high = 0,
    gap = false;
  const add = () => {
    out.push([column, low, gap]);
    if (high !== low) out.push([column, high, false]);
  };
  for (let i = 0; i < xs.length; i++) {
    const px = Math.round(x(xs[i]));
    if (px !== column) {
      if (column !== null) add();
      column = px;
      low = high = ys[i];
      gap = !!gaps[i];
    } else {
      low = Math.min(low, ys[i]);
      high = Math.max(high, ys[i]);
    }
  }
  if (column !== null) add();
  return out;
}

function area(layer, x, y) {
  if (!layer.xs.length) return "";
  const up = layer.xs
    .map((v, i) => `${i ? "L" : "M"}${x(v).toFixed(1)},${y(layer.top[i]).toFixed(1)}`)
    .join("");
  const down = layer.xs
    .map((v, i) => `L${x(v).toFixed(1)},${y(layer.base[i]).toFixed(1)}`)
    .reverse()
    .join("");
  return `${up}${down}Z`;
}

/** Round values that divide the range into about `count` parts. */
export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough) || rough;
  const out = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++)
    out.push(Number((i * size).toPrecision(12)));
  return out;
}

const TIMES = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
  604800,
];

function timeTicks(from, to, count) {
  const size = TIMES.find((t) => (to - from) / t <= count) || 604800;
  const out = [];
  for (let v = Math.ceil(from / size) * size; v <= to; v += size) out.push(v);
  return out;
}

function tickText(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3)
    return value.toExponential(0).replace("e+", "e").replace("e0", "");
  return size >= 1000
    ? `${Number((value / 1000).toPrecision(4))}k`
    : String(Number(value.toPrecision(6)));
}
