// Notes on messages: that an answer was stopped or cut off, or a message replaced. This browser keeps them by what the messages said.

import { h } from "./dom.js";
import { keep, keptOf } from "./chat_settings.js";

/** @typedef {import("./turns.js").Part} Part */
/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {"stopped" | "length" | "full" | "replaced" | "open"} Note  open: an answer without an end, it is not known why */

const MOST = 10; // notes on one message
const TEXTS = { stopped: "Stopped before its end", length: "Cut off at the longest answer", full: "Cut off, as memory is full", replaced: "Replaced", open: "Not ended" };

// An answer of the same name that was generated again, or replaced, is another one.
/** @param {{text: string}} part */
export function signatureOf({ text }) {
  let hash = 0;
  for (let at = 0; at < text.length; at += 1) hash = (Math.imul(hash, 31) + text.charCodeAt(at)) | 0;
  return `${text.length} ${hash}`;
}

// Returns the notes on what a message said, before each change too: Undo takes it back.
/** @param {string} name @param {Part} part */
const notesOf = (name, { label }) => [keptOf(name).notes?.[label] ?? []].flat();

/**
 * Keeps the note on a message in place of the one before.
 * @param {string} name of its session @param {Part} part @param {Note | null} note null for none
 */
export function keepNote(name, part, note) {
  const signature = signatureOf(part);
  const others = notesOf(name, part).filter((kept) => kept.signature !== signature).slice(1 - MOST);
  keep(name, { notes: { ...keptOf(name).notes, [part.label]: note ? [...others, { note, signature }] : others } });
}

/** Drops the notes that answers have no end: after an undo they may have one. @param {string} name of their session */
export function dropOpenNotes(name) {
  const notes = Object.entries(keptOf(name).notes || {}).map(([label, kept]) => [label, [kept].flat().filter(({ note }) => note !== "open")]);
  keep(name, { notes: Object.fromEntries(notes) });
}

/**
 * Returns the note on a message as it is now; null if there is none.
 * @param {string} name of its session @param {Part} part
 */
export function noteOf(name, part) {
  return notesOf(name, part).find(({ signature }) => signature === signatureOf(part))?.note ?? null;
}

/**
 * Returns a note in words. isNewest: whether the message's turn is the newest one, which can be continued.
 * @param {Note} note @param {boolean} isNewest
 */
export const noteText = (note, isNewest) => TEXTS[note] + ((isNewest && NEXT[note]) || "");

/** @type {Partial<Record<Note, string>>} */
const NEXT = { length: ": Continue, or allow more in Settings", open: ": Continue", full: ": remove or compress text, then Continue" };

/** @type {Record<string, Note>} */
const BY_END = { length: "length", full: "full", cancelled: "stopped" };

/**
 * Returns the note on a part of the newest turn that nothing was kept of, by why the server says that it ended. An answer that the model ended has the end token behind it.
 * @param {Memory} memory @param {Part} part @param {Turn} turn @returns {Note | null}
 */
export function openNote({ busy, last_answer }, { role, end }, turn) {
  if (busy || role !== "answer" || turn.parts.length < 2 || end !== turn.end) return null;
  return BY_END[last_answer?.ended ?? ""] || "open";
}

/**
 * Keeps why the newest answer has no end, which its text no longer shows once another turn follows; returns the turns.
 * @param {Memory} memory @param {Turn[]} turns
 */
export function withOpenNote(memory, turns) {
  const turn = turns.at(-1);
  const part = turn?.parts.at(-1);
  const note = turn && part && !noteOf(memory.name, part) && openNote(memory, part, turn);
  if (note) keepNote(memory.name, part, note);
  return turns;
}

/**
 * Creates the note on a message; null if there is none.
 * @param {Memory} memory @param {Part} part @param {Turn} turn @param {boolean} isNewest as of `noteText`
 */
export function noteElement(memory, part, turn, isNewest) {
  const note = noteOf(memory.name, part) || (isNewest ? openNote(memory, part, turn) : null);
  return note && h("span", { class: "standing note" }, noteText(note, isNewest));
}
