// Undo: before a change a fork of the session is kept, which takes its place again.

import { get, send } from "./api.js";
import { signatureOf } from "./message_note.js";

/** Changes of a session that can be undone: each keeps a fork. */
export const MOST = 10;
const NAME = /^_undo\.(.+)\.(\d+)\.([a-z]+)$/;

/** Returns what stands for a session in the names of its copies, which the server limits. @param {string} session */
const stemOf = (session) => (session.length > 70 ? `${session.slice(0, 50)}.${signatureOf({ text: session }).replace(/\D+/, ".")}` : session);

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

/** @typedef {{name: string, number: number, operation: string, tokens: number | undefined}} Step  tokens: the session's before the change, if it is in memory. */

/**
 * Returns the changes of a session that can be undone, the newest first.
 * @param {string} session @returns {Promise<Step[]>}
 */
export async function undoSteps(session) {
  const { data } = await get("/v1/sessions");
  return stepsAmong(data, session);
}

/**
 * Returns those of `undoSteps` among all sessions.
 * @param {SessionEntry[]} entries @param {string} session @returns {Step[]}
 */
export function stepsAmong(entries, session) {
  return entries
    .filter((entry) => entry.parent === session)
    .flatMap((entry) => {
      const match = NAME.exec(entry.name);
      return match && isCopyOf(entry.name, session) ? [{ name: entry.name, number: Number(match[2]), operation: match[3], tokens: entry.tokens }] : [];
    })
    .sort((/** @type {Step} */ a, /** @type {Step} */ b) => b.number - a.number);
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
  const steps = await undoSteps(session);
  const first = steps.findIndex((step) => !isObsolete(step, tokens));
  for (const { name } of first < 0 ? steps : steps.slice(0, first)) await send("DELETE", `/v1/sessions/${name}`);
}

/** @param {string} session */
export const undoNamesOf = async (session) => (await undoSteps(session)).map(({ name }) => name);

/**
 * Keeps a fork of a session as it is at a revision. Returns its name.
 * @param {string} session @param {number} revision @param {string} operation a word
 */
export async function keepUndo(session, revision, operation) {
  const steps = await undoSteps(session);
  const name = `_undo.${stemOf(session)}.${(steps[0]?.number || 0) + 1}.${operation}`;
  await send("POST", `/v1/sessions/${session}/fork`, { name }, { headers: { "If-Match": `"${revision}"` } });
  for (const { name: old } of steps.slice(MOST - 1)) await send("DELETE", `/v1/sessions/${old}`);
  return name;
}

/**
 * Drops the fork of a change that failed, if the session is at the revision of before.
 * @param {string} name @param {string} session @param {number} revision
 */
export async function dropIfUnchanged(name, session, revision) {
  const now = await get(`/v1/sessions/${session}/memory`);
  if (now.revision === revision) await send("DELETE", `/v1/sessions/${name}`);
}
