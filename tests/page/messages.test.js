// Unit tests of the web UI's messages, titles and settings: node --test tests/page/

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { branchTitle, titleFor } = await import(`${FILES}/chat_settings.js`);
const { isCopyOf } = await import(`${FILES}/undo.js`);
const { keepUndo } = await import(`${FILES}/undo_copies.js`);
const { turnsOf } = await import(`${FILES}/turns.js`);
const { budgetRange } = await import(`${FILES}/settings_dialog.js`);
const { withDates } = await import(`${FILES}/conversations.js`);
const { splitAnswer, splitFences, toolName, withFiles } = await import(`${FILES}/message_parts.js`);

test("a message is split into its blocks of code and the text around them", () => {
  const pieces = (text) => splitFences(text).map(({ isCode, text: own }) => [isCode, own]);
  assert.deepEqual(pieces("Why?\n```py\nx = 1\n\ny = 2\n```\n\nSay it."), [[false, "Why?"], [true, "```py\nx = 1\n\ny = 2\n```"], [false, "Say it."]]);
  const file = withFiles("Q", [{ name: "a.md", text: "```\nx\n```" }]);
  assert.deepEqual(pieces(file), [[false, "a.md"], [true, "````\n```\nx\n```\n````"], [false, "Q"]]);
  assert.deepEqual(pieces("```\n```"), [[true, "```\n```"]]);
  assert.deepEqual(pieces("```\n````\nA\n```"), [[true, "```\n````"], [false, "A\n```"]]); // the first one as long ends it
  for (const text of [" a\n", "a ```x``` b", "```\nno end", "```a```\nb\n"]) assert.deepEqual(pieces(text), [[false, text]]);
});

test("messages of many marks without an end take no time that grows with their square", () => {
  const start = performance.now();
  const [fences, thoughts] = ["```python\n".repeat(30_000), `a\n${"<think> x\n</thinking>\n".repeat(30_000)}`];
  assert.deepEqual(splitFences(fences), [{ isCode: false, text: fences }]);
  assert.equal(splitAnswer(thoughts).length, 1);
  assert.ok(performance.now() - start < 3000);
  assert.match(withFiles("", [{ name: "a", text: "`a ".repeat(140_000) }]), /^a\n```\n/);
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

const pieces = (text, reasoning) => splitAnswer(text, reasoning).map((piece) => [piece.kind, piece.text.trim()]);

test("reasoning that the server names is apart, whatever marks are around it", () => {
  const marks = [["", "\n</think>\n\n"], ["<think>\n", "</think>"], ["[THINK]", "[/THINK]"], ["<|channel>thought\n", "<channel|>"], ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"], ["<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"]];
  for (const [begin, end] of marks) {
    const text = `${begin}Why <think>?${end}So, <b>.`;
    const reasoning = { from: begin.length, to: text.length - end.length - "So, <b>.".length };
    assert.deepEqual(pieces(text, reasoning), [["reasoning", "Why <think>?"], ["text", "So, <b>."]]);
  }
});

test("a turn has the place of its reasoning in its answer", () => {
  const span = (start, end) => ({ start, end });
  const spans = { "turn 1": span(0, 5), "turn 1 question": span(0, 1), "turn 1 answer": span(1, 5), "turn 1 reasoning": span(2, 3) };
  const memory = { tokens: 5, cells: 5, runs: [], spans };
  const parts = turnsOf(memory, ["Q", "<think>", "Why", "</think>", "So"])[0].parts;
  assert.deepEqual(parts.map(({ reasoning }) => reasoning), [undefined, { from: 7, to: 10 }]);
});

test("without a name, reasoning is what an answer begins with", () => {
  assert.deepEqual(pieces("Why?\n```\nx\n```\n</think>\n\nSo."), [["reasoning", "Why?\n```\nx\n```"], ["text", "So."]]);
  for (const text of ["Write `<think>` before it.", "Say <think> first, and\n</think>\nthen.", "```\n<think>\na\n</think>\n```\nb", "The <tool_call> tag, `<tool_call>{}</tool_call>`, ends.", "```\n<tool_call>{}</tool_call>\n```\nb"]) {
    assert.deepEqual(pieces(text), [["text", text]]);
  }
  assert.deepEqual(pieces("Don't `x`: <tool_call>{\"a\": 1}"), [["text", "Don't `x`:"], ["tool", '{"a": 1}']]);
});

test("tool calls, results and later reasoning are apart, also while they are generated", () => {
  const call = "get_weather\n<arg_key>city</arg_key><arg_value>Lima</arg_value>";
  assert.deepEqual(pieces(`So:<tool_call>${call}</tool_call>`), [["text", "So:"], ["tool", call]]);
  assert.deepEqual(pieces("<tool_call>now\n</tool_call>It is"), [["tool", "now"], ["text", "It is"]]);
  for (const begun of ["", "get_w", "get_weather\n<ar", "{"]) assert.deepEqual(splitAnswer(`A\n<tool_call>${begun}`)[1], { kind: "tool", text: begun, open: true });
  assert.deepEqual(pieces("<tool_response>\nNo rain today.\n</tool_response>\nDry."), [["tool", "No rain today."], ["text", "Dry."]]);
  assert.deepEqual(pieces("Sure.\n<think>hm</think>\nOK"), [["text", "Sure."], ["reasoning", "hm"], ["text", "OK"]]);
  assert.deepEqual(splitAnswer("<think>a</think>B\n<think>\nc").map(({ kind, open }) => [kind, open]), [["reasoning", false], ["text", false], ["reasoning", true]]);
  for (const text of ["See\n<think> tags, of which none ends.", "Write `<tool_response>` and <tool_response> before it.", "a\n```\n<think>b</think>\n```"]) {
    assert.deepEqual(pieces(text), [["text", text]]);
  }
  assert.deepEqual([call, "now"].map(toolName), ["get_weather", "tool"]);
});

test("titles are cut between characters, and the server takes those of branches", () => {
  assert.equal(titleFor(`${"a".repeat(56)}😀${"b".repeat(9)}`), `${"a".repeat(56)}😀...`);
  const title = branchTitle("t".repeat(200), []);
  assert.match(title, /^t+\.\.\. \(branch\)$/);
  assert.ok(title.length <= 200 && branchTitle(title, [title]).length <= 200);
});

test("sessions whose long names begin alike have copies of their own for undo", async () => {
  globalThis.sessionStorage = { getItem: () => null };
  const sent = [];
  globalThis.fetch = async (path, { body }) => {
    if (body) sent.push(JSON.parse(body).name);
    return { ok: true, json: async () => ({ data: [] }) };
  };
  const names = ["a", "b"].map((end) => "s".repeat(80) + end);
  for (const name of names) await keepUndo(name, 0, "pin");
  assert.deepEqual(sent.map((copy) => names.map((name) => isCopyOf(copy, name))), [[true, false], [false, true]]);
  assert.ok(sent.every((copy) => /^[\w-][\w.-]{0,99}$/.test(copy)));
});
