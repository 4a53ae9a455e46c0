// The chat: a conversation's turns, the message box, and what can be done with a turn.

import { ApiError, get, send, streamEvents } from "./api.js";
import { CHANGED, changeError, changeHeaders } from "./actions.js";
import { ChatChanges } from "./chat_changes.js";
import { keep, keptOf, nameFor, titleFor, titleOf } from "./chat_settings.js";
import { composer } from "./composer.js";
import { conversationsChanged } from "./conversations.js";
import { fill, h, showStatus } from "./dom.js";
import { debounce, onOperation } from "./live.js";
import { memoryPanel } from "./memory_panel.js";
import { openTurn, standingNote, turnElement } from "./message.js";
import { fetchPieces } from "./tokens.js";
import { turnStrip } from "./turn_strip.js";
import { canGoBackTo, countOf, turnsOf } from "./turns.js";
import { undoSteps } from "./undo.js";

/** @typedef {import("./turns.js").Memory} Memory */
/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {import("./turns.js").Part} Part */

const WATCH_EVERY = 1000; // milliseconds, while a model generates

/**
 * Shows a conversation, or the beginning of a new one.
 * @param {HTMLElement} container
 * @param {{signal: AbortSignal, edits: boolean, parts: string[], settings: any}} view
 */
export async function chat(container, { signal, edits, parts, settings }) {
  const view = new ChatView(container, signal, edits, settings);
  await view.open(parts[1] || null);
}

