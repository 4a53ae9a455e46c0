// The forks that are kept for undo: loaded with what changes a session.

import { get, send } from "./api.js";
import { copiesAmong, MOST, stemOf } from "./undo.js";

/** Returns all copies for a session's undo. @param {string} session */
export const copiesOf = async (session) => copiesAmong((await get("/v1/sessions")).data, session);

/** Deletes copies that are no longer of use; what is left of them is dropped with the session. @param {{name: string}[]} copies */
export async function deleteCopies(copies) {
  for (const { name } of copies) await send("DELETE", `/v1/sessions/${name}`).catch(() => {});
}

/**
 * Keeps a fork of a session as it is at a revision. Returns its name.
 * @param {string} session @param {number} revision @param {string} operation a word
 */
export async function keepUndo(session, revision, operation) {
  const copies = await copiesOf(session);
  const name = `_undo.${stemOf(session)}.${(copies[0]?.number || 0) + 1}.${operation}`;
  await send("POST", `/v1/sessions/${session}/fork`, { name }, { headers: { "If-Match": `"${revision}"` } });
  await deleteCopies(copies.slice(MOST - 1));
  return name;
}

/**
 * Drops the fork of a change that failed, if the session is at the revision of before and the change is not in progress.
 * @param {string} name @param {string} session @param {number} revision
 */
export async function dropIfUnchanged(name, session, revision) {
  const now = await get(`/v1/sessions/${session}/memory`);
  if (now.revision === revision && !now.busy) await send("DELETE", `/v1/sessions/${name}`);
}
