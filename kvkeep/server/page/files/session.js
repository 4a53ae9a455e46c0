// One session: its strip, its text, its spans.

import { get, messageOf } from "./api.js";
import { selectionBar, sessionButtons } from "./actions.js";
import { bytes, fill, h, number, sessionLink, showStatus, title } from "./dom.js";
import { debounce, onOperation, rate } from "./live.js";
import { sizeText } from "./memory_text.js";
import { isPrompt, reuseText } from "./misses.js";
import { fetchPieces } from "./pieces.js";
import { Change } from "./session_change.js";
import { fetchSessions, knownSessions, onSessions } from "./session_list.js";
import { stateText } from "./sessions.js";
import { strip } from "./strip.js";
import { redraw, Selection, tokenElements } from "./tokens.js";
import { isUndoName, offeredStep, stepsAmong } from "./undo.js";
import { noteEnd, turnsOfSession, undoChange } from "./undo_change.js";

const SHOWN = 2048; // tokens of the text at a time
const MARKS = "What is struck through is forgotten; underlines have the colours of the legend.";
const SELECT = "Select words to change them.";

/** @param {HTMLElement} container @param {View} view */
export async function session(container, { signal, edits, parts }) {
  const name = parts[1];
  const memory = await get(`/v1/sessions/${name}/memory`);
  await new SessionView(container, signal, edits, memory).open(parts[2] === undefined ? null : Number(parts[2]));
}

class SessionView {
  /** @param {HTMLElement} container @param {AbortSignal} signal @param {boolean} edits @param {Memory} memory */
  constructor(container, signal, edits, memory) {
    const { name } = memory;
    this.name = name;
    this.signal = signal;
    this.edits = edits;
    this.memory = memory;
    this.isDrawn = false; // whether what is drawn shows `memory`
    /** @type {number | null} */
    this.stableRevision = null; // a revision in which the selected tokens still have the same numbers
    this.pendingChanges = 0;
    this.lastRequest = 0; // numbers of requests for the memory
    this.lastApplied = 0;
    this.isUndoing = false;
    this.offered = ""; // the fork of the change that Undo is offered for
    /** @type {number | null} */
    this.first = null; // first token of the text that is shown; null for the end of the text
    this.facts = h("p");
    this.text = h("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Text" });
    this.paging = h("div", { class: "actions" });
    const newChange = () => new Change(name, this.memory.revision, this);
    const current = () => this.memory;
    this.selection = new Selection(() => this.onSelection(), signal);
    const textOf = async (/** @type {number} */ start, /** @type {number} */ end) => (await fetchPieces(name, start, end)).map((piece) => piece.text).join("");
    this.controls = selectionBar(this.selection, edits ? newChange : null, current, textOf, (label) => this.selectSpan(label));
    this.strip = strip(name, (token) => this.selectToken(token));
    this.listen();
    const back = h("a", { href: `#/chat/${name}` }, "Back to the chat"); // in sight where the title is not
    const section = h("section", { class: "memory", "aria-label": "Memory" }, h("div", { class: "title" }, h("h2", {}, "Text"), back), h("p", { class: "hint" }, edits ? `${MARKS} ${SELECT}` : MARKS), this.text, this.paging);
    const chatLink = h("a", { class: "button", href: `#/chat/${name}` }, "Chat");
    const buttons = h("div", { class: "actions" }, chatLink, edits ? sessionButtons(newChange, current) : null);
    fill(container, title(memory.title || name, this.path, buttons), this.facts, this.strip.element, this.controls.element, section);
  }

  get path() {
    return `/v1/sessions/${this.name}/memory`;
  }

  listen() {
    const reloadSoon = debounce(() => {
      if (this.pendingChanges) reloadSoon(); // the operation may be this page's own change
      else this.reload();
    });
    onOperation((operation) => {
      if (operation && operation.session !== this.name) return;
      // Revisions may restart: after a restart of the server, or with a new session of this name.
      if (!operation || operation.what === "delete") this.forget();
      reloadSoon();
    }, this.signal);
    onSessions(() => this.offerUndo(), this.signal);
  }

  // Has the next memory drawn, even if it is at the revision that is shown.
  forget() {
    [this.isDrawn, this.stableRevision] = [false, null];
    this.selection.clear();
  }

  /** @param {number | null} at the token whose text is shown first; null for the end */
  async open(at) {
    if (at !== null && at < this.firstShown) this.first = at;
    await this.draw();
    const token = at === null ? null : /** @type {HTMLElement | null} */ (this.text.querySelector(`[data-at="${at}"]`));
    this.text.scrollTop = token ? token.offsetTop - this.text.offsetTop : this.text.scrollHeight;
    if (token) this.text.parentElement?.scrollIntoView();
  }

  async reload() {
    const request = ++this.lastRequest;
    try {
      const latest = await get(this.path);
      if (this.signal.aborted || request < this.lastApplied) return;
      this.lastApplied = request;
      const unchanged = latest.revision === this.memory.revision && this.isDrawn;
      this.memory = latest;
      if (unchanged) fill(this.facts, factLine(latest)); // tokens under the pointer stay in place
      else await this.draw();
    } catch (error) {
      this.fail(error);
    }
  }

  /** @param {unknown} error */
  fail(error) {
    if (!this.signal.aborted) showStatus(messageOf(error), true);
  }

  /** @param {number} revision */
  markStable(revision) {
    this.stableRevision = revision;
  }

  /**
   * Has Undo offered for a change.
   * @param {string} kept the fork of before @param {number} revision after it
   */
  async onKept(kept, revision) {
    await fetchSessions().catch(() => {}); // the connection's state is shown elsewhere
    if (revision === this.memory.revision) await noteEnd(this.memory, kept).catch(() => {}); // Undo asks then
  }

  offerUndo() {
    const step = this.edits ? offeredStep(stepsAmong(knownSessions(), this.name), this.memory.tokens) : undefined;
    if (this.offered === (step?.name || "")) return; // the button may have the focus
    this.offered = step?.name || "";
    this.controls.offerUndo(step?.operation || "", () => step && this.undo(step));
  }

  /** @param {import("./undo.js").Step} step */
  async undo(step) {
    if (this.isUndoing) return;
    this.isUndoing = true;
    this.pendingChanges += 1;
    try {
      await this.reload(); // it may have gone on just now
      const done = await undoChange(this.memory, step, () => turnsOfSession(this.memory));
      if (!done) return;
      this.forget();
      await fetchSessions().catch(() => {});
      await this.reload();
      showStatus(done.text, done.isError);
      this.text.focus({ preventScroll: true }); // the button is gone
    } catch (error) {
      this.fail(error);
    } finally {
      this.pendingChanges -= 1;
      this.isUndoing = false;
    }
  }

  async draw() {
    fill(this.facts, factLine(this.memory));
    this.offerUndo();
    this.strip.draw(this.memory);
    this.controls.updateSpans();
    if (this.selection.follow(this.memory, this.stableRevision)) {
      showStatus("The conversation has changed; the selection was cleared.");
    }
    this.controls.update();
    this.isDrawn = true;
    await this.drawText();
  }

  get firstShown() {
    return this.first === null ? Math.max(0, this.memory.tokens - SHOWN) : this.first;
  }

  async drawText() {
    const [start, memory, first] = [this.firstShown, this.memory, this.first];
    const end = Math.min(memory.tokens, start + SHOWN);
    const tokens = await fetchPieces(this.name, start, end);
    if (memory.revision !== this.memory.revision || first !== this.first) return; // outdated by a later call
    redraw(this.text, tokenElements(tokens, memory));
    const pageButton = (/** @type {string} */ label, /** @type {number} */ page) => h("button", { onclick: () => this.showFrom(page) }, label);
    fill(
      this.paging,
      start > 0 ? pageButton("Earlier", Math.max(0, start - SHOWN)) : null,
      end < memory.tokens ? pageButton("Later", end) : null,
    );
    this.markSelected();
  }

  redrawText() {
    return this.drawText().catch((error) => this.fail(error));
  }

  /** @param {number} start */
  showFrom(start) {
    this.first = start + SHOWN >= this.memory.tokens ? null : start;
    return this.redrawText();
  }

  /** @param {string} label of a span */
  selectSpan(label) {
    const span = this.memory.spans[label];
    if (span) this.selection.set(span.start, span.end, this.memory.revision, label);
  }

  /** @param {number} token */
  async selectToken(token) {
    const { revision } = this.memory;
    if (token < this.firstShown || token >= this.firstShown + SHOWN) {
      this.first = Math.max(0, token - SHOWN / 2);
      await this.redrawText();
    }
    this.selection.set(token, token + 1, revision);
    this.text.querySelector(`[data-at="${token}"]`)?.scrollIntoView({ block: "nearest" });
  }

  onSelection() {
    this.controls.update();
    this.markSelected();
  }

  markSelected() {
    const { start, end } = this.selection;
    for (const element of this.text.querySelectorAll("[data-at]")) {
      const at = Number(element.getAttribute("data-at"));
      element.classList.toggle("selected", at >= start && at < end);
    }
  }
}

