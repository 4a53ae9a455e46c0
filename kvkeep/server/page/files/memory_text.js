// What the memory beside the chat says, as sentences: values only, no elements.

import { canGoBackTo, cellsOf, countOf, sharesOf, standingText, statusOf, withoutEnd } from "./turns.js";

/** @param {number} value */
const count = (value) => Math.round(value).toLocaleString("en-US");

/** @param {number} value @param {string} noun */
const counted = (value, noun) => `${count(value)} ${noun}${Math.round(value) === 1 ? "" : "s"}`;

/** Policies that evict nothing. */
export const REFUSING = ["full", "self_extend"];

/** @type {Record<string, string>} */
const PINNED = { full: "Not compressed, nor removed by a compaction, until it is unpinned.", self_extend: "Not removed by a compaction until it is unpinned." };

/** @type {Record<string, string>} */
const UNPINNED = { full: "It may be compressed again, or removed by a compaction.", self_extend: "It may be removed by a compaction again." };

/** @type {Record<string, string>} */
const FULL = { window: "held", kept: "held" };

/** @type {Record<string, string>} */
const HELD = { window: "held until newer text needs the room" };

/**
 * Returns what a turn holds.
 * @param {Memory} memory @param {{start: number, end: number}} turn
 */
export function heldText(memory, { start, end }) {
  const shares = sharesOf(memory, start, end);
  const text = standingText(withoutEnd(shares));
  const isFull = REFUSING.includes(memory.policy);
  const kept = isFull ? 0 : shares.filter(({ standing }) => standing === "kept").reduce((sum, { tokens }) => sum + tokens, 0);
  const standing = [text === "kept" && kept ? "" : (isFull ? FULL : HELD)[text] || text, kept ? keptText(kept) : ""].filter(Boolean).join("; ");
  return `${counted(end - start, "token")} in ${counted(cellsOf(shares), "cell")}, ${standing}.`;
}

/**
 * Returns what it would do to delete a turn.
 * @param {Memory} memory @param {{start: number, end: number}} turn @param {(bytes: number) => string} bytes
 */
export function removeText(memory, { start, end }, bytes) {
  const cells = cellsOf(sharesOf(memory, start, end));
  if (!cells) return "Takes the text out of this chat. The model has forgotten it already.";
  return `Takes the text out of memory and out of this chat. Frees ${counted(cells, "cell")} (${bytes(cells * memory.cell_bytes)}, which Undo keeps for now). Later turns keep what they took from it.`;
}

/**
 * Returns what the web UI calls a part of a turn: what a user says need not be a question.
 * @param {string} role
 */
export const nameOf = (role) => (role === "question" ? "message" : role);

/**
 * Returns what a branch takes. Where text was forgotten or compressed by itself, newer text is written over what held it.
 * @param {Memory} memory @param {(bytes: number) => string} bytes
 */
export function branchText(memory, bytes) {
  const moved = EVICTION[memory.policy] && ["forgotten", "compressed"].find((standing) => countOf(memory, standing));
  if (!moved) return "Shares all cells up to here, so it takes almost nothing.";
  return `Takes up to ${bytes(memory.bytes)} more: since text was ${moved} here, a branch needs its own room for the newest text.`;
}

/** @type {[string, string][]} */
const UNHELD = [
  ["forgotten", "forgotten"],
  ["compressed", "compressed"],
  ["grouped", "seen at coarser distances"],
];

/**
 * Returns why a session cannot go back to its first `at` tokens: it goes back over text that it holds as it was, and to a token that it holds.
 * @param {Memory} memory @param {number} at
 */
export function noWayBackText(memory, at) {
  const after = sharesOf(memory, at, memory.tokens);
  for (const [standing, words] of UNHELD) if (after.some((share) => share.standing === standing)) return `some of the text from there on is ${words}`;
  const before = UNHELD.find(([standing]) => standing === statusOf(memory, at - 1));
  return before ? `the text just before it is ${before[1]}` : "the model's state after the text before it is not kept";
}

/**
 * Returns why a range cannot be removed or replaced.
 * @param {Memory} memory @param {{start: number, end: number}} range
 */
export function fixedText(memory, { start, end }) {
  if (end === memory.tokens && !canGoBackTo(memory, start)) return noWayBackText(memory, start);
  if (!memory.removable.length) return "this model or policy can only change the newest text";
  const isCompressed = sharesOf(memory, start, end).some(({ standing }) => standing === "compressed");
  return isCompressed ? "some of it is compressed" : "not all of it is in memory";
}

/**
 * Returns why a part of a turn cannot be replaced.
 * @param {Memory} memory @param {{role: string, start: number, end: number}} part
 */
export const irreplaceableText = (memory, part) => `The ${nameOf(part.role)} cannot be replaced, as ${fixedText(memory, part)}.`;

/**
 * Whether a token of a standing can be pinned: one with a cell of its own that is not pinned already. A kept one stays anyway.
 * @param {string} standing
 */
export const isPinnable = (standing) => ["window", "grouped"].includes(standing);

/**
 * Returns how many cells a pin of a range takes.
 * @param {Memory} memory @param {{start: number, end: number}} range
 */
