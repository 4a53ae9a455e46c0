// Unit tests of the web UI's logic: node --test tests/page/

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { offeredStep } = await import(`${FILES}/undo.js`);
const { splitAnswer, toolName, withFiles } = await import(`${FILES}/message_parts.js`);
const { cellsOf, checkpointsOf, pinnable, nextNumber, rangesOf, residualCells, sharesOf, standingText, statusOf, openingText, turnsOf, turnsSince, turnTitle, withoutEnd } = await import(`${FILES}/turns.js`);
const { branchTitle, longestAnswer, nameFor, titleFor, titleOf } = await import(`${FILES}/chat_settings.js`);
const { defaultTexts } = await import(`${FILES}/settings_dialog.js`);
const { keepView, keptView } = await import(`${FILES}/chat_place.js`);
const { folded, nested } = await import(`${FILES}/conversations.js`);
const { sizeWarning } = await import(`${FILES}/message_size.js`);
const { noteText, openNote } = await import(`${FILES}/message_note.js`);
const { sinceText } = await import(`${FILES}/undo_change.js`);

const memory = (fields) => ({ tokens: 0, cells: 0, runs: [], spans: {}, checkpoints: [], residual_cells: 0, heads: 6, rewind_room: 0, removable: ["pinned", "kept", "window", "forgotten"], ...fields });
const span = (start, end) => ({ start, end });
const run = (standing, start, end) => ({ standing, start, count: end - start });

test("turns are those of the spans, in order, with the system prompt first", () => {
  const texts = [..."SsQqAaQqAa"];
  const spans = {
    "turn 2": span(6, 10),
    "turn 2 question": span(6, 8),
    "turn 2 answer": span(8, 10),
    "turn 1": span(2, 6),
    "turn 1 question": span(2, 4),
    "turn 1 answer": span(4, 6),
    system: span(0, 2),
    "system text": span(1, 2),
    "a part": span(0, 3),
  };
  const turns = turnsOf(memory({ tokens: 10, spans }), texts);
  assert.deepEqual(turns.map(({ label }) => label), ["system", "turn 1", "turn 2"]);
  assert.deepEqual(turns[0].parts.map(({ text }) => text), ["s"]);
  assert.deepEqual(turns[2].parts.map(({ role, text }) => [role, text]), [["question", "Qq"], ["answer", "Aa"]]);
});

test("messages of a chat template are turns, which cover all tokens", () => {
  const texts = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n", "Hello"];
  const turns = turnsOf(memory({ tokens: texts.length }), texts);
  assert.deepEqual(turns.map(({ start, end }) => [start, end]), [[0, 6], [6, 10]]);
  assert.deepEqual(turns.map(({ parts }) => [parts[0].role, parts[0].text]), [["question", "Hi"], ["answer", "Hello"]]);
});

test("the text after the turns is a turn too: one in progress, or a text that was fed", () => {
  const spans = { "turn 1": span(0, 2), "turn 1 question": span(0, 1), "turn 1 answer": span(1, 2) };
  const texts = ["Q", "A", "\n", "<|im_start|>", "user", "\n", "B"];
  const turns = turnsOf(memory({ tokens: texts.length, spans }), texts);
  assert.deepEqual(turns.map(({ parts }) => parts.at(-1).text), ["A", "B"]);
  const begun = [...texts, "<|im_start|>", "assistant", "\n", "C"];
  const busy = turnsOf({ ...memory({ tokens: begun.length, spans }), busy: true }, begun);
  assert.deepEqual(busy.map(({ label, parts }) => [label, parts.map(({ text }) => text)]), [["turn 1", ["Q", "A"]], ["turn 2", ["B", "C"]]]);
  assert.equal(turnsOf(memory({ tokens: 3, spans }), texts.slice(0, 3)).length, 1);
  const late = { "turn 1": span(2, 4), "turn 1 answer": span(3, 4) };
  const around = turnsOf(memory({ tokens: 5, spans: late }), ["Fed ", "text", "Q", "A", "more"]);
  assert.deepEqual(around.map(({ label, start, end }) => [label, start, end]), [["text", 0, 2], ["turn 1", 2, 4], ["text 2", 4, 5]]);
});

test("another text is one turn, and no text is none", () => {
  assert.deepEqual(turnsOf(memory({ tokens: 2 }), ["a", "b"]).map(({ label, end }) => [label, end]), [["text", 2]]);
  assert.deepEqual(turnsOf(memory({}), []), []);
});

