// The answers of a conversation: sent messages, and what is generated for them, as it comes.

import { changeError, changeHeaders } from "./session_change.js";
import { ApiError, get, messageOf, send, streamEvents } from "./api.js";
import { NOTHING_DONE } from "./chat_empty.js";
import { returnDraft } from "./chat_place.js";
import { drop, keep, keptOf, longestAnswer, nameFor, titleFor } from "./chat_settings.js";
import { conversationsChanged } from "./conversations.js";
import { fill, showStatus } from "./dom.js";
import { openTurn, systemElement } from "./message.js";
import { fullText, NOW_FORGETS, stoppedText } from "./memory_text.js";
import { keepNote } from "./message_note.js";
import { countOf, nextNumber, unreadOf } from "./turns.js";
import { dropObsolete } from "./undo.js";

const SETTLE_TRIES = 100;
const SETTLE_EVERY = 100; // milliseconds

export class ChatAnswers {
  /** @param {import("./chat.js").ChatView} chat */
  constructor(chat) {
    this.chat = chat;
    /** @type {AbortController | null} */
    this.running = null; // while an answer is generated
    /** @type {"length" | "full" | "stopped" | null} */
    this.cutOff = null; // why the last answer ended, if neither the model nor this page's reader ended it
    this.isComplete = false; // whether the model ended it
    this.isBegun = false; // whether the server has begun with the message: it goes on with it, whatever becomes of this page
    this.mayForget = false; // whether it is still to be said that older text is forgotten
    /** @type {number | null} */
    this.appendedRevision = null; // in which the session's tokens are those of before, and an answer
  }

  // Ends the answer, of this page or of another client.
  async stop() {
    const isOwn = this.running !== null;
    this.leave();
    await this.endAnswer();
    if (!isOwn) await this.chat.reload();
  }

  // Leaves the answer to the server.
  leave() {
    this.running?.abort();
  }

  // Asks the server to end the session's answer; with a revision, only the one that was begun then. Returns whether it did.
  /** @param {Record<string, string>} [headers] */
  endAnswer(headers) {
    const fail = (/** @type {unknown} */ error) => {
      if (!(error instanceof ApiError && error.status === 412)) showStatus(messageOf(error), true);
      return false;
    };
    return send("POST", `${this.chat.path}/stop`, undefined, { headers }).then(() => true, fail);
  }

  /** @param {string} content @param {string} typed what names a new conversation */
  async say(content, typed) {
    if (this.chat.frame.isPanelOver && this.chat.frame.isPanelOpen) this.chat.frame.togglePanel(false);
    if (!(await this.chat.exclusively(() => this.begin(content, typed)))) this.giveBack(content);
  }

  /** @param {string} content @param {string} typed */
  async begin(content, typed) {
    const isNew = this.chat.name === null;
    try {
      if (isNew) await this.create(typed);
    } catch (error) {
      this.giveBack(content);
      return showStatus(messageOf(error), true);
    }
    const isRefused = await this.takeTurn(content);
    if (isNew && isRefused) await this.dropEmpty().catch(() => {}); // it stays in the list, empty
  }

  // Deletes the conversation that was created for a message that was refused. Raises ApiError.
  async dropEmpty() {
    const { memory } = this.chat;
    if (!memory || memory.tokens) return;
    await send("DELETE", this.chat.path, null, { headers: changeHeaders(memory.revision) });
    drop(memory.name);
    this.chat.beginAnew();
    conversationsChanged();
  }

  /** Puts a message back into the box that is not in the conversation. @param {string} content */
  giveBack(content) {
    if (this.chat.signal.aborted) returnDraft(this.chat.name, { text: content, files: [] });
    else this.chat.frame.box.restore(content);
  }

