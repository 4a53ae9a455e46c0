// The log of operations, the newest first.

import { get } from "./api.js";
import { bytes, clock, fill, h, number, sessionLink, title } from "./dom.js";
import { onOperation } from "./live.js";

const PATH = "/v1/operations";
const MAX_ROWS = 200;

/** @param {HTMLElement} container @param {View} view */
export async function operations(container, { signal }) {
  const rows = h("tbody");
  const { data } = await get(PATH);
  fill(rows, data.map(row));
  onOperation((operation) => {
    if (!operation) return;
    rows.prepend(row(operation));
    while (rows.children.length > MAX_ROWS) rows.lastChild.remove();
  }, signal);
  const names = ["Time", "Session", "Operation", "Tokens", "Milliseconds", "Bytes", "Revision"];
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

/** @param {Operation} operation */
function row(operation) {
  return h(
    "tr",
    {},
    h("td", {}, clock(operation.when)),
    h("td", {}, sessionLink(operation.session)),
    h("td", {}, operation.what),
    h("td", {}, number(operation.tokens)),
    h("td", {}, operation.seconds ? number(Math.round(operation.seconds * 1000)) : ""), // an alignment's are those of its answer
    h("td", {}, bytes(operation.nbytes)),
    h("td", {}, number(operation.revision)),
  );
}
