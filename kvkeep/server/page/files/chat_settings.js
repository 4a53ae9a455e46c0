// What this browser keeps of a conversation, such as its sampling settings. Titles of conversations.

import { h } from "./dom.js";

/** @typedef {{temperature?: number, top_p?: number, repeat_penalty?: number, max_tokens?: number}} Sampling */
/** @typedef {{note: import("./message_note.js").Note, signature: string}} KeptNote */
/** @typedef {{sampling?: Sampling, regenerated?: string, edits?: Record<string, string>, branchOf?: string, begunFrom?: string, notes?: Record<string, KeptNote | KeptNote[]>}} Kept */
/** @typedef {{policy?: string, max_kv_size?: number}} SessionSettings  Of a new session. */
/** @typedef {{session: SessionSettings, system: string, sampling: Sampling}} Chosen  For a conversation that has not begun. */

const STORE = "kvkeep conversations";

/** @type {[string, Record<string, Kept>]} */
let latest = ["{}", {}]; // what was stored when it was last read, and what it says

function load() {
  try {
    const text = localStorage.getItem(STORE) || "{}";
    if (text !== latest[0]) latest = [text, JSON.parse(text)];
    return latest[1];
  } catch {
    return {};
  }
}

/** @param {Record<string, Kept>} all */
function store(all) {
  try {
    localStorage.setItem(STORE, JSON.stringify(all));
  } catch {
    // Without storage, settings last as long as the page.
  }
}

/** @param {string} name @returns {Kept} */
export const keptOf = (name) => load()[name] || {};

/** @param {string} name @param {Kept} change */
export function keep(name, change) {
  const all = load();
  store({ ...all, [name]: { ...all[name], ...change } });
}

/** @param {string} name */
export function drop(name) {
  const { [name]: _, ...others } = load();
  store(others);
}

/**
 * Returns a conversation's title: the one that was given, or its session's name.
 * @param {{name: string, title: string | null}} session
 */
export const titleOf = ({ name, title }) => title || name;

const BRANCH_MARK = / \(branch( \d+)?\)$/; // at the end of a branch's title

/**
 * Creates the parts of a title: the mark of a branch is shown whole where the rest is cut.
 * @param {string} title
 */
export function titleParts(title) {
  const mark = BRANCH_MARK.exec(title)?.[0] || "";
  return [h("span", { class: "cut" }, title.slice(0, title.length - mark.length)), mark ? h("span", { class: "mark" }, mark) : null];
}

const LONGEST_TITLE = 200; // that the server takes

/** Cuts a text to a number of characters. @param {string} text @param {number} most */
function shortened(text, most) {
  const characters = [...text]; // one of two code units stays whole
  return characters.length > most ? `${characters.slice(0, most - 3).join("")}...` : text;
}

/**
 * Returns the title of a new branch of a conversation, which no other has.
 * @param {string} title of the conversation @param {Iterable<string>} taken
 */
export function branchTitle(title, taken) {
  const [own, others] = [shortened(title.replace(BRANCH_MARK, ""), LONGEST_TITLE - " (branch 9999)".length), new Set(taken)];
  let result = `${own} (branch)`;
  for (let number = 2; others.has(result); number += 1) result = `${own} (branch ${number})`;
  return result;
}

/**
 * Returns a session name that says how a conversation begins.
 * @param {string} text @param {string} [suffix]
 */
export function nameFor(text, suffix = Math.random().toString(36).slice(2, 6)) {
  const words = text
    .normalize("NFKD")
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-+|-+$/g, "");
  return `${words.slice(0, 40).replace(/-+$/, "") || "chat"}-${suffix}`;
}

/**
 * Returns a title for a conversation that begins with a text.
 * @param {string} text
 */
export function titleFor(text) {
  const line = text.trim().split("\n", 1)[0].trim();
  return shortened(line, 60);
}

/**
 * Returns the tokens of the longest answer, unless Settings say another: half of the memory's budget at most.
 * @param {{max_kv_size: number | null}} memory
 */
export const longestAnswer = ({ max_kv_size }) => Math.min(1024, Math.max(1, Math.floor((max_kv_size ?? Infinity) / 2)));
