// Changes of a session and of what is selected in it.

import { send } from "./api.js";
import { fill, h, number, promptDialog, showStatus } from "./dom.js";

const NAME = { pattern: "[A-Za-z0-9_\\-][A-Za-z0-9._\\-]*", maxlength: "100" };

export const CHANGED = "The session has changed since it was shown, so nothing was done. The page now shows its current state.";

// Returns the message for a failed change. Status 412: the session is at another revision.
export const changeError = (error) => (error.status === 412 ? CHANGED : error.message);

// Returns the headers of a change for one revision, under a key that lets it be repeated.
export const changeHeaders = (revision) => ({
  "If-Match": `"${revision}"`,
  "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()),
});

// One change, for the revision that is shown when it begins. However long its dialog stays open, the
// server refuses it once the session is at another revision.
// view: reload() loads the session again; markStable(revision) is called with a revision in which
// tokens have the same numbers as in the one before; pendingChanges counts changes in progress.
export class Change {
  constructor(name, revision, view) {
    this.name = name;
    this.revision = revision;
    this.view = view;
  }

  get headers() {
    return changeHeaders(this.revision);
  }

  async post(action, body, message, renumbers = false) {
    return this.send("POST", `/v1/sessions/${this.name}/${action}`, body, message, renumbers);
  }

  // Sends the change and shows a message, or what `message` returns for the result.
  // renumbers: whether tokens have other numbers afterwards. Returns null if the change failed.
  async send(method, path, body, message, renumbers = false) {
    this.view.pendingChanges += 1;
    try {
      const result = await send(method, path, body, { headers: this.headers });
      if (!renumbers) this.keepNumbers(result.revision);
      await this.view.reload();
      showStatus(typeof message === "function" ? message(result) : message);
      return result;
    } catch (error) {
      await this.fail(error);
      return null;
    } finally {
      this.view.pendingChanges -= 1;
    }
  }

  // Notes that this change kept tokens' numbers. A later revision includes changes by others too.
  keepNumbers(revision) {
    if (revision === this.revision + 1) this.view.markStable(revision);
  }

  async fail(error) {
    await this.view.reload();
    showStatus(changeError(error), true);
  }
}

// Creates the buttons for a whole session. newChange: returns a Change.
export function sessionButtons(newChange, memory) {
  const button = (label, run) => h("button", { onclick: () => run(newChange()) }, label);
  return [
    button("Fork", (change) => fork(change, null)),
    memory().policy === "full" ? button("Compress", compress) : null, // other policies refuse it
    button("Save", (change) => change.post("save", {}, "Saved to disk.")),
    button("Snapshot", snapshot),
    button("Stay in memory", (change) => {
      const resident = !memory().resident;
      const path = `/v1/sessions/${change.name}/resident`;
      return change.send("PUT", path, { resident }, resident ? "The session stays in memory." : "The session may be moved to disk.");
    }),
    button("Delete", remove),
  ];
}

async function snapshot(change) {
  const values = await promptDialog("Snapshot", [{ name: "name", label: "Name", required: true, ...NAME }], "Save");
  if (values) await change.post("snapshot", values, `Snapshot ${values.name} saved.`);
}

async function compress(change) {
  const fields = [
    { name: "ratio", label: "Compression ratio", kind: "number", value: "4", min: "1.1", step: "any", required: true },
    { name: "method", label: "Method", choices: ["", "fitted", "kvzip", "expected_attention", "snapkv", "keydiff"] },
  ];
  const values = await promptDialog("Compress", fields, "Compress");
  if (!values) return;
  showStatus("Compressing...");
  const body = { ratio: values.ratio, ...(values.method ? { method: values.method } : {}) };
  const message = ({ result }) => `Compressed ${number(result.cells_before)} cells to ${number(result.cells_after)}.`;
  await change.post("compress", body, message);
}

async function remove(change) {
  if (!(await promptDialog(`Delete ${change.name}?`, [], "Delete"))) return;
  const deleted = await change.send("DELETE", `/v1/sessions/${change.name}`, null, "Session deleted.");
  if (deleted) location.hash = "#/";
}

