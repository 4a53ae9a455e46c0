// Which session was forked from which, and where snapshots were taken.

import { get, send } from "./api.js";
import { asked, bytes, fill, h, number, sessionLink, tell, title } from "./dom.js";
import { listen, soon } from "./live.js";

const PATH = "/v1/sessions?unnamed=true";

export async function tree(place, { signal, edits }) {
  const forest = h("div");
  const again = async () => {
    try {
      const [found, taken] = await Promise.all([get(PATH), snapshots()]);
      if (!signal.aborted) fill(forest, drawn(found.data, taken, edits));
    } catch (error) {
      tell(error.message, true);
    }
  };
  listen(soon(again), signal);
  fill(place, title("Tree of forks and snapshots", PATH), forest);
  await again();
}

async function snapshots() {
  try {
    return (await get("/v1/snapshots")).data;
  } catch {
    return []; // a server without a folder has none
  }
}

function drawn(sessions, taken, edits) {
  const known = new Set(sessions.map((each) => each.name));
  const under = new Map();
  for (const each of sessions) {
    const parent = known.has(each.parent) && each.parent !== each.name ? each.parent : "";
    under.set(parent, [...(under.get(parent) || []), each]);
  }
  const branch = (entry) => {
    const own = taken.filter((each) => each.session === entry.name);
    const forks = under.get(entry.name) || [];
    const gone = entry.parent && !known.has(entry.parent) ? `, from ${entry.parent}, which is gone` : "";
    const held = entry.in_memory ? `${number(entry.tokens)} tokens, ${bytes(entry.bytes)}` : "on disk";
    const below = [...own.map((each) => leaf(each, edits)), ...forks.map(branch)];
    return h("li", {}, sessionLink(entry.name), ` ${held}${gone}`, below.length ? h("ul", {}, below) : null);
  };
  const lost = taken.filter((each) => !known.has(each.session));
  const roots = [...(under.get("") || []).map(branch), ...lost.map((each) => leaf(each, edits))];
  return roots.length ? h("ul", { class: "tree" }, roots) : h("p", {}, "There are no sessions yet.");
}

function leaf(snapshot, edits) {
  const restore = async () => {
    const given = await asked(`Restore ${snapshot.name}`, [{ name: "name", label: "As session (or one is made up)" }], "Restore");
    if (!given) return;
    try {
      const made = await send("POST", `/v1/snapshots/${snapshot.name}/restore`, given.name ? { name: given.name } : {});
      location.hash = `#/sessions/${made.name}`;
    } catch (error) {
      tell(error.message, true);
    }
  };
  return h(
    "li",
    { class: "snapshot" },
    `Snapshot ${snapshot.name}, ${bytes(snapshot.bytes)} `,
    edits ? h("button", { onclick: restore }, "Restore") : null,
  );
}
