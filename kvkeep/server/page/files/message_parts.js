// What an answer's text consists of: reasoning, tool calls, and what is said.

/** @typedef {{kind: "reasoning" | "tool" | "text", text: string, open: boolean}} Piece  open: whether a block has not ended, as in an answer that is being generated. */

const END = String.raw`(?![\s\S])`; // of the text: "$" ends a line
// Code, in which tags are no blocks.
const CODE = String.raw`^[ \t>]*(${"`"}{3,})[\s\S]*?(?:\1|${END})|(${"`"}+)[^${"`"}\n]+\2`;
// What a call begins with: JSON, XML, or a name and its arguments, of which there may be a part yet.
const CALL = String.raw`\s*[{[<]|\s*[\w.-]+\s*<(?:arg_key|/tool_call)>|[\w.-]*\s*(?:<[\w/]*)?${END}`;
// A call anywhere; a result that begins a line; reasoning that does, and ends or has its mark alone there.
const TOOL = String.raw`<(tool_call|tool_response)>(?=${CALL})|^[ \t]*<(tool_response)>`;
const THOUGHT = String.raw`^[ \t]*<(think|thinking|reasoning)>`;
const OPENINGS = String.raw`${CODE}|${TOOL}|${THOUGHT}`;
const REST_OF_LINE = /[ \t]*$/my;
const LEADING = /^\s*<(think|thinking|reasoning)>([\s\S]*?)(?:<\/\1>|$)/;
const UNOPENED_END = /\n[ \t]*<\/(?:think|thinking|reasoning)>[ \t]*(?=\n|$)/;
// Marks around the reasoning that the server names.
const PIPED = String.raw`(?:<\|(?:start|channel)\|?>\w*|<\|\w+\|>)`;
const BEGIN_MARK = new RegExp(String.raw`(?:${PIPED}+|<\w+>|\[[A-Z]+\]|Here is my thought process:)\s*$`);
const END_MARK = new RegExp(String.raw`^\s*(?:<\/\w+>|\[\/[A-Z]+\]|<\w+\|>|Here is my response:|)${PIPED}*`);

/** @typedef {{before: string, thought: string, after: string, open: boolean}} Reasoned  A text with its reasoning apart. */

/**
 * Returns the reasoning that a text begins with. The template may have written the mark before it.
 * @param {string} text @returns {Reasoned}
 */
function leadingReasoning(text) {
  const leading = LEADING.exec(text);
  if (leading) return { before: "", thought: leading[2], after: text.slice(leading[0].length), open: !leading[0].endsWith(`</${leading[1]}>`) };
  const end = UNOPENED_END.exec(text);
  const thought = text.slice(0, end?.index ?? 0);
  const isInCode = thought.split(/^[ \t]*```/m).length % 2 === 0;
  if (!end || isInCode || /<(think|reasoning)/.test(thought)) return { before: "", thought: "", after: text, open: false };
  return { before: "", thought, after: text.slice(end.index + end[0].length), open: false };
}

/** @param {string} text @param {{from: number, to: number}} reasoning @returns {Reasoned} */
const namedReasoning = (text, { from, to }) => ({ before: text.slice(0, from).replace(BEGIN_MARK, ""), thought: text.slice(from, to), after: text.slice(to).replace(END_MARK, ""), open: false });

/**
 * Splits an answer into its pieces.
 * @param {string} text @param {{from: number, to: number}} [reasoning] where the server says that it is
 * @returns {Piece[]}
 */
export function splitAnswer(text, reasoning) {
  const { before, thought, after, open } = reasoning ? namedReasoning(text, reasoning) : leadingReasoning(text);
  /** @type {Piece[]} */
  const thoughts = thought.trim() ? [{ kind: "reasoning", text: thought.trim(), open }] : [];
  return [...splitSaid(before), ...thoughts, ...splitSaid(after)];
}

/** @param {string} text without the reasoning that it begins with @returns {Piece[]} */
function splitSaid(text) {
  /** @type {Piece[]} */
  const pieces = [];
  let end = 0;
  /** @param {string} said */
  const say = (said) => {
    if (said.trim()) pieces.push({ kind: "text", text: said, open: false });
  };
  const openings = new RegExp(OPENINGS, "gm");
  const unclosed = new Set(); // tags that nothing ends from here on
  for (let match = openings.exec(text); match; match = openings.exec(text)) {
    const [tool, thought] = [match[3] || match[4], match[5]];
    const [tag, start] = [tool || thought, openings.lastIndex];
    if (!tag) continue;
    const close = unclosed.has(tag) ? -1 : text.indexOf(`</${tag}>`, start);
    if (close < 0) unclosed.add(tag);
    REST_OF_LINE.lastIndex = start;
    if (close < 0 && thought && !REST_OF_LINE.test(text)) continue;
    say(text.slice(end, match.index));
    pieces.push({ kind: tool ? "tool" : "reasoning", text: text.slice(start, close < 0 ? undefined : close).trim(), open: close < 0 });
    end = openings.lastIndex = close < 0 ? text.length : close + tag.length + 3;
  }
  say(text.slice(end));
  return pieces;
}

/**
 * Returns a name for a tool call: that of its function, if the text says one.
 * @param {string} text
 */
export function toolName(text) {
  const match = /"name"\s*:\s*"([^"]+)"/.exec(text) || /<function=([^>]+)>/.exec(text) || /^([\w.-]+)\s*<arg_key>/.exec(text);
  return match ? match[1] : "tool";
}

/**
 * Splits a message into its blocks of code, with their fences, and the text around them.
 * A block is from a fence to one that is as long, each in a line of its own.
 * @param {string} text @returns {{isCode: boolean, text: string}[]}
 */
export function splitFences(text) {
  const lines = text.split("\n");
  const closing = lines.map((line) => /^(`{3,})\s*$/.exec(line)?.[1].length || 0);
  const longest = [...closing, 0]; // of each line and those after it
  for (let at = lines.length; at > 0; at -= 1) longest[at - 1] = Math.max(longest[at - 1], longest[at]);
  /** @type {{isCode: boolean, text: string}[]} */
  const pieces = [];
  let end = 0; // of the lines so far
  /** @param {number} next */
  const sayUpTo = (next) => {
    const said = lines.slice(end, next).join("\n");
    if (said.trim()) pieces.push({ isCode: false, text: said.replace(/^\n+/, "").trimEnd() });
  };
  for (let at = 0; at < lines.length; at += 1) {
    const ticks = /^(`{3,})[^`]*$/.exec(lines[at])?.[1].length;
    if (!ticks || longest[at + 1] < ticks) continue;
    sayUpTo(at);
    end = at + 1;
    while (closing[end] < ticks) end += 1;
    end += 1;
    pieces.push({ isCode: true, text: lines.slice(at, end).join("\n") });
    at = end - 1;
  }
  if (!end) return [{ isCode: false, text }];
  sayUpTo(lines.length);
  return pieces;
}

/**
 * Returns a message with files before it, each in a fence that its text does not end.
 * @param {string} message @param {{name: string, text: string}[]} files
 */
export function withFiles(message, files) {
  const blocks = files.map(({ name, text }) => {
    let longest = 2;
    for (const [ticks] of text.matchAll(/`+/g)) longest = Math.max(longest, ticks.length);
    const fence = "`".repeat(longest + 1);
    return `${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return blocks.join("") + message;
}
