// The deletion of a conversation: loaded once it is asked for.

import { ApiError, messageOf, send } from "./api.js";
import { drop } from "./chat_settings.js";
import { showStatus } from "./dom.js";
import { undoNamesOf } from "./undo.js";

// Deletes a session; an answer is stopped first. While the session is busy, tries again for three seconds.
/** @param {string} name */
async function deleteIdle(name) {
  for (let tries = 1; ; tries += 1) {
    try {
      return await send("DELETE", `/v1/sessions/${name}`);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 409 || tries === 15) throw error;
      await send("POST", `/v1/sessions/${name}/stop`); // an answer, if it is busy with one
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }
}

/**
 * Deletes a conversation and what is kept for its undo, and says so. The page leaves it first.
 * @param {string} name @param {string} title
 */
export async function deleteConversation(name, title) {
  try {
    const undoNames = await undoNamesOf(name);
    if (location.hash === `#/chat/${name}`) {
      const left = new Promise((resolve) => window.addEventListener("hashchange", resolve, { once: true }));
      location.hash = "#/";
      await left; // ends this page's requests; another view begins without a message
    }
    await deleteIdle(name);
    for (const undo of undoNames) await send("DELETE", `/v1/sessions/${undo}`);
    drop(name);
    showStatus(`“${title}” was deleted.`);
  } catch (error) {
    showStatus(messageOf(error), true);
  }
}
