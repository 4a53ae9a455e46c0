// Tokens as text that can be pointed at, and what of it is selected.

import { get } from "./api.js";
import { h } from "./dom.js";
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

// Each token an element that knows which one it is.
export function drawn(tokens, memory) {
  return tokens.map((token) => {
    const how = standing(memory, token.at);
    return h("span", { class: `token ${how}`, "data-at": String(token.at), title: `${token.at}, ${how}` }, token.text || "·");
  });
}

// What is selected: tokens `start ... end - 1`, by pointing at text or by number.
export class Selection {
  constructor(changed, signal) {
    this.start = 0;
    this.end = 0;
    this.changed = changed;
    document.addEventListener("selectionchange", () => this.pointed(), { signal });
  }

  get empty() {
    return this.end <= this.start;
  }

  set(start, end) {
    this.start = Math.max(0, start);
    this.end = Math.max(0, end);
    this.changed();
  }

  pointed() {
    const selected = document.getSelection();
    if (!selected || selected.isCollapsed || !selected.rangeCount) return;
    const range = selected.getRangeAt(0);
    const places = [...document.querySelectorAll("[data-at]")].filter((each) => inside(range, each));
    if (!places.length) return;
    const at = places.map((each) => Number(each.dataset.at));
    this.set(Math.min(...at), Math.max(...at) + 1);
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
