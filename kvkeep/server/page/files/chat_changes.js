// What changes a conversation: answers once more, branches, settings and edits of memory, with undo.

import { send } from "./api.js";
import { changeError, changeHeaders } from "./actions.js";
import { askSettings, keep, keptOf, nameFor, titleFor, titleOf } from "./chat_settings.js";
import { conversationsChanged } from "./conversations.js";
import { h, promptDialog, showStatus } from "./dom.js";
import { openTurn } from "./message.js";
import { canGoBackTo } from "./turns.js";
import { dropUndo, keepUndo, undo } from "./undo.js";

/** @typedef {import("./turns.js").Memory} Memory */
/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {import("./turns.js").Part} Part */

const IN_A_BRANCH = "The new message is asked in a branch; this conversation stays as it is.";
const IN_A_NEW_ONE =
  "What led up to this message is not in memory any more, so the model cannot go back to it: the new message begins a conversation without the turns before. This one stays as it is.";
const NO_WAY_BACK =
  "This turn takes more than the memory holds, so the model cannot go back to its beginning. Edit its message to ask it in a new conversation.";

export class ChatChanges {
  /** @param {import("./chat.js").ChatView} chat */
  constructor(chat) {
    this.chat = chat;
  }

  /** @param {string} operation @param {string} path @param {any[]} bodies of one request each @param {string} message */
  changeMemory(operation, path, bodies, message) {
    const run = async (/** @type {any} */ headers) => {
      for (const body of bodies) {
        const { revision } = await send("POST", `${this.chat.path}/${path}`, body, { headers });
        headers = changeHeaders(revision);
      }
    };
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
      await this.chat.reload();
      const isUnchanged = this.chat.memory?.revision === memory.revision;
      if (kept && isUnchanged) await dropUndo(kept).catch(() => {});
      showStatus(changeError(error), true);
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
    if (!canGoBackTo(memory, turn.start)) return showStatus(NO_WAY_BACK, true);
    const count = memory.tokens - turn.start;
    const rewind = (/** @type {any} */ headers) => send("POST", `${this.chat.path}/rewind`, { count }, { headers });
    if (await this.change("regenerate", rewind, "")) await this.chat.takeTurn(question.text);
  }

  /** @param {Turn} turn @param {Part} question */
  async editQuestion(turn, question) {
    const fields = [{ name: "text", label: "Message", kind: "textarea", value: question.text, required: true }];
    const at = this.chat.turns[0] === turn ? 0 : turn.start;
    const isHeld = canGoBackTo(/** @type {Memory} */ (this.chat.memory), at);
    const note = h("p", { class: "hint" }, isHeld ? IN_A_BRANCH : IN_A_NEW_ONE);
    const values = await promptDialog("Ask otherwise", fields, "Send", note);
    if (!values) return;
    const text = String(values.text);
    const name = isHeld ? await this.fork(at, text) : await this.startAnew(text);
    if (!name) return;
    this.chat.leaveFor(name);
    await this.chat.load();
    await this.chat.takeTurn(text);
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
  fork(at, text) {
    const memory = /** @type {Memory} */ (this.chat.memory);
    const title = text ? titleFor(text) : `${titleOf(memory.name)} (branch)`;
    return this.createBeside(title, `${this.chat.path}/fork`, at === null ? {} : { at }, changeHeaders(memory.revision));
  }

  /**
   * Creates an empty conversation with this one's system prompt, policy and budget; returns its name, or null.
   * @param {string} text that it begins with
   */
  startAnew(text) {
    const { policy, max_kv_size } = /** @type {Memory} */ (this.chat.memory);
    this.chat.newSystem = this.chat.turns.find(({ label }) => label === "system")?.parts[0]?.text || "";
    return this.createBeside(titleFor(text), "/v1/sessions", { policy, ...(max_kv_size ? { max_kv_size } : {}) }, {});
  }

  /**
   * Creates a conversation with this one's sampling settings; returns its name, or null.
   * @param {string} title @param {string} path @param {any} body @param {Record<string, string>} headers
   */
  async createBeside(title, path, body, headers) {
    const { name } = /** @type {Memory} */ (this.chat.memory);
    try {
      const created = await send("POST", path, { name: nameFor(title.slice(0, 40)), ...body }, { headers });
      keep(created.name, { title, sampling: keptOf(name).sampling, branchOf: name });
      conversationsChanged();
      return /** @type {string} */ (created.name);
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
