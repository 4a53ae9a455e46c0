// The log of operations, the newest first.

import { get } from "./api.js";
import { bytes, clock, fill, h, number, sessionLink, title } from "./dom.js";
import { titleOf } from "./chat_settings.js";
import { onOperation, SHOWN_AGAIN } from "./live.js";
import { fetchSessions, knownSessions, onSessions } from "./session_list.js";
import { isUndoName } from "./undo.js";

const PATH = "/v1/operations";
const MAX_ROWS = 200;
/** @type {Record<string, string>} */
const WORDS = { fork: "branch", revert: "undo" };

/** @param {HTMLElement} container @param {View} view */
export async function operations(container, { signal }) {
  const rows = h("tbody");
  /** @type {Operation[]} */
  let log = [];
  let drawn = "";
  const draw = () => {
    const [shown, entries] = [shownOperations(log), knownSessions()];
    const latest = JSON.stringify([shown, entries.map(({ name, title: given }) => [name, given])]);
    if (latest !== drawn) fill(rows, shown.map((operation) => row(operation, entries)));
    drawn = latest;
  };
  const reload = async () => {
    [{ data: log }] = await Promise.all([get(PATH), fetchSessions()]);
    if (!signal.aborted) draw();
  };
  onOperation((operation) => {
    if (!operation || operation === SHOWN_AGAIN) return reload().catch(() => {}); // the connection's state is shown elsewhere
    log = [operation, ...log].slice(0, MAX_ROWS);
    return draw();
  }, signal);
  onSessions(draw, signal); // names have become links, or are none any more
  await reload();
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

/** @param {Operation} operation @param {SessionEntry[]} entries those that are there */
function row(operation, entries) {
  const name = operation.session;
  const entry = entries.find((known) => known.name === name);
  return h(
    "tr",
    {},
    h("td", {}, clock(operation.when)),
    h("td", {}, WORDS[operation.what] || operation.what),
    h("td", { class: "name" }, entry ? sessionLink(name, titleOf(entry)) : name),
    h("td", {}, number(operation.tokens)),
    h("td", {}, operation.seconds ? number(Math.round(operation.seconds * 1000)) : ""), // an alignment's are those of its answer
    h("td", {}, bytes(operation.nbytes)),
    h("td", {}, number(operation.revision)),
  );
}

/** Returns the operations to show of a log: those on copies for undo are none. @param {Operation[]} log */
export const shownOperations = (log) => log.filter(({ session }) => !isUndoName(session));
