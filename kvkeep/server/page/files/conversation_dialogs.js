// What the list of conversations does with one: loaded once it is asked for.

import { ApiError, messageOf, send } from "./api.js";
import { drop } from "./chat_settings.js";
import { conversationsChanged, focusItem, withParent } from "./conversations.js";
import { isOpen, promptDialog } from "./dialog.js";
import { h, showStatus } from "./dom.js";
import { changeError, changeHeaders } from "./session_change.js";
import { knownSessions } from "./session_list.js";
import { isUndoName } from "./undo.js";
import { copiesOf, deleteCopies } from "./undo_copies.js";

/**
 * Asks for a title of a conversation.
 * @param {SessionEntry} entry @param {string} title that it has
 */
export async function rename({ name }, title) {
  if (isOpen()) return;
  const values = await promptDialog("Rename", [{ name: "title", label: "Title", value: title, maxlength: "200", required: true }], "Rename");
  focusItem(name);
  if (!values) return;
  await send("PUT", `/v1/sessions/${name}/title`, { title: String(values.title).trim() }).catch((error) => showStatus(messageOf(error), true));
  conversationsChanged();
}

/**
 * Asks whether a conversation is to be deleted, and deletes it.
 * @param {SessionEntry} entry as it was listed @param {string} title @param {() => Promise<void>} reload  loads the list again
 */
export async function remove(entry, title, reload) {
  const { name } = entry;
  if (isOpen()) return;
  const hasBranches = knownSessions().some((other) => withParent(other).parent === name && !isUndoName(other.name));
  const note = `Its text and its memory are removed; this cannot be undone.${hasBranches ? " Its branches stay." : ""}`;
  if (!(await promptDialog(`Delete "${title}"?`, [], "Delete", h("p", {}, note)))) return focusItem(name);
  const links = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("#conversations a")]).map((other) => other.dataset.name);
  const at = links.indexOf(name);
  await deleteConversation(entry, title);
  await reload();
  if (document.activeElement === document.body) focusItem(links[at + 1] || links[at - 1] || "");
}

// Deletes a session as it was listed; an answer is stopped first. While the session is busy, tries again for three seconds.
/** @param {SessionEntry} entry */
async function deleteIdle({ name, revision, busy }) {
  for (let tries = 1; ; tries += 1) {
    try {
      const headers = busy || tries > 1 ? {} : changeHeaders(revision); // what it was busy with may have ended
      return await send("DELETE", `/v1/sessions/${name}`, null, { headers });
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 409 || tries === 15) throw error;
      await send("POST", `/v1/sessions/${name}/stop`); // an answer, if it is busy with one
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }
}

/**
 * Deletes a conversation and what is kept for its undo, and says so. The page leaves it first.
 * @param {SessionEntry} entry as it was listed @param {string} title
 */
async function deleteConversation(entry, title) {
  const { name } = entry;
  try {
    const copies = await copiesOf(name);
    if (location.hash === `#/chat/${name}`) {
      const left = new Promise((resolve) => window.addEventListener("hashchange", resolve, { once: true }));
      location.hash = "#/";
      await left; // ends this page's requests; another view begins without a message
    }
    await deleteIdle(entry);
    drop(name);
    await deleteCopies(copies);
    showStatus(`“${title}” was deleted.`);
  } catch (error) {
    showStatus(changeError(error), true);
  }
}
