// The buttons that change a session, and what is selected in it.

import { drop, titleOf } from "./chat_settings.js";
import { promptDialog } from "./dialog.js";
import { fill, h, number, showStatus } from "./dom.js";
import { NAME } from "./names.js";
import { rangesOf } from "./turns.js";
import { undoElement } from "./undo_button.js";
import { copiesOf, deleteCopies } from "./undo_copies.js";

/** @typedef {import("./inspector_change.js").Change} Change */

/** @type {Record<string, string>} */
const HINTS = {
  Branch: "Begin another conversation with the text and memory of this one",
  Compress: "Hold the whole text in fewer cells, with a loss",
  Save: "Write the conversation to disk now",
  Snapshot: "Keep a copy on disk under a name, from which sessions can begin",
  Delete: "Delete the conversation",
  Pin: "Hold the selected tokens whatever is evicted",
  Unpin: "Let the selected tokens be evicted like others",
  Name: "Give the selected tokens a name, by which clients can edit them",
  "Remove text": "Take the selected tokens out of the text and out of memory",
  Replace: "Put another text in place of the selected tokens",
  "Insert before": "Put a text before the selected tokens",
  "Branch here": "Begin another conversation with the text up to the end of the selection",
  Rewind: "Remove all that follows the selection",
};

/**
 * Creates the buttons for a whole session. update() shows what they would do now.
 * @param {() => Change} newChange @param {() => Memory} memory
 */
export function sessionButtons(newChange, memory) {
  /** @param {string} label @param {(change: Change) => Promise<any>} run */
  const button = (label, run) => h("button", { title: HINTS[label], onclick: () => run(newChange()) }, label);
  const residence = button("", (change) => {
    const resident = !memory().resident;
    const path = `/v1/sessions/${change.name}/resident`;
    return change.send("PUT", path, { resident }, resident ? "The conversation stays in memory." : "The conversation may be moved to disk.");
  });
  residence.title = "Whether the server may move it to disk when other sessions need memory";
  const update = () => fill(residence, memory().resident ? "Allow moving to disk" : "Stay in memory");
  update();
  const elements = [
    button("Branch", (change) => fork(change, null)),
    memory().policy === "full" ? button("Compress", compress) : null, // other policies refuse it
    button("Save", (change) => change.post("save", {}, "Saved to disk.")),
    button("Snapshot", snapshot),
    residence,
    button("Delete", (change) => remove(change, titleOf(memory()))),
  ];
  return { elements, update };
}

/** @param {Change} change */
async function snapshot(change) {
  const values = await promptDialog("Snapshot", [{ name: "name", label: "Name", required: true, ...NAME }], "Save");
  if (values) await change.post("snapshot", values, `Snapshot ${values.name} saved.`);
}

/** @param {Change} change */
async function compress(change) {
  const fields = [
    { name: "ratio", label: "Compression ratio", kind: "number", value: "4", min: "1.1", step: "any", required: true },
    { name: "method", label: "Method", choices: ["", "fitted", "kvzip", "expected_attention", "snapkv", "keydiff"] },
  ];
  const values = await promptDialog("Compress", fields, "Compress");
  if (!values) return;
  showStatus("Compressing...");
  const body = { ratio: values.ratio, ...(values.method ? { method: values.method } : {}) };
  const message = (/** @type {any} */ { result }) => `Compressed ${number(result.cells_before)} cells to ${number(result.cells_after)}.`;
  await change.post("compress", body, message, { undo: "compress" });
}

/** @param {Change} change @param {string} shownTitle of the session */
async function remove(change, shownTitle) {
  const note = "Its text and its memory are removed; this cannot be undone.";
  if (!(await promptDialog(`Delete "${shownTitle}"?`, [], "Delete", h("p", {}, note)))) return;
  const copies = await copiesOf(change.name).catch(() => []);
  const deleted = await change.send("DELETE", `/v1/sessions/${change.name}`, null, "Conversation deleted.");
  if (!deleted) return;
  drop(change.name);
  await deleteCopies(copies);
  location.hash = "#/";
}

/** @param {Change} change @param {number | null} at null for the end */
async function fork(change, at) {
  const where = at === null ? "at the end" : `before token ${at}`;
  const fields = [{ name: "name", label: "Name (optional)", ...NAME }];
  const values = await promptDialog(`Branch ${where}`, fields, "Branch");
  if (!values) return;
  const body = { ...(values.name ? { name: values.name } : {}), ...(at === null ? {} : { at }) };
  const forked = await change.post("fork", body, "Branched.");
  if (forked) location.hash = `#/sessions/${forked.name}`;
}

/**
 * Creates the bar of the selection: its range, and buttons that change it.
 * update() shows the selection; updateSpans() shows the names of the session's spans.
 * @param {import("./tokens.js").Selection} selection @param {(() => Change) | null} newChange null if changes are not allowed
 * @param {() => Memory} memory @param {(start: number, end: number) => Promise<string>} textOf
 * @param {(name: string) => void} selectSpan
 */
