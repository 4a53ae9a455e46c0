// Unit tests of the web UI's requests.

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { BROKEN_OFF, keyProblem, streamEvents } = await import(`${FILES}/api.js`);
const { goneText } = await import(`${FILES}/chat_empty.js`);
const { joinedDraft } = await import(`${FILES}/chat_place.js`);

test("a stream that breaks off is an error in plain words", async () => {
  globalThis.sessionStorage = { getItem: () => null };
  globalThis.document = { dispatchEvent: () => true };
  const pull = (controller) => controller.error(new TypeError("network error"));
  const start = (controller) => controller.enqueue(new TextEncoder().encode('event: token\ndata: {"text": "Hi"}\n\n'));
  globalThis.fetch = async () => ({ ok: true, body: new ReadableStream({ start, pull }, { highWaterMark: 0 }) });
  const events = streamEvents("POST", "/turns");
  await assert.rejects(async () => {
    for await (const event of events) assert.equal(event[0], "token");
  }, new Error(BROKEN_OFF));
});

test("a conversation that is gone was deleted only if the server said so", () => {
  assert.equal(goneText(true), "This conversation was deleted.");
  assert.match(goneText(false), /was deleted, or the server ended before it was saved\.$/);
});

test("the draft of a conversation that is gone comes before that of a new one", () => {
  const draft = (text, ...names) => ({ text, files: names.map((name) => ({ name, text: "" })) });
  assert.deepEqual(joinedDraft(draft("Old", "a"), draft("New", "b")), draft("Old\n\nNew", "a", "b"));
  assert.deepEqual([joinedDraft(draft(""), draft("New")), joinedDraft(draft("Old"), draft(""))], [draft("New"), draft("Old")]);
});

test("a key that no header can have is refused", () => {
  assert.equal(keyProblem("kv-0aZ"), "");
  assert.match(keyProblem("a–b"), /^A key has/);
});
