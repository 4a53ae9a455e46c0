// A session's text as turns, and what memory holds of each: values only, no elements.

import { MARKER, messageTurns, wholeMessage, withTurnInProgress } from "./message_turns.js";

/** @typedef {"system" | "question" | "answer" | "tool" | "text"} Role */
/** @typedef {{label: string, role: Role, start: number, end: number, text: string, reasoning?: {from: number, to: number}}} Part  reasoning: where it is in the text, if the server says so. */
/** @typedef {{label: string, number: number, start: number, end: number, parts: Part[]}} Turn */
/** @typedef {{standing: string, tokens: number, cells: number}} Share */

// From most to least of what the model holds.
export const STANDINGS = ["pinned", "kept", "window", "grouped", "compressed", "forgotten"];

/**
 * Returns the turns of a session: by its spans, by the messages that its text says, or its whole text.
 * @param {Memory} memory
 * @param {string[]} texts of its tokens
 * @returns {Turn[]}
 */
export function turnsOf(memory, texts) {
  const count = Math.min(memory.tokens, texts.length);
  if (!count) return [];
  /** @type {Turn[]} */
  const turns = [];
  // Before the turns, between them and after them is what was fed, and a turn in progress.
  for (const turn of [...namedTurns(memory.spans, texts), null]) {
    const [from, to] = [turns.at(-1)?.end || 0, turn ? turn.start : count];
    const messages = messageTurns(texts.slice(0, to), from);
    turns.push(...(memory.busy && !turn ? withTurnInProgress(messages, nextNumber(memory.spans)) : messages));
    if (turn) turns.push(turn);
  }
  return withOwnLabels(turns);
}

// Numbers texts and messages of the same label, in the text's order.
/** @param {Turn[]} turns */
function withOwnLabels(turns) {
  const taken = new Set();
  return turns.map((turn) => {
    let { label } = turn;
    for (let next = 2; taken.has(label); next += 1) label = `${turn.label.replace(/ \d+$/, "")} ${next}`;
    taken.add(label);
    return { ...turn, label };
  });
}

/** @param {Record<string, Span>} spans */
const turnNumbers = (spans) =>
  Object.keys(spans)
    .map((label) => /^turn (\d+)$/.exec(label))
    .flatMap((match) => (match ? [Number(match[1])] : []))
    .sort((a, b) => a - b);

/** Returns the number of a session's next turn. @param {Record<string, Span>} spans */
export const nextNumber = (spans) => (turnNumbers(spans).at(-1) || 0) + 1;

/** @param {Record<string, Span>} spans @param {string[]} texts @returns {Turn[]} */
function namedTurns(spans, texts) {
  const numbers = turnNumbers(spans);
  if (!numbers.length && !spans.system && !spans.opening) return [];
  /** @param {string} label @param {Role} role @param {number} [from] @param {number} [to] around it @returns {Part[]} */
  const part = (label, role, from, to) => {
    const span = spans[label];
    if (!span || span.end <= span.start) return [];
    const { start, end } = wholeMessage(texts, span, from, to);
    return [{ label, role, start, end, text: joined(texts, start, end) }];
  };
  /** @type {Turn[]} */
  const turns = numbers.map((number) => {
    const label = `turn ${number}`;
    const { start, end } = spans[label];
    const [question, answer] = [spans[`${label} question`], spans[`${label} answer`]];
    const asked = part(`${label} question`, "question", start, answer?.start ?? end);
    const answered = part(`${label} answer`, "answer", question?.end ?? start, end).map((own) => withReasoning(own, texts, spans[`${label} reasoning`]));
    return { label, number, start, end, parts: [...asked, ...answered] };
  });
  // The opening is what a template writes by itself: it has no text that was said.
  const label = spans.system ? "system" : "opening";
  if (spans[label]) {
    const { start, end } = spans[label];
    turns.unshift({ label, number: 0, start, end, parts: part("system text", "system") });
  }
  return turns.filter(({ start, end }) => end > start);
}

/**
 * Returns what the chat template wrote before the first message, without its marks: the model's own system prompt, if it has one.
 * @param {Memory} memory @param {string[]} texts of its tokens
 */