test("shares count the tokens of each standing, and their cells add up to the session's", () => {
  const runs = [
    { standing: "pinned", start: 0, count: 4 },
    { standing: "compressed", start: 4, count: 8 },
    { standing: "forgotten", start: 12, count: 4 },
    { standing: "window", start: 16, count: 4 },
  ];
  const held = memory({ tokens: 20, cells: 10, runs });
  assert.deepEqual(sharesOf(held, 2, 6), [
    { standing: "pinned", tokens: 2, cells: 2 },
    { standing: "compressed", tokens: 2, cells: 0.5 },
  ]);
  assert.equal(cellsOf(sharesOf(held, 0, 20)), 10);
  assert.equal(standingText(sharesOf(held, 12, 16)), "forgotten");
  assert.equal(standingText(sharesOf(held, 0, 20)), "4 of 20 tokens pinned, 8 compressed, 4 forgotten");
  assert.equal(standingText(sharesOf(held, 12, 17)), "4 of 5 tokens forgotten");
  assert.equal(standingText(sharesOf(held, 0, 12)), "4 of 12 tokens pinned, 8 compressed");
  assert.equal(standingText([]), "");
});

test("an answer is split into reasoning, calls and text, also while it is generated", () => {
  const kinds = (text) => splitAnswer(text).map((piece) => [piece.kind, piece.text, piece.open]);
  assert.deepEqual(kinds("<think>\nwhy\n</think>\nSo."), [["reasoning", "why", false], ["text", "\nSo.", false]]);
  assert.deepEqual(kinds("<think>why"), [["reasoning", "why", true]]);
  assert.deepEqual(kinds("a < b"), [["text", "a < b", false]]);
  assert.deepEqual(kinds('A<tool_call>{"name": "f"}</tool_call>'), [["text", "A", false], ["tool", '{"name": "f"}', false]]);
  assert.equal(toolName('{"name": "read_file"}'), "read_file");
  assert.equal(toolName("?"), "tool");
});

test("a file's fence is longer than any in its text", () => {
  assert.equal(withFiles("Q", [{ name: "a.md", text: "x ```` y\n" }]), "a.md\n`````\nx ```` y\n`````\n\nQ");
  assert.equal(withFiles("Q", []), "Q");
});

test("a session is named by how its conversation begins, as the server allows", () => {
  assert.equal(nameFor("What is the capital of France?", "abcd"), "what-is-the-capital-of-france-abcd");
  for (const text of ["日本語", "", "../../x", "é".repeat(99)]) assert.match(nameFor(text), /^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$/);
  assert.equal(titleFor("One line\nand another"), "One line");
  assert.equal(titleFor("x".repeat(99)).length, 60);
  assert.deepEqual([{ name: "a", title: null }, { name: "a", title: "Rivers" }].map(titleOf), ["a", "Rivers"]);
});

test("branches follow their parents, and every entry occurs once", () => {
  const entries = [["c", "b"], ["a", null], ["b", "a"], ["lost", "gone"], ["x", "y"], ["y", "x"]].map(([name, parent]) => ({ name, parent }));
  const order = nested(entries).map(([{ name }, depth]) => [name, depth]);
  assert.deepEqual(order.slice(0, 4), [["a", 0], ["b", 1], ["c", 2], ["lost", 0]]);
  assert.deepEqual(order.map(([name]) => name).sort(), ["a", "b", "c", "lost", "x", "y"]);
});

test("the newest change is undone, but no pin once the text has gone on", () => {
  const steps = [{ operation: "pin", tokens: 20 }, { operation: "remove", tokens: 30 }];
  assert.equal(offeredStep(steps, 20), steps[0]);
  assert.equal(offeredStep(steps, 25), steps[1]);
  assert.equal(offeredStep([steps[0]], 25), undefined);
  assert.equal(offeredStep([{ operation: "unpin", tokens: 20 }], 25)?.operation, "unpin"); // what it let go may be lost
  assert.equal(offeredStep([{ operation: "pin" }], 25)?.operation, "pin"); // of a copy that is on disk
  assert.equal(offeredStep([], 25), undefined);
});

test("turns since a change are those with nothing that was said before it", () => {
  const turn = (...texts) => ({ parts: texts.map((text, at) => ({ role: at ? "answer" : "question", text })) });
  const since = (now, before, allowsChange = false) => turnsSince(now, before, allowsChange).map(({ parts }) => parts[0].text);
  const before = [turn("A", "1"), turn("B", "2")];
  assert.deepEqual(since(before, before), []);
  assert.deepEqual(since([turn("B", "2")], before), []); // one was removed
  assert.deepEqual(since([turn("B", "2"), turn("A", "1")], before), ["A"]); // and said once more
  assert.deepEqual(since([turn("A", "1"), turn("B", "2 and on")], before), ["B"]); // continued
  assert.deepEqual(since([turn("A", "1"), turn("B", "3")], before, true), []); // answered once more
  assert.deepEqual(since([turn("X", "1"), turn("B", "2")], before, true), []); // replaced
  assert.deepEqual(since([turn("X", "1"), turn("B", "2 and on")], before, true), ["B"]);
  assert.deepEqual(since([turn("X", "1"), turn("B", "2"), turn("C", "2")], before, true), ["C"]);
  const [system, fed] = ["system", "text"].map((role) => (text) => ({ parts: [{ role, text }] }));
  assert.deepEqual(since([system("new"), ...before, { parts: [] }], [system("old"), ...before], true), []);
  assert.deepEqual(since([fed("a text, and more")], [fed("a text")]), ["a text, and more"]);
});

