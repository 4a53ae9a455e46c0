// What changes a conversation: answers once more, branches, settings and edits of memory, with undo.

import { createBeside, forkConversation } from "./branches.js";
import { CHANGED, changeError, changeHeaders, isUnchanged } from "./session_change.js";
import { returnDraft } from "./chat_place.js";
import { keep, keptOf, longestAnswer, titleFor } from "./chat_settings.js";
import { NOT_LOADED, send } from "./api.js";
import { keepLeft, promptDialog } from "./dialog.js";
import { h, showStatus, takeStatus } from "./dom.js";
import { changedText, noWayBackText } from "./memory_text.js";
import { keepNote, signatureOf } from "./message_note.js";
import { fetchSessions } from "./session_list.js";
import { canGoBackTo, openingText, turnText } from "./turns.js";
import { dropIfUnchanged, keepUndo } from "./undo_copies.js";

/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {import("./turns.js").Part} Part */

const IN_A_BRANCH = "The new message is asked in a branch; this conversation stays as it is.";
const BRANCHED = "You are in a branch now. The conversation that it left stays as it is: “Back to” beside the title leads there.";
const BEGUN_ANEW = "You are in a new conversation now. The one before stays as it is: “Back to” beside the title leads there.";
const IN_A_NEW_ONE = "the new message begins a conversation without the turns before. This one stays as it is.";
const ASK_ANEW = "Edit its message to ask it in a new conversation.";

export class ChatChanges {
  /** @param {import("./chat.js").ChatView} chat */
  constructor(chat) {
    this.chat = chat;
  }

  /**
   * Changes memory by requests; returns whether it was done.
   * @param {string} operation @param {string} path @param {any[]} bodies of one request each @param {import("./memory_text.js").ChangeMessage} message
   * @param {Memory} shown that they are for
   */
  async changeMemory(operation, path, bodies, message, shown) {
    const run = async (/** @type {any} */ headers) => {
      for (const body of bodies) {
        const { revision } = await send("POST", `${this.chat.path}/${path}`, body, { headers });
        headers = changeHeaders(revision);
      }
    };
    const isCurrent = isUnchanged(shown, this.chat.memory);
    if (!isCurrent) showStatus(CHANGED, true); // while a dialog was open
    const isDone = isCurrent && (await this.change(operation, run, message));
    if (isDone && operation === "replace") this.markReplaced(bodies[0].start);
    if (isDone && operation === "remove") this.chat.frame.unselect(); // texts after it may have its label now
    return isDone;
  }

  /** @param {number} start of a message that was replaced */
  markReplaced(start) {
    const { memory, turns } = this.chat;
    const part = turns.flatMap(({ parts }) => parts).find((each) => each.start === start);
    if (!memory || !part) return;
    keepNote(memory.name, part, "replaced");
    this.chat.draw();
  }

  /**
   * Changes the session, with a fork kept for undo. Returns whether it was done.
   * @param {string} operation @param {(headers: Record<string, string>) => Promise<any>} run @param {import("./memory_text.js").ChangeMessage} message
   */
  async change(operation, run, message) {
    const memory = /** @type {Memory} */ (this.chat.memory);
    /** @type {string | null} */
    let kept = null;
    try {
      kept = await keepUndo(memory.name, memory.revision, operation);
      await run(changeHeaders(memory.revision));
    } catch (error) {
      await this.chat.reload();
      if (kept) await dropIfUnchanged(kept, memory.name, memory.revision).catch(() => {});
      showStatus(changeError(error), true);
      return false;
    }
    await this.reloadAll();
    if (this.chat.memory && !this.chat.failedToLoad) showStatus(changedText(message, memory, this.chat.memory));
    return true;
  }

  // Loads the list of sessions as well: what is kept for undo has changed.
  async reloadAll() {
    await fetchSessions().catch(() => {}); // the connection's state is shown elsewhere
    await this.chat.reload();
  }

  // Undoes a change. What was said since then is kept in a branch, if that is agreed to.
  /** @param {import("./undo.js").Step} step */
  async undo(step) {
    await this.chat.reload(); // an answer that another client asked for may have ended just now
    const { memory } = this.chat;
    if (!memory) return;
    const loaded = await import("./undo_change.js").catch(() => null);
    if (!loaded) return showStatus(NOT_LOADED, true);
    const done = await loaded.undoChange(memory, step, async () => this.chat.turns);
    if (!done) return;
    await this.reloadAll();
    showStatus(done.text, done.isError);
  }

  // Removes an answer, and has the question answered once more, which stays with its pins.
  /** @param {Part} answer */
  async regenerate(answer) {
    const memory = /** @type {Memory} */ (this.chat.memory);
    if (!canGoBackTo(memory, answer.start)) return showStatus(`The model cannot go back to where this answer begins, as ${noWayBackText(memory, answer.start)}. ${ASK_ANEW}`, true);
    const count = memory.tokens - answer.start;
    const rewind = (/** @type {any} */ headers) => send("POST", `${this.chat.path}/rewind`, { count }, { headers });
    if (!(await this.change("regenerate", rewind, "")) || !this.chat.memory) return;
    await this.chat.answers.continueAnswer();
    const turn = this.chat.turns.at(-1);
    if (turn) keep(memory.name, { regenerated: signatureOf({ text: turnText(turn) }) });
  }

