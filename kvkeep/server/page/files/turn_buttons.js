// The buttons below a message of the chat.

import { withChanges } from "./chat_handlers.js";
import { h } from "./dom.js";
import { canGoBackTo } from "./turns.js";

/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {import("./turns.js").Part} Part */

/**
 * Creates the buttons of a message, an answer excepted.
 * @param {import("./chat.js").ChatView} chat @param {Turn} turn @param {Part} part
 * @param {(label: string, run: () => Promise<any>, hint: string) => HTMLElement} button creates one
 */
function questionButtons(chat, turn, part, button) {
  if (part.role !== "question" || !turn.label.startsWith("turn ")) return [];
  if (turn.parts.length > 1) return [button("Edit", () => withChanges(chat, (changes) => changes.editQuestion(turn, part)), "Ask the edited message in a branch")];
  const isCutOff = part.end === turn.end; // the template's end is missing: the server refuses an answer
  return turn === chat.turns.at(-1) && !isCutOff ? [button("Answer", () => chat.answers.continueAnswer(), "Generate an answer to this message")] : [];
}

/**
 * Creates the buttons of a part of a turn.
 * @param {import("./chat.js").ChatView} chat @param {Turn} turn @param {Part} part @returns {HTMLElement[]}
 */
export function turnButtons(chat, turn, part) {
  const memoryButton = h("button", { class: "small memory", title: `What memory holds of ${turn.label}`, onclick: () => chat.frame.select(turn.label, "chat") }, "Memory");
  if (!chat.edits) return part === turn.parts.at(-1) ? [memoryButton] : [];
  /** @param {string} label @param {() => Promise<any>} run @param {string} hint @param {any} [shown] */
  const button = (label, run, hint, shown = label) => h("button", { class: "small change", onclick: () => chat.exclusively(run), title: hint, "aria-label": label }, shown);
  const isTurn = turn.label.startsWith("turn ");
  const isLast = isTurn && turn === chat.turns.at(-1);
  if (part.role !== "answer") return [...questionButtons(chat, turn, part, button), memoryButton];
  return [
    isLast ? button("Regenerate", () => withChanges(chat, (changes) => changes.regenerate(part)), "Answer once more; the old answer can be restored by Undo") : null,
    isLast ? button("Continue", () => chat.answers.continueAnswer(), "Go on where the answer ended") : null,
    chat.memory && canGoBackTo(chat.memory, turn.end) ? button("Branch here", () => withChanges(chat, (changes) => changes.branch(turn.end)), "Go on from here in a branch", ["Branch", h("span", { class: "wide" }, " here")]) : null,
    memoryButton,
  ].flatMap((element) => (element ? [element] : []));
}
