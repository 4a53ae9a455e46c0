// What the memory beside the chat says, as sentences: values only, no elements.

import { cellsOf, countOf, sharesOf, standingText } from "./turns.js";

/** @param {number} value */
const count = (value) => Math.round(value).toLocaleString("en-US");

/** @param {number} value @param {string} noun */
const counted = (value, noun) => `${count(value)} ${noun}${Math.round(value) === 1 ? "" : "s"}`;

/**
 * Returns what a turn holds.
 * @param {Memory} memory @param {{start: number, end: number}} turn
 */
export function heldText(memory, { start, end }) {
  const shares = sharesOf(memory, start, end);
  const standing = { window: "in the window", kept: "kept", pinned: "pinned" }[standingText(shares)] || standingText(shares);
  return `${counted(end - start, "token")} in ${counted(cellsOf(shares), "cell")}, ${standing}.`;
}

/**
 * Returns what it would do to delete a turn.
 * @param {Memory} memory @param {{start: number, end: number}} turn @param {(bytes: number) => string} bytes
 */
export function forgetText(memory, { start, end }, bytes) {
  const cells = cellsOf(sharesOf(memory, start, end));
  return `Frees ${counted(cells, "cell")} (${bytes(cells * memory.cell_bytes)}) and removes the text. What follows stays as it was computed with it.`;
}

/** @param {{role: string}[]} parts */
const namesOf = (parts) => parts.map(({ role }) => role).join(" and ").replace(/^./, (letter) => letter.toUpperCase());

/**
 * Returns what it would do to pin a turn.
 * @param {Memory} memory @param {import("./turns.js").Turn} turn
 */
export function pinText(memory, { start, end, parts }) {
  const shares = sharesOf(memory, start, end);
  const lost = shares.filter(({ standing }) => standing === "forgotten").reduce((sum, { tokens }) => sum + tokens, 0);
  const cells = cellsOf(shares);
  const subject = parts.length > 1 ? `${namesOf(parts)} together: ` : "";
  const budget = memory.max_kv_size ? ` of ${count(memory.max_kv_size)}` : "";
  const note = lost ? ` ${counted(lost, "token")} are forgotten already and cannot be pinned.` : "";
  return `${subject}${counted(cells, "cell")}${budget} are never forgotten then.${note}`;
}

/**
 * Returns what it would do to replace a text with the rest as it is, or evaluated again.
 * @param {Memory} memory @param {number} end of the text @param {boolean} isFirst of those that can be replaced
 */
export const replaceText = (memory, end, isFirst) =>
  `${isFirst ? "Changes what the model remembers, and asks nothing. " : ""}Reads the new text alone; to be exact, ${counted(memory.tokens - end, "token")} after it as well.`;

/**
 * Returns what a session holds, and what that takes.
 * @param {Memory} memory @param {(bytes: number) => string} bytes
 */
export function sizeText(memory, bytes) {
  const budget = memory.max_kv_size ? ` of ${count(memory.max_kv_size)}` : "";
  const lost = countOf(memory, "forgotten");
  const forgotten = lost ? `, ${count(lost)} of them forgotten` : "";
  const shared = memory.bytes_shared ? `, ${bytes(memory.bytes_shared)} of it shared with branches and Undo` : "";
  return `${counted(memory.tokens, "token")} in ${count(memory.cells)}${budget} cells${forgotten}. ${bytes(memory.bytes)} reserved${shared}.`;
}

export const RESERVED_HINT = "Reserved is what cells take, with room for the next ones. What is shared exists once, and counts in each conversation that has it.";

/**
 * Returns what a compression would leave.
 * @param {Memory} memory @param {number} ratio @param {(bytes: number) => string} bytes
 */
export function compressText(memory, ratio, bytes) {
  const left = memory.cells / ratio;
  const freed = (memory.cells - left) * memory.cell_bytes;
  return `${count(memory.cells)} cells become about ${count(left)}: frees ${bytes(freed)}.`;
}

/**
 * Returns what the last answer cost, by the server's timings.
 * @param {{cache_n: number, prompt_n: number, predicted_n: number, predicted_per_second: number}} timings
 * @param {number} held tokens that were in memory before
 */
export function answerText(timings, held) {
  const speed = timings.predicted_per_second ? ` at ${timings.predicted_per_second.toFixed(1)} tokens/s` : "";
  if (!held) return `The last answer read ${counted(timings.prompt_n, "token")} and wrote ${count(timings.predicted_n)}${speed}.`;
  return `The last answer reused all ${counted(held, "token")} in memory, read ${count(timings.prompt_n)} new ones and wrote ${count(timings.predicted_n)}${speed}.`;
}
