// What a conversation's view consists of: heading, strip, turns, message box and memory panel.

import { placeOf, reserveHeights, scrollToPlace } from "./chat_place.js";
import { titleParts } from "./chat_settings.js";
import { composer } from "./composer.js";
import { byId, fill, h } from "./dom.js";
import { memoryPanel } from "./memory_panel.js";
import { endButton } from "./to_end.js";
import { turnStrip } from "./turn_strip.js";

/** @typedef {import("./turns.js").Turn} Turn */
/**
 * @typedef {object} Handlers  What the view does when it is used.
 * @property {(text: string, typed: string) => void} say  typed: what names a new conversation
 * @property {() => void} stop
 * @property {() => void} settings
 * @property {() => import("./message_size.js").Room} room  that the next message has
 * @property {import("./memory_panel.js").Actions} memory
 */

/** @typedef {{kind: string, name: string, title: string}} Origin  The conversation that one of a kind, such as a branch, left. */

const READ_ONLY = "This page may only read here. Start the server with --allow-edit to chat and to edit.";
const UNNAMED = "This is the prompt of another client, which the server drops once it needs the memory. Branch, at the top, begins a conversation that stays.";
const SETTLING_FRAMES = 12;
const NEAR_END = 200; // pixels: a reader who is nearer to the end follows it

export class ChatFrame {
  /** @param {HTMLElement} container @param {boolean} edits @param {Handlers} handlers */
  constructor(container, edits, handlers) {
    /** @type {Memory | null} */
    this.memory = null; // as it is drawn, with its turns
    /** @type {Turn[]} */
    this.turns = [];
    /** @type {string | null} */
    this.selected = null; // the label of a turn
    /** @type {HTMLElement | null} */
    this.panelOpener = null; // what had the focus
    /** @type {import("./chat_place.js").Place | null} */
    this.nextPlace = null; // that the turns are shown at when they are first drawn
    this.settlingFrames = 0; // in which the view still goes to the end
    /** @type {WeakMap<any, string>} */
    this.keys = new WeakMap(); // of the elements of turns: what they were drawn from
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.heading = h("h1");
    this.origin = h("p", { class: "origin", hidden: true });
    this.buttons = h("div", { class: "actions" });
    this.box = composer(handlers.say, handlers.stop, handlers.settings, handlers.room);
    this.unnamed = h("p", { class: "hint", hidden: true }, UNNAMED);
    this.strip = turnStrip((label) => this.point(label), (label, byKey) => this.select(label, "strip", byKey));
    this.panel = memoryPanel(edits ? handlers.memory : null);
    const close = h("button", { class: "small panel-close", "aria-label": "Close the memory panel", onclick: () => this.togglePanel(false) }, "×");
    this.panel.element.prepend(close);
    this.panelButton = h("button", { class: "panel-button", "aria-expanded": "false", onclick: () => this.togglePanel() }, "Memory");
    this.endButton = endButton(() => {
      this.goToEnd();
      this.log.focus({ preventScroll: true }); // the button is hidden there
    });
    const column = h("div", { class: "chat-column" }, this.log, this.endButton.element, byId("status"), edits ? [this.box.element, this.unnamed] : h("p", { class: "hint" }, READ_ONLY));
    const header = h("div", { class: "chat-header" }, h("div", { class: "chat-title" }, this.heading, this.origin), this.buttons, this.panelButton);
    this.element = h("div", { class: "chat" }, header, this.strip.element, h("div", { class: "chat-body" }, column, this.panel.element));
    fill(container, this.element);
    this.log.addEventListener("pointerover", (/** @type {Event} */ event) => this.point(labelAt(event)));
    this.log.addEventListener("pointerleave", () => this.point(null));
    this.log.addEventListener("scroll", () => this.endButton.show(!this.isNearEnd()));
    this.log.addEventListener("drawn", () => {
      this.followEnd();
      this.endButton.show(!this.isNearEnd(), true);
    });
    this.log.addEventListener("click", (/** @type {Event} */ event) => {
      const isControl = /** @type {HTMLElement} */ (event.target).closest("button, a, summary");
      if (!isControl && this.isPanelOver && this.isPanelOpen) this.togglePanel(false);
    });
    this.keepEndInView();
  }

  // Keeps a reader at the end there while the message box grows or a status appears.
  keepEndInView() {
    let height = 0;
    new ResizeObserver(() => {
      const lost = height - this.log.clientHeight;
      height = this.log.clientHeight;
      if (lost > 0 && this.distanceToEnd() < NEAR_END + lost) this.log.scrollTop += lost;
    }).observe(this.log);
  }