  /**
   * Asks an edited message in a branch, or in a new conversation; asks for it again, as it was written, if none could be begun.
   * @param {Turn} turn @param {Part} question @param {string} [written] @param {string} [failure] @returns {Promise<void>}
   */
  async editQuestion(turn, question, written = question.text, failure = "") {
    const fields = [{ name: "text", label: "Message", kind: "textarea", value: written, required: true }];
    const at = this.chat.turns[0].label === turn.label ? 0 : turn.start;
    const memory = /** @type {Memory} */ (this.chat.memory);
    const isHeld = canGoBackTo(memory, at);
    const note = h("p", { class: "hint" }, isHeld ? IN_A_BRANCH : `The model cannot go back to this message, as ${noWayBackText(memory, at)}: ${IN_A_NEW_ONE}`);
    const values = await promptDialog("Edit message", fields, "Send", note, failure ? h("p", { class: "failure" }, failure) : null);
    if (!values) return keepLeft(this.chat.name, question.text);
    const text = String(values.text);
    const name = isHeld ? await this.fork(at, text) : await this.startAnew(text);
    if (!this.chat.signal.aborted) {
      if (!name) return this.editAgain(question, text);
      this.chat.leaveFor(name);
      await this.chat.reload();
    }
    if (this.chat.signal.aborted) return returnDraft(name ?? this.chat.name, { text, files: [] });
    if (!this.chat.memory || this.chat.failedToLoad) return this.chat.answers.giveBack(text);
    showStatus(isHeld ? BRANCHED : BEGUN_ANEW);
    await this.chat.answers.takeTurn(text);
  }

  // Asks again for an edited message; puts it into the box if the one that was edited is no longer shown.
  /** @param {Part} question @param {string} text */
  async editAgain(question, text) {
    const failure = takeStatus();
    await this.chat.reload();
    const turn = !this.chat.signal.aborted && this.chat.memory && this.chat.turns.find(({ parts }) => parts.some((part) => part.label === question.label && part.text === question.text));
    if (turn) return this.editQuestion(turn, turn.parts[0], text, failure);
    this.chat.answers.giveBack(text);
    showStatus(failure, true);
  }

  /** @param {number | null} at */
  async branch(at) {
    const name = await this.fork(at, "");
    if (!name || this.chat.signal.aborted) return;
    const left = new Promise((resolve) => window.addEventListener("hashchange", resolve, { once: true }));
    location.hash = `#/chat/${name}`;
    await left; // another view begins without a message
    showStatus(BRANCHED);
  }

  /**
   * Forks the conversation; returns the fork's name, or null.
   * @param {number | null} at @param {string} text that it goes on with
   */
  fork(at, text) {
    return forkConversation(/** @type {Memory} */ (this.chat.memory), at, text);
  }

  /**
   * Creates an empty conversation with this one's system prompt, policy and budget; returns its name, or null.
   * @param {string} text that it begins with
   */
  startAnew(text) {
    const { name, policy, max_kv_size } = /** @type {Memory} */ (this.chat.memory);
    this.chat.chosen.system = this.systemPart()?.text || "";
    return createBeside(name, titleFor(text), "/v1/sessions", { policy, ...(max_kv_size ? { max_kv_size } : {}) }, {}, { begunFrom: name });
  }

  /** @param {string} [written] the system prompt that was refused @param {string} [failure] why */
  async changeSettings(written, failure) {
    const { chat } = this;
    const { name } = chat;
    const sampling = (name === null ? chat.chosen : keptOf(name)).sampling || {};
    const { sampling: given, policy, max_kv_size, budgets } = chat.settings;
    const defaults = { ...given, max_tokens: longestAnswer(chat.room), policy, max_kv_size, budgets };
    const dialog = await import("./settings_dialog.js").catch(() => null);
    if (!dialog) return showStatus(NOT_LOADED, true);
    const values = await dialog.askSettings({ ...this.systemPrompt(written), failure, sampling, defaults, session: name === null ? chat.chosen.session : null });
    if (!values) return;
    if (name === null) chat.chosen = { ...chat.chosen, sampling: values.sampling, session: values.session };
    else keep(name, { sampling: values.sampling });
    chat.frame.box.measure();
    if (!(await this.changeSystem(values.system))) await this.changeSettings(values.system, takeStatus());
  }

  // Returns the system prompt that the conversation has, or will begin with, and whether it can be changed.
  /** @param {string} [written] in place of it, if it can be */
  systemPrompt(written) {
    if (!this.chat.memory?.tokens) return { system: this.chat.chosen.system, systemHint: "for the whole conversation", isSystemEditable: true };
    const part = this.systemPart();
    if (part) return { system: written ?? part.text, systemHint: "replaced in memory", isSystemEditable: true };
    const own = openingText(this.chat.memory, this.chat.texts);
    return { system: own, systemHint: `${own ? "the model's own; another " : ""}can only be set before the first message`, isSystemEditable: false };
  }

  systemPart() {
    return this.chat.turns.find(({ label }) => label === "system")?.parts[0];
  }

  // Returns whether it was not refused.
  /** @param {string} text */
  async changeSystem(text) {
    if (!this.chat.memory?.tokens) {
      this.chat.chosen = { ...this.chat.chosen, system: text };
      return true;
    }
    const part = this.systemPart();
    if (!part || text === part.text) return true;
    const body = { op: "replace", span: part.label, text };
    const replace = (/** @type {any} */ headers) => send("POST", `${this.chat.path}/edit`, body, { headers });
    return (await this.change("replace", replace, "The system prompt was replaced in memory.")) || this.chat.signal.aborted || !this.chat.memory;
  }
}
