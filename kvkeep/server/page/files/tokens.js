// Tokens as text that can be selected, and the selection.

import { fill, h } from "./dom.js";
import { statusOf } from "./turns.js";

export const PART = "·"; // in the place of a token that has no text of its own

/**
 * Creates an element for each token, with its number and the revision in which it has that number.
 * @param {Piece[]} tokens @param {Memory} memory
 */
export function tokenElements(tokens, memory) {
  return tokens.map((token) => {
    const status = statusOf(memory, token.at);
    const [mark, about] = token.text ? ["", ""] : [" part", ", a part of the next character"];
    const data = { "data-at": String(token.at), "data-revision": String(memory.revision) };
    return h("span", { class: `token ${status}${mark}`, ...data, title: `${token.at}, ${status}${about}` }, token.text || PART);
  });
}

// Replaces the children of an element. First removes the browser's selection there: it would move to
// other tokens among the new children, or to all of them.
/** @param {Element} element @param {any[]} children */
export function redraw(element, ...children) {
  const selected = document.getSelection();
  const hasSelection = selected && selected.rangeCount && !selected.isCollapsed;
  if (hasSelection && selected.getRangeAt(0).intersectsNode(element)) selected.removeAllRanges();
  fill(element, ...children);
}

// The selected tokens `start ... end - 1` of a session at one revision, and the name of their span if
// they were selected by it. Tokens are selected in the text, by number, or by span.
export class Selection {
  /** @param {() => void} onChange called after each change @param {AbortSignal} signal */
  constructor(onChange, signal) {
    this.start = 0;
    this.end = 0;
    /** @type {string | null} */
    this.span = null;
    /** @type {number | null} */
    this.revision = null;
    this.onChange = onChange;
    document.addEventListener("selectionchange", () => this.takeBrowserSelection(), { signal });
  }

  get empty() {
    return this.end <= this.start;
  }

  // revision: the one that the numbers belong to. Numbers of another revision select nothing.
  /** @param {number} start @param {number} end @param {number | null} revision @param {string | null} [span] */
  set(start, end, revision, span = null) {
    if (revision !== this.revision) [start, end] = [0, 0];
    this.start = Math.max(0, start);
    this.end = Math.max(0, end);
    this.span = this.empty ? null : span;
    this.onChange();
  }

  // Selects nothing, at no revision.
  clear() {
    this.revision = null;
    this.set(0, 0, null);
  }

  // Moves to the session's current revision, in which the same numbers may mean other tokens.
  // stableRevision: the last revision in which tokens are known to have kept their numbers.
  // Returns whether the selection was lost.
  /** @param {Memory} memory @param {number | null} stableRevision */
  follow(memory, stableRevision) {
    const [before, hadTokens] = [this.revision, !this.empty];
    this.revision = memory.revision;
    if (before === memory.revision) return false;
    const place = this.span === null ? null : memory.spans[this.span];
    if (place) this.set(place.start, place.end, memory.revision, this.span);
    else if (this.span !== null || stableRevision !== memory.revision) this.set(0, 0, memory.revision);
    return hadTokens && this.empty;
  }

  takeBrowserSelection() {
    const selected = document.getSelection();
    if (!selected || selected.isCollapsed || !selected.rangeCount) return;
    const range = selected.getRangeAt(0);
    const elements = [...document.querySelectorAll("[data-at]")].filter((element) => includesText(range, element));
    if (!elements.length) return;
    const numbers = elements.map((element) => Number(element.getAttribute("data-at")));
    const revisions = new Set(elements.map((element) => Number(element.getAttribute("data-revision"))));
    this.set(Math.min(...numbers), Math.max(...numbers) + 1, revisions.size === 1 ? [...revisions][0] : null);
  }
}

/**
 * Whether a range includes some of an element's text, not only its edge.
 * @param {Range} range @param {Element} element
 */
function includesText(range, element) {
  const text = /** @type {Text | null} */ (element.firstChild);
  if (!text || !range.intersectsNode(text)) return false;
  const from = range.startContainer === text ? range.startOffset : 0;
  const to = range.endContainer === text ? range.endOffset : text.length;
  return to > from;
}
