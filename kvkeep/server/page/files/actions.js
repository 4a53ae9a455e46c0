// What can be done to a session, and to what is selected of it.

import { send } from "./api.js";
import { asked, fill, h, number, tell } from "./dom.js";

const NAME = { pattern: "[A-Za-z0-9_\\-][A-Za-z0-9._\\-]*", maxlength: "100" };

// What a change that came too late is answered by.
export const said = (error) =>
  error.status === 412
    ? "The session was changed meanwhile, and nothing was done. This is what it is now: choose again."
    : error.message;

// One change, begun at the revision that is shown then. However long a dialog stays open, the server
// refuses the change once the session is at another one.
// view: again reads the session anew; carry is called with a revision in which tokens have the same
// numbers as in the one before it; sending counts the changes that are on their way.
export class Change {
  constructor(name, revision, view) {
    Object.assign(this, { name, revision, view });
  }

  get headers() {
    return { "If-Match": `"${this.revision}"`, "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()) };
  }

  async post(what, body, done, moves = false) {
    return this.send("POST", `/v1/sessions/${this.name}/${what}`, body, done, moves);
  }

  // moves: whether tokens have other numbers afterwards.
  async send(method, path, body, done, moves = false) {
    this.view.sending += 1;
    try {
      const found = await send(method, path, body, { headers: this.headers });
      if (!moves) this.came(found.revision);
      await this.view.again();
      tell(typeof done === "function" ? done(found) : done);
      return found;
    } catch (error) {
      await this.failed(error);
      return null;
    } finally {
      this.view.sending -= 1;
    }
  }

  // The session is at a revision since. Past the next one somebody else has changed it, too.
  came(revision) {
    if (revision === this.revision + 1) this.view.carry(revision);
  }

  async failed(error) {
    await this.view.again();
    tell(said(error), true);
  }
}

// The buttons for a whole session.
// begin: a new Change.
export function forSession(begin, memory) {
  const button = (label, work) => h("button", { onclick: () => work(begin()) }, label);
  return [
    button("Fork", (change) => fork(change, null)),
    memory().policy === "full" ? button("Compress", compress) : null, // others do not take it
    button("Save", (change) => change.post("save", {}, "It is on disk.")),
    button("Snapshot", snapshot),
    button("Stay in memory", (change) => {
      const resident = !memory().resident;
      const path = `/v1/sessions/${change.name}/resident`;
      return change.send("PUT", path, { resident }, resident ? "It stays in memory." : "It may go to disk.");
    }),
    button("Delete", remove),
  ];
}

async function snapshot(change) {
  const given = await asked("Snapshot", [{ name: "name", label: "Name", required: true, ...NAME }], "Write it");
  if (given) await change.post("snapshot", given, `Snapshot ${given.name} is on disk.`);
}

async function compress(change) {
  const fields = [
    { name: "ratio", label: "How many times fewer cells", kind: "number", value: "4", min: "1.1", step: "any", required: true },
    { name: "method", label: "Method", choices: ["", "fitted", "kvzip", "expected_attention", "snapkv", "keydiff"] },
  ];
  const given = await asked("Compress", fields, "Compress");
  if (!given) return;
  tell("Compressing.");
  const body = { ratio: given.ratio, ...(given.method ? { method: given.method } : {}) };
  const cells = ({ result }) => `${number(result.cells_before)} cells became ${number(result.cells_after)}.`;
  await change.post("compress", body, cells);
}

async function remove(change) {
  if (!(await asked(`Delete ${change.name}?`, [], "Delete"))) return;
  const gone = await change.send("DELETE", `/v1/sessions/${change.name}`, null, "It is deleted.");
  if (gone) location.hash = "#/";
}

async function fork(change, at) {
  const where = at === null ? "where it stands" : `before token ${at}`;
  const given = await asked(`Fork ${where}`, [{ name: "name", label: "Name (or one is made up)", ...NAME }], "Fork");
  if (!given) return;
  const body = { ...(given.name ? { name: given.name } : {}), ...(at === null ? {} : { at }) };
  const made = await change.post("fork", body, "Forked.");
  if (made) location.hash = `#/sessions/${made.name}`;
}

// The bar for what is selected: its range, and what can be done to it.
// begin: a new Change; null where there is nothing to be changed. choose: selects a span by its name.
export function bar(selection, begin, memory, textOf, choose) {
  const from = h("input", { type: "number", min: "0", id: "from" });
  const to = h("input", { type: "number", min: "0", id: "to" });
  const typed = () => selection.set(Number(from.value), Number(to.value), selection.revision);
  from.addEventListener("change", typed);
  to.addEventListener("change", typed);
  const spans = h("select", { id: "span" });
  spans.addEventListener("change", () => choose(spans.value));
  const range = () => ({ start: selection.start, end: selection.end });
  const what = () => `tokens ${selection.start} to ${selection.end}`;
  const rewind = (change) => {
    const count = memory().tokens - selection.end;
    return change.post("rewind", { count }, `Rewound to token ${selection.end}.`);
  };
  const buttons = begin
    ? [
        ["Pin", (change) => change.post("pin", range(), `Pinned ${what()}.`)],
        ["Unpin", (change) => change.post("unpin", range(), `Unpinned ${what()}.`)],
        ["Name", (change) => named(change, range(), choose)],
        ["Delete text", (change) => change.post("edit", { op: "delete", ...range() }, `Took out ${what()}.`, true)],
        ["Replace", (change) => replace(change, range(), textOf)],
        ["Insert before", (change) => insert(change, selection.start)],
        ["Fork here", (change) => fork(change, selection.end)],
        ["Rewind to here", rewind],
      ].map(([label, work]) => h("button", { onclick: () => work(begin()) }, label))
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
    spans.value = selection.span ?? "";
    for (const button of buttons) button.disabled = selection.empty;
  };
  const renamed = () => {
    const names = Object.keys(memory().spans);
    fill(spans, ["", ...names].map((name) => h("option", { value: name }, name || (names.length ? "choose" : "none"))));
  };
  return { element, shown, renamed };
}

async function named(change, range, choose) {
  const given = await asked("Name these tokens", [{ name: "name", label: "Name", required: true, maxlength: "200" }], "Name");
  if (!given) return;
  const done = await change.post("spans", { ...given, ...range }, `They are now ${given.name}.`);
  if (done) choose(given.name);
}

const ANEW = { name: "anew", label: "Evaluate what follows anew", kind: "checkbox" };

async function replace(change, range, textOf) {
  let value;
  try {
    value = await textOf(range.start, range.end);
  } catch (error) {
    return change.failed(error);
  }
  const given = await asked("Replace", [{ name: "text", label: "By", kind: "textarea", value }, ANEW], "Replace");
  if (given) await change.post("edit", { op: "replace", ...range, ...wanted(given) }, edited, true);
}

async function insert(change, at) {
  const given = await asked(`Insert before token ${at}`, [{ name: "text", label: "Text", kind: "textarea" }, ANEW], "Insert");
  if (given) await change.post("edit", { op: "insert", at, ...wanted(given) }, edited, true);
}

const wanted = ({ text, anew }) => ({ text, recompute: anew ? "suffix" : "none" });

const edited = ({ result }) => `Changed; ${number(result.tokens_evaluated)} tokens evaluated.`;
