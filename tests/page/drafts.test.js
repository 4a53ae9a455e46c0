// Unit tests of what the web UI does with messages that are not sent, or not answered.

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { beforeDraft, keepDraft, takeDraft } = await import(`${FILES}/chat_place.js`);
const { noteText } = await import(`${FILES}/message_note.js`);
const { isAsked } = await import(`${FILES}/turns.js`);

test("a draft is kept by its conversation, until that is shown again", () => {
  const draft = { text: "And of", files: [] };
  keepDraft("a", draft);
  keepDraft(null, { ...draft, text: "New" });
  assert.equal(takeDraft("b").text, "");
  assert.equal(takeDraft("a"), draft);
  assert.equal(takeDraft("a").text, "");
  assert.equal(takeDraft(null).text, "New");
});

test("a message that was not sent is put before the draft", () => {
  assert.equal(beforeDraft("Sent", " "), "Sent");
  assert.equal(beforeDraft("Sent", "Draft"), "Sent\n\nDraft");
});

test("a message was read to its end if the newest turn says all of it, and what the template adds", () => {
  const turn = (text, end, ...others) => ({ label: "turn 1", number: 1, start: 0, end, parts: [{ label: "", role: "question", start: 1, end: 5, text }, ...others] });
  assert.ok(isAsked([turn("Hi there", 9)], "Hi there\n"));
  assert.ok(!isAsked([turn("Hi there", 5)], "Hi there"));
  assert.ok(!isAsked([turn("Hi", 5)], "Hi there"));
  assert.ok(!isAsked([turn("Hi there", 9), turn("Hi", 9)], "Hi there"));
  assert.ok(!isAsked([], "Hi there"));
});

test("the note on an answer that was cut off offers Continue at the newest turn alone", () => {
  assert.match(noteText("length", true), /^Cut off at the longest answer: Continue,/);
  assert.equal(noteText("length", false), "Cut off at the longest answer");
  assert.equal(noteText("stopped", true), noteText("stopped", false));
});
