// What a chat shows in place of turns: before the first one, and once the server no longer has the conversation.

import { returnDraft } from "./chat_place.js";
import { h } from "./dom.js";
import { MOST } from "./undo.js";

/** @typedef {import("./chat_place.js").Draft} Draft */

export const NOTHING_DONE = "Nothing was sent or changed: the server no longer has this conversation.";

/** Returns the paragraphs of a conversation that has not begun. @param {string} model */
export const welcomeTexts = (model) => [
  `Write below to talk with ${model || "the model"}, which runs on this server; nothing is sent anywhere else.`,
  "The strip above the chat is the model's memory: each turn has a part there, the wider the more memory it takes, and coloured by whether it is still held.",
  `Select a turn to pin it, to remove it from memory or to replace what it says; Undo takes back the last ${MOST} changes, one after another.`,
];

/**
 * Returns why a conversation is not there. isDeleted: whether the server said that it was deleted.
 * @param {boolean} isDeleted
 */
export const goneText = (isDeleted) =>
  isDeleted ? "This conversation was deleted." : "The server no longer has this conversation: it was deleted, or the server ended before it was saved.";

/**
 * Returns the paragraph of a conversation that is not there, with a link to a new one, which takes the draft along.
 * @param {boolean} isDeleted as of `goneText` @param {{draft: Draft}} box
 */
export function goneParagraph(isDeleted, box) {
  const moveDraft = () => {
    returnDraft(null, box.draft);
    box.draft = { text: "", files: [] };
  };
  return [`${goneText(isDeleted)} `, h("a", { href: "#/", onclick: moveDraft }, "Start a new one"), "."];
}
