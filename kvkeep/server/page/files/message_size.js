// What a message that is being written takes, and what memory would forget for it.

import { send } from "./api.js";
import { debounce } from "./live.js";

const REFUSING = ["full", "self_extend"]; // policies that evict nothing
const LARGE = 0.25; // of the budget: a message below it is not warned of while older text goes

/** @typedef {{policy: string, max_kv_size: number | null, cells: number}} Room */

/** @param {number} value */
const count = (value) => value.toLocaleString("en-US");

/**
 * Returns a warning of a message that does not fit, or for which much is forgotten; "" if there is none.
 * @param {number} tokens of the message @param {Room} room
 */
export function sizeWarning(tokens, { policy, max_kv_size, cells }) {
  if (!max_kv_size) return "";
  const free = max_kv_size - cells;
  const start = `About ${count(tokens)} tokens`;
  if (tokens <= free) return "";
  if (REFUSING.includes(policy)) return `${start}, but only ${count(free)} of ${count(max_kv_size)} cells are free: it does not fit, and will be refused.`;
  if (tokens >= max_kv_size) {
    return `${start}, but memory has ${count(max_kv_size)} cells: before the model answers it will have forgotten the conversation and the beginning of this message. Send it in parts, or begin a chat with a larger budget (Settings).`;
  }
  return tokens < LARGE * max_kv_size ? "" : `${start}: ${count(tokens - free)} of the oldest in memory are forgotten for them.`;
}

/**
 * Returns a function to be called with each text in the message box, which shows its warning once it is counted.
 * @param {() => Room} room @param {(warning: string) => void} show
 */
export function watchSize(room, show) {
  let text = "";
  const measure = debounce(async () => {
    const counted = text;
    const { tokens } = await send("POST", "/tokenize", { content: counted, parse_special: false }).catch(() => ({ tokens: [] }));
    if (counted === text) show(sizeWarning(tokens.length, room()));
  }, 300);
  return (/** @type {string} */ written) => {
    text = written;
    const { max_kv_size, cells } = room();
    const mostTokens = new Blob([text]).size; // a token has a byte at least
    if (!max_kv_size || mostTokens <= max_kv_size - cells) show("");
    else measure();
  };
}