test("what was said since a change counts new turns apart from a continued answer", () => {
  const turn = (...texts) => ({ parts: texts.map((text, at) => ({ role: at ? "answer" : "question", text })) });
  const earlier = [turn("A", "1"), turn("B", "2")];
  assert.equal(sinceText([turn("B", "2 and on"), turn("C", "3")], earlier), "The continued answer and the turn");
  assert.equal(sinceText([turn("B", "3"), turn("C")], earlier), "The 2 turns");
  assert.equal(sinceText([turn("B", "3")], earlier, true), "The continued answer");
  assert.equal(sinceText([turn("C", "3")], earlier, true), "The turn");
  assert.equal(sinceText([], earlier), "");
});

test("a question and its answer are pinned apart, with all tokens of the turn", () => {
  const parts = [{ role: "question", start: 13, end: 18 }, { role: "answer", start: 23, end: 40 }];
  assert.deepEqual(pinnable({ start: 10, end: 42, parts }), [{ name: "question", ...span(10, 23) }, { name: "answer", ...span(23, 42) }]);
  assert.deepEqual(pinnable({ start: 10, end: 18, parts: [parts[0]] }), [{ name: "", ...span(10, 18) }]);
});

test("the longest answer leaves half of the memory to what led to it", () => {
  assert.deepEqual([null, 100_000, 512, 1].map((max_kv_size) => longestAnswer({ max_kv_size })), [1024, 1024, 256, 1]);
});

test("settings say what the server's policy and budget are", () => {
  assert.deepEqual(defaultTexts({ policy: "sliding", max_kv_size: 512 }), { policy: "server default: sliding", budget: "server default: 512" });
  assert.equal(defaultTexts({ policy: "full", max_kv_size: null }).budget, "server default: no limit");
  assert.deepEqual(defaultTexts({}), { policy: "server default", budget: "server default" });
});

test("a pinned turn stays pinned when its end token is evicted, and counts what is pinned in part", () => {
  const shares = (...counts) => counts.map(([standing, tokens]) => ({ standing, tokens, cells: 0 }));
  const text = (...counts) => standingText(withoutEnd(shares(...counts)));
  assert.equal(text(["pinned", 45], ["forgotten", 1]), "pinned");
  assert.equal(text(["pinned", 1], ["forgotten", 3]), "1 of 4 tokens pinned, 3 forgotten");
  assert.equal(text(["forgotten", 2], ["pinned", 18]), "18 of 20 tokens pinned, 2 forgotten");
  assert.equal(standingText(shares(["pinned", 45], ["forgotten", 1])), "45 of 46 tokens pinned, 1 forgotten");
});

test("ranges of a turn are those of its tokens with a wanted standing, joined", () => {
  const runs = [run("kept", 0, 4), run("forgotten", 4, 9), run("pinned", 9, 12), run("window", 12, 20)];
  const isHeld = (standing) => standing !== "forgotten";
  assert.deepEqual(rangesOf(memory({ runs }), 2, 15, isHeld), [span(2, 4), span(9, 15)]);
  assert.deepEqual(rangesOf(memory({ runs }), 5, 8, isHeld), []);
});

test("residual cells are apart from those of compressed tokens, and with them all cells", () => {
  const held = memory({ tokens: 20, cells: 9, residual_cells: 12, runs: [run("compressed", 0, 16), run("window", 16, 20)] });
  assert.equal(residualCells(held), 2);
  assert.equal(cellsOf(sharesOf(held, 0, 16)), 3);
  assert.equal(cellsOf(sharesOf(held, 0, 20)) + residualCells(held), held.cells);
});

test("checkpoints are in the turn that ends with them, by its tokens", () => {
  const held = memory({ tokens: 20, cells: 16, checkpoints: [4, 10, 20], runs: [run("forgotten", 0, 4), run("window", 4, 20)] });
  assert.deepEqual(checkpointsOf(held, 0, 10), [{ at: 4, part: 0.4 }, { at: 10, part: 1 }]);
  assert.deepEqual(checkpointsOf(held, 10, 20), [{ at: 20, part: 1 }]);
  assert.deepEqual(checkpointsOf(memory({ ...held, runs: [run("forgotten", 0, 20)] }), 0, 8), [{ at: 4, part: 0.5 }]);
  assert.deepEqual([0, 4, 19, 20].map((token) => statusOf(held, token)), ["forgotten", "window", "window", ""]);
});

