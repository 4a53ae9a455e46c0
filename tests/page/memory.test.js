// Unit tests of what the web UI says of a memory: node --test tests/page/

import assert from "node:assert/strict";
import test from "node:test";

const FILES = "../../kvkeep/server/page/files";
const { canGoBackTo, canRemove } = await import(`${FILES}/turns.js`);
const { answerText, branchText, canPin, canRecompute, cellsToPin, changedText, compressedText, compressText, fullText, stoppedText, removeText, heldText, instead, irreplaceableText, noWayBackText, pinText, recomputeText, replacedText, replaceText, sizeText, unpinText } = await import(`${FILES}/memory_text.js`);
const { legendTexts } = await import(`${FILES}/turn_strip.js`);
const { boundText, missOf } = await import(`${FILES}/miss_text.js`);

const memory = (fields) => ({ tokens: 0, cells: 0, runs: [], spans: {}, checkpoints: [], residual_cells: 0, heads: 6, rewind_room: 0, removable: ["pinned", "kept", "window", "forgotten"], ...fields });
const span = (start, end) => ({ start, end });
const run = (standing, start, end) => ({ standing, start, count: end - start });

test("what does not fit beside other pins is not pinned, which is said before", () => {
  const runs = [run("kept", 0, 4), run("pinned", 4, 60), run("window", 60, 100)];
  const held = memory({ policy: "shift", tokens: 100, cells: 100, max_kv_size: 100, pin_room: 30, runs });
  assert.equal(cellsToPin(held, { start: 0, end: 60 }), 0); // what is kept takes nothing
  assert.equal(cellsToPin(held, { start: 50, end: 70 }), 10);
  assert.match(pinText(held, { start: 60, end: 90 }), /^Never forgotten .* Takes 30 of 100 cells, and leaves room to pin 0 more\.$/);
  assert.match(pinText(held, { start: 60, end: 91 }), /^Not enough room .* takes 31 cells, and 30 cells can still be pinned/);
  assert.deepEqual([30, 31].map((cells) => canPin(held, cells)), [true, false]);
  assert.ok(canPin({ ...held, pin_room: null }, 1000));
});

test("tokens without a cell of their own are not pinned", () => {
  const runs = [run("forgotten", 0, 3), run("compressed", 3, 9), run("window", 9, 20)];
  const held = memory({ policy: "archive", tokens: 20, cells: 14, max_kv_size: 100, pin_room: 50, runs });
  assert.equal(cellsToPin(held, { start: 0, end: 12 }), 3);
  assert.match(pinText(held, { start: 0, end: 12 }), /Takes 3 of 100 cells, and leaves room to pin 47 more\. 9 tokens are forgotten or compressed already/);
  assert.match(pinText(held, { start: 8, end: 12 }), /1 token is compressed already and cannot be pinned\.$/);
});

test("parts that are not held as a whole are named", () => {
  const held = (fields) => memory({ tokens: 20, rewind_room: 8, runs: [run("forgotten", 0, 4), run("compressed", 4, 9), run("window", 9, 20)], ...fields });
  const text = (fields, role, start, end) => irreplaceableText(held(fields), { role, start, end });
  assert.equal(text({}, "question", 2, 4), "The message cannot be replaced, as not all of it is in memory.");
  assert.match(text({}, "answer", 3, 10), /^The answer cannot be replaced, as some of it is compressed\.$/);
  assert.match(text({ removable: [] }, "answer", 10, 12), /can only change the newest text\.$/);
  assert.match(text({}, "answer", 9, 20), /as the text just before it is compressed\.$/);
});

