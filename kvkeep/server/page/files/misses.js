// Prompts that missed the prefix cache: where they differ from the nearest text, and why. Pinned prompts.

import { get, messageOf, send } from "./api.js";
import { clock, fill, h, number, showStatus, title } from "./dom.js";
import { differingTexts, reasonText } from "./miss_text.js";
import { reuseText } from "./reuse.js";
import { fetchSessions, titledLink } from "./session_list.js";

const PATH = "/v1/prefix/misses";
const PINS_PATH = "/v1/prefix/pins";
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
