// One session: its strip, its text, its spans.

import { get, messageOf } from "./api.js";
import { selectionBar, sessionButtons } from "./actions.js";
import { fill, h, showStatus, title } from "./dom.js";
import { debounce, onOperation, SHOWN_AGAIN } from "./live.js";
import { fetchPieces } from "./pieces.js";
import { Change } from "./inspector_change.js";
import { factLine, originText } from "./session_facts.js";
import { fetchSessions, knownSessions, onSessions } from "./session_list.js";
import { strip } from "./strip.js";
import { PART, redraw, Selection, tokenElements } from "./tokens.js";
import { offeredStep, stepsAmong } from "./undo.js";
import { noteEnd, textsOf, turnsOfSession, undoChange } from "./undo_change.js";

const SHOWN = 2048; // tokens of the text at a time
const MARKS = "What is struck through is forgotten; underlines have the colours of the legend.";
const SELECT = "Select words to change them.";
const PARTS = ` Each ${PART} stands for a token that is a part of the character after it.`;

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
    this.origin = ""; // that the facts name
    /** @type {number | null} */
    this.first = null; // first token of the text that is shown; null for the end of the text
    this.facts = h("p");
    this.text = h("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Text" });
    this.paging = h("div", { class: "actions" });
    this.partHint = h("span");
    const newChange = () => new Change(this);
    const current = () => this.memory;
    this.selection = new Selection(() => this.onSelection(), signal);
    const textOf = async (/** @type {number} */ start, /** @type {number} */ end) => textsOf(await fetchPieces(this.memory, start, end)).join("");
    this.controls = selectionBar(this.selection, edits ? newChange : null, current, textOf, (label) => this.selectSpan(label));
    this.strip = strip((token) => this.selectToken(token));
    this.listen();
    const back = h("a", { href: `#/chat/${name}` }, "Back to the chat"); // in sight where the title is not
    const section = h("section", { class: "memory", "aria-label": "Memory" }, h("div", { class: "title" }, h("h2", {}, "Text"), back), h("p", { class: "hint" }, edits ? `${MARKS} ${SELECT}` : MARKS, this.partHint), this.text, this.paging);
    const chatLink = h("a", { class: "button", href: `#/chat/${name}` }, "Chat");
    this.buttons = edits ? sessionButtons(newChange, current) : null;
    const buttons = h("div", { class: "actions" }, chatLink, this.buttons?.elements);
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
      if (operation === SHOWN_AGAIN) return reloadSoon();
      if (operation && operation.session !== this.name) return null;
      // Revisions may restart: after a restart of the server, or with a new session of this name.
      if (!operation || operation.what === "delete") this.forget();
      return reloadSoon();
    }, this.signal);
    onSessions(() => {
      this.offerUndo();
      if (originText(this.memory) !== this.origin) this.drawFacts(); // or else a link there keeps the focus
    }, this.signal);
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
      if (latest.created !== this.memory.created) this.forget(); // another one has the name
      const unchanged = latest.revision === this.memory.revision && this.isDrawn;
      this.memory = latest;
      if (unchanged) this.drawFacts(); // tokens under the pointer stay in place
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
    this.controls.element.toggleAttribute("inert", true);
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
      this.controls.element.toggleAttribute("inert", false);
    }
  }

  drawFacts() {
    this.origin = originText(this.memory);
    fill(this.facts, factLine(this.memory));
    this.buttons?.update();
  }

  async draw() {
    this.drawFacts();
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
    const tokens = await fetchPieces(memory, start, end);
    if (memory.revision !== this.memory.revision || first !== this.first) return; // outdated by a later call
    if (!tokens) return this.reload();
    redraw(this.text, tokenElements(tokens, memory));
    fill(this.partHint, tokens.some((token) => !token.text) ? PARTS : null);
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
  async selectSpan(label) {
    const span = this.memory.spans[label];
    if (!span) return;
    this.selection.set(span.start, span.end, this.memory.revision, label);
    await this.showToken(span.start);
  }

  /** @param {number} token */
  async selectToken(token) {
    const { revision } = this.memory;
    await this.showToken(token);
    this.selection.set(token, token + 1, revision);
  }

  // Scrolls to a token: if it is not in view, its line becomes the first one.
  /** @param {number} token */
  async showToken(token) {
    if (token < this.firstShown || token >= this.firstShown + SHOWN) {
      this.first = Math.max(0, token - SHOWN / 2);
      await this.redrawText();
    }
    const element = /** @type {HTMLElement | null} */ (this.text.querySelector(`[data-at="${token}"]`));
    if (!element) return;
    const top = element.offsetTop - this.text.offsetTop - this.text.scrollTop;
    if (top < 0 || top + element.offsetHeight > this.text.clientHeight) this.text.scrollTop += top;
    element.scrollIntoView({ block: "nearest" });
  }

  onSelection() {
    this.controls.update();
    this.markSelected();
  }

  markSelected() {
    const { start, end } = this.selection;
    this.strip.select(start, end);
    for (const element of this.text.querySelectorAll("[data-at]")) {
      const at = Number(element.getAttribute("data-at"));
      element.classList.toggle("selected", at >= start && at < end);
    }
  }
}
