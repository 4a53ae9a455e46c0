// What can be done to a session, and to what is selected of it.

import { send } from "./api.js";
import { asked, fill, h, number, tell } from "./dom.js";

const NAME = { pattern: "[A-Za-z0-9_\\-][A-Za-z0-9._\\-]*", maxlength: "100" };

// Sends changes that are meant for the session as it is shown.
export class Changes {
  constructor(name, revision, again) {
    Object.assign(this, { name, revision, again });
  }

  async post(what, body, done) {
    return this.send("POST", `/v1/sessions/${this.name}/${what}`, body, done);
  }

  async send(method, path, body, done) {
    const headers = { "If-Match": `"${this.revision()}"`, "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()) };
    try {
      const found = await send(method, path, body, { headers });
      await this.again();
      tell(typeof done === "function" ? done(found) : done);
      return found;
    } catch (error) {
      await this.again();
      tell(error.status === 412 ? "It was changed meanwhile; this is what it is now. Try again." : error.message, true);
      return null;
    }
  }
}

// The buttons for a whole session.
export function forSession(changes, memory) {
  const button = (label, work) => h("button", { onclick: work }, label);
  const { name } = changes;
  return [
    button("Fork", () => fork(changes, null)),
    memory().policy === "full" ? button("Compress", () => compress(changes)) : null, // others do not take it
    button("Save", () => changes.post("save", {}, "It is on disk.")),
    button("Snapshot", () => snapshot(changes)),
    button("Stay in memory", () => {
      const resident = !memory().resident;
      return changes.send("PUT", `/v1/sessions/${name}/resident`, { resident }, resident ? "It stays in memory." : "It may go to disk.");
    }),
    button("Delete", () => remove(changes)),
  ];
}

async function snapshot(changes) {
  const given = await asked("Snapshot", [{ name: "name", label: "Name", required: true, ...NAME }], "Write it");
  if (given) await changes.post("snapshot", given, `Snapshot ${given.name} is on disk.`);
}

async function compress(changes) {
  const fields = [
    { name: "ratio", label: "How many times fewer cells", kind: "number", value: "4", min: "1.1", step: "any", required: true },
    { name: "method", label: "Method", choices: ["", "fitted", "kvzip", "expected_attention", "snapkv", "keydiff"] },
  ];
  const given = await asked("Compress", fields, "Compress");
  if (!given) return;
  tell("Compressing.");
  const body = { ratio: given.ratio, ...(given.method ? { method: given.method } : {}) };
  const said = ({ result }) => `${number(result.cells_before)} cells became ${number(result.cells_after)}.`;
  await changes.post("compress", body, said);
}

async function remove(changes) {
  if (!(await asked(`Delete ${changes.name}?`, [], "Delete"))) return;
  const gone = await changes.send("DELETE", `/v1/sessions/${changes.name}`, null, "It is deleted.");
  if (gone) location.hash = "#/";
}

async function fork(changes, at) {
  const where = at === null ? "where it stands" : `before token ${at}`;
  const given = await asked(`Fork ${where}`, [{ name: "name", label: "Name (or one is made up)", ...NAME }], "Fork");
  if (!given) return;
  const body = { ...(given.name ? { name: given.name } : {}), ...(at === null ? {} : { at }) };
  const made = await changes.post("fork", body, "Forked.");
  if (made) location.hash = `#/sessions/${made.name}`;
}

// The bar for what is selected: its range, and what can be done to it.
export function bar(selection, changes, memory, textOf) {
  const from = h("input", { type: "number", min: "0", id: "from" });
  const to = h("input", { type: "number", min: "0", id: "to" });
  const typed = () => selection.set(Number(from.value), Number(to.value));
  from.addEventListener("change", typed);
  to.addEventListener("change", typed);
  const spans = h("select", { id: "span" });
  spans.addEventListener("change", () => {
    const span = memory().spans[spans.value];
    if (span) selection.set(span.start, span.end);
  });
  const range = () => ({ start: selection.start, end: selection.end });
  const what = () => `tokens ${selection.start} to ${selection.end}`;
  const buttons = changes
    ? [
        ["Pin", () => changes.post("pin", range(), `Pinned ${what()}.`)],
        ["Unpin", () => changes.post("unpin", range(), `Unpinned ${what()}.`)],
        ["Name", () => named(changes, range())],
        ["Delete text", () => changes.post("edit", { op: "delete", ...range() }, `Took out ${what()}.`)],
        ["Replace", () => replace(changes, range(), textOf)],
        ["Insert before", () => insert(changes, selection.start)],
        ["Fork here", () => fork(changes, selection.end)],
        ["Rewind to here", () => changes.post("rewind", { count: memory().tokens - selection.end }, `Rewound to token ${selection.end}.`)],
      ].map(([label, work]) => h("button", { onclick: work }, label))
    : [];
  const element = h(
    "div",
    { class: "selection", role: "group", "aria-label": "Selection" },
    h("label", { for: "from" }, "From token"),
    from,
    h("label", { for: "to" }, "to before"),
    to,
    h("label", { for: "span" }, "or span"),
    spans,
    buttons,
  );
  const shown = () => {
    from.value = String(selection.start);
    to.value = String(selection.end);
    for (const button of buttons) button.disabled = selection.empty;
  };
  const renamed = () => {
    const names = Object.keys(memory().spans);
    fill(spans, ["", ...names].map((name) => h("option", { value: name }, name || (names.length ? "choose" : "none"))));
  };
  return { element, shown, renamed };
}

async function named(changes, range) {
  const given = await asked("Name these tokens", [{ name: "name", label: "Name", required: true, maxlength: "200" }], "Name");
  if (given) await changes.post("spans", { ...given, ...range }, `They are now ${given.name}.`);
}

const ANEW = { name: "anew", label: "Evaluate what follows anew", kind: "checkbox" };

async function replace(changes, range, textOf) {
  const value = await textOf(range.start, range.end);
  const given = await asked("Replace", [{ name: "text", label: "By", kind: "textarea", value }, ANEW], "Replace");
  if (given) await changes.post("edit", { op: "replace", ...range, ...wanted(given) }, edited);
}

async function insert(changes, at) {
  const given = await asked(`Insert before token ${at}`, [{ name: "text", label: "Text", kind: "textarea" }, ANEW], "Insert");
  if (given) await changes.post("edit", { op: "insert", at, ...wanted(given) }, edited);
}

const wanted = ({ text, anew }) => ({ text, recompute: anew ? "suffix" : "none" });

const edited = ({ result }) => `Changed; ${number(result.tokens_evaluated)} tokens evaluated.`;
