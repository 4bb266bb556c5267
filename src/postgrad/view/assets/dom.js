// Creates elements. Texts become text nodes: model output is never parsed as markup.
const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. `props`: class, on ({event: handler}), text, value, checked ...; all others
 * become attributes.
 */
export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

const PROPERTIES = new Set([
  "value",
  "checked",
  "disabled",
  "hidden",
  "selected",
  "indeterminate",
  "open",
]);

function build(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || (value === false && !PROPERTIES.has(key)))
      continue;
    if (key === "class") node.setAttribute("class", value);
    else if (key === "on")
      for (const [name, handler] of Object.entries(value)) node.addEventListener(name, handler);
    else if (key === "text") node.textContent = value;
    else if (PROPERTIES.has(key)) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replaces the children of a node. */
export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

/** Announces a text to screen readers. */
export function announce(text) {
  document.getElementById("announcement").textContent = text;
}

/** A row of buttons that selects one of several values. `choices`: [[value, label]]. */
export function choice(label, choices, value, changed) {
  const buttons = choices.map(([key, text]) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(key === value),
        "data-key": key,
        on: { click: () => pick(key) },
      },
      text,
    ),
  );
  function pick(key) {
    for (const button of buttons)
      button.setAttribute("aria-pressed", String(button.dataset.key === String(key)));
    changed(key);
  }
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

/** A labeled select. */
export function select(label, choices, value, changed) {
  const box = h(
    "select",
    { on: { change: () => changed(box.value) } },
    choices.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
  );
  return h("label", { class: "field" }, h("span", {}, label), box);
}

/** A function that calls `work` once, `ms` after its last call. */
export function debounce(work, ms = 250) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), ms);
  };
}

/** Downloads data as a file. */
export function download(name, data, type) {
  const address = URL.createObjectURL(data instanceof Blob ? data : new Blob([data], { type }));
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** A valid file name. */
export function fileName(...parts) {
  return parts
    .join("-")
    .replace(/[^A-Za-z0-9._-]+/g, "-")
    .replace(/^-+|-+$/g, "")
    .slice(0, 120);
}
