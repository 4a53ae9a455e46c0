// Turns of a text that has no spans of turns: by the messages that it says, or as a whole.

/** @typedef {import("./turns.js").Role} Role */
/** @typedef {import("./turns.js").Turn} Turn */

export const MARKER = /<\|im_start\|>(\w+)\n?/g; // of a message in ChatML; texts of other templates stay whole
const THINKING = /^\s*<think/; // that a template begins an answer with
const END_MARK = "<|im_end|>";
const END = /<\|im_end\|>\s*$/;
/** @type {Record<string, Role>} */
const ROLES = { system: "system", user: "question", assistant: "answer", tool: "tool" };

/**
 * Returns the messages that tokens `first ...` say, and what comes before them; nothing for a blank text.
 * @param {string[]} texts of all tokens @param {number} first @returns {Turn[]}
 */
export function messageTurns(texts, first) {
  const whole = texts.slice(first).join("");
  const find = tokenFinder(texts.slice(first));
  const tokenAt = (/** @type {number} */ place) => (place < whole.length ? first + find(place) : texts.length);
  const starts = [...whole.matchAll(MARKER)];
  const places = [...starts.map(({ index }) => index), whole.length];
  const before = whole.slice(0, places[0]).replace(END, "");
  const turns = before.trim() ? [textTurn("text", 1, first, tokenAt(places[0]), "text", before)] : [];
  const messages = starts.map(({ 0: { length }, 1: role, index }, at) => {
    const text = whole.slice(index + length, places[at + 1]).replace(END, "");
    return textTurn(`message ${at + 1}`, at + 1, tokenAt(index), tokenAt(places[at + 1]), ROLES[role] || "text", text);
  });
  return [...turns, ...messages];
}

/**
 * Returns messages with those from the newest one of a user on as the turn that they are when its answer is complete.
 * @param {Turn[]} messages that follow the turns that are complete @param {number} number of the turn
 * @returns {Turn[]}
 */
export function withTurnInProgress(messages, number) {
  const isQuestion = (/** @type {Turn} */ { parts }) => parts[0].role === "question";
  if (messages.filter(isQuestion).length !== 1) return messages; // a prompt that another client sent as a whole
  const at = messages.findIndex(isQuestion);
  const own = messages.slice(at);
  const label = `turn ${number}`;
  const turn = { label, number, start: own[0].start, end: own[own.length - 1].end, parts: own.flatMap(({ parts }) => parts) };
  return [...messages.slice(0, at).map((message) => (message.parts[0].role === "system" ? { ...message, label: "system", number: 0 } : message)), turn];
}

/**
 * Returns the range of a message with what was inserted at its edges, between the marks of ChatML.
 * @param {string[]} texts of all tokens @param {{start: number, end: number}} span of the message @param {number} [from] @param {number} [to] around it
 */
export function wholeMessage(texts, { start, end }, from = start, to = end) {
  const [before, after] = [texts.slice(from, start), texts.slice(end, to)];
  const [head, tail] = [before.join(""), after.join("")];
  const marker = [...head.matchAll(MARKER)].at(-1);
  const place = marker ? marker.index + marker[0].length : head.length;
  const stop = Math.max(0, tail.indexOf(END_MARK));
  const isInserted = head.slice(place).trim() && !THINKING.test(head.slice(place));
  return {
    start: isInserted ? from + tokenFinder(before)(place) : start,
    end: tail.slice(0, stop).trim() ? end + tokenFinder(after)(stop) : end,
  };
}

/** @param {string} label @param {number} number @param {number} start @param {number} end @param {Role} role @param {string} text @returns {Turn} */
const textTurn = (label, number, start, end, role, text) => ({ label, number, start, end, parts: [{ label, role, start, end, text }] });

// Returns a function from a place in the text to its token.
/** @param {string[]} texts */
function tokenFinder(texts) {
  let length = 0;
  const ends = texts.map((text) => (length += text.length));
  /** @param {number} place */
  return (place) => {
    let [low, high] = [0, ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > place) high = middle;
      else low = middle + 1;
    }
    return low;
  };
}
