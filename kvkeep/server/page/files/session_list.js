// The server's list of sessions: fetched once for all parts of the page that show it.

import { get } from "./api.js";
import { titleOf } from "./chat_settings.js";
import { sessionLink } from "./dom.js";

const PATH = "/v1/sessions?unnamed=true";

/** @type {SessionEntry[]} */
let latest = [];
let newest = 0; // the number of the last request: an older one that answers later is not shown
/** @type {Set<(entries: SessionEntry[]) => void>} */
const listeners = new Set();

/** Returns the sessions as they were last fetched. */
export const knownSessions = () => latest;

/**
 * Fetches the sessions and shows them to all listeners. Raises ApiError.
 * @returns {Promise<SessionEntry[]>}
 */
export async function fetchSessions() {
  const number = ++newest;
  const { data } = await get(PATH);
  if (number !== newest) return data;
  latest = data;
  for (const listener of listeners) listener(latest);
  return data;
}

/**
 * Calls a listener with the sessions each time they were fetched, until the signal aborts.
 * @param {(entries: SessionEntry[]) => void} listener @param {AbortSignal} signal
 */
export function onSessions(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
}

/** Returns the title of a session, as far as it is known. @param {string} name */
export const knownTitle = (name) => titleOf(latest.find((known) => known.name === name) || { name, title: null });

/** @param {string} name */
export const titledLink = (name) => sessionLink(name, knownTitle(name));
