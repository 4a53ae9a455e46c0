// Branches of a conversation, and new ones with its settings.

import { send } from "./api.js";
import { branchTitle, keep, keptOf, nameFor, titleFor, titleOf } from "./chat_settings.js";
import { conversationsChanged } from "./conversations.js";
import { showStatus } from "./dom.js";
import { changeError, changeHeaders } from "./session_change.js";
import { fetchSessions } from "./session_list.js";

/**
 * Forks a conversation; returns the fork's name, or null.
 * @param {Memory} memory of the revision that is forked @param {number | null} at @param {string} text that it goes on with
 */
export async function forkConversation(memory, at, text) {
  const others = text ? [] : await fetchSessions().catch(() => []);
  const title = text ? titleFor(text) : branchTitle(titleOf(memory), others.map(titleOf));
  return createBeside(memory.name, title, `/v1/sessions/${memory.name}/fork`, at === null ? {} : { at }, changeHeaders(memory.revision), { branchOf: memory.name });
}

/**
 * Creates a conversation with the sampling settings of another one; returns its name, or null.
 * @param {string} other its name @param {string} title @param {string} path @param {any} body @param {Record<string, string>} headers @param {import("./chat_settings.js").Kept} kept of it, besides
 */
export async function createBeside(other, title, path, body, headers, kept) {
  try {
    const created = await send("POST", path, { name: nameFor(title.slice(0, 40)), title, ...body }, { headers });
    const { sampling, notes } = keptOf(other);
    keep(created.name, { sampling, notes, ...kept });
    conversationsChanged();
    return /** @type {string} */ (created.name);
  } catch (error) {
    showStatus(changeError(error), true);
    return null;
  }
}
