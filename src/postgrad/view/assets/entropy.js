import { fill, h } from "./dom.js";
export async function showEntropy(holder) { fill(holder, h("h1", {}, "Entropy flow"), h("p", { class: "empty" }, "No analysis here yet.")); return () => true; }
