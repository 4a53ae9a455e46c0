// What a message that is being written takes, and what memory would forget for it.

import { send } from "./api.js";
import { debounce } from "./live.js";
import { REFUSING } from "./memory_text.js";

const LARGE = 0.25; // of the budget: a message below it is not warned of while older text goes, and an answer takes no more, as a rule

/** @typedef {{policy: string, max_kv_size: number | null, cells: number, runs?: Run[], system?: string}} Room  system: a prompt that is evaluated before the message */

const TEMPLATE = 10; // tokens that a template writes around a later message, about
const MOST_OPENING = 64; // tokens, or somewhat more, that it writes around the first one

/** @param {number} value */
const count = (value) => value.toLocaleString("en-US");

/**
 * Returns a warning of a message that does not fit, or for which older text is forgotten, at first or much of it; "" if there is none.
 * @param {number} tokens of the message @param {Room} room
 */
export function sizeWarning(tokens, room) {
  const { policy, max_kv_size, cells } = room;
  if (!max_kv_size) return "";
  const free = max_kv_size - cells;
  const start = `About ${count(tokens)} tokens`;
  if (tokens <= free) return free - tokens < LARGE * max_kv_size ? nearlyFullText(room) : "";
  if (REFUSING.includes(policy)) return `${start}, but only ${count(free)} of ${count(max_kv_size)} cells are free: it does not fit, and will be refused.`;
  if (tokens >= max_kv_size) {
    return `${start}, but memory has ${count(max_kv_size)} cells: before the model answers it will have forgotten ${cells ? "the conversation and " : ""}the beginning of this message. Send it in parts, or begin a chat with a larger budget (Settings).`;
  }
  return tokens < LARGE * max_kv_size ? nearlyFullText(room) : `${start}: ${count(tokens - free)} of the oldest in memory are forgotten for them.`;
}

/**
 * Returns a warning before memory is full for the first time; "" once text is forgotten, or compressed by itself.
 * @param {Room} room
 */
function nearlyFullText({ policy, max_kv_size, cells, runs = [] }) {
  if (policy === "archive" || runs.some(({ standing }) => standing === "forgotten")) return "";
  const [most, free] = [Number(max_kv_size), Number(max_kv_size) - cells];
  const start = free > most / 2 ? `Memory has room for ${count(most)} cells only, of which ${count(free)} are free.` : `Memory is nearly full: ${count(free)} of ${count(most)} cells are free.`;
  if (REFUSING.includes(policy)) return `${start} The answer ends when it is full.`;
  return `${start} With this message and its answer the oldest text begins to be forgotten: pin what must stay.`;
}

/**
 * Returns how many tokens a message takes, with what the template writes around it. Raises ApiError.
 * @param {string} text @param {Room} room
 */
async function countTokens(text, { cells, system }) {
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: text }];
  const content = cells ? text : (await send("POST", "/apply-template", { messages })).prompt;
  const { tokens } = await send("POST", "/tokenize", { content, parse_special: !cells });
  return tokens.length + (cells ? TEMPLATE : 0);
}

/**
 * Returns a function to be called with each text in the message box, and again when memory changes: it shows the warning once the text is counted.
 * @param {() => Room} room @param {(warning: string) => void} show called with another warning
 */
export function watchSize(room, show) {
  let [text, shown] = ["", ""];
  let counted = { key: "", tokens: 0 };
  const keyOf = (/** @type {string} */ written) => JSON.stringify([written, room().cells > 0, room().system]);
  const say = (/** @type {string} */ warning) => {
    if (warning !== shown) show(warning);
    shown = warning;
  };
  const measure = debounce(async () => {
    const [asked, key] = [text, keyOf(text)];
    const tokens = await countTokens(asked, room()).catch(() => null);
    if (asked !== text || key !== keyOf(text)) return;
    if (tokens !== null) counted = { key, tokens };
    say(tokens === null ? "" : sizeWarning(tokens, room()));
  }, 300);
  return (/** @type {string} */ written) => {
    text = written;
    const mostTokens = new Blob([text]).size + MOST_OPENING; // a token has a byte at least
    if (!text.trim() || !sizeWarning(mostTokens, room())) say("");
    else if (keyOf(text) === counted.key) say(sizeWarning(counted.tokens, room()));
    else measure();
  };
}
