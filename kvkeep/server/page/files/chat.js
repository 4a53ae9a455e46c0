// The chat: loads a conversation, draws it, and runs one change or answer at a time.

import { BUSY, BUSY_ELSEWHERE, CHANGED, CHANGING, isUnchanged } from "./session_change.js";
import { get, messageOf, nullIfMissing } from "./api.js";
import { ChatAnswers } from "./chat_answers.js";
import { goneParagraph, NOTHING_DONE, welcomeTexts } from "./chat_empty.js";
import { ChatFrame } from "./chat_frame.js";
import { handlersOf, loadChanges, onKey, withChanges } from "./chat_handlers.js";
import { closedView, keepView, keptView, openedView, returnDraft, takeDraft } from "./chat_place.js";
import { titleOf } from "./chat_settings.js";
import { originOf } from "./conversations.js";
import { fill, focusNow, h, showStatus, statusText } from "./dom.js";
import { debounce, isLive, onOperation, SHOWN_AGAIN } from "./live.js";
import { knownSessions, onSessions } from "./session_list.js";
import { standingNote, turnElement } from "./message.js";
import { noteElement, withOpenNote } from "./message_note.js";
import { fetchPieces } from "./pieces.js";
import { focusUndo, undoElement } from "./undo_button.js";
import { turnButtons } from "./turn_buttons.js";
import { turnsOf } from "./turns.js";
import { offeredStep, stepsAmong } from "./undo.js";

/** @typedef {import("./turns.js").Turn} Turn */

const WATCH_EVERY = 1000; // milliseconds, while a model generates

/**
 * Shows a conversation, or the beginning of a new one.
 * @param {HTMLElement} container @param {View} view
 */
export async function chat(container, { signal, edits, parts, settings }) {
  await new ChatView(container, signal, edits, settings).open(parts[1] || null);
}

export class ChatView {
  /** @param {HTMLElement} container @param {AbortSignal} signal @param {boolean} edits @param {PageSettings} settings */
  constructor(container, signal, edits, settings) {
    this.signal = signal;
    this.edits = edits;
    this.settings = settings;
    /** @type {string | null} */
    this.name = null;
    /** @type {Memory | null} */
    this.memory = null;
    this.isOutdated = false; // whether the session may be another one at the same revision
    this.isDeleted = false; // whether the server said so
    /** @type {string[]} */
    this.texts = [];
    /** @type {Turn[]} */
    this.turns = [];
    this.failedToLoad = false; // whether the status says so
    this.shownHeader = ""; // what its buttons are for
    this.loads = this.applied = 0; // how often it was loaded, and the number of the newest result
    this.busy = false; // whether an answer or a change is in progress
    /** @type {import("./chat_settings.js").Chosen} */
    this.chosen = { session: {}, system: "", sampling: {} };
    this.answers = new ChatAnswers(this);
    this.container = container;
    this.frame = new ChatFrame(container, edits, handlersOf(this));
    this.listen();
  }

