// Cells of each layer and KV head: after compression each head holds a number of its own.

import { get, messageOf } from "./api.js";
import { fill, h, number, showStatus, title } from "./dom.js";
import { debounce, onOperation } from "./live.js";
import { fetchSessions, knownTitle, titledLink } from "./session_list.js";

/** @param {HTMLElement} container @param {View} view */
export async function heads(container, { signal, parts }) {
  const name = parts[1];
  const path = `/v1/sessions/${name}/heads`;
  const table = h("table", { class: "heads", "aria-label": "Cells by layer and KV head" });
  const detail = h("div", { role: "status", class: "detail" });
  const fail = (/** @type {unknown} */ error) => signal.aborted || showStatus(messageOf(error), true);
  const reload = async () => {
    /** @type {{cells: number[][]}} */
    const { cells } = await get(path);
    if (signal.aborted) return;
    const most = Math.max(1, ...cells.flat());
    const names = cells[0].map((_, head) => h("th", { scope: "col" }, `head ${head}`));
    fill(
      table,
      h("thead", {}, h("tr", {}, h("td"), names)),
      h("tbody", {}, cells.map((counts, layer) => layerRow(counts, layer, most, (head) => showHead(layer, head).catch(fail)))),
    );
  };
  const showHead = async (/** @type {number} */ layer, /** @type {number} */ head) => {
    /** @type {{positions: number[], residual: number[], end: number}} */
    const { positions, residual, end } = await get(`${path}?layer=${layer}&head=${head}`);
    if (signal.aborted) return;
    const url = `#/sessions/${name}/heads/${layer}/${head}`;
    history.replaceState(null, "", url); // the view stays
    const marks = positions.map((at) => h("span", { style: { left: `${(100 * at) / Math.max(1, end)}%` } }));
    const note = residual.length ? `, ${number(residual.length)} of them residual (means of evicted cells)` : "";
    fill(
      detail,
      h("h2", {}, `Layer ${layer}, head ${head}: ${number(positions.length)} cells of ${number(end)} positions${note}`),
      h("div", { class: "positions", role: "img", "aria-label": "Positions in the cache" }, marks),
    );
  };
  onOperation(debounce(() => reload().catch(fail)), signal);
  await fetchSessions(); // for the title
  fill(
    container,
    title(`Cells of ${knownTitle(name)}`, path),
    h("p", {}, "Cells in each layer and KV head of ", titledLink(name), ": select a head to see the positions of its cells."),
    detail,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Cells" }, table),
  );
  await reload();
  if (parts[2]) await showHead(Number(parts[2]), Number(parts[3]));
}

/**
 * Creates the row of a layer: a button for each head, shaded by its count relative to the most.
 * @param {number[]} counts @param {number} layer @param {number} most @param {(head: number) => void} onSelect
 */
function layerRow(counts, layer, most, onSelect) {
  const cell = (/** @type {number} */ count, /** @type {number} */ head) => {
    const depth = String(Math.round((100 * count) / most));
    const label = `layer ${layer}, head ${head}: ${count} cells`;
    const button = h("button", { onclick: () => onSelect(head), "aria-label": label }, number(count));
    button.style.setProperty("--depth", `${depth}%`);
    return h("td", {}, button);
  };
  return h("tr", {}, h("th", { scope: "row" }, `layer ${layer}`), counts.map(cell));
}
