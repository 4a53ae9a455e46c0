// Unit tests of the web UI's messages, titles and settings: node --test tests/page/

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { budgetRange } = await import(`${FILES}/settings_dialog.js`);
const { withDates } = await import(`${FILES}/conversations.js`);
const { splitFences, withFiles } = await import(`${FILES}/message_parts.js`);

test("a message is split into its blocks of code and the text around them", () => {
  const pieces = (text) => splitFences(text).map(({ isCode, text: own }) => [isCode, own]);
  assert.deepEqual(pieces("Why?\n```py\nx = 1\n\ny = 2\n```\n\nSay it."), [[false, "Why?"], [true, "```py\nx = 1\n\ny = 2\n```"], [false, "Say it."]]);
  const file = withFiles("Q", [{ name: "a.md", text: "```\nx\n```" }]);
  assert.deepEqual(pieces(file), [[false, "a.md"], [true, "````\n```\nx\n```\n````"], [false, "Q"]]);
  assert.deepEqual(pieces("```\n```"), [[true, "```\n```"]]);
  for (const text of [" a\n", "a ```x``` b", "```\nno end", "```a```\nb\n"]) assert.deepEqual(pieces(text), [[false, text]]);
});

test("conversations of the same title have dates", () => {
  const entries = [["a", "Hi"], ["b", "Hi"], ["c", "Bye"], ["_undo.c.1.pin", "Bye"]].map(([name, title]) => ({ name, title, created: 1_790_000_000 }));
  const dates = withDates(entries).map(({ date }) => date);
  assert.match(dates[0], /^Sep 2\d, \d\d:\d\d$/);
  assert.deepEqual(dates, [dates[0], dates[0], "", ""]);
});

test("a new conversation has a budget that its policy takes", () => {
  const defaults = { policy: "sliding", budgets: { sliding: 8192, self_extend: 29_696 } };
  assert.deepEqual(budgetRange(defaults, ""), { min: 32, max: 8192, label: "Memory budget, in cells: 32 to 8,192" });
  assert.equal(budgetRange(defaults, "self_extend").max, 29_696);
  assert.deepEqual(budgetRange({}, "full"), { min: 32, max: undefined, label: "Memory budget, in cells: at least 32" });
});