/** @param {Memory} memory */
function factLine(memory) {
  const tokensPerSecond = rate(memory.name);
  return [
    `${sizeText(memory, bytes)} Policy ${memory.policy}. `,
    overwrittenParts(memory),
    memory.parent && !isUndoName(memory.parent) ? ["Branch of ", sessionLink(memory.parent), ". "] : "",
    memory.last_prompt && isPrompt(memory) ? `Last prompt: ${reuseText(memory.last_prompt)}. ` : "",
    tokensPerSecond ? `${tokensPerSecond.toFixed(1)} tokens/s. ` : "",
    `${stateText(memory)}. `.replace(/^./, (letter) => letter.toUpperCase()),
    h("a", { href: `#/sessions/${memory.name}/heads` }, "Cells by head"),
  ].flat();
}

/**
 * Returns what local windows, states and checkpoints take, and what a rewind costs; "" without any.
 * @param {Memory} memory
 */
function overwrittenParts(memory) {
  const { cells, ...others } = memory.bytes_by_part;
  const parts = Object.entries(others).filter(([, size]) => size);
  if (!parts.length) return "";
  const sizes = parts.map(([part, size]) => `${bytes(size)} of ${part}`).join(", ");
  const ends = memory.checkpoints.map(number).join(", ");
  const evaluated = memory.rewind_evaluates;
  return [
    `${bytes(cells)} of cells, ${sizes}. `,
    ends ? `Checkpoints after ${ends} tokens. ` : "",
    evaluated === null ? "" : `A rewind of one token evaluates ${number(evaluated)} again. `,
  ].join("");
}
