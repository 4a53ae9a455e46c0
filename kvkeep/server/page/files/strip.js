// A session as a strip of its tokens, coloured by status.

import { fill, h, number } from "./dom.js";
import { debounce } from "./live.js";
import { fetchPieces } from "./pieces.js";
import { statusOf } from "./turns.js";
import { legend } from "./turn_strip.js";

const PREVIEW = 12; // tokens on either side of the pointer

/**
 * Creates a strip. draw(memory): draws it for a session's memory. select(start, end): marks tokens.
 * @param {(token: number) => void} onSelect
 */
export function strip(onSelect) {
  const bars = h("div", { class: "bars" });
  const spanMarks = h("div", { class: "marks" });
  const preview = h("p", { class: "preview" }, "Point at the strip to show its text.");
  const slider = h("div", {
    class: "strip",
    role: "slider",
    tabindex: "0",
    "aria-label": "Tokens by status; arrow keys move, Enter selects",
    "aria-valuemin": "0",
    "aria-valuemax": "0",
    "aria-valuenow": "0",
  });
  const chosen = h("div", { class: "chosen", hidden: true });
  slider.append(bars, spanMarks, chosen);
  const legendPart = h("div");
  /** @type {Pick<Memory, "name" | "revision" | "tokens" | "runs">} */
  let memory = { name: "", revision: 0, tokens: 0, runs: [] };
  let at = 0;
  let chosenAt = -1; // the first token that is selected

  const showPreview = debounce(async () => {
    if (!memory.tokens) return;
    const token = at;
    const start = Math.max(0, token - PREVIEW);
    const pieces = await fetchPieces(memory, start, Math.min(memory.tokens, token + PREVIEW)).catch(() => null);
    if (!pieces || token !== at) return;
    const text = (/** @type {number} */ from, /** @type {number} */ to) => pieces.slice(from, to).map((piece) => piece.text).join("");
    const own = token - start;
    fill(preview, `Token ${number(token)}, ${statusOf(memory, token)}: `, h("q", {}, text(0, own), h("mark", {}, text(own, own + 1)), text(own + 1, pieces.length)));
  }, 60);
  const moveTo = (/** @type {number} */ token) => {
    at = Math.min(Math.max(0, token), Math.max(0, memory.tokens - 1));
    slider.setAttribute("aria-valuenow", String(at));
    slider.setAttribute("aria-valuetext", `token ${at}, ${statusOf(memory, at)}`);
    showPreview();
  };
  const tokenUnder = (/** @type {MouseEvent} */ event) => {
    const box = slider.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left) / box.width) * memory.tokens);
  };
  slider.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => moveTo(tokenUnder(event)));
  slider.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    moveTo(tokenUnder(event));
    onSelect(at);
  });
  slider.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const page = Math.max(1, Math.round(memory.tokens / 20));
    /** @type {Record<string, number>} */
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1, PageUp: page, PageDown: -page };
    const step = steps[event.key];
    if (step) moveTo(at + step);
    else if (event.key === "Home") moveTo(0);
    else if (event.key === "End") moveTo(memory.tokens - 1);
    else if (event.key === "Enter" && memory.tokens) onSelect(at);
    else return;
    event.preventDefault();
  });

  /** @param {Memory} shown */
  function draw(shown) {
    memory = shown;
    slider.setAttribute("aria-valuemax", String(Math.max(0, shown.tokens - 1)));
    fill(bars, shown.runs.map((run) => h("span", { class: run.standing, style: { flexGrow: String(run.count) } })));
    const spans = Object.entries(shown.spans).filter(([, span]) => span.end > span.start);
    const spanElements = spans.map(([label, span]) => spanMark(label, span, shown.tokens));
    const checkpoints = shown.checkpoints.map((end) => checkpointMark(end, shown.tokens));
    fill(spanMarks, shown.tokens ? [...spanElements, ...checkpoints] : []);
    fill(legendPart, legend(shown));
    moveTo(Math.min(at, shown.tokens));
  }

  /** @param {number} start @param {number} end */
  function select(start, end) {
    chosen.hidden = end <= start;
    if (chosen.hidden) chosenAt = -1;
    if (chosen.hidden) return;
    Object.assign(chosen.style, placeOf(start, end, memory.tokens));
    if (start !== chosenAt) moveTo(start);
    chosenAt = start;
  }

  return { element: h("div", {}, slider, preview, legendPart), draw, select };
}

/**
 * Returns the style of what lies at tokens of a strip.
 * @param {number} start @param {number} end @param {number} tokens of all
 */
const placeOf = (start, end, tokens) => ({ left: `${(100 * start) / tokens}%`, width: `${(100 * (end - start)) / tokens}%` });

/** @param {string} label @param {Span} span @param {number} tokens */
const spanMark = (label, { start, end }, tokens) => h("span", { title: label, style: placeOf(start, end, tokens) });

/** @param {number} end @param {number} tokens */
function checkpointMark(end, tokens) {
  const style = { left: `calc(${(100 * end) / tokens}% - 1px)`, width: "2px" };
  return h("span", { class: "checkpoint", title: `checkpoint after ${number(end)} tokens`, style });
}
