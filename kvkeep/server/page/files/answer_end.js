// What a message alone does not show, such as that an answer was stopped: this browser keeps it by what the message said.

import { h } from "./dom.js";
import { keep, keptOf } from "./chat_settings.js";

/** @typedef {import("./turns.js").Part} Part */
/** @typedef {"stopped" | "length" | "replaced"} End  How an answer ended, or that a message was replaced in memory. */

const TEXTS = { stopped: "Stopped before its end", length: "Cut off at the longest answer: Continue, or allow more in Settings", replaced: "Replaced" };

// An answer of the same name that was generated again, or replaced, is another one.
/** @param {Part} part */
function signatureOf({ text }) {
  let hash = 0;
  for (let at = 0; at < text.length; at += 1) hash = (Math.imul(hash, 31) + text.charCodeAt(at)) | 0;
  return `${text.length} ${hash}`;
}

/**
 * Keeps how an answer ended, or that a message was replaced.
 * @param {string} name of its session @param {Part} part @param {End | null} end null if the model ended it
 */
export function keepEnd(name, part, end) {
  const { [part.label]: _, ...others } = keptOf(name).ends || {};
  keep(name, { ends: end ? { ...others, [part.label]: { end, signature: signatureOf(part) } } : others });
}

/**
 * Creates the note that an answer was stopped or cut off, or a message replaced; null if it was not.
 * @param {string} name of its session @param {Part} part
 */
export function endNote(name, part) {
  const kept = keptOf(name).ends?.[part.label];
  return kept && kept.signature === signatureOf(part) ? h("span", { class: "standing" }, TEXTS[kept.end]) : null;
}