export class ChatView {
  /** @param {HTMLElement} container @param {AbortSignal} signal @param {boolean} edits @param {any} settings */
  constructor(container, signal, edits, settings) {
    this.container = container;
    this.signal = signal;
    this.edits = edits;
    this.settings = settings;
    /** @type {string | null} */
    this.name = null;
    /** @type {Memory | null} */
    this.memory = null;
    this.isOutdated = false; // whether the session may be another one at the same revision
    /** @type {string[]} */
    this.texts = [];
    /** @type {Turn[]} */
    this.turns = [];
    /** @type {AbortController | null} */
    this.running = null;
    /** @type {string | null} */
    this.selected = null; // the label of a turn
    /** @type {{timings: any, held: number} | null} */
    this.lastAnswer = null;
    this.changes = new ChatChanges(this);
    this.failedToLoad = false; // whether the status says so
    this.busy = false; // whether an answer or a change is in progress
    /** @type {import("./chat_settings.js").SessionSettings} */
    this.newSession = {};
    this.newSystem = ""; // of a conversation that has not begun
    /** @type {import("./chat_settings.js").Sampling} */
    this.newSampling = {};
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.heading = h("h1", {}, "New chat");
    this.headerButtons = h("div", { class: "actions" });
    this.box = composer((text) => this.say(text), () => this.running?.abort(), () => this.exclusively(() => this.changes.changeSettings()));
    const note = h("p", { class: "hint" }, "This page may only read here. Start the server with --allow-edit to chat and to edit.");
    this.strip = turnStrip((label) => this.point(label), (label) => this.select(label, "strip"));
    this.panel = memoryPanel(edits ? { change: (...change) => this.changes.changeMemory(...change), branch: (at) => this.exclusively(() => this.changes.branch(at)) } : null);
    this.panelButton = h("button", { class: "panel-button", "aria-expanded": "false", onclick: () => this.togglePanel() }, "Memory");
    const column = h("div", { class: "chat-column" }, this.log, edits ? this.box.element : note);
    this.frame = h("div", { class: "chat" }, h("div", { class: "chat-header" }, this.heading, this.headerButtons, this.panelButton), this.strip.element, h("div", { class: "chat-body" }, column, this.panel.element));
    fill(container, this.frame);
    this.log.addEventListener("pointerover", (/** @type {Event} */ event) => this.point(/** @type {HTMLElement} */ (event.target).closest(".turn")?.getAttribute("data-turn") || null));
    this.log.addEventListener("pointerleave", () => this.point(null));
    this.log.addEventListener("drawn", () => this.followEnd());
    signal.addEventListener("abort", () => this.running?.abort());
    document.addEventListener("deleting", (/** @type {any} */ event) => event.detail === this.name && this.running?.abort(), { signal });
    document.addEventListener("keydown", (event) => this.onKey(event), { signal });
    const reloadSoon = debounce(() => (this.busy ? reloadSoon() : this.reload()));
    onOperation((operation) => {
      if (operation && operation.session !== this.name) return;
      if (!operation || operation.what === "delete") this.isOutdated = true; // revisions may start again
      reloadSoon();
    }, signal);
    const timer = setInterval(() => this.watch(), WATCH_EVERY);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  /** @param {string | null} name */
  async open(name) {
    this.name = name;
    if (name === null) this.drawWelcome();
    else await this.load();
    if (this.edits) this.box.focus();
  }

  get path() {
    return `/v1/sessions/${this.name}`;
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const typing = /** @type {HTMLElement} */ (event.target).closest?.("input, textarea, select, dialog");
    if (event.key === "Escape" && document.querySelector("dialog[open]")) return; // it closes the dialog
    if (event.key === "Escape" && this.running) this.running.abort();
    else if (event.key === "Escape" && this.panel.element.classList.contains("open")) this.togglePanel(false);
    if (event.key === "/" && !typing && this.edits) {
      event.preventDefault();
      this.box.focus();
    }
  }

  // Follows a generation: this page's own by its memory alone, as its text is streamed.
  async watch() {
    if (!this.running) return this.memory?.busy ? this.reload() : null;
    if (this.name === null) return null;
    const memory = await get(`${this.path}/memory`).catch(() => null);
    if (!memory || !this.running || this.signal.aborted) return null;
    const start = this.turns.at(-1)?.end || 0;
    const newest = { label: "newest turn", number: 0, start, end: memory.tokens, parts: [] };
    return this.drawMemory(memory, memory.tokens > start ? [...this.turns, newest] : this.turns);
  }

  /** @param {Memory} memory @param {Turn[]} turns */
  drawMemory(memory, turns) {
    if (!turns.some(({ label }) => label === this.selected)) this.selected = null;
    this.strip.draw(memory, turns, this.selected);
    this.panel.draw(memory, turns, this.selected, this.lastAnswer);
    this.frame.classList.add("has-memory");
    this.point(null);
  }

  // Lights a turn in the chat and in the strip.
  /** @param {string | null} label */
  point(label) {
    this.strip.light(label, this.selected);
    for (const element of this.log.querySelectorAll(".turn")) {
      const own = element.getAttribute("data-turn");
      element.classList.toggle("lit", own !== null && own === label);
      element.classList.toggle("selected", own !== null && own === this.selected);
    }
  }

  // Selects a turn, or none if it is the one that is selected. from: where it was chosen.
  /** @param {string} label @param {"strip" | "chat"} from */
  select(label, from) {
    this.selected = label === this.selected && from === "strip" ? null : label;
    if (this.memory) this.drawMemory(this.memory, this.turns);
    if (from === "strip") this.log.querySelector(".turn.selected")?.scrollIntoView({ block: "nearest" });
    else this.togglePanel(true);
  }

  togglePanel(open = this.panelButton.getAttribute("aria-expanded") !== "true") {
    this.panelButton.setAttribute("aria-expanded", String(open));
    this.panel.element.classList.toggle("open", open);
    (open ? this.panel.element : this.panelButton).focus({ preventScroll: true });
  }

  drawWelcome() {
    document.title = "New chat - kvkeep";
    this.heading.textContent = "New chat";
    fill(
      this.log,
      h(
        "div",
        { class: "welcome" },
        h("p", {}, `Write below to talk with ${this.settings.model || "the model"}, which runs on this server; nothing is sent anywhere else.`),
        h("p", {}, "The strip above the chat is the model's memory: each turn has a part there, as wide as what it takes, and coloured by whether it is still held."),
        h("p", {}, "Select a turn to pin it, to make the model forget it or to replace what it said; Undo takes every change back."),
      ),
    );
  }

  // Loads the session's memory and text, and draws them. Raises ApiError.
  async load() {
    const [name, before] = [this.name, this.isOutdated ? null : this.memory];
    const memory = /** @type {Memory} */ (await get(`${this.path}/memory`));
    if (this.signal.aborted || name !== this.name) return;
    const unchanged = before && before.revision === memory.revision && before.tokens === memory.tokens;
    if (unchanged) {
      this.memory = memory;
      return;
    }
    if (memory.revision !== this.appendedRevision && memory.tokens !== before?.tokens) this.lastAnswer = null;
    const first = before && memory.revision === this.appendedRevision ? Math.min(before.tokens, memory.tokens) : 0;
    const pieces = await fetchPieces(/** @type {string} */ (name), first, memory.tokens);
    if (this.signal.aborted || name !== this.name) return;
    [this.memory, this.isOutdated] = [memory, false];
    this.texts = [...this.texts.slice(0, first), ...pieces.map(({ text }) => text)];
    if (!this.running) await this.draw();
  }

  async reload() {
    if (this.name === null) return;
    try {
      await this.load();
      if (this.failedToLoad) showStatus("");
      this.failedToLoad = false;
    } catch (error) {
      if (this.signal.aborted) return;
      if (error instanceof ApiError && error.status === 404) return this.drawGone();
      this.failedToLoad = true;
      showStatus(/** @type {Error} */ (error).message, true);
    }
  }

  drawGone() {
    this.memory = null;
    fill(this.log, h("div", { class: "welcome" }, h("p", {}, "This conversation was deleted. ", h("a", { href: "#/" }, "Start a new one"), ".")));
  }

  async draw() {
    const memory = /** @type {Memory} */ (this.memory);
    const atEnd = this.isAtEnd();
    this.turns = turnsOf(memory, this.texts);
    this.heading.textContent = titleOf(memory.name);
    document.title = `${titleOf(memory.name)} - kvkeep`;
    await this.drawHeader();
    const elements = this.turns.filter(({ parts }) => parts.length).map((turn) => turnElement(turn, (part) => [...this.buttonsOf(turn, part), standingNote(memory, part)]));
    const empty = h("div", { class: "welcome" }, h("p", {}, "Nothing has been said here yet."));
    fill(this.log, elements.length ? elements : empty);
    this.drawMemory(memory, this.turns);
    if (atEnd) this.followEnd(true);
  }

  async drawHeader() {
    const [step] = this.edits ? await undoSteps(/** @type {string} */ (this.name)).catch(() => []) : [];
    const link = h("a", { class: "button", href: `#/sessions/${this.name}` }, "Inspect");
    const undoButton = step ? h("button", { onclick: () => this.exclusively(() => this.changes.undo(step)) }, `Undo ${step.operation}`) : null;
    const branch = this.edits ? h("button", { onclick: () => this.exclusively(() => this.changes.branch(null)) }, "Branch") : null;
    fill(this.headerButtons, undoButton, branch, link);
  }

  /**
   * Runs one change or answer at a time; another one is not begun, nor one of a session that cannot be loaded.
   * Returns whether it was run.
   * @param {() => Promise<any>} run @param {{focus: (options?: FocusOptions) => void}} [next] that has the focus afterwards
   */
  async exclusively(run, next = this.box) {
    if (this.busy) {
      showStatus("Wait until the answer is complete, or stop it.");
      return false;
    }
    this.setBusy(true);
    showStatus("");
    try {
      if (this.name !== null && !(await this.isCurrent())) return false;
      await run();
    } finally {
      this.setBusy(false); // only now: the next turn is for the revision that is shown
    }
    if (!this.signal.aborted) next.focus({ preventScroll: true });
    return true;
  }

  // Whether the session is what is shown; says so if it is not.
  async isCurrent() {
    const before = this.memory;
    if (this.isOutdated || !before) await this.reload();
    const isSame = before?.revision === this.memory?.revision && before?.tokens === this.memory?.tokens;
    if (!isSame && this.memory) showStatus(CHANGED, true);
    return isSame && this.memory !== null && !this.isOutdated;
  }

  /** @param {boolean} busy */
  setBusy(busy) {
    this.busy = busy;
    this.box.setBusy(busy);
    this.headerButtons.inert = busy;
    this.headerButtons.classList.toggle("inert", busy);
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80 || !this.turns.length;
  }

  // Scrolls to the end, unless the reader has scrolled away from it.
  followEnd(force = false) {
    if (force || this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 200) this.log.scrollTop = this.log.scrollHeight;
  }

  /** @param {Turn} turn @param {Part} part @returns {HTMLElement[]} */
  buttonsOf(turn, part) {
    if (!this.edits) return part === turn.parts.at(-1) ? [h("button", { class: "small", onclick: () => this.select(turn.label, "chat") }, "Memory")] : [];
    const isLast = turn === this.turns.at(-1);
    /** @param {string} label @param {() => Promise<any>} run @param {string} [hint] */
    const button = (label, run, hint) => h("button", { class: "small", onclick: () => this.exclusively(run), title: hint }, label);
    const isTurn = turn.label.startsWith("turn ");
    const memoryButton = h("button", { class: "small", onclick: () => this.select(turn.label, "chat") }, "Memory");
    if (part === turn.parts[0] && turn.parts.length === 1 && part.role !== "answer") return [memoryButton];
    if (part.role === "question" && isTurn) return [button("Edit", () => this.changes.editQuestion(turn, part), "Ask otherwise, in a branch")];
    if (part.role !== "answer") return [];
    return [
      isTurn && isLast ? button("Regenerate", () => this.changes.regenerate(turn), "Answer once more; the old answer can be restored by Undo") : null,
      isTurn && isLast ? button("Continue", () => this.changes.continueAnswer(), "Go on where the answer ended") : null,
      this.memory && canGoBackTo(this.memory, turn.end) ? button("Branch from here", () => this.changes.branch(turn.end)) : null,
      memoryButton,
    ].flatMap((element) => (element ? [element] : []));
  }

  /** @param {string} content */
  async say(content) {
    if (!(await this.exclusively(() => this.begin(content)))) this.box.restore(content);
  }

  /** @param {string} content */
  async begin(content) {
    try {
      if (this.name === null) await this.create(content);
    } catch (error) {
      this.box.restore(content);
      return showStatus(/** @type {Error} */ (error).message, true);
    }
    await this.takeTurn(content);
  }

  // Creates the session of a new conversation. Raises ApiError.
  /** @param {string} content */
  async create(content) {
    const created = await send("POST", "/v1/sessions", { name: nameFor(content), ...this.newSession });
    this.name = created.name;
    keep(created.name, { title: titleFor(content), sampling: this.newSampling });
    history.replaceState(null, "", `#/chat/${created.name}`);
    this.heading.textContent = titleOf(created.name);
    fill(this.log);
    this.memory = await get(`${this.path}/memory`);
    conversationsChanged();
  }

  /** @param {string} content */
  async takeTurn(content) {
    const memory = this.memory;
    if (!memory) return;
    const turn = openTurn(content);
    if (!this.turns.length) fill(this.log);
    this.log.append(turn.element);
    this.followEnd(true);
    const system = !memory.tokens && this.newSystem ? { system: this.newSystem } : {};
    const body = { content, stream: true, ...system, ...keptOf(memory.name).sampling };
    await this.stream("turns", body, turn, () => this.box.restore(content));
  }

  // Streams an answer into a turn that is shown. onNothing: called if nothing of it was kept.
  /** @param {string} action @param {any} body @param {ReturnType<typeof openTurn>} turn @param {() => void} onNothing */
  async stream(action, body, turn, onNothing) {
    const memory = /** @type {Memory} */ (this.memory);
    const [{ revision }, held] = [memory, memory.tokens - countOf(memory, "forgotten")];
    this.running = new AbortController();
    this.box.setStoppable(true);
    /** @type {Error | null} */
    let failure = null;
    try {
      const options = { headers: changeHeaders(revision), signal: this.running.signal };
      for await (const [kind, event] of streamEvents("POST", `${this.path}/${action}`, body, options)) {
        if (kind === "read") turn.note(`Reading ${event.done} of ${event.total} tokens...`);
        else if (kind === "token") turn.push(event);
        else if (kind === "error") throw new Error(event.error.message);
        else if (kind === "done") {
          this.lastAnswer = { timings: event.timings, held };
          if (event.revision === revision + 1) this.appendedRevision = event.revision;
        }
      }
    } catch (error) {
      if (/** @type {Error} */ (error).name !== "AbortError") failure = /** @type {Error} */ (error);
    }
    turn.finish();
    this.box.setStoppable(false);
    if (turn.isEmpty) onNothing();
    this.running = null;
    if (this.signal.aborted) return;
    await this.settle();
    if (failure) showStatus(changeError(failure), true);
    conversationsChanged();
  }

  // Loads the session once it is no longer busy with an answer that was stopped.
  async settle() {
    for (let tries = 0; tries < 20; tries += 1) {
      await this.reload();
      if (!this.memory?.busy) break;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    if (this.memory) await this.draw();
  }

  // Shows another conversation in this view.
  /** @param {string} name */
  leaveFor(name) {
    history.pushState(null, "", `#/chat/${name}`);
    [this.name, this.memory, this.texts, this.turns, this.lastAnswer] = [name, null, [], [], null];
  }
}