  listen() {
    const { signal } = this;
    for (const leave of [() => this.answers.leave(), () => this.keepView(), () => closedView(this)]) signal.addEventListener("abort", leave);
    document.addEventListener("keydown", (event) => onKey(this, event), { signal });
    const reloadSoon = debounce(() => (this.busy ? reloadSoon() : this.reload()));
    onOperation((operation) => {
      if (operation === SHOWN_AGAIN) return reloadSoon();
      const isOwn = !operation || operation.session === this.name;
      this.isDeleted ||= isOwn && operation?.what === "delete";
      if (isOwn && (!operation || this.isDeleted)) this.isOutdated = true; // revisions may start again
      return isOwn || ["fork", "delete"].includes(operation.what) ? reloadSoon() : null; // of another session: it may share cells
    }, signal);
    onSessions((entries) => {
      this.drawHeader();
      const isElsewhere = !this.busy && !this.memory?.busy && entries.some(({ name, busy }) => busy && name === this.name);
      if (isElsewhere) this.reload();
    }, signal);
    const timer = setInterval(() => this.watch(), WATCH_EVERY);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  /** @param {string | null} name */
  async open(name) {
    this.name = name;
    const draft = takeDraft(name);
    this.frame.box.draft = draft;
    this.chosen = draft.chosen || this.chosen;
    openedView(this);
    const focused = focusNow();
    if (name === null) this.drawWelcome();
    else {
      const entry = knownSessions().find((known) => known.name === name);
      this.frame.setTitle(entry ? titleOf(entry) : "Loading...");
      this.frame.welcome("Loading...");
      this.frame.restore(keptView(name));
      await this.load();
    }
    if (this.edits) loadChanges(); // here by the time they are asked for
    if (this.edits && [focused, document.body].includes(focusNow())) this.frame.box.focus(); // or else it was moved meanwhile
  }

  get path() {
    return `/v1/sessions/${this.name}`;
  }

  // The memory that the next message has: for a new conversation, that of the settings.
  get room() {
    if (this.frame.isGone) return { policy: "", max_kv_size: null, cells: 0 };
    const { memory, chosen: { session, system } } = this;
    const { policy = this.settings.policy || "", max_kv_size = this.settings.max_kv_size ?? null } = session;
    if (memory) return memory.tokens ? memory : { ...memory, system };
    return { policy, max_kv_size, cells: 0, system };
  }

  // Follows a generation: this page's own by its memory alone, as its text is streamed.
  async watch() {
    if (!isLive()) return null;
    if (!this.answers.running) return this.memory?.busy ? this.reload() : null;
    if (this.name === null) return null;
    const memory = await get(`${this.path}/memory`).catch(() => null);
    if (!memory || !this.answers.running || this.signal.aborted) return null;
    this.answers.sayIfForgetting(memory);
    const start = this.turns.at(-1)?.end || 0;
    const newest = { label: "newest turn", number: 0, start, end: memory.tokens, parts: [] };
    return this.frame.drawMemory(memory, memory.tokens > start ? [...this.turns, newest] : this.turns);
  }

  drawWelcome() {
    this.frame.setTitle("New chat");
    this.frame.welcome(...welcomeTexts(this.settings.model));
  }

  // Loads the session's memory and text, and draws them. Raises ApiError.
  /** @returns {Promise<void>} */
  async load() {
    const [name, before, number] = [this.name, this.isOutdated ? null : this.memory, ++this.loads];
    const isLate = () => this.signal.aborted || name !== this.name || number < this.applied;
    const memory = /** @type {Memory | null} */ (await get(`${this.path}/memory`).catch(nullIfMissing));
    if (isLate()) return;
    if (!memory || isUnchanged(before, memory)) this.applied = number;
    if (!memory) return this.drawGone();
    if (isUnchanged(before, memory)) {
      this.memory = memory;
      this.frame.panel.drawBudget(memory); // what it shares may be less
      return this.drawBusy();
    }
    const first = this.answers.hasAppended(before, memory) ? this.turns.at(-1)?.start || 0 : 0; // an answer that goes on loses its end token
    const pieces = await fetchPieces(memory, first, memory.tokens);
    if (isLate()) return;
    if (!pieces) return this.load();
    this.applied = number;
    [this.memory, this.isOutdated, this.isDeleted, this.answers.appendedRevision] = [memory, false, false, null]; // revisions start again after an undo
    this.texts = [...this.texts.slice(0, first), ...pieces.map(({ text }) => text)];
    this.drawBusy();
    if (!this.answers.running) this.draw();
  }

  async reload() {
    if (this.name === null || this.signal.aborted) return;
    try {
      await this.load();
      if (this.failedToLoad) showStatus("");
      this.failedToLoad = false;
    } catch (error) {
      if (this.signal.aborted) return;
      this.failedToLoad = true;
      showStatus(messageOf(error), true);
    }
  }

  drawGone() {
    if (!this.frame.isGone) this.frame.showGone(this.memory ? titleOf(this.memory) : `${this.name}`, goneParagraph(this.isDeleted, this.frame.box));
    this.memory = null;
    this.frame.box.measure();
  }

  draw() {
    const memory = /** @type {Memory} */ (this.memory);
    const turns = withOpenNote(memory, turnsOf(memory, this.texts));
    const isFollowed = this.turns.length ? this.frame.isNearEnd() : !this.frame.isLeftAmong(turns);
    this.turns = turns;
    this.frame.setTitle(titleOf(memory));
    this.drawHeader();
    const shown = this.turns.filter(({ parts }) => parts.length);
    const elements = shown.map((turn) => turnElement(turn, (part) => [...turnButtons(this, turn, part), noteElement(memory, part, turn, turn === turns.at(-1)), standingNote(memory, part)]));
    if (elements.length) this.frame.drawTurns(shown, elements);
    else this.frame.welcome("Nothing has been said here yet.");
    this.frame.drawMemory(memory, this.turns);
    if (isFollowed) this.frame.goToEnd();
  }

  // Draws the heading's buttons, and the way back from a branch. They stay what they are while nothing changed: one may have the focus.
  drawHeader() {
    if (this.name === null || !this.memory) return;
    const { name, edits } = this;
    const entries = knownSessions();
    const step = edits ? offeredStep(stepsAmong(entries, name), this.memory.tokens) : undefined;
    const origin = originOf(entries, name);
    this.frame.setNamed(entries.find((entry) => entry.name === name)?.named !== false);
    const shown = JSON.stringify([name, step, origin]);
    if (shown === this.shownHeader) return;
    this.shownHeader = shown;
    const link = h("a", { class: "button", href: `#/sessions/${name}` }, "Inspect");
    const branch = edits ? h("button", { onclick: () => this.exclusively(() => withChanges(this, (changes) => changes.branch(null))) }, "Branch") : null;
    fill(this.frame.buttons, branch, link, step ? undoElement(step, () => this.exclusively(() => withChanges(this, (changes) => changes.undo(step)), { focus: () => focusUndo(this.frame.box) })) : null);
    this.frame.setOrigin(origin);
  }

  /**
   * Runs one change or answer at a time; another one is not begun, nor one of a session that cannot be loaded.
   * Returns whether it was run. A focus that was moved meanwhile stays.
   * @param {() => Promise<any>} run @param {{focus: (options?: FocusOptions) => void}} [next] that has the focus afterwards
   */
  async exclusively(run, next = this.frame.box) {
    if (this.busyText) {
      showStatus(this.busyText, false, true);
      return false;
    }
    const pressed = /** @type {HTMLElement} */ (document.activeElement);
    this.setBusy(true);
    showStatus("");
    try {
      if (this.name !== null && !(await this.isCurrent())) return false;
      await run();
    } finally {
      this.setBusy(false); // only now: the next turn is for the revision that is shown
    }
    const hasMoved = ![pressed, document.body].includes(/** @type {HTMLElement} */ (document.activeElement));
    if (!this.signal.aborted && !hasMoved) next.focus({ preventScroll: true });
    return true;
  }

  // Whether the session is what is shown, or nothing was shown before; says so if it is not.
  async isCurrent() {
    const before = this.memory;
    if (this.isOutdated || !before) await this.reload();
    const isSame = !before || isUnchanged(before, this.memory);
    if (!isSame && this.memory) showStatus(CHANGED, true);
    if (this.frame.isGone) showStatus(NOTHING_DONE, true);
    return isSame && this.memory !== null && !this.isOutdated;
  }

  // Shows the beginning of a new conversation in place of one that did not begin, with what was written and chosen for it. A view that was left keeps that for the next one.
  beginAnew() {
    if (this.signal.aborted) return returnDraft(null, { ...takeDraft(this.name), chosen: this.chosen });
    const { draft } = this.frame.box;
    [this.name, this.memory, this.texts, this.turns, this.shownHeader] = [null, null, [], [], ""];
    history.replaceState(null, "", "#/");
    this.frame = new ChatFrame(this.container, this.edits, handlersOf(this));
    this.drawWelcome();
    this.drawBusy();
    this.frame.box.draft = draft;
    this.frame.box.focus();
  }

  /** @param {boolean} busy */
  setBusy(busy) {
    this.busy = busy;
    this.drawBusy();
  }

  // Why nothing can be begun now; "" if it can.
  get busyText() {
    if (this.busy) return this.answers.running ? BUSY : CHANGING;
    return this.memory?.busy ? BUSY_ELSEWHERE : "";
  }

  // Whether there is an answer that can be stopped.
  get isStoppable() {
    return this.edits && (this.answers.running !== null || this.busyText === BUSY_ELSEWHERE);
  }

  drawBusy() {
    this.frame.setBusy(this.busyText);
    this.frame.box.setStoppable(this.isStoppable);
    if (!this.busyText && [BUSY, CHANGING, BUSY_ELSEWHERE].includes(statusText() || "")) showStatus("");
  }

  keepView() {
    if (this.name !== null && this.memory) keepView(this.name, this.frame.view);
  }

  // Shows another conversation in this view.
  /** @param {string} name */
  leaveFor(name) {
    this.keepView();
    history.pushState(null, "", `#/chat/${name}`);
    [this.name, this.memory, this.texts, this.turns] = [name, null, [], []];
  }
}
