// All conversations and cached prompts: what they hold and how fast they run.

import { get, messageOf, send } from "./api.js";
import { promptDialog } from "./dialog.js";
import { bytes, fill, h, number, sessionLink, showStatus, title } from "./dom.js";
import { titleOf } from "./chat_settings.js";
import { debounce, onOperation, rate } from "./live.js";
import { RESERVED_HINT } from "./memory_text.js";
import { NAME } from "./names.js";
import { POLICIES, POLICY_TEXTS } from "./settings_dialog.js";
import { isUndoCopy } from "./undo.js";

const PATH = "/v1/sessions?unnamed=true";

/** @param {HTMLElement} container @param {View} view */
export async function sessions(container, { signal, edits }) {
  const rows = h("tbody");
  const summary = h("p");
  const reload = async () => {
    try {
      /** @type {{data: SessionEntry[]}} */
      const { data } = await get(PATH);
      if (signal.aborted) return;
      const shown = data.filter((entry) => !isUndoCopy(entry, data));
      fill(rows, shown.map(row));
      const held = data.reduce((sum, entry) => sum + (entry.bytes || 0), 0);
      summary.textContent = data.length
        ? `Conversations and cached prompts: ${number(shown.length)}, copies for Undo: ${number(data.length - shown.length)}. ${bytes(held)} reserved. ${RESERVED_HINT}`
        : "No conversations yet.";
    } catch (error) {
      showStatus(messageOf(error), true);
    }
  };
  onOperation(debounce(reload), signal);
  const timer = setInterval(() => {
    for (const cell of rows.querySelectorAll("[data-rate]")) cell.textContent = rateText(cell.dataset.rate);
  }, 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
  const names = ["Conversation", "Tokens", "Cells", "Reserved", "Tokens/s", "State"];
  fill(
    container,
    title("Overview", PATH, edits ? h("button", { onclick: createSession }, "New chat") : null),
    summary,
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Conversations and prompts" },
      h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), rows),
    ),
  );
  await reload();
}

/** @param {string} name */
const rateText = (name) => (rate(name) ? rate(name).toFixed(1) : "");

/** @param {SessionEntry} entry */
function row(entry) {
  const budget = entry.max_kv_size ? ` of ${number(entry.max_kv_size)}` : "";
  const inMemory = entry.in_memory;
  return h(
    "tr",
    {},
    h("th", { scope: "row", class: "name" }, sessionLink(entry.name, titleOf(entry)), entry.named ? null : h("small", {}, " cached prompt")),
    h("td", {}, inMemory ? number(entry.tokens) : ""),
    h("td", {}, inMemory ? `${number(entry.cells)}${budget}` : ""),
    h("td", {}, inMemory ? bytes(entry.bytes) : ""),
    h("td", { "data-rate": entry.name }, rateText(entry.name)),
    h("td", {}, stateText(entry)),
  );
}

/** @param {SessionEntry | Memory} entry */
export function stateText(entry) {
  const words = [];
  if (entry.busy) words.push("busy");
  if ("in_memory" in entry && !entry.in_memory) words.push("on disk");
  if (entry.resident) words.push("stays in memory");
  words.push(entry.saved_revision === entry.revision ? "saved" : `revision ${entry.revision}`);
  return words.join(", ");
}

async function createSession() {
  const values = await promptDialog(
    "New chat",
    [
      { name: "name", label: "Name (optional)", ...NAME },
      { name: "policy", label: "Memory policy", choices: ["", ...Object.keys(POLICIES)], texts: POLICY_TEXTS },
      { name: "max_kv_size", label: "Memory budget, in cells (empty: server default)", kind: "number", min: "1" },
    ],
    "Create",
  );
  if (!values) return;
  const body = Object.fromEntries(Object.entries(values).filter(([, value]) => value));
  try {
    const created = await send("POST", "/v1/sessions", body);
    location.hash = `#/sessions/${created.name}`;
  } catch (error) {
    showStatus(messageOf(error), true);
  }
}