export function openingText({ spans: { opening } }, texts) {
  const text = opening ? joined(texts, opening.start, opening.end) : "";
  return text.replace(MARKER, "").replace(/<[^<>]*>/g, "").trim();
}

/** @param {Part} part @param {string[]} texts @param {Span | undefined} span @returns {Part} */
function withReasoning(part, texts, span) {
  if (!span || span.start < part.start || span.end > part.end) return part;
  const from = joined(texts, part.start, span.start).length;
  return { ...part, reasoning: { from, to: from + joined(texts, span.start, span.end).length } };
}

/** @param {string[]} texts @param {number} start @param {number} end */
const joined = (texts, start, end) => texts.slice(start, end).join("");

/**
 * Returns how many tokens and cells of `start ... end - 1` have each standing, in the text's order.
 * @param {Memory} memory @param {number} start @param {number} end
 * @returns {Share[]}
 */
export function sharesOf(memory, start, end) {
  const perToken = cellsPerCompressedToken(memory);
  return memory.runs.flatMap((run) => {
    const tokens = Math.min(end, run.start + run.count) - Math.max(start, run.start);
    if (tokens <= 0) return [];
    return [{ standing: run.standing, tokens, cells: tokens * cellsPerToken(run.standing, perToken) }];
  });
}

/** @param {string} standing @param {number} compressed */
function cellsPerToken(standing, compressed) {
  if (standing === "forgotten") return 0;
  return standing === "compressed" ? compressed : 1;
}

// What compressed tokens hold on average: all cells that are neither residual nor those of other tokens.
/** @param {Memory} memory */
function cellsPerCompressedToken(memory) {
  const compressed = countOf(memory, "compressed");
  if (!compressed) return 0;
  const others = memory.tokens - compressed - countOf(memory, "forgotten") + residualCells(memory);
  return Math.min(1, Math.max(0, (memory.cells - others) / compressed));
}

/** @param {Memory} memory @param {string} standing */
export const countOf = (memory, standing) =>
  memory.runs.filter((run) => run.standing === standing).reduce((sum, run) => sum + run.count, 0);

/**
 * Returns how many of a session's cells are residual: they stand for evicted ones and belong to no token.
 * @param {Memory} memory
 */
export const residualCells = (memory) => (memory.heads ? memory.residual_cells / memory.heads : 0);

/**
 * Returns where the checkpoints of a turn are, as parts of its tokens: 1 is its end.
 * @param {Memory} memory @param {number} start @param {number} end
 */
export function checkpointsOf(memory, start, end) {
  const inside = memory.checkpoints.filter((at) => start < at && at <= end);
  return inside.map((at) => ({ at, part: (at - start) / (end - start) }));
}

/**
 * Returns the ranges of `start ... end - 1` whose tokens have a wanted standing.
 * @param {Memory} memory @param {number} start @param {number} end @param {(standing: string) => boolean} wanted
 */
export function rangesOf(memory, start, end, wanted) {
  /** @type {{start: number, end: number}[]} */
  const ranges = [];
  for (const run of memory.runs) {
    const [from, to] = [Math.max(start, run.start), Math.min(end, run.start + run.count)];
    const last = ranges.at(-1);
    if (to <= from || !wanted(run.standing)) continue;
    if (last?.end === from) last.end = to;
    else ranges.push({ start: from, end: to });
  }
  return ranges;
}

/**
 * Returns a token's standing; "" beyond the text.
 * @param {Pick<Memory, "runs">} memory @param {number} token
 */
export const statusOf = ({ runs }, token) => runs.find(({ start, count }) => token >= start && token < start + count)?.standing || "";

/**
 * Whether the session can be forked or rewound to its first `at` tokens.
 * @param {Memory} memory @param {number} at
 */
export const canGoBackTo = ({ tokens, rewind_room }, at) => tokens - at <= rewind_room;

/**
 * Whether a range can be removed; one of which nothing is forgotten can be replaced, too.
 * @param {Memory} memory @param {{start: number, end: number}} range
 */
export const canRemove = (memory, { start, end }) =>
  end === memory.tokens ? canGoBackTo(memory, start) : sharesOf(memory, start, end).every(({ standing }) => memory.removable.includes(standing));

