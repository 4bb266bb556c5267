// The pictures of a prompt.
import { address } from "./api.js";
import { h } from "./dom.js";

/** The pictures with these keys; `folder` is the run or evaluation that they belong to. */
export function pictures(folder, keys) {
  const images = (keys || []).map((key, i) =>
    h("img", {
      src: address("picture", { folder, key }),
      alt: `Picture ${i + 1} of the prompt`,
    }),
  );
  return h("div", { class: "pictures", hidden: !images.length }, images);
}
