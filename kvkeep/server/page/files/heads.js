// Which cells each layer and KV head holds: after compression each has a number of its own.

import { get } from "./api.js";
import { fill, h, number, sessionLink, title } from "./dom.js";
import { listen, soon } from "./live.js";

export async function heads(place, { signal, parts }) {
  const name = parts[1];
  const path = `/v1/sessions/${name}/heads`;
  const table = h("table", { class: "heads", "aria-label": "Cells by layer and KV head" });
  const detail = h("div", { role: "status", class: "detail" });
  const again = async () => {
    const found = await get(path);
    if (signal.aborted) return;
    const most = Math.max(1, ...found.cells.flat());
    const names = found.cells[0].map((_, head) => h("th", { scope: "col" }, `head ${head}`));
    fill(
      table,
      h("thead", {}, h("tr", {}, h("td"), names)),
      h("tbody", {}, found.cells.map((row, layer) => line(row, layer, most, (head) => shown(layer, head)))),
    );
  };
  const shown = async (layer, head) => {
    const found = await get(`${path}?layer=${layer}&head=${head}`);
    const { positions, end } = found;
    const marks = positions.map((at) => h("span", { style: { left: `${(100 * at) / Math.max(1, end)}%` } }));
    fill(
      detail,
      h("h2", {}, `Layer ${layer}, head ${head}: ${number(positions.length)} cells of ${number(end)} positions`),
      h("div", { class: "positions", role: "img", "aria-label": "Positions that are held" }, marks),
    );
  };
  listen(soon(again), signal);
  fill(
    place,
    title(`Cells of ${name}`, path),
    h("p", {}, "How many cells each layer and KV head of ", sessionLink(name), " holds. Choose one to see where they stand."),
    detail,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Cells" }, table),
  );
  await again();
}

function line(row, layer, most, choose) {
  const cell = (count, head) => {
    const depth = String(Math.round((100 * count) / most));
    const button = h("button", { onclick: () => choose(head), "aria-label": `layer ${layer}, head ${head}: ${count} cells` }, number(count));
    button.style.setProperty("--depth", `${depth}%`);
    return h("td", {}, button);
  };
  return h("tr", {}, h("th", { scope: "row" }, `layer ${layer}`), row.map(cell));
}
