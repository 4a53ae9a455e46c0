// Unit tests of the inspector's logic: node --test tests/page/

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { nameProblem } = await import(`${FILES}/names.js`);
const { rewindText } = await import(`${FILES}/actions.js`);

test("a rewind says where it goes to and what it removes", () => {
  const text = (end, empty = false) => rewindText({ tokens: 1200 }, { end, empty });
  assert.equal(text(1100), "Rewind to token 1,100 (removes 100 tokens)");
  assert.equal(text(1199), "Rewind to token 1,199 (removes 1 token)");
  assert.equal(text(1300), "Rewind to token 1,300 (removes 0 tokens)");
  assert.equal(text(0, true), "Rewind");
});

test("a name that is not allowed is refused with one that is", () => {
  assert.deepEqual(["", "before-lunch", "_a.b-1"].map(nameProblem), ["", "", ""]);
  const suggested = (name) => /Allowed is “(.+)”\.$/.exec(nameProblem(name))?.[1];
  assert.deepEqual(["before lunch", "Mein Name", ".hidden", "Über uns!", "東京", "a/b"].map(suggested), ["before-lunch", "Mein-Name", "hidden", "Uber-uns", "my-notes", "a-b"]);
  for (const name of ["x y", "- -", "..", "é"]) assert.equal(nameProblem(suggested(name)), "");
});
