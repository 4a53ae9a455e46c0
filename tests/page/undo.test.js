// Unit tests of what is kept for undo, and of texts of one revision: node --test tests/page/

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { shownOperations } = await import(`${FILES}/operations.js`);
const { fetchPieces } = await import(`${FILES}/pieces.js`);
const { copiesAmong, isUndoCopy, isUndoName, stepsAmong } = await import(`${FILES}/undo.js`);
const { dropIfUnchanged, keepUndo } = await import(`${FILES}/undo_copies.js`);

test("forks that are kept for undo are known by their names", () => {
  assert.ok(isUndoName("_undo.a.b-1.2.edit"));
  assert.ok(!isUndoName("_undo"));
  const copy = { name: "_undo.a.1.pin", parent: "a" };
  assert.ok(isUndoCopy(copy, [copy, { name: "a" }]));
  const newer = { name: "_undo.a.10.pin", parent: "a" };
  assert.ok(isUndoCopy(copy, [copy, newer]));
  assert.ok(!isUndoCopy(newer, [copy, newer])); // the newest that is left is shown
});

// Has requests answered by a function of the method and the path; returns those that were made.
function serve(answer) {
  const made = [];
  globalThis.sessionStorage = { getItem: () => null };
  globalThis.fetch = async (path, { method }) => {
    made.push(`${method} ${path}`);
    const json = answer(method, path);
    return json === null ? { ok: false, status: 404, json: async () => ({ error: {} }) } : { ok: true, json: async () => json };
  };
  return made;
}

test("copies of an earlier session of a name are not offered, but counted and dropped", async () => {
  const copies = Array.from({ length: 11 }, (_, at) => ({ name: `_undo.a.${at + 1}.edit`, parent: "a", created: at < 9 ? 5 : 20 }));
  const entries = [{ name: "a", parent: null, created: 20 }, ...copies];
  assert.deepEqual(stepsAmong(entries, "a").map(({ number }) => number), [11, 10]);
  assert.equal(copiesAmong(entries, "a").length, 11);
  const made = serve((method) => (method === "DELETE" ? null : { data: entries }));
  assert.equal(await keepUndo("a", 3, "pin"), "_undo.a.12.pin"); // although old ones cannot be deleted
  assert.deepEqual(made.slice(-2), ["DELETE /v1/sessions/_undo.a.2.edit", "DELETE /v1/sessions/_undo.a.1.edit"]);
});

test("the copy of a change that is still in progress stays", async () => {
  for (const busy of [true, false]) {
    const made = serve(() => ({ revision: 3, busy }));
    await dropIfUnchanged("_undo.a.1.edit", "a", 3);
    assert.equal(made.length, busy ? 1 : 2);
  }
});

test("texts of two revisions are not mixed", async () => {
  let revision = 3;
  serve((_, path) => ({ revision: path.includes("start=4096") ? revision : 3, pieces: [{ id: 5, text: "x" }] }));
  assert.equal((await fetchPieces({ name: "a", revision: 3 }, 0, 5000)).length, 2);
  revision = 4;
  assert.equal(await fetchPieces({ name: "a", revision: 3 }, 0, 5000), null);
});

test("operations on copies for undo are not shown", () => {
  const log = [["delete", "_undo.a.1.remove"], ["revert", "a"], ["fork", "a-2"], ["fork", "_undo.a.1.remove"]].map(([what, session]) => ({ what, session }));
  assert.deepEqual(shownOperations(log).map(({ what, session }) => [what, session]), [["revert", "a"], ["fork", "a-2"]]);
});
