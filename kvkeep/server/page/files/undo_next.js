// One more undo by the key while the one before is in progress: loaded when that happens.

import { isFree } from "./undo_button.js";

const PATIENCE = 5000; // milliseconds in which an undo by the key is expected to be complete
const LOOK_EVERY = 50;
let isWaiting = false;

/**
 * Undoes one more change once an undo that the key began is complete; not if a dialog asks, or if something else takes long.
 * Returns when it began, or `start` if it did not.
 * @param {number} start of the undo in progress, by `performance.now`
 */
export async function undoNext(start) {
  if (isWaiting) return start;
  isWaiting = true;
  try {
    while (performance.now() - start < PATIENCE) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY));
      const button = /** @type {HTMLElement | null} */ (document.querySelector("button.undo"));
      if (!button || document.querySelector("dialog[open]")) return start;
      if (!isFree(button)) continue;
      button.click();
      return performance.now();
    }
    return start;
  } finally {
    isWaiting = false;
  }
}
