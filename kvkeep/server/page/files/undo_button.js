// The button that undoes the newest change, and its key.

import { h } from "./dom.js";
import { wordOf } from "./undo.js";

/**
 * Creates the button. On a narrow screen it shows no more than "Undo".
 * @param {{operation: string}} step @param {() => void} run
 */
export function undoElement({ operation }, run) {
  import("./undo_change.js").catch(() => {}); // here by the time it is asked for
  const word = wordOf(operation);
  const label = `Undo ${word}`;
  return h("button", { class: "undo", onclick: run, "aria-label": label, "aria-keyshortcuts": "Control+Z", title: `${label} (Ctrl+Z, outside the message box)` }, "Undo", h("span", { class: "wide" }, ` ${word}`));
}

/** Gives the focus to the button of the next undo, for one more; without one to something else. @param {{focus: () => void}} other */
export const focusUndo = (other) => (/** @type {HTMLElement | null} */ (document.querySelector("button.undo")) || other).focus();

// Undoes the newest change by Ctrl+Z, unless a text is written or a dialog is open: there it undoes what was typed.
/** @param {KeyboardEvent} event */
export function undoByKey(event) {
  const isTyping = /** @type {HTMLElement} */ (event.target).closest?.("input, textarea, select, dialog");
  const isKey = (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "z";
  const button = /** @type {HTMLElement | null} */ (document.querySelector("button.undo"));
  if (!isKey || isTyping || !button || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  if (isFree(button)) {
    undoneAt = performance.now();
    button.click();
  } else if (undoneAt !== null) {
    const start = undoneAt;
    import("./undo_next.js").then(async ({ undoNext }) => (undoneAt = await undoNext(start))).catch(() => {}); // without the server there is no undo
  }
}

/** @type {number | null} */
let undoneAt = null; // when the key was pressed for the undo that may be in progress

/** Whether no change is in progress that the button would wait for. @param {HTMLElement} button */
export const isFree = (button) => !button.closest("[inert]");
