// Unit tests of what the web UI does with messages that are not sent, or not answered.

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { beforeDraft, closedView, keepDraft, openedView, returnDraft, storeDrafts, takeDraft } = await import(`${FILES}/chat_place.js`);
const { dropOpenNotes, keepNote, noteOf, noteText, openNote, signatureOf } = await import(`${FILES}/message_note.js`);
const { watchSize } = await import(`${FILES}/message_size.js`);
const { unreadOf } = await import(`${FILES}/turns.js`);

test("a draft is kept by its conversation, until that is shown again", () => {
  const draft = { text: "And of", files: [] };
  keepDraft("a", draft);
  keepDraft(null, { ...draft, text: "New" });
  assert.equal(takeDraft("b").text, "");
  assert.equal(takeDraft("a"), draft);
  assert.equal(takeDraft("a").text, "");
  assert.equal(takeDraft(null).text, "New");
});

test("drafts are stored for the next page, and without their files if these are too large", () => {
  let [stored, most] = ["", 200];
  const setItem = (_, value) => {
    if (value.length > most) throw new Error("QuotaExceededError");
    stored = value;
  };
  globalThis.sessionStorage = { getItem: () => stored, setItem };
  keepDraft("c", { text: "Read this", files: [{ name: "a.md", text: "x".repeat(50) }] });
  keepDraft("d", { text: " ", files: [] });
  assert.ok(storeDrafts());
  assert.deepEqual(JSON.parse(stored), [["c", { text: "Read this", files: [{ name: "a.md", text: "x".repeat(50) }] }]]);
  most = 60;
  assert.ok(!storeDrafts());
  assert.deepEqual(JSON.parse(stored), [["c", { text: "Read this", files: [] }]]);
});

test("a message that is put back goes to the view that shows its conversation, whose draft is stored, too", () => {
  const draft = (text) => ({ text, files: [] });
  let stored = "";
  globalThis.sessionStorage = { getItem: () => "[]", setItem: (_, value) => (stored = value) };
  const view = { name: "e", chosen: {}, frame: { box: { draft: draft("New") } } };
  openedView(view);
  returnDraft("e", draft("Sent"));
  returnDraft("f", draft("Other"));
  returnDraft("f", draft("First"));
  assert.equal(view.frame.box.draft.text, "Sent\n\nNew");
  storeDrafts();
  const written = Object.fromEntries(JSON.parse(stored));
  assert.deepEqual([written.e.text, written.f.text], ["Sent\n\nNew", "First\n\nOther"]);
  closedView(view);
  assert.deepEqual([takeDraft("e").text, takeDraft("f").text], ["Sent\n\nNew", "First\n\nOther"]);
  const chosen = { system: "Be brief." };
  closedView({ ...view, name: null, chosen });
  returnDraft(null, draft("Again"));
  assert.equal(takeDraft(null).chosen, chosen);
});

test("a message is measured again when memory changes, but counted once", async () => {
  globalThis.window = globalThis;
  let requests = 0;
  globalThis.fetch = async () => ((requests += 1), { ok: true, json: async () => ({ tokens: Array(60) }) });
  const room = { policy: "full", max_kv_size: 100, cells: 90 };
  const shown = [];
  const waiting = new Promise((resolve) => shown.push(resolve));
  const measure = watchSize(() => room, (warning) => (shown.push(warning), shown[0]()));
  measure("x".repeat(300));
  await waiting;
  room.cells = 20;
  measure("x".repeat(300));
  assert.match(shown[1], /will be refused/);
  assert.match(shown[2], /^Memory has room for 100 cells only, of which 80 are free/);
  measure("");
  assert.deepEqual([shown[3], requests], ["", 1]);
});

test("a message that was not sent is put before the draft", () => {
  assert.equal(beforeDraft("Sent", " "), "Sent");
  assert.equal(beforeDraft("Sent", "Draft"), "Sent\n\nDraft");
});

test("a message was read to its end if the newest turn says all of it, and what the template adds", () => {
  const turn = (text, end, ...others) => ({ label: "turn 1", number: 1, start: 0, end, parts: [{ label: "", role: "question", start: 1, end: 5, text }, ...others] });
  assert.equal(unreadOf([turn("Hi there", 9)], "Hi there\n"), "");
  assert.equal(unreadOf([turn("Hi there", 5)], "Hi there"), "Hi there");
  assert.equal(unreadOf([turn("Hi", 5)], "Hi there"), " there");
  assert.equal(unreadOf([turn("Hi there", 9), turn("Hey", 9)], "Hi there"), "Hi there");
  assert.equal(unreadOf([], "Hi there"), "Hi there");
});

test("the note on an answer that was cut off offers Continue at the newest turn alone", () => {
  assert.match(noteText("length", true), /^Cut off at the longest answer: Continue,/);
  assert.equal(noteText("length", false), "Cut off at the longest answer");
  assert.equal(noteText("stopped", true), noteText("stopped", false));
});

test("an answer without the end token is not ended, also in a browser that did not ask for it", () => {
  const memory = { busy: false, last_answer: null };
  const turn = (end) => ({ label: "turn 1", number: 1, start: 0, end, parts: [{ role: "question", start: 0, end: 2 }, { role: "answer", start: 3, end: 6 }] });
  assert.equal(openNote(memory, turn(6).parts[1], turn(6)), "open");
  assert.equal(openNote(memory, turn(7).parts[1], turn(7)), null);
  assert.equal(openNote(memory, turn(2).parts[0], turn(2)), null);
});

test("a note stays with its message until the text is another one", () => {
  const stored = new Map();
  globalThis.localStorage = { getItem: (key) => stored.get(key) ?? null, setItem: (key, value) => stored.set(key, value) };
  const part = (label, text) => ({ label, role: "answer", start: 0, end: 1, text });
  keepNote("a", part("turn 1 question", "Hi"), "replaced");
  keepNote("a", part("turn 1 answer", "Hello"), "stopped");
  assert.equal(noteOf("a", part("turn 1 question", "Hi")), "replaced");
  assert.equal(noteOf("a", part("turn 1 answer", "Hello")), "stopped");
  assert.equal(noteOf("a", part("turn 1 answer", "Hello!")), null);
  assert.equal(noteOf("b", part("turn 1 answer", "Hello")), null);
  keepNote("a", part("turn 1 answer", "Hello"), null);
  assert.equal(noteOf("a", part("turn 1 answer", "Hello")), null);
  assert.equal(noteOf("a", part("turn 1 question", "Hi")), "replaced");
  keepNote("a", part("turn 1 question", "Ho"), "replaced");
  assert.equal(noteOf("a", part("turn 1 question", "Hi")), "replaced"); // after an undo
  for (let number = 0; number < 20; number += 1) keepNote("a", part("turn 1 question", `${number}`), "replaced");
  assert.ok(JSON.parse(stored.get("kvkeep conversations")).a.notes["turn 1 question"].length <= 10);
  keepNote("d", part("turn 1 answer", "Hello"), "open");
  keepNote("d", part("turn 2 answer", "Ho"), "stopped");
  dropOpenNotes("d");
  assert.deepEqual([["turn 1 answer", "Hello"], ["turn 2 answer", "Ho"]].map(([label, text]) => noteOf("d", part(label, text))), [null, "stopped"]);
  stored.set("kvkeep conversations", JSON.stringify({ c: { notes: { x: { note: "stopped", signature: signatureOf({ text: "Hi" }) } } } })); // of an earlier version
  assert.equal(noteOf("c", part("x", "Hi")), "stopped");
});
