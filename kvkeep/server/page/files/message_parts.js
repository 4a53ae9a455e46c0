// What an answer's text consists of: reasoning, tool calls, and what is said.

/** @typedef {{kind: "reasoning" | "tool" | "text", text: string, open: boolean}} Piece  open: whether a block has not ended, as in an answer that is being generated. */

const END = String.raw`(?![\s\S])`; // of the text: "$" ends a line
// Code, in which tags are no blocks.
const CODE = String.raw`^[ \t>]*(${"`"}{3,})[\s\S]*?(?:\1|${END})|(${"`"}+)[^${"`"}\n]+\2`;
// What a call begins with: JSON, XML, or a name and its arguments, of which there may be a part yet.
const CALL = String.raw`\s*[{[<]|\s*[\w.-]+\s*<(?:arg_key|/tool_call)>|[\w.-]*\s*(?:<[\w/]*)?${END}`;
// A call anywhere; a result that begins a line; reasoning that does, and ends or has its mark alone there.
const TOOL = String.raw`<(tool_call|tool_response)>(?=${CALL})|^[ \t]*<(tool_response)>`;
const THOUGHT = String.raw`^[ \t]*<(think|thinking|reasoning)>(?=[ \t]*$|[\s\S]*?</\5>)`;
const BLOCKS = new RegExp(String.raw`${CODE}|(?:${TOOL}|${THOUGHT})([\s\S]*?)(?:</(?:\3\4\5)>|${END})`, "gm");
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
  for (const match of text.matchAll(BLOCKS)) {
    const [tool, thought] = [match[3] || match[4], match[5]];
    if (!tool && !thought) continue;
    say(text.slice(end, match.index));
    pieces.push({ kind: tool ? "tool" : "reasoning", text: match[6].trim(), open: !match[0].endsWith(`</${tool || thought}>`) });
    end = match.index + match[0].length;
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

// A block of code from a fence to one that is as long, each in a line of its own.
const FENCED = /^(`{3,})[^`\n]*\n(?:[\s\S]*?\n)?\1`*[ \t]*$/gm;

/**
 * Splits a message into its blocks of code, with their fences, and the text around them.
 * @param {string} text @returns {{isCode: boolean, text: string}[]}
 */
export function splitFences(text) {
  /** @type {{isCode: boolean, text: string}[]} */
  const pieces = [];
  let end = 0;
  /** @param {string} said */
  const say = (said) => said.trim() && pieces.push({ isCode: false, text: said.replace(/^\n+|\s+$/g, "") });
  for (const match of text.matchAll(FENCED)) {
    say(text.slice(end, match.index));
    pieces.push({ isCode: true, text: match[0] });
    end = match.index + match[0].length;
  }
  if (!end) return [{ isCode: false, text }];
  say(text.slice(end));
  return pieces;
}

/**
 * Returns a message with files before it, each in a fence that its text does not end.
 * @param {string} message @param {{name: string, text: string}[]} files
 */
export function withFiles(message, files) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return blocks.join("") + message;
}
