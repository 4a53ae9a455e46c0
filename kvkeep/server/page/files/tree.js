// The tree of branches, with the snapshots of each conversation.

import { get, messageOf, send } from "./api.js";
import { promptDialog } from "./dialog.js";
import { bytes, fill, h, number, sessionLink, showStatus, title } from "./dom.js";
import { titleOf } from "./chat_settings.js";
import { debounce, onOperation } from "./live.js";
import { NAME } from "./names.js";
import { isUndoCopy, isUndoName } from "./undo.js";

const PATH = "/v1/sessions?unnamed=true";

/** @param {HTMLElement} container @param {View} view */
export async function tree(container, { signal, edits }) {
  const forest = h("div");
  const reload = async () => {
    try {
      const [sessions, snapshots] = await Promise.all([get(PATH), fetchSnapshots()]);
      const shown = sessions.data.filter((/** @type {SessionEntry} */ entry) => !isUndoCopy(entry, sessions.data));
      if (!signal.aborted) fill(forest, forestOf(shown, snapshots, edits));
    } catch (error) {
      showStatus(messageOf(error), true);
    }
  };
  onOperation(debounce(reload), signal);
  fill(container, title("Tree of branches and snapshots", PATH), forest);
  await reload();
}

/** @returns {Promise<SnapshotEntry[]>} */
async function fetchSnapshots() {
  try {
    return (await get("/v1/snapshots")).data;
  } catch {
    return []; // a server without a folder has no snapshots
  }
}

/** @param {SessionEntry[]} sessions @param {SnapshotEntry[]} snapshots @param {boolean} edits */
function forestOf(sessions, snapshots, edits) {
  const names = new Set(sessions.map((entry) => entry.name));
  /** @type {Map<string, SessionEntry[]>} */
  const children = new Map(); // by parent; "" for roots
  for (const entry of sessions) {
    const parent = entry.parent && names.has(entry.parent) && entry.parent !== entry.name ? entry.parent : "";
    children.set(parent, [...(children.get(parent) || []), entry]);
  }
  const placed = new Set(); // names
  /** @param {SessionEntry} entry @returns {HTMLElement} */
  const branch = (entry) => {
    placed.add(entry.name);
    const own = snapshots.filter((snapshot) => snapshot.session === entry.name);
    const branches = (children.get(entry.name) || []).filter(({ name }) => !placed.has(name));
    const gone = entry.parent && !names.has(entry.parent) && !isUndoName(entry.parent) ? `, branch of ${entry.parent} (deleted)` : "";
    const held = entry.in_memory ? `${number(entry.tokens)} tokens, ${bytes(entry.bytes)}` : "on disk";
    const below = [...own.map((snapshot) => leaf(snapshot, edits)), ...branches.map(branch)];
    return h("li", {}, sessionLink(entry.name, titleOf(entry)), ` ${held}${gone}`, below.length ? h("ul", {}, below) : null);
  };
  const orphans = snapshots.filter((snapshot) => !snapshot.session || !names.has(snapshot.session));
  const trees = (children.get("") || []).map(branch);
  for (const entry of sessions) if (!placed.has(entry.name)) trees.push(branch(entry)); // of parents in a circle
  const roots = [...trees, ...orphans.map((snapshot) => leaf(snapshot, edits))];
  return roots.length ? h("ul", { class: "tree" }, roots) : h("p", {}, "No conversations yet.");
}

/** @param {SnapshotEntry} snapshot @param {boolean} edits */
function leaf(snapshot, edits) {
  const restore = async () => {
    const fields = [{ name: "name", label: "Name of the new conversation (optional)", ...NAME }];
    const values = await promptDialog(`Restore ${snapshot.name}`, fields, "Restore");
    if (!values) return;
    try {
      const body = values.name ? { name: values.name } : {};
      const restored = await send("POST", `/v1/snapshots/${snapshot.name}/restore`, body);
      location.hash = `#/sessions/${restored.name}`;
    } catch (error) {
      showStatus(messageOf(error), true);
    }
  };
  return h(
    "li",
    { class: "snapshot" },
    `Snapshot ${snapshot.name}, ${bytes(snapshot.bytes)}${snapshot.rounded ? `, rounded: ${snapshot.rounded}` : ""} `,
    edits ? h("button", { onclick: restore }, "Restore") : null,
  );
}
