// Prompts that were evaluated again: where they part from the nearest text, and why.

import { get, send } from "./api.js";
import { clock, fill, h, number, sessionLink, tell, title } from "./dom.js";

const PATH = "/v1/prefix/misses";
const WHY = {
  cold: "No text begins like it.",
  differs: "The nearest text goes on otherwise.",
  below_step: "What they have in common ends within the first step.",
  written: "The nearest text was written by the model there, not read.",
  forgotten: "Cells of the nearest text are forgotten.",
  compressed: "Cells of the nearest text are compressed.",
  quantised: "Cells of the nearest text are quantised.",
  edited: "The nearest text was edited, so that its cells are not what its tokens alone give.",
  settings: "The nearest session has another policy, budget, step or bits.",
};

export async function missed(place, { parts }) {
  const { data } = await get(PATH);
  const [, chosen] = parts;
  const shown = chosen ? data.filter((each) => String(each.number) === chosen) : data;
  const cards = h("div", {}, shown.length ? shown.map((each) => card(each, chosen)) : h("p", {}, "None yet."));
  fill(place, title(chosen ? `Missed prompt ${chosen}` : "Missed prompts", PATH), explaining(cards), cards);
}

function explaining(cards) {
  const text = h("textarea", { rows: "3", id: "prompt", required: true });
  const asks = async (event) => {
    event.preventDefault();
    try {
      const found = await send("POST", "/v1/prefix/explain", { text: text.value, special: true });
      cards.prepend(card(found));
    } catch (error) {
      tell(error.message, true);
    }
  };
  return h(
    "form",
    { onsubmit: asks },
    h("label", { for: "prompt" }, "What would be reused of this prompt?"),
    text,
    h("button", {}, "Explain"),
  );
}

function card(miss, chosen) {
  const when = miss.created ? `, ${clock(miss.created)}` : "";
  const name = miss.number ? `Prompt ${miss.number}` : "This prompt";
  const heading = miss.number && !chosen ? h("a", { href: `#/missed/${miss.number}` }, name) : name;
  return h(
    "article",
    { class: "card" },
    h("h2", {}, heading),
    h(
      "p",
      {},
      `${number(miss.reused)} of ${number(miss.prompt_tokens)} tokens reused`,
      miss.session ? [" from ", sessionLink(miss.session)] : "",
      `${when}. ${WHY[miss.reason] || miss.reason} `,
      miss.differs_at === null ? "" : `First difference: token ${number(miss.differs_at)}.`,
    ),
    miss.prompt_text === undefined ? null : texts(miss),
  );
}

function texts(miss) {
  return h(
    "div",
    { class: "texts" },
    h("p", { class: "common" }, h("strong", {}, "Both: "), h("span", {}, miss.common_text)),
    h("p", { class: "own" }, h("strong", {}, "The prompt goes on: "), h("mark", {}, miss.prompt_text)),
    h("p", { class: "other" }, h("strong", {}, "The nearest text goes on: "), h("mark", {}, miss.nearest_text)),
  );
}