export function selectionBar(selection, newChange, memory, textOf, selectSpan) {
  const from = h("input", { type: "number", min: "0", id: "from" });
  const to = h("input", { type: "number", min: "0", id: "to" });
  const selectTyped = () => selection.set(Number(from.value), Number(to.value), selection.revision);
  from.addEventListener("change", selectTyped);
  to.addEventListener("change", selectTyped);
  const spans = h("select", { id: "span" });
  spans.addEventListener("change", () => selectSpan(spans.value));
  const range = () => ({ start: selection.start, end: selection.end });
  const rangeText = () => (selection.end - selection.start === 1 ? `token ${selection.start}` : `${tokensText(selection.end - selection.start)} from token ${selection.start} on`);
  const after = () => countAfter(memory(), selection);
  const rewind = (/** @type {Change} */ change) => change.post("rewind", { count: after() }, `Rewound to token ${selection.end}: ${tokensText(after())} removed.`, { undo: "rewind" });
  const removeText = (/** @type {Change} */ change) => change.post("edit", { op: "delete", ...range() }, `Removed ${rangeText()}.`, { undo: "delete", renumbers: true });
  /** @type {[string, (change: Change) => Promise<any>][]} */
  const operations = [
    ["Pin", (change) => change.post("pin", range(), `Pinned ${rangeText()}.`, { undo: "pin" })],
    ["Unpin", (change) => change.post("unpin", range(), `Unpinned ${rangeText()}.`, { undo: "unpin" })],
    ["Name", (change) => nameSpan(change, range(), selectSpan)],
    ["Remove text", removeText],
    ["Replace", (change) => replace(change, range(), textOf)],
    ["Insert before", (change) => insert(change, selection.start)],
    ["Branch here", (change) => fork(change, selection.end)],
    ["Rewind", rewind],
  ];
  const buttons = newChange ? operations.map(([label, run]) => h("button", { title: HINTS[label], onclick: () => run(newChange()) }, label)) : [];
  const rewindButton = buttons.at(-1);
  const unpinButton = buttons[1];
  const undoPlace = h("span");
  const element = h(
    "div",
    { class: "selection", role: "group", "aria-label": "Selection" },
    h("label", { for: "from" }, "From token"),
    from,
    h("label", { for: "to" }, "to (excluded)"),
    to,
    h("label", { for: "span" }, "or span"),
    spans,
    buttons,
    undoPlace,
  );
  const update = () => {
    from.value = String(selection.start);
    to.value = String(selection.end);
    spans.value = selection.span ?? "";
    for (const button of buttons) button.disabled = selection.empty;
    if (!rewindButton) return;
    fill(rewindButton, rewindText(memory(), selection));
    rewindButton.disabled ||= !after();
    unpinButton.disabled ||= !rangesOf(memory(), selection.start, selection.end, (standing) => standing === "pinned").length;
  };
  const updateSpans = () => {
    const names = Object.keys(memory().spans);
    fill(spans, ["", ...names].map((name) => h("option", { value: name }, name || (names.length ? "choose" : "none"))));
  };
  /** @param {string} operation "" if nothing can be undone @param {() => void} run */
  const offerUndo = (operation, run) => fill(undoPlace, operation ? undoElement({ operation }, run) : null);
  return { element, update, updateSpans, offerUndo };
}

/** @param {number} count */
const tokensText = (count) => `${number(count)} ${count === 1 ? "token" : "tokens"}`;

/** @param {{tokens: number}} memory @param {{end: number}} selection */
const countAfter = ({ tokens }, { end }) => Math.max(0, tokens - end);

/**
 * Returns what a rewind to the end of the selected tokens is called: what it removes.
 * @param {{tokens: number}} memory @param {{end: number, empty: boolean}} selection
 */
export const rewindText = (memory, selection) => (selection.empty ? "Rewind" : `Rewind to token ${number(selection.end)} (removes ${tokensText(countAfter(memory, selection))})`);

/** @typedef {{start: number, end: number}} TokenRange */

/** @param {Change} change @param {TokenRange} range @param {(name: string) => void} selectSpan */
async function nameSpan(change, range, selectSpan) {
  const fields = [{ name: "name", label: "Name", required: true, maxlength: "200" }];
  const values = await promptDialog("Name this span", fields, "Name");
  if (!values) return;
  const named = await change.post("spans", { ...values, ...range }, `Span ${values.name} created.`);
  if (named) selectSpan(values.name);
}

const RECOMPUTE = { name: "recompute", label: "Evaluate the tokens after it again, so that later text takes the change into account (slower)", kind: "checkbox" };

/** @param {Change} change @param {TokenRange} range @param {(start: number, end: number) => Promise<string>} textOf */
async function replace(change, range, textOf) {
  let value;
  try {
    value = await textOf(range.start, range.end);
  } catch (error) {
    return change.fail(error);
  }
  const text = { name: "text", label: /^\s/.test(value) ? "New text, with the space before it" : "New text", kind: "textarea", value };
  await edit(change, "Replace", text, { op: "replace", ...range }, "edit");
}

/** @param {Change} change @param {number} at */
async function insert(change, at) {
  const text = { name: "text", label: "Text", kind: "textarea", value: "" };
  await edit(change, `Insert before token ${at}`, text, { op: "insert", at }, "insert");
}

/**
 * Asks for a text and edits by it; once more, with the text as it was written, if that fails.
 * @param {Change} change @param {string} heading @param {{name: string, label: string, kind: string, value: string}} text @param {any} body @param {string} undo
 */
async function edit(change, heading, text, body, undo) {
  for (;;) {
    const reason = change.problem ? h("p", { class: "failure" }, change.problem) : null;
    const values = await promptDialog(heading, [text, RECOMPUTE], heading.split(" ")[0], reason);
    if (!values || (await change.post("edit", { ...body, ...editFields(values) }, editMessage, { undo, renumbers: true }))) return;
    text = { ...text, value: values.text };
    showStatus(""); // the dialog says why
  }
}

/** @param {{text: string, recompute: boolean}} values */
const editFields = ({ text, recompute }) => ({ text, recompute: recompute ? "suffix" : "none" });

const editMessage = (/** @type {any} */ { result }) => `Edited; ${number(result.tokens_evaluated)} tokens evaluated.`;
