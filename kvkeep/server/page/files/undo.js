// Undo: before a change a fork of the session is kept, to which the session is reverted.

import { get, send } from "./api.js";
import { signatureOf } from "./message_note.js";

/** Changes of a session that can be undone: each keeps a fork. */
export const MOST = 10;
const NAME = /^_undo\.(.+)\.(\d+)\.([a-z]+)$/;

/** Returns what stands for a session in the names of its copies, which the server limits. @param {string} session */
export const stemOf = (session) => (session.length > 70 ? `${session.slice(0, 50)}.${signatureOf({ text: session }).replace(/\D+/, ".")}` : session);

/** @param {string} name */
export const isUndoName = (name) => NAME.test(name);

/** Returns the number of a copy for undo: the newest has the highest. Of other names 0. @param {string} name */
const numberOf = (name) => Number(NAME.exec(name)?.[2] || 0);

/** Whether a name is that of a copy for a session's undo. @param {string} name @param {string} session */
export const isCopyOf = (name, session) => [stemOf(session), session.slice(0, 70)].includes(NAME.exec(name)?.[1] || "");

/**
 * Whether a session is a copy for the undo of another one that exists, or not the newest copy of one that does not.
 * @param {SessionEntry} entry @param {SessionEntry[]} entries all sessions
 */
export const isUndoCopy = (entry, entries) => isUndoName(entry.name) && entries.some(({ name, parent }) => name === entry.parent || (parent === entry.parent && numberOf(name) > numberOf(entry.name)));

/** @type {Record<string, string>} */
const WORDS = { delete: "remove", edit: "replace" };

/** Returns the word for a change, as its button says it. @param {string} operation */
export const wordOf = (operation) => WORDS[operation] || operation;

/** @typedef {{name: string, number: number, operation: string, tokens: number | undefined, created: number}} Step  tokens: the session's before the change, if it is in memory. */

/**
 * Returns the copies for a session's undo, the newest first: also those of an earlier session of its name.
 * @param {SessionEntry[]} entries all sessions @param {string} session @returns {Step[]}
 */
export const copiesAmong = (entries, session) =>
  entries
    .filter((entry) => entry.parent === session)
    .flatMap(({ name, tokens, created }) => {
      const match = NAME.exec(name);
      return match && isCopyOf(name, session) ? [{ name, number: Number(match[2]), operation: match[3], tokens, created }] : [];
    })
    .sort((a, b) => b.number - a.number);

/**
 * Returns the changes of a session that can be undone, the newest first.
 * @param {SessionEntry[]} entries all sessions @param {string} session
 */
export function stepsAmong(entries, session) {
  const start = entries.find(({ name }) => name === session)?.created ?? 0;
  return copiesAmong(entries, session).filter(({ created }) => created >= start);
}

/**
 * Returns the newest change to offer Undo for. Once a text has gone on, a pin is undone by its own button alone.
 * @param {Step[]} steps @param {number} tokens of the session now
 */
export const offeredStep = (steps, tokens) => steps.find((step) => !isObsolete(step, tokens));

/** @param {Step} step @param {number} tokens of the session now */
const isObsolete = ({ operation, tokens: before }, tokens) => operation === "pin" && before !== undefined && before !== tokens;

/**
 * Drops the forks of newest changes that are no longer offered, once a text has gone on.
 * @param {string} session @param {number} tokens of it now
 */
export async function dropObsolete(session, tokens) {
  const steps = stepsAmong((await get("/v1/sessions")).data, session);
  const first = steps.findIndex((step) => !isObsolete(step, tokens));
  for (const { name } of first < 0 ? steps : steps.slice(0, first)) await send("DELETE", `/v1/sessions/${name}`);
}
