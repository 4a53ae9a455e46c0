// The chat in a session: its turns as they stand in memory, and the next one.

import { streamed } from "./api.js";
import { fill, h, tell } from "./dom.js";
import { drawn, pieces } from "./tokens.js";

const SHOWN = 20; // turns

// name: of the session. chosen: is told of a part that is to be selected. done: once a turn is over.
export function chat(name, edits, chosen, done, signal) {
  const turns = h("div", { class: "turns", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const system = h("input", { id: "system" });
  const first = h("p", {}, h("label", { for: "system" }, "System prompt, if any"), system);
  const words = h("textarea", { id: "words", rows: "2", required: true });
  const button = h("button", { class: "main" }, "Send");
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  let under = null;

  const says = async () => {
    const content = words.value;
    if (!content.trim() || under) return;
    under = new AbortController();
    signal.addEventListener("abort", () => under?.abort(), { once: true });
    words.value = "";
    button.disabled = true;
    stop.hidden = false;
    const answer = h("p", { class: "answer" });
    const asks = h("p", { class: "question" }, content);
    turns.append(asks, answer);
    turns.scrollTop = turns.scrollHeight;
    const body = { content, stream: true, ...(!first.hidden && system.value ? { system: system.value } : {}) };
    try {
      const events = streamed("POST", `/v1/sessions/${name}/turns`, body, { signal: under.signal });
      for await (const [kind, event] of events) heard(kind, event, answer);
    } catch (error) {
      if (error.name !== "AbortError") tell(error.message, true);
      if (!answer.textContent) words.value = content;
    }
    under = null;
    button.disabled = false;
    stop.hidden = true;
    if (!signal.aborted) await done();
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
    const parts = said(memory.spans);
    if (!parts.length) {
      fill(turns, h("p", { class: "hint" }, memory.tokens ? "No turns here: the text beside is all." : "Nothing was said yet."));
      return;
    }
    const shown = [];
    for (const part of parts) shown.push(...(await bubble(name, part, memory, chosen)));
    if (under) return;
    fill(turns, shown);
    turns.scrollTop = turns.scrollHeight;
  }

  const element = h("section", { class: "chat", "aria-label": "Chat" }, h("h2", {}, "Chat"), turns, edits ? form : null);
  return { element, draw, busy: () => under !== null };
}

async function bubble(name, { label, who, span }, memory, chosen) {
  const tokens = await pieces(name, span.start, span.end);
  const select = h("button", { class: "who", onclick: () => chosen(span.start, span.end), title: `Select ${label}` }, label);
  return [h("div", { class: who }, select, h("p", {}, drawn(tokens, memory)))];
}

// What was said, in its order: the newest turns, and the system prompt.
function said(spans) {
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
