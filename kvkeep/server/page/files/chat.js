// The chat in a session: its turns as memory holds them, and a form for the next one.

import { streamEvents } from "./api.js";
import { changeError } from "./actions.js";
import { h, showStatus } from "./dom.js";
import { fetchPieces, redraw, tokenElements } from "./tokens.js";

const SHOWN = 20; // turns

// Creates the chat of a session. newChange: returns a Change; null if turns are not allowed.
// selectSpan: selects a span by name. afterTurn: called once a turn has ended.
export function chat(name, newChange, selectSpan, afterTurn, signal) {
  const turns = h("div", { class: "turns", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const system = h("input", { id: "system" });
  const systemField = h("p", {}, h("label", { for: "system" }, "System prompt (optional)"), system);
  const input = h("textarea", { id: "words", rows: "2", required: true });
  const sendButton = h("button", { class: "main" }, "Send");
  const stopButton = h("button", { type: "button", hidden: true }, "Stop");
  let running = null; // the AbortController of the turn in progress
  let latest = null; // the memory that is drawn, or about to be

  const takeTurn = async () => {
    const content = input.value;
    if (!content.trim() || sendButton.disabled) return;
    const change = newChange();
    running = new AbortController();
    signal.addEventListener("abort", () => running?.abort(), { once: true });
    input.value = "";
    sendButton.disabled = true;
    stopButton.hidden = false;
    const answer = h("p", { class: "answer" });
    turns.append(h("p", { class: "question" }, content), answer);
    turns.scrollTop = turns.scrollHeight;
    let failure = null;
    const body = { content, stream: true };
    if (!systemField.hidden && system.value) body.system = system.value;
    try {
      const options = { headers: change.headers, signal: running.signal };
      for await (const [kind, event] of streamEvents("POST", `/v1/sessions/${name}/turns`, body, options)) {
        showEvent(kind, event, answer);
        if (kind === "done") change.keepNumbers(event.revision); // a turn only appends tokens
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
      if (!answer.textContent) input.value = content;
    }
    running = null;
    stopButton.hidden = true;
    if (!signal.aborted) await afterTurn();
    if (failure && !signal.aborted) showStatus(changeError(failure), true);
    sendButton.disabled = false; // only now: the next turn is for the revision that is shown
  };
  const showEvent = (kind, event, answer) => {
    if (kind === "read") answer.dataset.reading = `prefill: ${event.done} of ${event.total} tokens`;
    else if (kind === "token") {
      if (event.reasoning) answer.dataset.reading = "reasoning";
      else delete answer.dataset.reading;
      answer.append(event.text);
      turns.scrollTop = turns.scrollHeight;
    } else if (kind === "error") throw new Error(event.error.message);
  };
  stopButton.addEventListener("click", () => running?.abort());
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      takeTurn();
    }
  });
  const submit = (event) => {
    event.preventDefault();
    takeTurn();
  };
  const form = h(
    "form",
    { onsubmit: submit },
    systemField,
    h("label", { for: "words" }, "Message"),
    input,
    h("div", { class: "actions" }, sendButton, stopButton),
  );

  async function draw(memory) {
    if (running) return;
    systemField.hidden = memory.tokens > 0;
    const parts = partsOf(memory.spans);
    latest = memory;
    if (!parts.length) {
      const hint = memory.tokens ? "This session has no chat turns; its text is shown beside." : "No messages yet.";
      redraw(turns, h("p", { class: "hint" }, hint));
      return;
    }
    const bubbles = [];
    for (const part of parts) bubbles.push(await bubble(name, part, memory, selectSpan));
    if (running || latest !== memory) return;
    redraw(turns, bubbles);
    turns.scrollTop = turns.scrollHeight;
  }

  const heading = h("h2", {}, "Chat");
  const element = h("section", { class: "chat", "aria-label": "Chat" }, heading, turns, newChange ? form : null);
  return { element, draw, busy: () => running !== null };
}

async function bubble(name, { label, kind, span }, memory, selectSpan) {
  const tokens = await fetchPieces(name, span.start, span.end);
  const attributes = { class: "turn-label", onclick: () => selectSpan(label), title: `Select ${label}` };
  return h("div", { class: kind }, h("button", attributes, label), h("p", {}, tokenElements(tokens, memory)));
}

// Returns the parts of the conversation in order: the system prompt and the newest turns.
function partsOf(spans) {
  const numbers = Object.keys(spans)
    .map((label) => /^turn (\d+)$/.exec(label))
    .filter(Boolean)
    .map(([, digits]) => Number(digits))
    .sort((a, b) => a - b)
    .slice(-SHOWN);
  const parts = [{ label: "system text", kind: "system" }];
  for (const turn of numbers) {
    parts.push({ label: `turn ${turn} question`, kind: "question" }, { label: `turn ${turn} answer`, kind: "answer" });
  }
  return parts
    .map((part) => ({ ...part, span: spans[part.label] }))
    .filter(({ span }) => span && span.end > span.start);
}
