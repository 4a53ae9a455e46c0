// The messages of a chat as elements.

import { fill, h } from "./dom.js";
import { copyButton, markdown } from "./markdown.js";
import { splitAnswer, splitFences, toolName } from "./message_parts.js";
import { sharesOf, standingText, turnTitle } from "./turns.js";

/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {import("./turns.js").Part} Part */

const ROLE_NAMES = { system: "System prompt", question: "You", answer: "Model", tool: "Tool", text: "Text" };
const DRAW_EVERY = 80; // milliseconds, while an answer is generated

/**
 * Creates a turn. buttons: of one of its parts.
 * @param {Turn} turn @param {(part: Part) => (HTMLElement | null)[]} buttons
 */
export function turnElement(turn, buttons) {
  const number = /\d/.test(turn.label) ? h("span", { class: "turn-number" }, turnTitle(turn)) : null;
  const parts = turn.parts.map((part, at) => partElement(part, [...buttons(part), at ? null : number]));
  return h("section", { class: "turn", "data-turn": turn.label, "aria-label": turn.label }, parts);
}

/**
 * Creates the note that a message is pinned, compressed or forgotten, in part or whole; null if it is not.
 * @param {Memory} memory @param {Part} part
 */
export function standingNote(memory, { start, end }) {
  const text = standingText(sharesOf(memory, start, end));
  const standing = ["pinned", "forgotten", "compressed"].find((name) => text.includes(name));
  if (!standing) return null;
  return h("span", { class: "standing" }, h("span", { class: `swatch ${standing}` }), ` ${text} `, wordsLink(memory, { start, end }));
}

/**
 * Creates the link to a text with its forgotten words struck through; null if it is held, or forgotten, as a whole.
 * @param {Memory} memory @param {{start: number, end: number}} range
 */
export function wordsLink(memory, { start, end }) {
  const text = standingText(sharesOf(memory, start, end));
  if (!text.includes("forgotten") || text === "forgotten") return null;
  return h("a", { href: `#/sessions/${memory.name}/at/${start}`, title: "Show this text with its forgotten words struck through" }, "which words?");
}

/** @param {Part} part @param {(HTMLElement | null)[]} buttons */
function partElement({ role, text, reasoning }, buttons) {
  const bar = h("div", { class: "message-bar" }, copyButton(() => text), buttons);
  return h("article", { class: `message ${role}`, "aria-label": ROLE_NAMES[role] }, contentOf(role, text, reasoning), bar);
}

/** @param {Part["role"]} role @param {string} text @param {Part["reasoning"]} reasoning */
function contentOf(role, text, reasoning) {
  if (role === "answer") return h("div", { class: "content" }, answerElements(text, true, reasoning));
  if (role === "question") return questionContent(text);
  return folded(role === "tool" ? `Tool result` : ROLE_NAMES[role], text, role === "text");
}

// What a user said, as it was written; blocks of code are shown as those of an answer.
/** @param {string} text */
const questionContent = (text) => h("div", { class: "content" }, splitFences(text).map((piece) => (piece.isCode ? markdown(piece.text) : h("div", { class: "plain" }, piece.text))));

/** @param {string} text @param {boolean} final @param {Part["reasoning"]} [reasoning] */
function answerElements(text, final, reasoning) {
  return splitAnswer(text, reasoning).map((piece) => {
    if (piece.kind === "text") return markdown(piece.text, final);
    if (piece.kind === "tool") return folded(`Tool call: ${toolName(piece.text)}`, piece.text, false);
    return folded(piece.open && !final ? "Reasoning..." : "Reasoning", piece.text, false);
  });
}

/** @param {string} summary @param {string} text @param {boolean} open */
const folded = (summary, text, open) =>
  h(
    "details",
    { class: "folded", open },
    h("summary", {}, summary),
    h("div", { class: "plain", tabindex: "0", role: "region", "aria-label": summary }, text),
  );

/**
 * Creates a system prompt that is not in memory yet.
 * @param {string} text
 */
export const systemElement = (text) => turnElement({ label: "system", number: 0, start: 0, end: 0, parts: [{ label: "", role: "system", start: 0, end: 0, text }] }, () => []);

/**
 * Creates the turn that is being answered. push adds text; note shows progress before there is some.
 * @param {string | null} question null to continue an answer, or to begin it
 * @param {{number?: number, bar?: Element | null}} [options] number: of the turn. bar: of the answer that is continued, which moves below the new text
 */
export function openTurn(question, { number, bar } = {}) {
  const content = h("div", { class: "content" });
  const progress = h("p", { class: "hint", role: "status" }, "Waiting...");
  const answer = h("article", { class: "message answer", "aria-label": "Model", "aria-busy": "true" }, progress, content, bar || h("div", { class: "message-bar" })); // bars have the place of the buttons to come
  const asked = question === null ? null : h("article", { class: "message question", "aria-label": "You" }, questionContent(question), h("div", { class: "message-bar" }, copyButton(() => question), h("span", { class: "turn-number" }, `Turn ${number}`)));
  const element = h("section", { class: "turn open", "aria-label": "newest turn" }, asked, answer);
  let [reasoning, text] = ["", ""];
  let [timer, duration] = [0, 0]; // of the last drawing, in milliseconds
  const draw = () => {
    const start = performance.now();
    timer = 0;
    const thought = reasoning ? folded(text ? "Reasoning" : "Reasoning...", reasoning, false) : null;
    const wasOpen = content.querySelector("details")?.open;
    fill(content, thought, answerElements(text, false));
    const details = content.querySelector("details");
    if (details && wasOpen) details.open = true;
    element.dispatchEvent(new CustomEvent("drawn", { bubbles: true }));
    duration = performance.now() - start;
  };
  return {
    element,
    get isEmpty() {
      return !text && !reasoning;
    },
    /** @param {string} message */
    note(message) {
      progress.textContent = message;
    },
    /** @param {{text?: string, reasoning?: string}} event */
    push(event) {
      progress.hidden = true;
      text += event.text || "";
      reasoning += event.reasoning || "";
      timer ||= window.setTimeout(draw, Math.min(2000, Math.max(DRAW_EVERY, 4 * duration))); // a long answer takes long
    },
    /** Marks it as one that the server may not have kept. @param {boolean} isInBox whether its message was put back */
    unconfirm(isInBox) {
      element.classList.add("unconfirmed");
      element.querySelector(".turn-number")?.remove(); // it may get another one
      progress.hidden = false;
      progress.textContent = `Not confirmed: the server does not answer. ${isInBox ? "The message is in the box, too." : "Once it does, what it kept is shown here."}`;
    },
    finish() {
      clearTimeout(timer);
      draw();
      answer.removeAttribute("aria-busy");
    },
  };
}