  // What is to be shown again when the conversation is opened again.
  get view() {
    return { selected: this.selected, place: this.isNearEnd() ? null : placeOf(this.log) };
  }

  // Has the conversation shown as it was left, once it is drawn.
  /** @param {import("./chat_place.js").LeftView} view */
  restore({ selected, place }) {
    [this.selected, this.nextPlace] = [selected, place];
  }

  // Whether turns that are drawn first are shown where they were left.
  /** @param {Turn[]} turns */
  isLeftAmong(turns) {
    return turns.some(({ label }) => label === this.nextPlace?.label);
  }

  /** @param {string} title of the conversation */
  setTitle(title) {
    fill(this.heading, titleParts(title));
    this.heading.title = title; // the heading may be cut
    if (this.element.isConnected) document.title = `${title} - kvkeep`; // or else its view was left
  }

  // Shows where a branch comes from, with the way back.
  /** @param {Origin | null} origin */
  setOrigin(origin) {
    this.origin.hidden = !origin;
    if (origin) fill(this.origin, `${origin.kind}. `, h("a", { href: `#/chat/${origin.name}`, title: origin.title }, `Back to “${origin.title}”`));
  }

  // Shows a paragraph in place of turns, and nothing of memory, until there is a memory to draw.
  /** @param {string} title @param {any[]} paragraph */
  showGone(title, paragraph) {
    this.setTitle(title);
    this.welcome(paragraph);
    this.element.classList.add("gone");
  }

  // Whether the server no longer has the conversation.
  get isGone() {
    return this.element.classList.contains("gone");
  }

  // Shows the message box, or for a prompt of another client how to go on from it.
  /** @param {boolean} isNamed */
  setNamed(isNamed) {
    this.box.element.hidden = !isNamed;
    this.unnamed.hidden = isNamed;
  }

