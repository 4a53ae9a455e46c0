// The log of operations, the newest first.

import { get } from "./api.js";
import { bytes, clock, fill, h, number, sessionLink, title } from "./dom.js";
import { titleOf } from "./chat_settings.js";
import { onOperation } from "./live.js";
import { fetchSessions, knownSessions } from "./session_list.js";
import { isUndoName } from "./undo.js";

const PATH = "/v1/operations";
const MAX_ROWS = 200;

/** @param {HTMLElement} container @param {View} view */
export async function operations(container, { signal }) {
  const rows = h("tbody");
  const [{ data }, entries] = await Promise.all([get(PATH), fetchSessions()]);
  fill(rows, data.filter(isShown).map((/** @type {Operation} */ operation) => row(operation, entries)));
  onOperation((operation) => {
    if (!operation || !isShown(operation)) return;
    rows.prepend(row(operation, null));
    while (rows.children.length > MAX_ROWS) rows.lastChild.remove();
  }, signal);
  const names = ["Time", "Operation", "Conversation", "Tokens", "Milliseconds", "Bytes", "Revision"];
  fill(
    container,
    title("Operations", PATH),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Operations" },
      h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), rows),
    ),
  );
}

// Copies for Undo are this page's own.
/** @param {Operation} operation */
const isShown = ({ session }) => !isUndoName(session);

/** @param {Operation} operation @param {SessionEntry[] | null} entries those that are there; null if that is not known */
function row(operation, entries) {
  const name = operation.session;
  const entry = (entries || knownSessions()).find((known) => known.name === name);
  const isLinked = entry || (!entries && operation.what !== "delete");
  return h(
    "tr",
    {},
    h("td", {}, clock(operation.when)),
    h("td", {}, operation.what === "fork" ? "branch" : operation.what),
    h("td", {}, isLinked ? sessionLink(name, entry ? titleOf(entry) : name) : name),
    h("td", {}, number(operation.tokens)),
    h("td", {}, operation.seconds ? number(Math.round(operation.seconds * 1000)) : ""), // an alignment's are those of its answer
    h("td", {}, bytes(operation.nbytes)),
    h("td", {}, number(operation.revision)),
  );
}
