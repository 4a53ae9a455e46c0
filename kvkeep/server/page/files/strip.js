// A session as a strip of its tokens, coloured by status.

import { get } from "./api.js";
import { fill, h, number } from "./dom.js";
import { debounce } from "./live.js";

export const STATUSES = ["kept", "pinned", "window", "grouped", "compressed", "forgotten"];
const PREVIEW = 12; // tokens on either side of the pointer

// Creates a strip. draw(memory): draws it for a session's memory. onSelect: called with a token.
export function strip(name, onSelect) {
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
  slider.append(bars, spanMarks);
  const legend = h("ul", { class: "legend" });
  /** @type {any} */
  let memory = { tokens: 0, runs: [], spans: {} };
  let at = 0;

  const showPreview = debounce(async () => {
    if (!memory.tokens) return;
    const start = Math.max(0, at - PREVIEW);
    const { pieces } = await get(`/v1/sessions/${name}/text?start=${start}&end=${at + PREVIEW}`);
    const text = pieces.map((piece) => piece.text).join("");
    fill(preview, `Token ${number(at)}, ${statusOf(memory, at)}: `, h("q", {}, text));
  }, 60);
  const moveTo = (token) => {
    at = Math.min(Math.max(0, token), Math.max(0, memory.tokens - 1));
    slider.setAttribute("aria-valuenow", String(at));
    slider.setAttribute("aria-valuetext", `token ${at}, ${statusOf(memory, at)}`);
    showPreview();
  };
  const tokenUnder = (event) => {
    const box = slider.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left) / box.width) * memory.tokens);
  };
  slider.addEventListener("pointermove", (event) => moveTo(tokenUnder(event)));
  slider.addEventListener("click", (event) => {
    moveTo(tokenUnder(event));
    onSelect(at);
  });
  slider.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(memory.tokens / 20));
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1, PageUp: page, PageDown: -page }[event.key];
    if (step) moveTo(at + step);
    else if (event.key === "Home") moveTo(0);
    else if (event.key === "End") moveTo(memory.tokens - 1);
    else if (event.key === "Enter" && memory.tokens) onSelect(at);
    else return;
    event.preventDefault();
  });

  function draw(newMemory) {
    memory = newMemory;
    slider.setAttribute("aria-valuemax", String(Math.max(0, memory.tokens - 1)));
    fill(bars, memory.runs.map((run) => h("span", { class: run.standing, style: { flexGrow: String(run.count) } })));
    const spans = Object.entries(memory.spans).filter(([, span]) => span.end > span.start);
    const spanElements = spans.map(([label, span]) => spanMark(label, span, memory.tokens));
    const checkpoints = (memory.checkpoints || []).map((end) => checkpointMark(end, memory.tokens));
    fill(spanMarks, memory.tokens ? [...spanElements, ...checkpoints] : []);
    /** @type {[string, number][]} */
    const counts = STATUSES.map((status) => [status, countOf(memory, status)]);
    fill(legend, counts.filter(([, count]) => count).map(legendEntry));
    moveTo(Math.min(at, memory.tokens));
  }

  return { element: h("div", {}, slider, preview, legend), draw };
}

function spanMark(label, span, tokens) {
  const style = { left: `${(100 * span.start) / tokens}%`, width: `${(100 * (span.end - span.start)) / tokens}%` };
  return h("span", { title: label, style });
}

function checkpointMark(end, tokens) {
  const style = { left: `calc(${(100 * end) / tokens}% - 1px)`, width: "2px" };
  return h("span", { class: "checkpoint", title: `checkpoint after ${number(end)} tokens`, style });
}

const legendEntry = ([status, count]) =>
  h("li", {}, h("span", { class: `swatch ${status}` }), ` ${status} ${number(count)}`);

const countOf = (memory, status) =>
  memory.runs.filter((run) => run.standing === status).reduce((sum, run) => sum + run.count, 0);

// Returns a token's status: kept, pinned, window, ... ("standing" in the API).
export function statusOf(memory, token) {
  const run = memory.runs.find(({ start, count }) => token >= start && token < start + count);
  return run ? run.standing : "";
}
