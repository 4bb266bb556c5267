import { fill, h } from "./dom.js";
export async function showEntropy(holder) { fill(holder, h("p", { class: "empty" }, "…")); return () => true; }
