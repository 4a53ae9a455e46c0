// Another text in place of a message's: loaded once it is asked for.

import { returnDraft } from "./chat_place.js";
import { isOpen, keepLeft, promptDialog } from "./dialog.js";
import { h, takeStatus } from "./dom.js";
import { canRecompute, nameOf, recomputeText, replacedText } from "./memory_text.js";

/** @typedef {import("./memory_panel.js").Actions} Actions */

/**
 * Asks for a text in place of that of a part, and again with what was written if it could not be replaced.
 * @param {Memory} memory @param {import("./turns.js").Part} part @param {Actions} actions @param {string} [written] @param {string} [failure]
 */
export async function replaceText(memory, part, actions, written = part.text, failure = "") {
  if (isOpen()) return written === part.text ? undefined : returnDraft(memory.name, { text: written, files: [] });
  const fields = [
    { name: "text", label: "New text", kind: "textarea", value: written, required: true },
    ...(canRecompute(memory, part) ? [{ name: "recompute", label: recomputeText(memory, part.end), kind: "checkbox" }] : []),
  ];
  const values = await promptDialog(`Replace ${nameOf(part.role)}`, fields, "Replace", failure ? h("p", { class: "failure" }, failure) : null);
  if (!values) return keepLeft(memory.name, part.text);
  if (values.text === part.text) return;
  const body = { op: "replace", start: part.start, end: part.end, text: values.text, recompute: values.recompute ? "suffix" : "none" };
  const message = replacedText(part, memory.tokens, body.recompute === "suffix");
  if (await actions.change("replace", "edit", [body], message, memory)) return;
  const now = actions.now(part);
  if (!now) return returnDraft(memory.name, { text: String(values.text), files: [] });
  await replaceText(now.memory, now.part, actions, values.text, takeStatus());
}
