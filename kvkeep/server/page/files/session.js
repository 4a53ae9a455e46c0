// One session: its strip, its text, its spans, and the chat in it.

import { get } from "./api.js";
import { bar, Changes, forSession } from "./actions.js";
import { chat } from "./chat.js";
import { bytes, fill, h, number, sessionLink, tell, title } from "./dom.js";
import { listen, rate, soon } from "./live.js";
import { state } from "./sessions.js";
import { strip } from "./strip.js";
import { drawn, pieces, Selection } from "./tokens.js";

const SHOWN = 2048; // tokens of the text at a time

export async function session(place, { signal, edits, parts }) {
  const name = parts[1];
  const path = `/v1/sessions/${name}/memory`;
  let memory = await get(path);
  let drawnOnce = false;
  let first = null; // of the text that is shown; null for its end
  const facts = h("p");
  const text = h("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Text" });
  const paging = h("div", { class: "actions" });

  const again = async () => {
    try {
      const now = await get(path);
      const same = now.revision === memory.revision && drawnOnce;
      memory = now;
      if (signal.aborted) return;
      if (same) fill(facts, about(memory)); // what somebody points at stays where it is
      else await draw();
    } catch (error) {
      if (!signal.aborted) tell(error.message, true);
    }
  };
  const changes = edits ? new Changes(name, () => memory.revision, again) : null;
  const selection = new Selection(() => {
    selecting.shown();
    mark(selection);
  }, signal);
  const textOf = async (start, end) => (await pieces(name, start, end)).map((each) => each.text).join("");
  const selecting = bar(selection, changes, () => memory, textOf);
  const show = async (token) => {
    if (token < shownFrom() || token >= shownFrom() + SHOWN) {
      first = Math.max(0, token - SHOWN / 2);
      await drawText();
    }
    selection.set(token, token + 1);
    text.querySelector(`[data-at="${token}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const shownFrom = () => (first === null ? Math.max(0, memory.tokens - SHOWN) : first);
  const line = strip(name, show);
  const choose = (start, end) => selection.set(start, end);
  const talk = chat(name, edits, choose, again, signal);

  async function drawText() {
    const from = shownFrom();
    const to = Math.min(memory.tokens, from + SHOWN);
    fill(text, drawn(await pieces(name, from, to), memory));
    const page = (label, start) => h("button", { onclick: () => turn(start) }, label);
    fill(
      paging,
      from > 0 ? page("Earlier", Math.max(0, from - SHOWN)) : null,
      to < memory.tokens ? page("Later", to) : null,
    );
    mark(selection);
  }
  const turn = (start) => {
    first = start + SHOWN >= memory.tokens ? null : start;
    return drawText();
  };

  async function draw() {
    fill(facts, about(memory));
    line.draw(memory);
    selecting.renamed();
    selecting.shown();
    drawnOnce = true;
    await Promise.all([drawText(), talk.draw(memory)]);
  }

  const news = soon(() => {
    if (!talk.busy()) again();
  });
  listen((operation) => {
    if (!operation || operation.session === name) news();
  }, signal);
  const memoryView = h("section", { class: "memory", "aria-label": "Memory" }, h("h2", {}, "Text"), text, paging);
  fill(
    place,
    title(name, path, edits ? h("div", { class: "actions" }, forSession(changes, () => memory)) : null),
    facts,
    line.element,
    selecting.element,
    h("div", { class: "beside" }, memoryView, talk.element),
  );
  await draw();
  text.scrollTop = text.scrollHeight;
}

function about(memory) {
  const budget = memory.max_kv_size ? ` of ${number(memory.max_kv_size)}` : "";
  const shared = memory.bytes_shared ? `, ${bytes(memory.bytes_shared)} shared` : "";
  const pace = rate(memory.name);
  return [
    `${number(memory.tokens)} tokens in ${number(memory.cells)}${budget} cells, ${memory.policy}. `,
    `${bytes(memory.bytes)}${shared}. `,
    memory.parent ? ["Forked from ", sessionLink(memory.parent), ". "] : "",
    pace ? `${pace.toFixed(1)} tokens/s. ` : "",
    `${state(memory)}. `.replace(/^./, (letter) => letter.toUpperCase()),
    h("a", { href: `#/sessions/${memory.name}/heads` }, "Cells by head"),
  ].flat();
}

function mark(selection) {
  for (const element of document.querySelectorAll("[data-at]")) {
    const at = Number(element.dataset.at);
    element.classList.toggle("chosen", at >= selection.start && at < selection.end);
  }
}
