// What changes a conversation: answers once more, branches, settings and edits of memory, with undo.

import { send } from "./api.js";
import { changeError, changeHeaders } from "./actions.js";
import { askSettings, keep, keptOf, nameFor, titleFor, titleOf } from "./chat_settings.js";
import { conversationsChanged } from "./conversations.js";
import { h, promptDialog, showStatus } from "./dom.js";
import { openTurn } from "./message.js";
import { dropUndo, keepUndo, undo } from "./undo.js";

/** @typedef {import("./turns.js").Memory} Memory */
/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {import("./turns.js").Part} Part */

export class ChatChanges {
  /** @param {import("./chat.js").ChatView} chat */
  constructor(chat) {
    this.chat = chat;
  }

  /** @param {string} operation @param {string} path @param {any} body @param {string} message */
  changeMemory(operation, path, body, message) {
    const run = (/** @type {any} */ headers) => send("POST", `${this.chat.path}/${path}`, body, { headers });
    return this.chat.exclusively(() => this.change(operation, run, message), this.chat.panel.element);
  }

  /**
   * Changes the session, with a fork kept for undo. Returns whether it was done.
   * @param {string} operation @param {(headers: Record<string, string>) => Promise<any>} run @param {string} message
   */
  async change(operation, run, message) {
    const memory = /** @type {Memory} */ (this.chat.memory);
    /** @type {string | null} */
    let kept = null;
    try {
      kept = await keepUndo(memory.name, memory.revision, operation);
      await run(changeHeaders(memory.revision));
      showStatus(message);
    } catch (error) {
      if (kept) await dropUndo(kept).catch(() => {});
      showStatus(changeError(error), true);
      await this.chat.reload();
      return false;
    }
    await this.chat.reload();
    return true;
  }

  /** @param {import("./undo.js").Step} step */
  async undo(step) {
    const memory = /** @type {Memory} */ (this.chat.memory);
    try {
      await undo(memory.name, step, memory.revision);
      showStatus(`Undone: ${step.operation}.`);
    } catch (error) {
      showStatus(changeError(error), true);
    }
    this.chat.memory = null;
    await this.chat.reload();
  }

  /** @param {Turn} turn */
  async regenerate(turn) {
    const memory = /** @type {Memory} */ (this.chat.memory);
    const question = turn.parts.find(({ role }) => role === "question");
    if (!question) return;
    const count = memory.tokens - turn.start;
    const rewind = (/** @type {any} */ headers) => send("POST", `${this.chat.path}/rewind`, { count }, { headers });
    if (await this.change("regenerate", rewind, "")) await this.chat.takeTurn(question.text);
  }

  /** @param {Turn} turn @param {Part} question */
  async editQuestion(turn, question) {
    const fields = [{ name: "text", label: "Message", kind: "textarea", value: question.text, required: true }];
    const note = h("p", { class: "hint" }, "The new message is asked in a branch; this conversation stays as it is.");
    const values = await promptDialog("Ask otherwise", fields, "Send", note);
    if (!values) return;
    const at = this.chat.turns[0] === turn ? 0 : turn.start;
    const name = await this.fork(at, String(values.text));
    if (!name) return;
    this.chat.leaveFor(name);
    await this.chat.load();
    await this.chat.takeTurn(String(values.text));
  }

  /** @param {number | null} at */
  async branch(at) {
    const name = await this.fork(at, "");
    if (name) location.hash = `#/chat/${name}`;
  }

  /**
   * Forks the conversation; returns the fork's name, or null.
   * @param {number | null} at @param {string} text that it goes on with
   */
  async fork(at, text) {
    const memory = /** @type {Memory} */ (this.chat.memory);
    const title = text ? titleFor(text) : `${titleOf(memory.name)} (branch)`;
    const body = { name: nameFor(title.slice(0, 40)), ...(at === null ? {} : { at }) };
    try {
      const forked = await send("POST", `${this.chat.path}/fork`, body, { headers: changeHeaders(memory.revision) });
      keep(forked.name, { title, sampling: keptOf(memory.name).sampling, branchOf: memory.name });
      conversationsChanged();
      return /** @type {string} */ (forked.name);
    } catch (error) {
      showStatus(changeError(error), true);
      return null;
    }
  }

  async changeSettings() {
    const name = this.chat.name;
    const begun = Boolean(this.chat.memory?.tokens);
    const system = this.chat.turns.find(({ label }) => label === "system")?.parts[0];
    const hint = begun ? (system ? "edited in memory" : "this conversation began without one") : "for the whole conversation";
    const sampling = name === null ? this.chat.newSampling : keptOf(name).sampling || {};
    const current = begun ? system?.text || "" : this.chat.newSystem;
    const values = await askSettings(sampling, current, hint, !begun || Boolean(system), this.chat.settings.sampling || {}, name === null ? this.chat.newSession : null);
    if (!values) return;
    if (name === null) [this.chat.newSampling, this.chat.newSession] = [values.sampling, values.session];
    else keep(name, { sampling: values.sampling });
    if (!begun) this.chat.newSystem = values.system;
    else if (system && values.system !== current) {
      const body = { op: "replace", span: system.label, text: values.system };
      const replace = (/** @type {any} */ headers) => send("POST", `${this.chat.path}/edit`, body, { headers });
      await this.change("edit", replace, "The system prompt was replaced in memory.");
    }
  }

  // Goes on with the newest answer, where it ended.
  async continueAnswer() {
    const { sampling } = keptOf(/** @type {string} */ (this.chat.name));
    const turn = openTurn(null);
    this.chat.log.append(turn.element);
    await this.chat.stream("turns", { stream: true, ...sampling }, turn, () => {});
  }
}
