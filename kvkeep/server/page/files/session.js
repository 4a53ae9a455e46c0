// One session: its strip, its text, its spans, and the chat in it.

import { get } from "./api.js";
import { bar, Change, forSession } from "./actions.js";
import { chat } from "./chat.js";
import { bytes, fill, h, number, sessionLink, tell, title } from "./dom.js";
import { listen, rate, soon } from "./live.js";
import { state } from "./sessions.js";
import { strip } from "./strip.js";
import { drawn, pieces, redraw, Selection } from "./tokens.js";

const SHOWN = 2048; // tokens of the text at a time

export async function session(place, { signal, edits, parts }) {
  const name = parts[1];
  const path = `/v1/sessions/${name}/memory`;
  let memory = await get(path);
  let current = false; // whether what is drawn is of that
  let carried = null; // a revision in which what is selected has the same numbers
  let [begun, read] = [0, 0]; // readings of memory: the last one, and the newest that came
  let first = null; // of the text that is shown; null for its end
  const facts = h("p");
  const text = h("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Text" });
  const paging = h("div", { class: "actions" });

  const again = async () => {
    const reading = ++begun;
    try {
      const now = await get(path);
      if (signal.aborted || reading < read) return;
      read = reading;
      const same = now.revision === memory.revision && current;
      memory = now;
      if (same) fill(facts, about(memory)); // what somebody points at stays where it is
      else await draw();
    } catch (error) {
      if (!signal.aborted) tell(error.message, true);
    }
  };
  const carry = (revision) => {
    carried = revision;
  };
  const view = { again, carry, sending: 0 };
  const begin = edits ? () => new Change(name, memory.revision, view) : null;
  const selection = new Selection(() => {
    selecting.shown();
    mark(selection);
  }, signal);
  const textOf = async (start, end) => (await pieces(name, start, end)).map((each) => each.text).join("");
  const choose = (label) => {
    const span = memory.spans[label];
    if (span) selection.set(span.start, span.end, memory.revision, label);
  };
  const selecting = bar(selection, begin, () => memory, textOf, choose);
  const show = async (token) => {
    const { revision } = memory;
    if (token < shownFrom() || token >= shownFrom() + SHOWN) {
      first = Math.max(0, token - SHOWN / 2);
      await turned();
    }
    selection.set(token, token + 1, revision);
    text.querySelector(`[data-at="${token}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const shownFrom = () => (first === null ? Math.max(0, memory.tokens - SHOWN) : first);
  const line = strip(name, show);
  const turnOver = () => {
    current = false; // the chat was not drawn meanwhile
    return again();
  };
  const talk = chat(name, begin, choose, turnOver, signal);

  async function drawText() {
    const [from, of, at] = [shownFrom(), memory, first];
    const to = Math.min(of.tokens, from + SHOWN);
    const tokens = await pieces(name, from, to);
    if (of.revision !== memory.revision || at !== first) return; // a later drawing has begun
    redraw(text, drawn(tokens, of));
    const page = (label, start) => h("button", { onclick: () => turn(start) }, label);
    fill(
      paging,
      from > 0 ? page("Earlier", Math.max(0, from - SHOWN)) : null,
      to < of.tokens ? page("Later", to) : null,
    );
    mark(selection);
  }
  const turn = (start) => {
    first = start + SHOWN >= memory.tokens ? null : start;
    return turned();
  };
  const turned = () => drawText().catch((error) => signal.aborted || tell(error.message, true));

  async function draw() {
    fill(facts, about(memory));
    line.draw(memory);
    selecting.renamed();
    if (selection.follow(memory, carried)) tell("The session was changed: nothing is selected any more.");
    selecting.shown();
    current = true;
    await Promise.all([drawText(), talk.draw(memory)]);
  }

  const news = soon(() => {
    if (view.sending) news(); // whose change it may be
    else if (!talk.busy()) again();
  });
  listen((operation) => {
    if (operation && operation.session !== name) return;
    // Revisions may begin anew: where the server was started again, and with a session of that name.
    if (!operation || operation.what === "delete") {
      [current, carried] = [false, null];
      selection.forget();
    }
    news();
  }, signal);
  const memoryView = h("section", { class: "memory", "aria-label": "Memory" }, h("h2", {}, "Text"), text, paging);
  fill(
    place,
    title(name, path, edits ? h("div", { class: "actions" }, forSession(begin, () => memory)) : null),
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
