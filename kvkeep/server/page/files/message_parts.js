// What an answer's text consists of: reasoning, tool calls, and what is said.

/** @typedef {{kind: "reasoning" | "tool" | "text", text: string, open: boolean}} Piece */

const BLOCKS = /<(think|thinking|reasoning|tool_call|tool_response)>([\s\S]*?)(?:<\/\1>|$)/g;

/**
 * Splits an answer into its pieces. open: whether a block has not ended, as in an answer that is being generated.
 * @param {string} text @returns {Piece[]}
 */
export function splitAnswer(text) {
  /** @type {Piece[]} */
  const pieces = [];
  let end = 0;
  /** @param {string} said */
  const say = (said) => {
    if (said.trim()) pieces.push({ kind: "text", text: said, open: false });
  };
  for (const match of text.matchAll(BLOCKS)) {
    say(text.slice(end, match.index));
    const kind = match[1].startsWith("tool") ? "tool" : "reasoning";
    if (match[2].trim()) pieces.push({ kind, text: match[2].trim(), open: !match[0].endsWith(`</${match[1]}>`) });
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
  const match = /"name"\s*:\s*"([^"]+)"/.exec(text) || /<function=([^>]+)>/.exec(text);
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