/**
 * Returns a turn's label as a title, such as "Turn 2".
 * @param {Turn} turn
 */
export const turnTitle = ({ label }) => label.replace(/^./, (letter) => letter.toUpperCase());

/** @param {Turn} turn */
const contentOf = ({ parts }) => parts.map(({ role, text }) => `${role} ${text}`);

/** Returns what a turn says. @param {Turn} turn */
export const turnText = (turn) => contentOf(turn).join("\n");

/**
 * Returns the turns that were said, or gone on with, since an earlier state of the conversation.
 * @param {Turn[]} turns @param {Turn[]} earlier
 * @param {boolean} allowsChange whether the text of one turn may differ: a message was replaced, or answered once more
 */
export function turnsSince(turns, earlier, allowsChange) {
  let [rest, mayDiffer] = [earlier.map(contentOf), allowsChange];
  return turns.filter((turn) => {
    const texts = contentOf(turn);
    if (!texts.length || turn.parts[0].role === "system") return false;
    let at = rest.findIndex((before) => before.length === texts.length && texts.every((text) => before.includes(text)));
    if (at < 0 && mayDiffer) {
      at = rest.findIndex((before) => texts.some((text) => before.includes(text)));
      if (at < 0 && texts.length === 1 && rest[0]?.length === 1) at = 0; // the whole of a text that was fed
      mayDiffer = at < 0;
    }
    rest = rest.slice(at + 1);
    return at < 0;
  });
}

/**
 * Returns what the newest turn does not say of a message; "" if that was read to its end, with what the template adds.
 * @param {Turn[]} turns @param {string} content
 */
export function unreadOf(turns, content) {
  const turn = turns.at(-1);
  const question = turn?.parts.find(({ role }) => role === "question");
  const read = question?.text.trim() || "";
  if (!turn || !question || !content.trim().startsWith(read)) return content;
  return content.trim() === read && question.end < turn.end ? "" : content.trim().slice(read.length) || content;
}

const END_TOKENS = 2; // that a template writes after a message, once the next one follows

/**
 * Returns a turn's standing in words, such as "pinned", or "6 of 20 tokens pinned, 14 forgotten" if its tokens differ.
 * @param {Share[]} shares
 */
export function standingText(shares) {
  const names = [...new Set(shares.map(({ standing }) => standing))];
  if (names.length <= 1) return names[0] || "";
  /** @param {string} name */
  const tokens = (name) => shares.filter(({ standing }) => standing === name).reduce((sum, share) => sum + share.tokens, 0);
  const all = shares.reduce((sum, share) => sum + share.tokens, 0);
  const count = (/** @type {string} */ name) => tokens(name).toLocaleString("en-US");
  for (const name of ["pinned", "compressed"]) if (!names.includes("forgotten") && tokens(name) > all * 0.9) return name; // all but the template's own tokens
  const [first, ...others] = ["pinned", "compressed", "forgotten"].filter((name) => names.includes(name));
  if (!first) return names.sort((a, b) => tokens(b) - tokens(a))[0];
  return [`${count(first)} of ${all.toLocaleString("en-US")} tokens ${first}`, ...others.map((name) => `${count(name)} ${name}`)].join(", ");
}

/**
 * Returns the shares of a whole turn without the template's end, if that alone is forgotten of a pinned turn: it came after the pin.
 * @param {Share[]} shares
 */
export function withoutEnd(shares) {
  const [end, others] = [shares.at(-1), shares.slice(0, -1)];
  const isEnd = end?.standing === "forgotten" && end.tokens <= END_TOKENS && standingText(others) === "pinned";
  return isEnd ? others : shares;
}

/** @param {Share[]} shares */
export const cellsOf = (shares) => shares.reduce((sum, { cells }) => sum + cells, 0);

/**
 * Returns the parts of a turn that are pinned apart, with the template's tokens around them: its question and its answer, or all of it.
 * @param {Turn} turn @returns {{name: string, start: number, end: number}[]}
 */
export function pinnable({ start, end, parts }) {
  const [question, answer] = parts;
  if (!answer) return [{ name: "", start, end }];
  return [{ name: question.role, start, end: answer.start }, { name: answer.role, start: answer.start, end }];
}
