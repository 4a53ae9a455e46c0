// Tokens as text that can be pointed at, and what of it is selected.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { standing } from "./strip.js";

const PART = 4096; // tokens that one request gives

// The tokens `start ... end - 1`, each with its text.
export async function pieces(name, start, end) {
  const found = [];
  for (let first = start; first < end; first += PART) {
    const part = await get(`/v1/sessions/${name}/text?start=${first}&end=${Math.min(end, first + PART)}`);
    found.push(...part.pieces);
  }
  return found.map((piece, index) => ({ ...piece, at: start + index }));
}

// Each token an element that has its number, and the revision in which it has that number.
export function drawn(tokens, memory) {
  return tokens.map((token) => {
    const how = standing(memory, token.at);
    const data = { "data-at": String(token.at), "data-revision": String(memory.revision) };
    return h("span", { class: `token ${how}`, ...data, title: `${token.at}, ${how}` }, token.text || "·");
  });
}

// Fills an element with tokens drawn anew. The browser's selection there goes with the old ones: of the
// new ones it would select others, or all.
export function redraw(element, ...children) {
  const selected = document.getSelection();
  const there = selected && selected.rangeCount && !selected.isCollapsed;
  if (there && selected.getRangeAt(0).intersectsNode(element)) selected.removeAllRanges();
  fill(element, ...children);
}

// The selected tokens `start ... end - 1` of a session at one revision; `span` if they have a name.
// They are chosen by pointing at text, by number, or by span. changed: called after each change.
export class Selection {
  constructor(changed, signal) {
    Object.assign(this, { start: 0, end: 0, span: null, revision: null, changed });
    document.addEventListener("selectionchange", () => this.pointed(), { signal });
  }

  get empty() {
    return this.end <= this.start;
  }

  // revision: the one that the numbers are of. Those of an outdated one select nothing.
  set(start, end, revision, span = null) {
    if (revision !== this.revision) [start, end] = [0, 0];
    this.start = Math.max(0, start);
    this.end = Math.max(0, end);
    this.span = this.empty ? null : span;
    this.changed();
  }

  // Nothing is selected, of no revision.
  forget() {
    this.revision = null;
    this.set(0, 0, null);
  }

  // Moves on to a session as it is now: numbers of another revision mean other tokens.
  // carried: the revision up to which the tokens are known to have kept their numbers.
  // Returns whether something was selected and no longer is.
  follow(memory, carried) {
    const [before, had] = [this.revision, !this.empty];
    this.revision = memory.revision;
    if (before === memory.revision) return false;
    const place = this.span === null ? null : memory.spans[this.span];
    if (place) this.set(place.start, place.end, memory.revision, this.span);
    else if (this.span !== null || carried !== memory.revision) this.set(0, 0, memory.revision);
    return had && this.empty;
  }

  pointed() {
    const selected = document.getSelection();
    if (!selected || selected.isCollapsed || !selected.rangeCount) return;
    const range = selected.getRangeAt(0);
    const places = [...document.querySelectorAll("[data-at]")].filter((each) => inside(range, each));
    if (!places.length) return;
    const at = places.map((each) => Number(each.dataset.at));
    const shown = new Set(places.map((each) => Number(each.dataset.revision)));
    this.set(Math.min(...at), Math.max(...at) + 1, shown.size === 1 ? [...shown][0] : null);
  }
}

// Whether a range has some of an element's text, and not its edge alone.
function inside(range, element) {
  const text = element.firstChild;
  if (!text || !range.intersectsNode(text)) return false;
  const from = range.startContainer === text ? range.startOffset : 0;
  const to = range.endContainer === text ? range.endOffset : text.length;
  return to > from;
}