test("what a change would free or cost is said by the cells that are held", () => {
  const runs = [{ standing: "pinned", start: 0, count: 10 }, { standing: "forgotten", start: 10, count: 10 }];
  const held = memory({ policy: "sliding", tokens: 20, cells: 10, max_kv_size: 100, pin_room: 80, bytes: 1000, cell_bytes: 40, runs });
  const window = memory({ ...held, runs: [{ ...runs[0], standing: "window" }, runs[1]] });
  const bytes = (count) => `${count} bytes`;
  assert.match(heldText(held, { start: 0, end: 20 }), /^20 tokens in 10 cells, 10 of 20 tokens pinned, 10 forgotten/);
  assert.match(removeText(held, { start: 0, end: 5 }, bytes), /Frees 5 cells \(200 bytes, which Undo/);
  assert.match(pinText(window, { start: 5, end: 15 }), /Takes 5 of 100 cells, and leaves room to pin 75 more\. 5 tokens are forgotten already/);
  assert.equal(pinText({ ...window, max_kv_size: null, pin_room: null }, { start: 5, end: 10 }), "Never forgotten until it is unpinned. Takes 5 cells.");
  assert.equal(sizeText({ ...held, bytes_shared: 0 }, bytes), "10 of 100 cells in use. 20 tokens, of which 10 are forgotten. 1000 bytes reserved.");
  assert.match(sizeText({ ...held, max_kv_size: null, bytes_shared: 9 }, bytes), /^10 cells in use.* reserved, 9 bytes of it shared with other conversations, such as branches, or kept for Undo\.$/);
  const large = { ...held, cells: 200, highest_ratio: 4.5 };
  assert.equal(compressText(large, 4, bytes), "200 cells become about 50: frees 6000 bytes, which Undo keeps for now.");
  assert.match(compressText(large, 5, bytes), /^not possible with 200 cells, .* stay as they are: 4\.5 to 1 at most\.$/);
  assert.match(compressText({ ...large, highest_ratio: null }, 2, bytes), /^not possible .* stay as they are\.$/);
  assert.match(recomputeText(held, 15), /^Evaluate the 5 tokens after it again/);
  const answer = { held: 0, read: 3, generated: 1, per_second: 0 };
  assert.equal(answerText(answer), "The last answer read 3 tokens and wrote 1.");
  assert.equal(answerText({ ...answer, held: 20, read: 1, per_second: 2 }), "The last answer reused all 20 cells in memory, read 1 new token and wrote 1 at 2.0 tokens/s.");
});

test("what follows a replaced text is evaluated again only where the session can go back", () => {
  const runs = [run("pinned", 0, 10), run("forgotten", 10, 20), run("window", 20, 40)];
  const held = memory({ policy: "sliding", tokens: 40, rewind_room: 19, runs });
  const can = (start, end) => canRecompute(held, { start, end });
  assert.deepEqual([can(2, 8), can(20, 25), can(21, 25), can(30, 40)], [false, false, true, false]); // the last is at the end
  assert.match(replaceText(held, span(21, 25), true), /You choose whether what follows is evaluated again\.$/);
  assert.match(replaceText(held, span(2, 8), true), /What follows stays as it was: it cannot be evaluated again, as some of the text from there on is forgotten\.$/);
  assert.equal(replaceText(held, span(30, 40), true), "Changes what the model remembers, and asks nothing.");
  assert.equal(replaceText(held, span(2, 8), false), "");
});

test("a branch shares all cells until newer text is written over what was forgotten", () => {
  const text = (policy, standing) => branchText(memory({ policy, bytes: 900, tokens: 20, runs: [run(standing, 0, 10), run("window", 10, 20)] }), (count) => `${count} bytes`);
  const all = "Shares all cells up to here, so it takes almost nothing.";
  assert.equal(text("sliding", "kept"), all);
  assert.equal(text("full", "compressed"), all);
  assert.match(text("shift", "forgotten"), /^Takes up to 900 bytes more: since text was forgotten here/);
  assert.match(text("archive", "compressed"), /since text was compressed here/);
});

test("to remove what is forgotten takes it out of the chat alone", () => {
  const held = memory({ tokens: 20, cells: 10, cell_bytes: 40, runs: [run("forgotten", 0, 10), run("window", 10, 20)] });
  const text = (start, end) => removeText(held, { start, end }, (count) => `${count} bytes`);
  assert.equal(text(0, 10), "Takes the text out of this chat. The model has forgotten it already.");
  assert.match(text(5, 15), /^Takes the text out of memory and out of this chat\. Frees 5 cells/);
});

test("what a policy keeps of the beginning, and what it has instead of compression, is said", () => {
  const runs = [run("kept", 0, 4), run("window", 4, 20)];
  const text = (fields, start, end) => heldText(memory({ policy: "sliding", tokens: 20, cells: 20, runs, ...fields }), { start, end });
  assert.equal(text({}, 0, 20), "20 tokens in 20 cells, held until newer text needs the room; the first 4 tokens stay (an attention sink: the model needs them).");
  assert.equal(text({}, 0, 4), "4 tokens in 4 cells, the first 4 tokens stay (an attention sink: the model needs them).");
  assert.equal(text({ runs: [run("kept", 0, 20)] }, 0, 20), "20 tokens in 20 cells, the first 20 tokens stay.");
  assert.equal(text({ policy: "full" }, 0, 20), "20 tokens in 20 cells, held.");
  assert.match(instead("sliding"), /^Old text is evicted by itself.*\(sliding\)\. Compress needs a chat with policy full: New chat, then Settings\.$/);
  assert.equal(instead("full"), "");
});

test("the legend counts residual cells as the budget counts cells", () => {
  const held = memory({ policy: "full", tokens: 20, cells: 15, heads: 90, residual_cells: 450, runs: [run("compressed", 0, 20)] });
  assert.deepEqual(legendTexts(held), [["compressed", "compressed 20 tokens"], ["residual", "5 cells per head stand for compressed text (residual)"]]);
  assert.equal(legendTexts({ ...held, residual_cells: 2 })[1][1], "1 cell per head stands for compressed text (residual)");
});

test("what bounds the reuse of a prompt is said with the numbers", () => {
  const miss = { reason: "differs", prompt_tokens: 70, reused: 37, differs_at: 52 };
  assert.equal(boundText(miss), " 52 tokens are the same, of which 37 were reused: reuse ends where the last whole prefill step of them ends.");
  assert.match(boundText({ ...miss, reason: "no_checkpoint" }), /: reuse ends at the last checkpoint before the difference\.$/);
  assert.match(boundText({ ...miss, reason: "edited" }), /^ 52 .* 37 were reused\.$/);
  assert.match(boundText({ ...miss, reused: 69, differs_at: null }), /^ 70 .* 69 were reused: the last one is always evaluated/);
  assert.equal(boundText({ ...miss, reused: 52 }), "");
  assert.equal(boundText({ ...miss, reason: "cold", reused: 0, differs_at: null }), "");
  assert.equal(boundText({ ...miss, moved: 3 }), "");
});

test("a session goes back as far as the server says, and what it says is removed", () => {
  const runs = [run("kept", 0, 4), run("forgotten", 4, 9), run("window", 9, 20)];
  const held = (fields) => memory({ tokens: 20, runs, rewind_room: 10, ...fields });
  const places = [0, 4, 9, 10, 20].map((at) => canGoBackTo(held(), at));
  assert.deepEqual(places, [false, false, false, true, true]);
  const removed = (fields) => [[4, 12], [9, 20], [12, 20]].map(([start, end]) => canRemove(held(fields), { start, end }));
  assert.deepEqual(removed(), [true, false, true]);
  assert.deepEqual(removed({ removable: ["kept", "window"] }), [false, false, true]);
});

test("what a session cannot go back over is named", () => {
  const runs = [run("kept", 0, 4), run("forgotten", 4, 9), run("window", 9, 20)];
  const text = (at, fields) => noWayBackText(memory({ tokens: 20, runs, ...fields }), at);
  assert.equal(text(6), "some of the text from there on is forgotten");
  assert.equal(text(9), "the text just before it is forgotten");
  assert.equal(text(6, { runs: [run("compressed", 0, 20)] }), "some of the text from there on is compressed");
  assert.equal(text(12), "the model's state after the text before it is not kept");
});

test("what memory forgot and why a message was refused is said with the numbers", () => {
  const full = memory({ policy: "full", cells: 120, max_kv_size: 128, highest_ratio: 4 });
  assert.match(fullText(full, true), /^Memory is full: 120 of 128 cells .* Compress the whole memory \(in the memory panel\) or remove a turn \(by the Memory button below it\) or begin a chat with another policy/);
  assert.match(fullText({ ...full, policy: "self_extend", removable: [] }, true), /evicts nothing\. Begin a chat/);
  assert.match(fullText({ ...full, cells: 100, highest_ratio: null }, true), /^The message does not fit: 100 of 128 .* evicts nothing\. Remove a turn .* or send a shorter message or begin a chat/);
  assert.match(fullText({ ...full, cells: 0, max_kv_size: 32 }, true), /^The message does not fit: memory has 32 cells, .* larger budget or another policy in Settings\.$/);
  assert.match(fullText(full, false), /so nothing was generated\. Compress the whole memory \(in the memory panel\) or remove a turn .* or begin a chat/);
  assert.match(stoppedText(210, 57, false), /^Stopped\. 210 tokens of the message were read and stay as a turn\. 57 tokens of older text are forgotten for it\. The rest of the message is in the box\.$/);
  assert.match(stoppedText(30, 0, true), /read and stays: Answer has it answered\.$/);
  assert.match(stoppedText(0, 0, false), /memory is as before/);
});

test("what an unpinned turn and a replaced one are afterwards is said", () => {
  assert.match(unpinText(memory({ policy: "full" })), /compressed again/);
  assert.match(unpinText(memory({ policy: "sliding" })), /forgotten again/);
  const coarse = memory({ policy: "self_extend", tokens: 20, cells: 20, max_kv_size: null, pin_room: null, runs: [run("window", 0, 20)] });
  assert.match(heldText(coarse, { start: 0, end: 20 }), /cells, held\.$/); // this policy evicts nothing
  assert.match(pinText(coarse, { start: 0, end: 20 }), /^Not removed by a compaction/);
  const text = (role, isRecomputed) => replacedText({ role, end: 40 }, 41, isRecomputed);
  assert.equal(text("question", false), "The message was replaced in memory; its answer stays as it was.");
  assert.equal(text("question", true), "The message was replaced in memory, and the 1 token after it evaluated again: their text is as before.");
  assert.equal(text("answer", false), "The answer was replaced in memory.");
});

test("a session's last prompt is found among the misses, which name the nearest session", () => {
  const misses = [
    { number: 3, session: "other", prompt_tokens: 24, reused: 8 },
    { number: 2, session: "a", prompt_tokens: 24, reused: 8 },
    { number: 1, session: null, prompt_tokens: 30, reused: 0 },
  ];
  const of = (fields) => missOf(misses, { name: "b", parent: "a", ...fields })?.number;
  assert.equal(of({ last_prompt: { prompt_tokens: 24, reused: 8 } }), 2);
  assert.equal(of({ last_prompt: { prompt_tokens: 30, reused: 0 } }), 1);
  assert.equal(of({ last_prompt: { prompt_tokens: 31, reused: 0 } }), undefined);
});

test("what a change made memory forget, and what a compression left, is said with its message", () => {
  const before = memory({ policy: "sliding", cells: 100, runs: [run("forgotten", 0, 10), run("window", 10, 110)] });
  const after = (fields) => ({ ...before, cells: 41, runs: [run("forgotten", 0, 26), run("compressed", 26, 30), run("window", 30, 110)], ...fields });
  assert.equal(changedText("Replaced.", before, after()), "Replaced. 16 tokens were forgotten for it.");
  assert.equal(changedText("Replaced.", before, after({ policy: "archive" })), "Replaced. 16 tokens were forgotten for it. 4 tokens were compressed for it.");
  assert.equal(changedText("Removed.", before, after({ runs: [run("window", 0, 90)] })), "Removed.");
  assert.equal(changedText("", before, after()), "");
  assert.equal(changedText(compressedText, before, after()), "Compressed: 100 cells became 41. Undo keeps those of before for now.");
});
