// What the inspector says of a session in a line: what it takes, where it comes from, its state.

import { originOf } from "./conversations.js";
import { bytes, h, number, sessionLink } from "./dom.js";
import { rate } from "./live.js";
import { sizeText } from "./memory_text.js";
import { isPrompt, reuseText } from "./reuse.js";
import { knownSessions } from "./session_list.js";
import { stateText } from "./sessions.js";
import { isUndoName } from "./undo.js";

/** Creates the parts of the line. @param {Memory} memory */
export function factLine(memory) {
  const tokensPerSecond = rate(memory.name);
  return [
    `${sizeText(memory, bytes)} Policy ${memory.policy}. `,
    overwrittenParts(memory),
    originParts(memory),
    memory.last_prompt && isPrompt(memory) ? `Last prompt: ${reuseText(memory.last_prompt)}. ` : "",
    tokensPerSecond ? `${tokensPerSecond.toFixed(1)} tokens/s. ` : "",
    `${stateText(memory)}. `.replace(/^./, (letter) => letter.toUpperCase()),
    h("a", { href: `#/sessions/${memory.name}/heads` }, "Cells by head"),
  ].flat();
}

/**
 * Returns what a session was begun from, with a link if that is there.
 * @param {Memory} memory
 */
function originParts({ name, parent }) {
  const entries = knownSessions();
  const origin = originOf(entries, name);
  if (origin) return [origin.kind === "Branch" ? "Branch of " : "Begun from ", sessionLink(origin.name, origin.title), ". "];
  return parent && entries.length && !isUndoName(parent) ? [`Branch of ${parent} (deleted). `] : [];
}

/** Returns what tells whether the line would name another origin. @param {Memory} memory */
export const originText = (memory) => JSON.stringify(originOf(knownSessions(), memory.name));

/**
 * Returns what local windows, states and checkpoints take, and what a rewind costs; "" without any.
 * @param {Memory} memory
 */
function overwrittenParts(memory) {
  const { cells, ...others } = memory.bytes_by_part;
  const parts = Object.entries(others).filter(([, size]) => size);
  if (!parts.length) return "";
  const sizes = parts.map(([part, size]) => `${bytes(size)} of ${part}`).join(", ");
  const ends = memory.checkpoints.map(number).join(", ");
  const evaluated = memory.rewind_evaluates;
  return [
    `${bytes(cells)} of cells, ${sizes}. `,
    ends ? `Checkpoints after ${ends} tokens. ` : "",
    evaluated === null ? "" : `A rewind of one token evaluates ${number(evaluated)} again. `,
  ].join("");
}
