// What a chat does when its view's controls or keys are used.

/** @typedef {import("./chat.js").ChatView} ChatView */

/**
 * Returns what the controls of a chat's view do.
 * @param {ChatView} chat @returns {import("./chat_frame.js").Handlers}
 */
export const handlersOf = (chat) => ({
  say: (text, typed) => chat.answers.say(text, typed),
  stop: () => chat.answers.stop(),
  room: () => chat.room,
  settings: () => chat.exclusively(() => chat.changes.changeSettings()),
  memory: {
    change: (...change) => chat.changes.changeMemory(...change),
    now: (part) => chat.changes.now(part),
    branch: (at) => chat.exclusively(() => chat.changes.branch(at)),
  },
});

/**
 * Stops an answer or closes the panel by Escape; "/" leads to the message box.
 * @param {ChatView} chat @param {KeyboardEvent} event
 */
export function onKey({ answers, edits, frame }, event) {
  const typing = /** @type {HTMLElement} */ (event.target).closest?.("input, textarea, select, dialog");
  if (event.key === "Escape" && document.querySelector("dialog[open]")) return; // it closes the dialog
  if (event.key === "Escape" && answers.running) answers.stop();
  else if (event.key === "Escape" && frame.isPanelOpen) frame.togglePanel(false);
  if (event.key === "/" && !typing && edits) {
    event.preventDefault();
    frame.box.focus();
  }
}