  // Creates the session of a new conversation. Raises ApiError.
  /** @param {string} typed */
  async create(typed) {
    const { chat } = this;
    const title = titleFor(typed);
    const created = await send("POST", "/v1/sessions", { name: nameFor(typed), title, ...chat.chosen.session });
    chat.name = created.name;
    keep(created.name, { sampling: chat.chosen.sampling });
    if (!chat.signal.aborted) history.replaceState(null, "", `#/chat/${created.name}`);
    chat.frame.setTitle(title);
    fill(chat.frame.log);
    chat.memory = await get(`${chat.path}/memory`);
    conversationsChanged();
  }

  // Returns whether the message was refused before anything was read.
  /** @param {string} content */
  async takeTurn(content) {
    const { chat } = this;
    const { memory } = chat;
    if (!memory) return false;
    const turn = openTurn(content, { number: nextNumber(memory.spans) });
    const isFirst = !chat.frame.log.querySelector(".turn"); // one that is not confirmed stays
    if (isFirst) fill(chat.frame.log);
    const system = !memory.tokens && chat.chosen.system ? { system: chat.chosen.system } : {};
    if (isFirst && system.system) chat.frame.log.append(systemElement(system.system));
    chat.frame.log.append(turn.element);
    chat.frame.goToEnd();
    const body = { content, stream: true, max_tokens: longestAnswer(memory), ...system, ...keptOf(memory.name).sampling };
    return this.stream(body, turn);
  }

  // Goes on with the newest answer where it ended, or begins it if there is none.
  async continueAnswer() {
    const memory = /** @type {Memory} */ (this.chat.memory);
    const { sampling } = keptOf(memory.name);
    const bar = this.chat.frame.takeLastAnswerBar();
    bar?.querySelector(".note")?.remove(); // that it is not complete
    const turn = openTurn(null, { bar });
    this.chat.frame.log.append(turn.element);
    await this.stream({ stream: true, max_tokens: longestAnswer(memory), ...sampling }, turn);
    if (turn.isEmpty && this.isComplete) showStatus(bar ? "The answer is complete: the model ended it again at once." : "The model ended the answer at once.", false, true);
  }

  // Streams an answer into a turn that is shown. Its message is put back into the box if it does not stay in memory. Returns whether it was refused before anything was read.
  /** @param {any} body @param {ReturnType<typeof openTurn>} turn */
  async stream(body, turn) {
    const { chat } = this;
    const memory = /** @type {Memory} */ (chat.memory);
    this.mayForget = !countOf(memory, "forgotten");
    this.running = new AbortController();
    chat.drawBusy();
    const { signal } = this.running;
    const failure = await this.receive({ ...body, detached: true }, turn, signal).then(() => null, (error) => (error.name === "AbortError" ? null : error));
    this.running = null;
    turn.finish();
    const mayBeLost = body.content && (turn.isEmpty || failure);
    if (turn.isEmpty && signal.aborted) turn.note("Stopping...");
    chat.drawBusy();
    const isRefused = failure instanceof ApiError && failure.status > 0;
    if (chat.signal.aborted) {
      if (mayBeLost && !this.isBegun) this.giveBack(body.content);
      return isRefused;
    }
    await this.settle(signal.aborted ? "stopped" : this.cutOff, memory);
    this.drawEnd(turn, isRefused, Boolean(mayBeLost));
    if (mayBeLost && !(this.isBegun && chat.memory?.busy)) this.checkMessage(body.content, memory, signal.aborted);
    this.sayWhy(failure, turn.isEmpty);
    if (chat.memory) await dropObsolete(chat.memory.name, chat.memory.tokens).catch(() => {}); // what is left is dropped later
    conversationsChanged();
    return isRefused;
  }

  // Draws the turn from what was loaded after it; or marks it, if that could not be loaded.
  /** @param {ReturnType<typeof openTurn>} turn @param {boolean} isRefused before anything was read @param {boolean} isInBox whether the message is put back */
  drawEnd(turn, isRefused, isInBox) {
    if (this.chat.failedToLoad && !isRefused) turn.unconfirm(isInBox);
    else if (this.chat.memory && !this.chat.signal.aborted) this.chat.draw();
  }

