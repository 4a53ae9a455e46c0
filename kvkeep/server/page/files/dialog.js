// Dialogs with fields: loaded once one is asked for.

import { returnDraft } from "./chat_place.js";
import { h } from "./dom.js";

const DOUBLE_CLICK = { within: 400, beside: 10 }; // milliseconds, pixels

/** Ignores the second click of a double click, which would hit what lies behind a dialog. @param {MouseEvent} first */
function ignoreSecondClick(first) {
  if (!first.detail) return; // made by the keyboard
  const dialog = /** @type {Element} */ (first.currentTarget).closest("dialog");
  const ignore = (/** @type {MouseEvent} */ event) => {
    if (dialog?.open) return; // it refused what was written
    if (Math.hypot(event.clientX - first.clientX, event.clientY - first.clientY) > DOUBLE_CLICK.beside) return;
    event.preventDefault();
    event.stopPropagation();
  };
  document.addEventListener("click", ignore, { capture: true });
  setTimeout(() => document.removeEventListener("click", ignore, { capture: true }), DOUBLE_CLICK.within);
}

/** Whether a dialog is open, as after the first click of a double click. */
export const isOpen = () => document.querySelector("dialog[open]") !== null;

/**
 * @typedef {{name: string, label: string, kind?: string, value?: string | number, choices?: string[], texts?: Record<string, string>,
 *   problem?: (value: string) => string, [attribute: string]: any}} Field  problem: returns why a value is refused, or "".
 */

/** @type {any} */
let leftValues = null; // of the last dialog, if it was closed because its view was left

// Shows a dialog with fields. Resolves to their values, or to null if it was cancelled.
// notes: elements between the heading and the fields.
/** @param {string} heading @param {Field[]} fields @param {string} action @param {any[]} notes @returns {Promise<any>} */
export function promptDialog(heading, fields, action, ...notes) {
  return new Promise((resolve) => {
    const inputs = fields.map(field);
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, heading),
      notes,
      inputs.map(({ label }) => label),
      h(
        "div",
        { class: "actions", onclick: ignoreSecondClick },
        h("button", { value: "done", class: action === "Delete" ? "main danger" : "main" }, action),
        h("button", { value: "", formnovalidate: "" }, "Cancel"),
      ),
    );
    const dialog = h("dialog", { "aria-label": heading }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      const values = Object.fromEntries(inputs.map(({ name, read }) => [name, read()]));
      leftValues = dialog.returnValue === "left" ? values : null;
      resolve(dialog.returnValue === "done" ? values : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    const first = dialog.querySelector("input, textarea");
    if (first instanceof HTMLInputElement && first.type === "text") first.select(); // typing replaces it
    if (action === "Delete") dialog.querySelector("button:not(.main)").focus();
  });
}

/**
 * Creates a field of a dialog: its labelled element, its name, and a function that reads its value.
 * @param {Field} description
 */
function field({ name, label, kind = "text", value = "", choices, texts = {}, problem, ...attributes }) {
  let input;
  if (choices) {
    const options = choices.map((choice) => h("option", { value: choice }, texts[choice] || choice || "server default"));
    input = h("select", { name, ...attributes }, options);
  } else if (kind === "textarea") {
    input = h("textarea", { name, rows: "4", ...attributes });
  } else {
    input = h("input", { name, type: kind, ...attributes });
  }
  if (kind === "checkbox") {
    return { label: h("label", { class: "check" }, input, ` ${label}`), name, read: () => input.checked };
  }
  input.value = value;
  const refuse = () => input.setCustomValidity(attributes.required && !input.value.trim() ? "Write something." : problem?.(input.value) || "");
  if (attributes.required || problem) input.addEventListener("input", refuse);
  const readNumber = () => (input.value === "" ? null : Number(input.value));
  const read = () => (kind === "number" ? readNumber() : input.value);
  return { label: h("label", {}, label, input), name, read };
}

/**
 * Returns the text of a dialog to the draft of a conversation if its view was left, unless it is what it was before.
 * @param {string | null} name @param {string} before
 */
export function keepLeft(name, before) {
  if (leftValues && leftValues.text !== before) returnDraft(name, { text: leftValues.text, files: [] });
}
