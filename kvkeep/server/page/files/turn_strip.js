// The whole context as a strip of turns, as wide as their cells; inside, each standing has the share of its tokens.

import { fill, h, number } from "./dom.js";
import { keptText } from "./memory_text.js";
import { cellsOf, checkpointsOf, countOf, residualCells, sharesOf, STANDINGS, standingText, withoutEnd } from "./turns.js";

/** @typedef {import("./turns.js").Turn} Turn */

const AT_END = 4; // pixels
const SHRUNK_TO = 60; // percent of the strip: before so many turns make the rest narrower, the strip scrolls
const NARROWEST = 0.004; // of the strip: what holds no cells has a place too

/**
 * Creates a strip. onPoint: called with the label of the turn under the pointer, or null;
 * onSelect: with that of the turn that was chosen, and whether a key chose it.
 * @param {(label: string | null) => void} onPoint @param {(label: string, byKey: boolean) => void} onSelect
 */
export function turnStrip(onPoint, onSelect) {
  const bars = h("div", { class: "turn-bars", role: "group", "aria-label": "Memory by turn; arrow keys move, Enter selects and leads to what can be done with it, Escape leads back" });
  const free = h("span", { class: "free", title: "free cells", style: { flexGrow: "1" } });
  const residual = h("span", { class: "residual", role: "img" });
  const element = h("div", { class: "turn-strip" }, bars);
  fill(bars, free);

  const buttons = () => /** @type {HTMLElement[]} */ ([...bars.querySelectorAll("button")]);
  const labelOf = (/** @type {Event} */ event) => /** @type {HTMLElement} */ (event.target).closest("button")?.dataset.turn || null;
  bars.addEventListener("pointerover", (/** @type {Event} */ event) => onPoint(labelOf(event)));
  bars.addEventListener("pointerleave", () => onPoint(null));
  bars.addEventListener("focusin", (/** @type {Event} */ event) => onPoint(labelOf(event)));
  bars.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const label = labelOf(event);
    if (label) onSelect(label, !event.detail);
  });
  bars.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const all = buttons();
    const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const target = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (target === undefined || !all[target]) return;
    event.preventDefault();
    for (const button of all) button.tabIndex = -1;
    all[target].tabIndex = 0;
    all[target].focus();
  });

  return {
    element,
    /** Returns the button of a turn. @param {string} label */
    buttonOf: (label) => buttons().find((button) => button.dataset.turn === label),
    /** @param {Memory} memory @param {Turn[]} turns @param {string | null} selected */
    draw(memory, turns, selected) {
      const wasAtEnd = bars.scrollLeft + bars.clientWidth > bars.scrollWidth - AT_END;
      const focused = bars.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.turn : null;
      const total = Math.max(memory.cells, memory.max_kv_size || 0, 1);
      const entry = selected || turns.at(-1)?.label; // the one that Tab reaches
      fill(bars, turns.map((turn) => bar(memory, turn, total, turn.label === entry)), residual, free);
      const sparse = residualCells(memory);
      residual.hidden = !sparse;
      residual.style.flexGrow = String(sparse / total);
      residual.title = residualText(memory);
      residual.setAttribute("aria-label", residual.title);
      free.style.flexGrow = String(Math.max(0, 1 - memory.cells / total));
      if (wasAtEnd) bars.scrollLeft = bars.scrollWidth; // of more turns than there is room for
      for (const button of buttons()) if (button.dataset.turn === focused) button.focus();
    },
    /** @param {string | null} pointed @param {string | null} selected */
    light(pointed, selected) {
      for (const button of buttons()) {
        button.classList.toggle("lit", button.dataset.turn === pointed);
        button.classList.toggle("selected", button.dataset.turn === selected);
        button.setAttribute("aria-pressed", String(button.dataset.turn === selected));
        if (button.dataset.turn === pointed && !bars.matches(":hover")) reveal(bars, button);
      }
    },
  };
}

// Scrolls to a part of the strip, if it is not in view.
/** @param {HTMLElement} bars @param {HTMLElement} button */
function reveal(bars, button) {
  const [start, end] = [button.offsetLeft - bars.offsetLeft, button.offsetLeft - bars.offsetLeft + button.offsetWidth];
  if (start < bars.scrollLeft || end > bars.scrollLeft + bars.clientWidth) bars.scrollLeft = start - bars.clientWidth / 2;
}

/** @param {Memory} memory @param {Turn} turn @param {number} total @param {boolean} reachable */
function bar(memory, turn, total, reachable) {
  const shares = sharesOf(memory, turn.start, turn.end);
  const cells = cellsOf(shares);
  const checkpoints = checkpointsOf(memory, turn.start, turn.end);
  const after = checkpoints.length ? `, checkpoint after token ${checkpoints.map(({ at }) => number(at)).join(", ")}` : "";
  const text = `${turn.label}: ${number(turn.end - turn.start)} tokens, ${number(Math.round(cells))} cells, ${standingText(withoutEnd(shares))}${after}`;
  const parts = withoutEnd(shares).map(({ standing, tokens }) => h("span", { class: standing, style: { flexGrow: String(tokens) } }));
  const marks = checkpoints.map(({ part }) => h("span", { class: "checkpoint", style: { left: `calc(${100 * part}% - 2px)` } }));
  const share = Math.max(NARROWEST, cells / total);
  const style = { flexGrow: String(share), minWidth: `max(var(--least, 5px), ${SHRUNK_TO * share}%)` };
  const button = h("button", { type: "button", "data-turn": turn.label, title: text, "aria-label": text, style }, parts, marks);
  button.tabIndex = reachable ? 0 : -1;
  return button;
}

/** @param {Memory} memory */
const residualText = (memory) => `${number(memory.residual_cells)} residual cells, over all layers and KV heads: each stands for a cluster of evicted cells`;

/** @type {Record<string, string>} */
const NAMES = { window: "window (the newest)" };

/**
 * Returns pairs of a standing and what the legend says of it. A session's cells are those of each head, and so are residual ones.
 * @param {Memory} memory @returns {[string, string][]}
 */
export function legendTexts(memory) {
  const entries = STANDINGS.map((standing) => /** @type {[string, string, number]} */ ([standing, "tokens", countOf(memory, standing)]));
  const residual = memory.residual_cells && Math.max(1, Math.round(residualCells(memory)));
  entries.push(["residual", residual === 1 ? "cell per head stands" : "cells per head stand", residual], ["checkpoint", "places", memory.checkpoints.length]);
  const evicts = memory.policy !== "full";
  /** @param {string} name @param {string} unit @param {number} count */
  const words = (name, unit, count) => {
    if (name === "residual") return `${number(count)} ${unit} for compressed text (residual)`;
    return evicts && name === "kept" ? keptText(count) : `${(evicts && NAMES[name]) || name} ${number(count)} ${unit}`;
  };
  return entries.filter(([, , count]) => count).map((entry) => [entry[0], words(...entry)]);
}

/**
 * Creates the legend of a session: how many tokens have each standing.
 * @param {Memory} memory
 */
export function legend(memory) {
  const entries = legendTexts(memory).map(([standing, text]) => h("li", {}, h("span", { class: `swatch ${standing}` }), ` ${text}`));
  return h("ul", { class: "legend", "aria-label": "Legend" }, entries);
}