export const cellsToPin = (memory, { start, end }) => cellsOf(sharesOf(memory, start, end).filter(({ standing }) => isPinnable(standing)));

/**
 * Whether so many more cells can be pinned.
 * @param {Memory} memory @param {number} cells
 */
export const canPin = ({ pin_room }, cells) => pin_room === null || cells <= pin_room;

/**
 * Returns what it would do to pin a range, or why there is no room for it.
 * @param {Memory} memory @param {{start: number, end: number}} range
 */
export function pinText(memory, { start, end }) {
  const [cells, room] = [cellsToPin(memory, { start, end }), memory.pin_room];
  if (!canPin(memory, cells)) return `Not enough room to pin this: it takes ${counted(cells, "cell")}, and ${counted(Math.max(0, room || 0), "cell")} can still be pinned. Unpin something first.`;
  const left = room === null ? "" : `, and leaves room to pin ${count(room - cells)} more`;
  const budget = memory.max_kv_size === null ? "" : ` of ${counted(memory.max_kv_size, "cell")}`;
  const effect = PINNED[memory.policy] || "Never forgotten until it is unpinned.";
  return `${effect} Takes ${count(cells)}${budget || (cells === 1 ? " cell" : " cells")}${left}.${lostText(sharesOf(memory, start, end))}`;
}

/**
 * Returns what unpinning does.
 * @param {Memory} memory
 */
export const unpinText = ({ policy }) => UNPINNED[policy] || "It may be forgotten again.";

/**
 * Returns a sentence about tokens that have no cell of their own to pin; "" if there are none.
 * @param {import("./turns.js").Share[]} shares
 */
function lostText(shares) {
  const names = ["forgotten", "compressed"].filter((name) => shares.some(({ standing }) => standing === name));
  const lost = shares.filter(({ standing }) => names.includes(standing)).reduce((sum, { tokens }) => sum + tokens, 0);
  return lost ? ` ${counted(lost, "token")} ${lost === 1 ? "is" : "are"} ${names.join(" or ")} already and cannot be pinned.` : "";
}

/**
 * Whether what follows a replaced text can be evaluated again.
 * @param {Memory} memory @param {{start: number, end: number}} range of the text
 */
export const canRecompute = (memory, { start, end }) => end < memory.tokens && canGoBackTo(memory, start);

/**
 * Returns what it would do to replace a text.
 * @param {Memory} memory @param {{start: number, end: number}} range @param {boolean} isFirst of those that can be replaced
 */
export function replaceText(memory, range, isFirst) {
  if (!isFirst) return "";
  if (canRecompute(memory, range)) return "Changes what the model remembers, and asks nothing. You choose whether what follows is evaluated again.";
  const stays = range.end < memory.tokens ? ` What follows stays as it was: it cannot be evaluated again, as ${noWayBackText(memory, range.start)}.` : "";
  return `Changes what the model remembers, and asks nothing.${stays}`;
}

/**
 * Returns what a replacement did.
 * @param {{role: string, end: number}} part as it was @param {number} tokens of the session before @param {boolean} isRecomputed
 */
export function replacedText({ role, end }, tokens, isRecomputed) {
  const subject = `The ${nameOf(role)} was replaced in memory`;
  if (isRecomputed) return `${subject}, and the ${counted(tokens - end, "token")} after it evaluated again: their text is as before.`;
  return role === "question" ? `${subject}; its answer stays as it was.` : `${subject}.`;
}

/**
 * Returns the label of the choice to evaluate what follows a replaced text.
 * @param {Memory} memory @param {number} end of the text
 */
export const recomputeText = (memory, end) =>
  `Evaluate the ${counted(memory.tokens - end, "token")} after it again, so that later turns take the change into account (slower)`;

/**
 * Returns what a session holds, and what that takes.
 * @param {Memory} memory @param {(bytes: number) => string} bytes
 */
export function sizeText(memory, bytes) {
  const budget = memory.max_kv_size ? ` of ${count(memory.max_kv_size)}` : "";
  const lost = countOf(memory, "forgotten");
  const forgotten = lost ? `, of which ${count(lost)} ${lost === 1 ? "is" : "are"} forgotten` : "";
  const shared = memory.bytes_shared ? `, ${bytes(memory.bytes_shared)} of it shared with other conversations, such as branches, or kept for Undo` : "";
  return `${count(memory.cells)}${budget} cells in use. ${counted(memory.tokens, "token")}${forgotten}. ${bytes(memory.bytes)} reserved${shared}.`;
}

export const RESERVED_HINT = "A cell is what memory holds of one token. Reserved is what cells take, with room for the next ones. What is shared exists once, and counts in each conversation that has it.";

/**
 * Returns what a compression would leave, or why it is impossible.
 * @param {Memory} memory @param {number} ratio @param {(bytes: number) => string} bytes
 */
export function compressText(memory, ratio, bytes) {
  const [left, highest] = [memory.cells / ratio, memory.highest_ratio || 1];
  if (ratio > highest) return `not possible with ${counted(memory.cells, "cell")}, as the beginning, the newest and pinned ones stay as they are${highest > 1 ? `: ${highest} to 1 at most` : ""}.`;
  const freed = (memory.cells - left) * memory.cell_bytes;
  return `${count(memory.cells)} cells become about ${count(left)}: frees ${bytes(freed)}, which Undo keeps for now.`;
}

