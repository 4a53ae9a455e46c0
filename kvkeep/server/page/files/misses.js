// Prompts that missed the prefix cache: where they differ from the nearest text, and why.

import { get, send } from "./api.js";
import { clock, fill, h, number, sessionLink, showStatus, title } from "./dom.js";

const PATH = "/v1/prefix/misses";
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
  settings: "The nearest session has another policy, budget, prefill step or KV bits.",
};

export async function misses(container, { parts }) {
  const { data } = await get(PATH);
  const [, selected] = parts; // the number of one prompt, in the URL
  const shown = selected ? data.filter((miss) => String(miss.number) === selected) : data;
  const cards = h("div", {}, shown.length ? shown.map((miss) => card(miss, selected)) : h("p", {}, "No missed prompts yet."));
  fill(container, title(selected ? `Missed prompt ${selected}` : "Missed prompts", PATH), explainForm(cards), cards);
}

function explainForm(cards) {
  const text = h("textarea", { rows: "3", id: "prompt", required: true });
  const explain = async (event) => {
    event.preventDefault();
    try {
      const result = await send("POST", "/v1/prefix/explain", { text: text.value, special: true });
      cards.prepend(card(result));
    } catch (error) {
      showStatus(error.message, true);
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
      `${number(miss.reused)} of ${number(miss.prompt_tokens)} tokens reused`,
      miss.session ? [" from ", sessionLink(miss.session)] : "",
      `${when}. ${REASONS[miss.reason] || miss.reason} `,
      miss.differs_at === null ? "" : `First difference: token ${number(miss.differs_at)}.`,
    ),
    miss.prompt_text === undefined ? null : differingTexts(miss),
  );
}

function differingTexts(miss) {
  return h(
    "div",
    { class: "texts" },
    h("p", { class: "common" }, h("strong", {}, "Both: "), h("span", {}, miss.common_text)),
    h("p", { class: "own" }, h("strong", {}, "The prompt continues: "), h("mark", {}, miss.prompt_text)),
    h("p", { class: "other" }, h("strong", {}, "The nearest text continues: "), h("mark", {}, miss.nearest_text)),
  );
}