  // Puts what was not read of a message without an answer back into the box.
  /** @param {string} content @param {Memory} before @param {boolean} isStopped */
  checkMessage(content, before, isStopped) {
    const { memory, turns, failedToLoad } = this.chat;
    const read = (memory?.tokens || 0) - before.tokens;
    const rest = read > 0 ? unreadOf(turns, content) : content;
    if (rest) this.giveBack(rest);
    const lost = memory ? countOf(memory, "forgotten") - countOf(before, "forgotten") : 0;
    if (isStopped && !failedToLoad) showStatus(stoppedText(read, lost, !rest), false, true);
  }

  // Says why an answer failed, or that memory is full where none was begun.
  /** @param {unknown} failure null for none @param {boolean} isEmpty whether nothing was generated */
  sayWhy(failure, isEmpty) {
    const { memory, frame } = this.chat;
    const isRefused = failure instanceof ApiError && failure.code === "context_length_exceeded";
    const isFull = isRefused || (!failure && isEmpty && this.cutOff === "full");
    if (isFull && memory?.policy === "full" && memory.tokens) frame.panel.openCompress();
    if (isFull && memory) showStatus(fullText(memory, isRefused), true);
    else if (failure) showStatus(frame.isGone ? NOTHING_DONE : changeError(failure), true);
  }

  /** @param {any} body @param {ReturnType<typeof openTurn>} turn @param {AbortSignal} signal */
  async receive(body, turn, signal) {
    [this.cutOff, this.isBegun, this.isComplete] = [null, false, false];
    const { revision } = /** @type {Memory} */ (this.chat.memory);
    const options = { headers: changeHeaders(revision), signal };
    for await (const [kind, event] of streamEvents("POST", `${this.chat.path}/turns`, body, options)) {
      this.isBegun = true;
      if (this.chat.signal.aborted) return;
      if (kind === "read") turn.note(`Reading ${event.done} of ${event.total} tokens...`);
      else if (kind === "token") turn.push(event);
      else if (kind === "error" && event.error.code === "cancelled") this.cutOff = "stopped";
      else if (kind === "error") throw new ApiError(0, event.error.message, event.error.code);
      else if (kind === "done") {
        this.isComplete = event.finish_reason === "eos";
        if (["length", "full"].includes(event.finish_reason)) this.cutOff = event.finish_reason;
        if (event.revision === revision + 1) this.appendedRevision = event.revision;
      }
    }
  }

  /**
   * Whether all that a session has beside its tokens of before is the newest answer of this page.
   * @param {Memory | null} before @param {Memory} memory
   */
  hasAppended(before, { revision, tokens }) {
    return before?.revision === revision - 1 && before.tokens <= tokens && revision === this.appendedRevision;
  }

  // Says once that this answer, or its message, made memory full.
  /** @param {Memory} memory */
  sayIfForgetting(memory) {
    if (!this.mayForget || !countOf(memory, "forgotten")) return;
    this.mayForget = false;
    showStatus(NOW_FORGETS);
  }

  // Loads the session once it is no longer busy with an answer that was stopped. note: how the answer ended, null if the model ended it.
  /** @param {import("./message_note.js").Note | null} note @param {Memory} before */
  async settle(note, before) {
    for (let tries = 0; tries < SETTLE_TRIES; tries += 1) {
      await this.chat.reload();
      if (note !== "stopped" || !this.chat.memory?.busy) break;
      if (!(await this.endAnswer(changeHeaders(before.revision)))) break; // it may have been begun only now, or be another one
      await new Promise((resolve) => setTimeout(resolve, SETTLE_EVERY));
    }
    const { memory, turns } = this.chat;
    if (!memory) return;
    this.sayIfForgetting(memory);
    const part = turns.at(-1)?.parts.at(-1);
    if (part?.role === "answer" && memory.tokens !== before.tokens) keepNote(memory.name, part, note);
  }
}
