// Unit tests of a session's text as turns: fed texts, and turns in progress.

import assert from "node:assert/strict";
import test from "node:test";

const { turnsOf, turnsSince } = await import("../../kvkeep/server/page/files/turns.js");

const memory = (fields) => ({ tokens: 0, runs: [], spans: {}, busy: false, ...fields });
const span = (start, end) => ({ start, end });

test("a text that was fed between turns is a turn, without the end that the template writes", () => {
  const spans = { "turn 1": span(0, 2), "turn 1 question": span(0, 1), "turn 1 answer": span(1, 2), "turn 2": span(4, 6), "turn 2 answer": span(5, 6) };
  const texts = ["Q", "A", "Fed ", "<|im_end|>\n", "Q", "B"];
  const turns = turnsOf(memory({ tokens: 6, spans }), texts);
  assert.deepEqual(turns.map(({ label, start, end }) => [label, start, end]), [["turn 1", 0, 2], ["text", 2, 4], ["turn 2", 4, 6]]);
  assert.equal(turns[1].parts[0].text, "Fed ");
  const begun = ["Q", "A", "Fed ", "<|im_end|>\n", "<|im_start|>", "user\n", "B"];
  const busy = turnsOf({ ...memory({ tokens: 7, spans: { "turn 1": span(0, 2), "turn 1 answer": span(1, 2) } }), busy: true }, begun);
  assert.deepEqual(busy.map(({ label, end }) => [label, end]), [["turn 1", 2], ["text", 4], ["turn 2", 7]]);
  const blank = turnsOf(memory({ tokens: 6, spans }), ["Q", "A", "<|im_end|>", "\n", "Q", "B"]);
  assert.equal(blank.length, 2);
});

test("texts that were fed at several places are numbered, as messages are", () => {
  const spans = { "turn 1": span(1, 3), "turn 1 question": span(1, 2), "turn 1 answer": span(2, 3), "turn 2": span(4, 5) };
  const labels = (...texts) => turnsOf(memory({ tokens: texts.length, spans }), texts).map(({ label }) => label);
  assert.deepEqual(labels("Fed ", "Q", "A", "more", "B", "again"), ["text", "turn 1", "text 2", "turn 2", "text 3"]);
  const said = ["<|im_start|>user\nHi", "Q", "A", "<|im_start|>user\nYou", "B", "<|im_start|>user\nI"];
  assert.deepEqual(labels(...said), ["message 1", "turn 1", "message 2", "turn 2", "message 3"]);
});

test("what was inserted at the edges of a message is a part of it", () => {
  const spans = { "turn 1": span(0, 10), "turn 1 question": span(3, 4), "turn 1 answer": span(7, 8) };
  const texts = ["<|im_start|>", "user\n", "Mind: ", "Hi", "<|im_end|>\n", "<|im_start|>", "assistant\n", "Hello", " LAST", "<|im_end|>\n"];
  const [{ parts }] = turnsOf(memory({ tokens: 10, spans }), texts);
  assert.deepEqual(parts.map(({ text, start, end }) => [text, start, end]), [["Mind: Hi", 2, 4], ["Hello LAST", 7, 9]]);
  const thinking = [...texts.slice(0, 6), "assistant\n<think>\n", "Hello", ...texts.slice(8)];
  assert.equal(turnsOf(memory({ tokens: 10, spans }), thinking)[0].parts[1].start, 7); // of the template: Regenerate leaves it
  const other = ["[INST]", " ", "Mind: ", "Hi", "[/INST]", "", "", "Hello", "</s>", ""]; // marks that the page does not know
  assert.deepEqual(turnsOf(memory({ tokens: 10, spans }), other)[0].parts.map(({ text }) => text), ["Hi", "Hello"]);
});

test("the opening stays one once no turn is left", () => {
  const turns = turnsOf(memory({ tokens: 3, spans: { opening: span(0, 3) } }), ["<|im_start|>system\n", "Be terse.", "<|im_end|>\n"]);
  assert.deepEqual(turns.map(({ label, parts }) => [label, parts.length]), [["opening", 0]]);
});

test("the first turn is one while it is answered, too", () => {
  const texts = ["<|im_start|>system\n", "Be terse.", "<|im_end|>\n", "<|im_start|>user\n", "Hi", "<|im_end|>\n", "<|im_start|>assistant\n", "Hello"];
  const busy = (given) => turnsOf({ ...memory({ tokens: given.length }), busy: true }, given).map(({ label, parts }) => [label, parts.map(({ role }) => role)]);
  assert.deepEqual(busy(texts), [["system", ["system"]], ["turn 1", ["question", "answer"]]]);
  assert.deepEqual(busy(texts.slice(0, 5)), [["system", ["system"]], ["turn 1", ["question"]]]);
  assert.deepEqual(busy(texts.slice(3)), [["turn 1", ["question", "answer"]]]);
  assert.equal(busy([...texts, ...texts.slice(3)]).length, 5); // a chat that another client sent as a whole
});

test("a fed text that was replaced is no turn since then", () => {
  const turn = (...texts) => ({ parts: texts.map((text) => ({ role: texts.length > 1 ? "question" : "text", text })) });
  const earlier = [turn("Q", "A"), turn("fed"), turn("R", "B")];
  const now = (...more) => [turn("Q", "A"), turn("another"), turn("R", "B"), ...more];
  assert.equal(turnsSince(now(), earlier, true).length, 0);
  assert.equal(turnsSince(now(turn("S", "C")), earlier, true).length, 1);
  assert.equal(turnsSince([turn("Q", "A"), turn("more")], [turn("Q", "A")], true).length, 1);
  assert.equal(turnsSince(now(), earlier, false).length, 1);
});
