// Why a prompt was not reused further: sentences, and the two texts.

import { h, number } from "./dom.js";

/** @type {Record<string, string>} */
const REASONS = {
  cold: "No evaluated text begins with the same tokens.",
  differs: "The nearest text continues differently.",
  below_step: "The common prefix is shorter than one prefill step.",
  no_checkpoint: "The nearest text has no checkpoint that is near enough.",
  written: "The nearest text was generated there, not prefilled.",
  forgotten: "Cells of the nearest text were evicted.",
  compressed: "Cells of the nearest text were compressed.",
  quantised: "Cells of the nearest text are quantised.",
  edited: "The nearest text was edited, so its cells differ from those of a fresh prefill.",
  settings: "The nearest text has another policy, budget, prefill step or KV bits.",
};

/** @param {Miss} miss */
export const reasonText = (miss) => `${REASONS[miss.reason] || miss.reason}${boundText(miss)}`;

/**
 * Returns the entry of a session's last prompt among the recent misses, which name the session that is nearest.
 * @param {Miss[]} data @param {Memory} memory
 */
export const missOf = (data, { name, parent, last_prompt: prompt }) =>
  data.find((miss) => [name, parent, null].includes(miss.session) && miss.prompt_tokens === prompt?.prompt_tokens && miss.reused === prompt.reused);

/** @type {Record<string, string>} */
const BOUNDS = {
  differs: "reuse ends where the last whole prefill step of them ends",
  no_checkpoint: "reuse ends at the last checkpoint before the difference",
};

/**
 * Returns why not all tokens that a prompt shares with the nearest text were reused; "" if they were.
 * @param {Miss} miss
 */
export function boundText({ reason, prompt_tokens, reused, moved, differs_at }) {
  const shared = differs_at ?? prompt_tokens;
  if (reason === "cold" || moved !== undefined || reused >= shared) return "";
  const isLast = reused === prompt_tokens - 1;
  const bound = isLast ? "the last one is always evaluated, for the logits of the answer" : BOUNDS[reason];
  return ` ${number(shared)} tokens are the same, of which ${number(reused)} were reused${bound ? `: ${bound}` : ""}.`;
}

/**
 * Creates what says why a prompt was not reused further: a sentence, and the two texts.
 * @param {Miss} miss
 */
export const missElements = (miss) => [
  h("p", {}, reasonText(miss), " ", h("a", { href: `#/missed/${miss.number}` }, `Prompt ${miss.number}`)),
  miss.prompt_text === undefined ? null : differingTexts(miss),
];

/** Creates the texts of a prompt and of the nearest session, where they differ. @param {Miss} miss */
export function differingTexts(miss) {
  return h(
    "div",
    { class: "texts" },
    h("p", { class: "common" }, h("strong", {}, "Both: "), h("span", {}, miss.common_text)),
    h("p", { class: "own" }, h("strong", {}, "The prompt continues: "), h("mark", {}, miss.prompt_text)),
    h("p", { class: "other" }, h("strong", {}, "The nearest text continues: "), h("mark", {}, miss.nearest_text)),
  );
}
