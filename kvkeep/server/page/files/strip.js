// A session as a strip of its tokens, coloured by how they stand.

import { get } from "./api.js";
import { fill, h, number } from "./dom.js";
import { soon } from "./live.js";

export const STANDINGS = ["kept", "pinned", "window", "grouped", "compressed", "forgotten"];
const AROUND = 12; // tokens that are shown where one points

// A strip that is drawn anew from what a session's memory is. choose: is told of a token.
export function strip(name, choose) {
  const bars = h("div", { class: "bars" });
  const marks = h("div", { class: "marks" });
  const pointed = h("p", { class: "pointed" }, "Point at the strip to read the text there.");
  const slider = h("div", {
    class: "strip",
    role: "slider",
    tabindex: "0",
    "aria-label": "Tokens by standing; arrow keys move, Enter selects",
    "aria-valuemin": "0",
    "aria-valuemax": "0",
    "aria-valuenow": "0",
  });
  slider.append(bars, marks);
  const legend = h("ul", { class: "legend" });
  let memory = { tokens: 0, runs: [], spans: {} };
  let at = 0;

  const read = soon(async () => {
    if (!memory.tokens) return;
    const start = Math.max(0, at - AROUND);
    const { pieces } = await get(`/v1/sessions/${name}/text?start=${start}&end=${at + AROUND}`);
    fill(pointed, `Token ${number(at)}, ${standing(memory, at)}: `, h("q", {}, pieces.map((each) => each.text).join("")));
  }, 60);
  const move = (token) => {
    at = Math.min(Math.max(0, token), Math.max(0, memory.tokens - 1));
    slider.setAttribute("aria-valuenow", String(at));
    slider.setAttribute("aria-valuetext", `token ${at}, ${standing(memory, at)}`);
    read();
  };
  const under = (event) => {
    const box = slider.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left) / box.width) * memory.tokens);
  };
  slider.addEventListener("pointermove", (event) => move(under(event)));
  slider.addEventListener("click", (event) => {
    move(under(event));
    choose(at);
  });
  slider.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(memory.tokens / 20));
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1, PageUp: page, PageDown: -page }[event.key];
    if (step) move(at + step);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(memory.tokens - 1);
    else if (event.key === "Enter" && memory.tokens) choose(at);
    else return;
    event.preventDefault();
  });

  function draw(now) {
    memory = now;
    slider.setAttribute("aria-valuemax", String(Math.max(0, memory.tokens - 1)));
    fill(bars, memory.runs.map((run) => h("span", { class: run.standing, style: { flexGrow: String(run.count) } })));
    const places = Object.entries(memory.spans).filter(([, span]) => span.end > span.start);
    fill(marks, memory.tokens ? places.map(([label, span]) => mark(label, span, memory.tokens)) : []);
    fill(legend, STANDINGS.map((each) => [each, counted(memory, each)]).filter(([, count]) => count).map(entry));
    move(Math.min(at, memory.tokens));
  }

  return { element: h("div", {}, slider, pointed, legend), draw };
}

function mark(label, span, tokens) {
  const style = { left: `${(100 * span.start) / tokens}%`, width: `${(100 * (span.end - span.start)) / tokens}%` };
  return h("span", { title: label, style });
}

const entry = ([standing, count]) =>
  h("li", {}, h("span", { class: `swatch ${standing}` }), ` ${standing} ${number(count)}`);

const counted = (memory, standing) =>
  memory.runs.filter((run) => run.standing === standing).reduce((sum, run) => sum + run.count, 0);

export function standing(memory, token) {
  const run = memory.runs.find((each) => token >= each.start && token < each.start + each.count);
  return run ? run.standing : "";
}
