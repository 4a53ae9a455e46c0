// What of a prompt was reused.

import { number } from "./dom.js";

/**
 * Whether a session holds prompts of requests. In a conversation of turns, each reuses all before it.
 * @param {Memory} memory
 */
export const isPrompt = (memory) => Boolean(memory.tokens && memory.last_prompt) && !Object.keys(memory.spans).some((label) => /^(turn \d+|opening|system)$/.test(label));

/**
 * Returns what of a prompt was reused, and how much of that was moved in place, as in /v1/prefix/explain.
 * @param {Reuse} reuse
 */
export function reuseText({ prompt_tokens, reused, moved, reread }) {
  const text = `${number(reused)} of ${number(prompt_tokens)} tokens reused`;
  return moved === undefined ? text : `${text}, ${number(moved)} of them moved in place, ${number(reread || 0)} others read again`;
}
