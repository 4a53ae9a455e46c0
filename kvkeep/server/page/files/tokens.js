// Tokens as text that can be selected, and the selection.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { statusOf } from "./strip.js";

const MAX_PIECES = 4096; // tokens that one request returns

// Fetches tokens `start ... end - 1`, each with its text and its number `at`.
export async function fetchPieces(name, start, end) {
  const pieces = [];
  for (let first = start; first < end; first += MAX_PIECES) {
    const last = Math.min(end, first + MAX_PIECES);
    const part = await get(`/v1/sessions/${name}/text?start=${first}&end=${last}`);
    pieces.push(...part.pieces);
  }
  return pieces.map((piece, index) => ({ ...piece, at: start + index }));
}

// Creates an element for each token, with its number and the revision in which it has that number.
export function tokenElements(tokens, memory) {
  return tokens.map((token) => {
    const status = statusOf(memory, token.at);
    const data = { "data-at": String(token.at), "data-revision": String(memory.revision) };
    return h("span", { class: `token ${status}`, ...data, title: `${token.at}, ${status}` }, token.text || "·");
  });
}

// Replaces the children of an element. First removes the browser's selection there: it would move to
// other tokens among the new children, or to all of them.
export function redraw(element, ...children) {
  const selected = document.getSelection();
  const hasSelection = selected && selected.rangeCount && !selected.isCollapsed;
  if (hasSelection && selected.getRangeAt(0).intersectsNode(element)) selected.removeAllRanges();
  fill(element, ...children);
}

// The selected tokens `start ... end - 1` of a session at one revision, and the name of their span if
// they were selected by it. Tokens are selected in the text, by number, or by span.
export class Selection {
  // onChange: called after each change.
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

// Whether a range includes some of an element's text, not only its edge.
function includesText(range, element) {
  const text = element.firstChild;
  if (!text || !range.intersectsNode(text)) return false;
  const from = range.startContainer === text ? range.startOffset : 0;
  const to = range.endContainer === text ? range.endOffset : text.length;
  return to > from;
}
