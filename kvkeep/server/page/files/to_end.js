// The button that leads to the end of a conversation, shown while the reader is away from it.

import { h } from "./dom.js";

/**
 * Creates the button. go: scrolls to the end.
 * @param {() => void} go
 */
export function endButton(go) {
  const element = h("button", { class: "to-end", hidden: true, onclick: go }, "To the newest");
  return {
    element,
    /**
     * Shows it to a reader who is away from the end, and whether text was added there since then.
     * @param {boolean} isAway @param {boolean} [isNew]
     */
    show(isAway, isNew = false) {
      element.hidden = !isAway;
      if (!isAway || isNew) element.textContent = isAway ? "New text below" : "To the newest";
    },
  };
}