/** @typedef {string | ((before: Memory, after: Memory) => string)} ChangeMessage */

/** Returns what a compression did. @param {Memory} before @param {Memory} after */
export const compressedText = (before, after) => `Compressed: ${counted(before.cells, "cell")} became ${count(after.cells)}. Undo keeps those of before for now.`;

/**
 * Returns the message of a change with what memory lost for it; "" for a change without one.
 * @param {ChangeMessage} message @param {Memory} before @param {Memory} after
 */
export function changedText(message, before, after) {
  if (typeof message === "function") return message(before, after);
  const standings = after.policy === "archive" ? ["forgotten", "compressed"] : ["forgotten"];
  const losses = standings.flatMap((standing) => {
    const lost = countOf(after, standing) - countOf(before, standing);
    return lost > 0 ? [` ${counted(lost, "token")} ${lost === 1 ? "was" : "were"} ${standing} for it.`] : [];
  });
  return message && message + losses.join("");
}

/**
 * Returns what the last answer took.
 * @param {LastAnswer} answer
 */
export function answerText({ held, read, generated, per_second }) {
  const speed = per_second ? ` at ${per_second.toFixed(1)} tokens/s` : "";
  const reused = held ? `reused all ${counted(held, "cell")} in memory, ` : "";
  return `The last answer ${reused}read ${counted(read, held ? "new token" : "token")} and wrote ${count(generated)}${speed}.`;
}

/** @type {Record<string, string>} */
const EVICTION = {
  sliding: "Old text is evicted by itself, the oldest first (sliding).",
  shift: "Old text is evicted by itself, a part of it at once (shift).",
  archive: "Old text is compressed by itself (archive).",
  self_extend: "Nothing is evicted: older text is seen at coarser distances (self_extend).",
};

/**
 * Returns what a policy has instead of compression on request; "" if it has that.
 * @param {string} policy
 */
export const instead = (policy) => (EVICTION[policy] ? `${EVICTION[policy]} Compress needs a chat with policy full: New chat, then Settings.` : "");

/**
 * Returns what of a memory's first tokens stays for good; "" if that needs no words.
 * @param {number} tokens
 */
export const keptText = (tokens) => `the first ${counted(tokens, "token")} ${tokens === 1 ? "stays" : "stay"}${tokens <= SINKS ? " (an attention sink: the model needs them)" : ""}`;

const SINKS = 4; // tokens that every text needs at its beginning

// Said once when a memory begins to forget. How much is said beside the chat, where it is counted anew.
export const NOW_FORGETS = "Memory is full: the oldest text is forgotten from now on. Pin what must stay.";

const SHORTEST_MESSAGE = 16; // tokens, with those of the template

/**
 * Returns why a message was refused that does not fit, or no answer was begun or continued.
 * @param {Memory} memory @param {boolean} isMessage
 */
export function fullText(memory, isMessage) {
  const { cells, max_kv_size, policy, highest_ratio, removable } = memory;
  const most = max_kv_size || cells;
  if (isMessage && !cells) return `The message does not fit: memory has ${counted(most, "cell")}, and policy ${policy} evicts nothing. Send a shorter message, or choose a larger budget or another policy in Settings.`;
  const compress = policy === "full" && highest_ratio ? ["Compress the whole memory (in the memory panel)"] : [];
  const hasRoom = isMessage && most - cells >= SHORTEST_MESSAGE;
  const shorter = hasRoom ? ["send a shorter message"] : [];
  const remove = cells && removable.length ? ["remove a turn (by the Memory button below it)"] : [];
  const unpin = countOf(memory, "pinned") && !compress.length ? ["unpin what is pinned, and compress"] : [];
  const ways = [...compress, ...remove, ...(policy === "full" ? unpin : []), ...shorter, "begin a chat with another policy or a larger budget (New chat, then Settings)"].join(" or ");
  return `${hasRoom ? "The message does not fit" : "Memory is full"}: ${count(cells)} of ${count(most)} cells are in use, and policy ${policy} evicts nothing${isMessage ? "" : ", so nothing was generated"}. ${ways.replace(/^./, (letter) => letter.toUpperCase())}.`;
}

/**
 * Returns what is left of a message that was stopped before its answer.
 * @param {number} read tokens of it that stay in memory @param {number} lost tokens of older text @param {boolean} isWhole
 */
export function stoppedText(read, lost, isWhole) {
  const older = lost > 0 ? ` ${counted(lost, "token")} of older text ${lost === 1 ? "is" : "are"} forgotten for it.` : "";
  if (isWhole) return `Stopped. The message had been read and stays: Answer has it answered.${older}`;
  if (read <= 0) return "Stopped: memory is as before, and the message is back in the box.";
  return `Stopped. ${counted(read, "token")} of the message ${read === 1 ? "was" : "were"} read and ${read === 1 ? "stays" : "stay"} as a turn.${older} The rest of the message is in the box.`;
}
