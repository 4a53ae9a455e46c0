// The chat in a session: its turns as they stand in memory, and the next one.

import { streamed } from "./api.js";
import { said } from "./actions.js";
import { h, tell } from "./dom.js";
import { drawn, pieces, redraw } from "./tokens.js";

const SHOWN = 20; // turns

// name: of the session. begin: a new Change; null where nothing is to be said. choose: selects a span
// by its name. done: called once a turn is over.
export function chat(name, begin, choose, done, signal) {
  const turns = h("div", { class: "turns", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const system = h("input", { id: "system" });
  const first = h("p", {}, h("label", { for: "system" }, "System prompt, if any"), system);
  const words = h("textarea", { id: "words", rows: "2", required: true });
  const button = h("button", { class: "main" }, "Send");
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  let under = null;
  let latest = null; // what is drawn, or is about to be

  const says = async () => {
    const content = words.value;
    if (!content.trim() || button.disabled) return;
    const change = begin();
    under = new AbortController();
    signal.addEventListener("abort", () => under?.abort(), { once: true });
    words.value = "";
    button.disabled = true;
    stop.hidden = false;
    const answer = h("p", { class: "answer" });
    const asks = h("p", { class: "question" }, content);
    turns.append(asks, answer);
    turns.scrollTop = turns.scrollHeight;
    let failure = null;
    const body = { content, stream: true, ...(!first.hidden && system.value ? { system: system.value } : {}) };
    try {
      const { headers } = change;
      const events = streamed("POST", `/v1/sessions/${name}/turns`, body, { headers, signal: under.signal });
      for await (const [kind, event] of events) {
        heard(kind, event, answer);
        if (kind === "done") change.came(event.revision); // it was added behind all that was there
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
      if (!answer.textContent) words.value = content;
    }
    under = null;
    stop.hidden = true;
    if (!signal.aborted) await done();
    if (failure && !signal.aborted) tell(said(failure), true);
    button.disabled = false; // what is said next is for what is shown by now
  };
  const heard = (kind, event, answer) => {
    if (kind === "read") answer.dataset.reading = `reading, ${event.done} of ${event.total} tokens`;
    else if (kind === "token") {
      delete answer.dataset.reading;
      answer.append(event.text);
      turns.scrollTop = turns.scrollHeight;
    } else if (kind === "error") throw new Error(event.error.message);
  };
  stop.addEventListener("click", () => under?.abort());
  words.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      says();
    }
  });
  const submit = (event) => {
    event.preventDefault();
    says();
  };
  const form = h(
    "form",
    { onsubmit: submit },
    first,
    h("label", { for: "words" }, "Say"),
    words,
    h("div", { class: "actions" }, button, stop),
  );

  async function draw(memory) {
    if (under) return;
    first.hidden = memory.tokens > 0;
    const parts = partsOf(memory.spans);
    latest = memory;
    if (!parts.length) {
      redraw(turns, h("p", { class: "hint" }, memory.tokens ? "No turns here: the text beside is all." : "Nothing was said yet."));
      return;
    }
    const shown = [];
    for (const part of parts) shown.push(await bubble(name, part, memory, choose));
    if (under || latest !== memory) return;
    redraw(turns, shown);
    turns.scrollTop = turns.scrollHeight;
  }

  const element = h("section", { class: "chat", "aria-label": "Chat" }, h("h2", {}, "Chat"), turns, begin ? form : null);
  return { element, draw, busy: () => under !== null };
}

async function bubble(name, { label, who, span }, memory, choose) {
  const tokens = await pieces(name, span.start, span.end);
  const select = h("button", { class: "who", onclick: () => choose(label), title: `Select ${label}` }, label);
  return h("div", { class: who }, select, h("p", {}, drawn(tokens, memory)));
}

// What was said, in its order: the newest turns, and the system prompt.
function partsOf(spans) {
  const numbers = Object.keys(spans)
    .map((each) => /^turn (\d+)$/.exec(each))
    .filter(Boolean)
    .map(([, digits]) => Number(digits))
    .sort((a, b) => a - b)
    .slice(-SHOWN);
  const parts = [{ label: "system text", who: "system" }];
  for (const each of numbers) {
    parts.push({ label: `turn ${each} question`, who: "question" }, { label: `turn ${each} answer`, who: "answer" });
  }
  return parts
    .map((part) => ({ ...part, span: spans[part.label] }))
    .filter(({ span }) => span && span.end > span.start);
}
