import { fill, h } from "./dom.js";
export async function showEvaluations(holder) { fill(holder, h("p", { class: "empty" }, "…")); return () => true; }
export function showEvaluationsOf(body) { fill(body, h("p", { class: "empty" }, "…")); return { follow() {} }; }
