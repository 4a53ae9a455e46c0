// Unit tests of the inspector's logic: node --test tests/page/

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { rewindText } = await import(`${FILES}/actions.js`);

test("a rewind says where it goes to and what it removes", () => {
  const text = (end, empty = false) => rewindText({ tokens: 1200 }, { end, empty });
  assert.equal(text(1100), "Rewind to token 1,100 (removes 100 tokens)");
  assert.equal(text(1199), "Rewind to token 1,199 (removes 1 token)");
  assert.equal(text(1300), "Rewind to token 1,300 (removes 0 tokens)");
  assert.equal(text(0, true), "Rewind");
});