  /** @param {Memory} memory @param {Turn[]} turns */
  drawMemory(memory, turns) {
    this.element.classList.remove("gone");
    [this.memory, this.turns] = [memory, turns];
    if (!turns.some(({ label }) => label === this.selected)) this.selected = null;
    this.strip.draw(memory, turns, this.selected);
    this.panel.draw(memory, turns, this.selected);
    this.box.measure();
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

  // Selects a turn; a click on the part of the strip that is selected selects none. from: where it was chosen. byKey: which leads on to the panel.
  /** @param {string} label @param {"strip" | "chat"} from */
  select(label, from, byKey = false) {
    const isShown = !this.isPanelOver || this.isPanelOpen;
    this.selected = label === this.selected && from === "strip" && isShown && !byKey ? null : label;
    if (this.memory) this.drawMemory(this.memory, this.turns);
    this.settlingFrames = 0;
    if (from === "strip") this.log.querySelector(".turn.selected")?.scrollIntoView({ block: "nearest" });
    if (from === "chat" || (this.selected !== null && (this.isPanelOver || byKey))) this.togglePanel(true, byKey ? this.panel.turnPart : this.panel.element);
  }

  // Selects no turn.
  unselect() {
    this.selected = null;
    if (this.memory) this.drawMemory(this.memory, this.turns);
  }

  // Whether the panel lies over the chat when it is open, as there is no room beside it.
  get isPanelOver() {
    return getComputedStyle(this.panelButton).display !== "none";
  }

  get isPanelOpen() {
    return this.panelButton.getAttribute("aria-expanded") === "true";
  }

  // Opens or closes the panel. target: what has the focus in an open one.
  togglePanel(open = !this.isPanelOpen, target = this.panel.element) {
    const hasFocus = this.panel.element.contains(document.activeElement);
    if (open && !hasFocus) this.panelOpener = /** @type {HTMLElement} */ (document.activeElement);
    this.panelButton.setAttribute("aria-expanded", String(open));
    this.panel.element.classList.toggle("open", open);
    if (open) target.focus({ preventScroll: true });
    else if (hasFocus) this.openerNow().focus({ preventScroll: true });
  }

  // Returns what opened the panel, or what has taken its place since then.
  openerNow() {
    const opener = this.panelOpener;
    if (opener?.isConnected && opener !== document.body) return opener;
    const bar = opener?.dataset.turn && this.strip.buttonOf(opener.dataset.turn);
    return bar || this.log.querySelector(".turn.selected button.memory") || this.panelButton;
  }

  /** @param {string} reason why nothing can be changed now, "" if it can */
  setBusy(reason) {
    this.box.setBusy(reason);
    this.element.classList.toggle("busy", Boolean(reason));
    this.buttons.inert = Boolean(reason);
    this.disableChanges();
  }

  // Disables the buttons of messages in their places while an answer or a change is in progress.
  disableChanges() {
    const isBusy = this.element.classList.contains("busy");
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    // A disabled button with the focus would get no keys in some browsers: Escape stops an answer.
    if (isBusy && focused?.matches("button.change")) focused.blur();
    for (const button of this.log.querySelectorAll("button.change")) button.disabled = isBusy;
  }

  // Returns the buttons and notes of the answer at the end, if there is one, to be moved elsewhere: its turn is drawn anew.
  takeLastAnswerBar() {
    const bar = this.log.querySelector(".turn:last-child > .answer:last-child > .message-bar");
    if (bar) this.keys.delete(bar.closest(".turn"));
    return bar;
  }

  // Shows paragraphs in place of turns.
  /** @param {any[]} paragraphs of what each consists of */
  welcome(...paragraphs) {
    fill(this.log, h("div", { class: "welcome" }, paragraphs.map((content) => h("p", {}, content))));
    this.endButton.show(false);
  }

  // Replaces the turns that are not what they were. The first one in view stays where it is, and turns out of view have the heights of before.
  /** @param {Turn[]} turns @param {HTMLElement[]} drawn of each */
  drawTurns(turns, drawn) {
    const shown = new Map([...this.log.children].map((element) => [this.keys.get(element), element]));
    const elements = drawn.map((element, at) => {
      const key = JSON.stringify(turns[at]) + element.outerHTML;
      this.keys.set(element, key);
      return /** @type {HTMLElement} */ (shown.get(key) || element);
    });
    const place = placeOf(this.log) || this.nextPlace;
    this.nextPlace = null;
    const wasInView = isInView(/** @type {HTMLElement | null} */ (this.log.querySelector(".turn.selected")), this.log);
    keepFolds(this.log, elements);
    if (place) reserveHeights(elements, place);
    for (const child of [...this.log.childNodes]) if (!elements.includes(/** @type {any} */ (child))) child.remove();
    elements.forEach((element, at) => element === this.log.childNodes[at] || this.log.insertBefore(element, this.log.childNodes[at]));
    if (place) scrollToPlace(this.log, place);
    if (wasInView) elements.find((turn) => turn.dataset.turn === this.selected)?.scrollIntoView({ block: "nearest" });
    this.disableChanges();
    this.endButton.show(!this.isNearEnd());
  }

  distanceToEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
  }

  isNearEnd() {
    return this.distanceToEnd() < NEAR_END;
  }

  // Scrolls to the end, unless the reader has scrolled away from it.
  followEnd(force = false) {
    if (force || this.isNearEnd()) this.log.scrollTop = this.log.scrollHeight;
  }

  // Scrolls to the end, and again while turns that come into view get the heights that were estimated before.
  goToEnd() {
    this.settlingFrames = SETTLING_FRAMES;
    const settle = () => {
      if (this.settlingFrames <= 0) return; // another place was chosen meanwhile
      this.settlingFrames -= 1;
      this.followEnd(true);
      requestAnimationFrame(settle);
    };
    settle();
  }
}

// Opens and closes what can be folded of turns as it is in those of a log that they replace.
/** @param {HTMLElement} log @param {HTMLElement[]} elements */
function keepFolds(log, elements) {
  for (const element of elements) {
    const turn = log.querySelector(`.turn[data-turn="${element.dataset.turn}"]`) ?? (element === elements.at(-1) ? log.querySelector(".turn.open") : null);
    const [before, folds] = [turn, element].map((each) => each?.querySelectorAll("details") || []);
    if (before.length === folds.length) folds.forEach((fold, at) => (fold.open = before[at].open));
  }
}

/** @param {HTMLElement | null} turn @param {HTMLElement} log */
function isInView(turn, log) {
  const top = turn ? turn.offsetTop - log.offsetTop - log.scrollTop : Infinity;
  return turn !== null && top < log.clientHeight && top + turn.offsetHeight > 0;
}

/** @param {Event} event */
const labelAt = (event) => /** @type {HTMLElement} */ (event.target).closest(".turn")?.getAttribute("data-turn") || null;