test("branches of a conversation have titles of their own", () => {
  assert.equal(branchTitle("Lakes", []), "Lakes (branch)");
  assert.equal(branchTitle("Lakes", ["Lakes", "Lakes (branch)"]), "Lakes (branch 2)");
  assert.equal(branchTitle("Lakes (branch 2)", ["Lakes (branch)", "Lakes (branch 2)"]), "Lakes (branch 3)");
});

test("a message is warned of if memory does not hold it, or forgets much for it", () => {
  const runs = [{ standing: "forgotten", start: 0, count: 9 }];
  const room = (fields) => ({ policy: "sliding", max_kv_size: 512, cells: 400, runs, ...fields });
  assert.equal(sizeWarning(112, room()), "");
  assert.equal(sizeWarning(120, room()), ""); // less than a quarter of the memory
  assert.match(sizeWarning(200, room()), /^About 200 tokens: 88 of the oldest/);
  assert.match(sizeWarning(1200, room()), /^About 1,200 tokens, but memory has 512 cells/);
  assert.match(sizeWarning(113, room({ policy: "full" })), /only 112 of 512 cells are free: it does not fit/);
  assert.equal(sizeWarning(9999, room({ max_kv_size: null })), "");
});

test("before memory is full for the first time, it is said that text will be forgotten", () => {
  const room = (fields) => ({ policy: "sliding", max_kv_size: 512, cells: 300, ...fields });
  assert.equal(sizeWarning(84, room()), ""); // a quarter of the budget is free for the answer
  for (const tokens of [85, 212]) assert.match(sizeWarning(tokens, room()), /^Memory is nearly full: 212 of 512 cells are free\. .*begins to be forgotten: pin/);
  assert.match(sizeWarning(100, room({ policy: "full" })), /nearly full.* The answer ends when it is full\.$/);
  assert.match(sizeWarning(60, room({ max_kv_size: 64, cells: 0 })), /^Memory has room for 64 cells only, of which 64 are free\. With this message/);
  assert.equal(sizeWarning(100, room({ policy: "archive" })), "");
  assert.equal(sizeWarning(100, room({ runs: [{ standing: "forgotten", start: 0, count: 1 }] })), ""); // it was said before
});

test("the next turn has the number after the highest", () => {
  assert.equal(nextNumber({}), 1);
  assert.equal(nextNumber({ "turn 2": span(0, 1), "turn 10": span(1, 2), "turn 10 answer": span(1, 2), opening: span(0, 1) }), 11);
});

test("a turn's title has the number of its label", () => {
  assert.deepEqual(["turn 2", "message 13", "system"].map((label) => turnTitle({ label })), ["Turn 2", "Message 13", "System"]);
});

test("a view that was left is kept by its conversation", () => {
  const place = { label: "turn 3", above: -40, heights: new Map([["turn 3", 200]]) };
  assert.deepEqual(keptView("a"), { selected: null, place: null });
  keepView("a", { selected: "turn 2", place });
  assert.deepEqual(keptView("a"), { selected: "turn 2", place });
  assert.deepEqual(keptView("b"), { selected: null, place: null });
});

test("the model's own system prompt is shown without the template's marks", () => {
  const texts = ["<|im_start|>", "system", "\n", "Be ", "kind.", "<|im_end|>", "\n", "Hi"];
  assert.equal(openingText(memory({ spans: { opening: span(0, 7) } }), texts), "Be kind.");
  assert.equal(openingText(memory({ spans: { opening: span(0, 1) } }), ["<bos>", "Hi"]), "");
  assert.equal(openingText(memory({}), texts), "");
});

test("a search finds titles with and without accents", () => {
  assert.equal(folded("Où est l'Île ? Straßen in MÜNCHEN"), "ou est l'ile ? straßen in munchen");
  assert.ok(folded("東京の天気").includes(folded("東京")));
});

test("an answer without an end token has a note by why it ended", () => {
  const part = { role: "answer", end: 9 };
  const note = (ended, fields, end = 9) => openNote({ busy: false, last_answer: ended && { ended }, ...fields }, part, { end, parts: [{}, part] });
  assert.deepEqual(["length", "full", "cancelled", "failed", null].map((ended) => note(ended)), ["length", "full", "stopped", "open", "open"]);
  assert.equal(note("eos", {}, 10), null);
  assert.equal(note("length", { busy: true }), null);
  assert.equal(noteText("length", true), "Cut off at the longest answer: Continue, or allow more in Settings");
  assert.equal(noteText("length", false), "Cut off at the longest answer");
});
