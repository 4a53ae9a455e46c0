// Prompts that missed the prefix cache: where they differ from the nearest text, and why. Pinned prompts.

import { get, messageOf, send } from "./api.js";
import { titleOf } from "./chat_settings.js";
import { clock, fill, h, number, sessionLink, showStatus, title } from "./dom.js";
import { fetchSessions, knownSessions } from "./session_list.js";

const PATH = "/v1/prefix/misses";
const PINS_PATH = "/v1/prefix/pins";
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

/** @param {string} name */
const titledLink = (name) => sessionLink(name, titleOf(knownSessions().find((known) => known.name === name) || { name, title: null }));

/** @param {Miss} miss */
const reasonText = (miss) => `${REASONS[miss.reason] || miss.reason}${boundText(miss)}`;

/** @param {HTMLElement} container @param {View} view */
export async function misses(container, { parts, edits }) {
  /** @type {[{data: Miss[]}, {data: PrefixPin[]}, SessionEntry[]]} */
  const [{ data }, pins] = await Promise.all([get(PATH), get(PINS_PATH), fetchSessions()]);
  const [, selected] = parts; // the number of one prompt, in the URL
  const shown = selected ? data.filter((miss) => String(miss.number) === selected) : data;
  const cards = h("div", {}, shown.length ? shown.map((miss) => card(miss, selected)) : h("p", {}, "No missed prompts yet."));
  const heading = title(selected ? `Missed prompt ${selected}` : "Missed prompts", PATH);
  fill(container, heading, explainForm(cards), selected ? null : pinnedPrompts(pins.data, edits), cards);
}

/**
 * Lists the prompts that requests protect from eviction; null if there are none.
 * @param {PrefixPin[]} pins @param {boolean} edits
 */
function pinnedPrompts(pins, edits) {
  if (!pins.length) return null;
  return h("section", { class: "pins" }, h("h2", {}, "Pinned prompts"), h("ul", {}, pins.map((pin) => pinEntry(pin, edits))));
}

/** @param {PrefixPin} pin @param {boolean} edits */
function pinEntry(pin, edits) {
  const release = async () => {
    try {
      await send("DELETE", `${PINS_PATH}/${pin.id}`);
      entry.remove();
      showStatus("released");
    } catch (error) {
      showStatus(messageOf(error), true);
    }
  };
  const key = pin.prompt_cache_key === null ? "" : `, key ${pin.prompt_cache_key}`;
  const minutes = Math.ceil(pin.expires_in / 60);
  const entry = h(
    "li",
    {},
    `${number(pin.tokens)} tokens in `,
    titledLink(pin.session),
    `${key}: ${number(minutes)} ${minutes === 1 ? "minute" : "minutes"} left. `,
    edits ? h("button", { onclick: release }, "Release") : null,
  );
  return entry;
}

/** @param {HTMLElement} cards */
function explainForm(cards) {
  const text = h("textarea", { rows: "3", id: "prompt", required: true });
  const explain = async (/** @type {Event} */ event) => {
    event.preventDefault();
    try {
      const result = await send("POST", "/v1/prefix/explain", { text: text.value, special: true });
      cards.prepend(card(result));
    } catch (error) {
      showStatus(messageOf(error), true);
    }
  };
  return h(
    "form",
    { onsubmit: explain },
    h("label", { for: "prompt" }, "Check how much of a prompt would be reused:"),
    text,
    h("button", {}, "Explain"),
  );
}

/** @param {Miss} miss @param {string} [selected] */
function card(miss, selected) {
  const when = miss.created ? `, ${clock(miss.created)}` : "";
  const name = miss.number ? `Prompt ${miss.number}` : "This prompt";
  const heading = miss.number && !selected ? h("a", { href: `#/missed/${miss.number}` }, name) : name;
  return h(
    "article",
    { class: "card" },
    h("h2", {}, heading),
    h(
      "p",
      {},
      reuseText(miss),
      miss.session ? [" from ", titledLink(miss.session)] : "",
      `${when}. ${reasonText(miss)} `,
      miss.differs_at === null ? "" : `First difference: token ${number(miss.differs_at)}.`,
      miss.not_in_place ? ` Not aligned in place: ${miss.not_in_place}.` : "",
    ),
    miss.prompt_text === undefined ? null : differingTexts(miss),
  );
}

/**
 * Whether a session holds prompts of requests. In a conversation of turns, each reuses all before it.
 * @param {Memory} memory
 */
export const isPrompt = (memory) => Boolean(memory.tokens && memory.last_prompt) && !Object.keys(memory.spans).some((label) => /^turn \d+$/.test(label));

/**
 * Returns what of a prompt was reused, and how much of that was moved in place, as in /v1/prefix/explain.
 * @param {Reuse} reuse
 */
export function reuseText({ prompt_tokens, reused, moved, reread }) {
  const text = `${number(reused)} of ${number(prompt_tokens)} tokens reused`;
  return moved === undefined ? text : `${text}, ${number(moved)} of them moved in place, ${number(reread || 0)} others read again`;
}

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

/** @param {Miss} miss */
function differingTexts(miss) {
  return h(
    "div",
    { class: "texts" },
    h("p", { class: "common" }, h("strong", {}, "Both: "), h("span", {}, miss.common_text)),
    h("p", { class: "own" }, h("strong", {}, "The prompt continues: "), h("mark", {}, miss.prompt_text)),
    h("p", { class: "other" }, h("strong", {}, "The nearest text continues: "), h("mark", {}, miss.nearest_text)),
  );
}