async function fork(change, at) {
  const where = at === null ? "at the end" : `before token ${at}`;
  const fields = [{ name: "name", label: "Name (optional)", ...NAME }];
  const values = await promptDialog(`Fork ${where}`, fields, "Fork");
  if (!values) return;
  const body = { ...(values.name ? { name: values.name } : {}), ...(at === null ? {} : { at }) };
  const forked = await change.post("fork", body, "Forked.");
  if (forked) location.hash = `#/sessions/${forked.name}`;
}

// Creates the bar of the selection: its range, and buttons that change it.
// newChange: returns a Change; null if changes are not allowed. selectSpan: selects a span by name.
// update() shows the selection; updateSpans() shows the names of the session's spans.
export function selectionBar(selection, newChange, memory, textOf, selectSpan) {
  const from = h("input", { type: "number", min: "0", id: "from" });
  const to = h("input", { type: "number", min: "0", id: "to" });
  const selectTyped = () => selection.set(Number(from.value), Number(to.value), selection.revision);
  from.addEventListener("change", selectTyped);
  to.addEventListener("change", selectTyped);
  const spans = h("select", { id: "span" });
  spans.addEventListener("change", () => selectSpan(spans.value));
  const range = () => ({ start: selection.start, end: selection.end });
  const rangeText = () => `tokens ${selection.start} to ${selection.end}`;
  const rewind = (change) => {
    const count = memory().tokens - selection.end;
    return change.post("rewind", { count }, `Rewound to token ${selection.end}.`);
  };
  const deleteText = (change) => change.post("edit", { op: "delete", ...range() }, `Deleted ${rangeText()}.`, true);
  /** @type {[string, (change: Change) => Promise<any>][]} */
  const operations = [
    ["Pin", (change) => change.post("pin", range(), `Pinned ${rangeText()}.`)],
    ["Unpin", (change) => change.post("unpin", range(), `Unpinned ${rangeText()}.`)],
    ["Name", (change) => nameSpan(change, range(), selectSpan)],
    ["Delete text", deleteText],
    ["Replace", (change) => replace(change, range(), textOf)],
    ["Insert before", (change) => insert(change, selection.start)],
    ["Fork here", (change) => fork(change, selection.end)],
    ["Rewind to here", rewind],
  ];
  const buttons = newChange ? operations.map(([label, run]) => h("button", { onclick: () => run(newChange()) }, label)) : [];
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
  );
  const update = () => {
    from.value = String(selection.start);
    to.value = String(selection.end);
    spans.value = selection.span ?? "";
    for (const button of buttons) button.disabled = selection.empty;
  };
  const updateSpans = () => {
    const names = Object.keys(memory().spans);
    fill(spans, ["", ...names].map((name) => h("option", { value: name }, name || (names.length ? "choose" : "none"))));
  };
  return { element, update, updateSpans };
}

async function nameSpan(change, range, selectSpan) {
  const fields = [{ name: "name", label: "Name", required: true, maxlength: "200" }];
  const values = await promptDialog("Name this span", fields, "Name");
  if (!values) return;
  const named = await change.post("spans", { ...values, ...range }, `Span ${values.name} created.`);
  if (named) selectSpan(values.name);
}

const RECOMPUTE = { name: "recompute", label: "Re-evaluate the following tokens (exact)", kind: "checkbox" };

async function replace(change, range, textOf) {
  let value;
  try {
    value = await textOf(range.start, range.end);
  } catch (error) {
    return change.fail(error);
  }
  const fields = [{ name: "text", label: "New text", kind: "textarea", value }, RECOMPUTE];
  const values = await promptDialog("Replace", fields, "Replace");
  if (values) await change.post("edit", { op: "replace", ...range, ...editFields(values) }, editMessage, true);
}

async function insert(change, at) {
  const fields = [{ name: "text", label: "Text", kind: "textarea" }, RECOMPUTE];
  const values = await promptDialog(`Insert before token ${at}`, fields, "Insert");
  if (values) await change.post("edit", { op: "insert", at, ...editFields(values) }, editMessage, true);
}

const editFields = ({ text, recompute }) => ({ text, recompute: recompute ? "suffix" : "none" });

const editMessage = ({ result }) => `Edited; ${number(result.tokens_evaluated)} tokens evaluated.`;
