// The log of operations, the newest first.

import { get } from "./api.js";
import { bytes, clock, fill, h, number, sessionLink, title } from "./dom.js";
import { titleOf } from "./chat_settings.js";
import { onOperation, SHOWN_AGAIN } from "./live.js";
import { fetchSessions, knownSessions, onSessions } from "./session_list.js";
import { isCopyOf, isUndoName } from "./undo.js";

const PATH = "/v1/operations";
const MAX_ROWS = 200;

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
    h("td", {}, operation.what === "fork" ? "branch" : operation.what),
    h("td", { class: "name" }, entry ? sessionLink(name, titleOf(entry)) : name),
    h("td", {}, number(operation.tokens)),
    h("td", {}, operation.seconds ? number(Math.round(operation.seconds * 1000)) : ""), // an alignment's are those of its answer
    h("td", {}, bytes(operation.nbytes)),
    h("td", {}, number(operation.revision)),
  );
}

/**
 * Returns the operations to show of a log, the newest first: an undo is one, and not a deletion and a fork of the copy kept for it.
 * @param {Operation[]} log
 */
export function shownOperations(log) {
  /** @type {Set<string>} */
  const undone = new Set(); // sessions whose deletion for an undo comes next
  return log.flatMap((operation) => {
    const { session, what, parent } = operation;
    if (isUndoName(session)) return [];
    if (what === "delete" && undone.delete(session)) return [];
    if (what !== "fork" || !isCopyOf(parent || "", session)) return [operation];
    undone.add(session);
    return [{ ...operation, what: "undo" }];
  });
}
