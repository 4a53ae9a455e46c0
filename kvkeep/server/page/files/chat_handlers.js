// What a chat does when its view's controls or keys are used.

import { NOT_LOADED } from "./api.js";
import { isComposing, showStatus } from "./dom.js";

/** @typedef {import("./chat.js").ChatView} ChatView */
/** @typedef {import("./chat_changes.js").ChatChanges} ChatChanges */

// Loads the code of changes, which the first view does without; null without the server.
export const loadChanges = () => import("./chat_changes.js").catch(() => null);

/**
 * Runs a change of the conversation. Without the server, from which its code is loaded, it says so.
 * @param {ChatView} chat @param {(changes: ChatChanges) => Promise<any>} run
 */
export async function withChanges(chat, run) {
  const loaded = await loadChanges();
  return loaded ? run(new loaded.ChatChanges(chat)) : showStatus(NOT_LOADED, true);
}

/**
 * Returns what the controls of a chat's view do.
 * @param {ChatView} chat @returns {import("./chat_frame.js").Handlers}
 */
export const handlersOf = (chat) => ({
  say: (text, typed) => chat.answers.say(text, typed),
  stop: () => chat.answers.stop(),
  room: () => chat.room,
  settings: () => chat.exclusively(() => withChanges(chat, (changes) => changes.changeSettings())),
  memory: {
    async change(operation, path, bodies, message, shown = /** @type {Memory} */ (chat.memory)) {
      let isDone = false;
      const run = () => withChanges(chat, async (changes) => (isDone = await changes.changeMemory(operation, path, bodies, message, shown)));
      await chat.exclusively(run, chat.frame.panel);
      return isDone;
    },
    now: (part) => (chat.signal.aborted ? null : partNow(chat, part)),
    branch: (at) => chat.exclusively(() => withChanges(chat, (changes) => changes.branch(at))),
  },
});

/**
 * Returns where a part of a turn is now; null if it is no longer what it was.
 * @param {ChatView} chat @param {import("./turns.js").Part} part
 */
export function partNow({ memory, turns }, part) {
  const same = turns.flatMap(({ parts }) => parts).find(({ label, text }) => label === part.label && text === part.text);
  return memory && same ? { memory, part: same } : null;
}

/**
 * Stops an answer or closes the panel by Escape; "/" leads to the message box.
 * @param {ChatView} chat @param {KeyboardEvent} event
 */
export function onKey({ answers, edits, frame, isStoppable }, event) {
  if (isComposing(event)) return;
  const typing = /** @type {HTMLElement} */ (event.target).closest?.("input, textarea, select, dialog");
  if (event.key === "Escape" && document.querySelector("dialog[open]")) return; // it closes the dialog
  if (event.key === "Escape" && isStoppable) answers.stop();
  else if (event.key === "Escape" && frame.isPanelOpen) frame.togglePanel(false);
  if (event.key === "/" && !typing && edits) {
    event.preventDefault();
    frame.box.focus();
  }
}
