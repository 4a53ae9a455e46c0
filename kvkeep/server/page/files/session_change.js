// What a change of a session is sent with, for the revision that is shown, and why it was refused.

import { ApiError, messageOf } from "./api.js";

export const CHANGED = "The conversation has changed since it was shown, so nothing was done. The page now shows its current state.";

export const BUSY = "Wait until the answer is complete, or stop it.";

export const CHANGING = "Wait until the change is complete.";

export const BUSY_ELSEWHERE = "An answer is being generated in this conversation, perhaps in another tab: wait until it is complete, or stop it.";

/** @type {Record<string, string>} */
const TEXTS = {
  session_busy: BUSY_ELSEWHERE,
  context_length_exceeded: "There is no room in memory for this text. Write a shorter one, have what follows evaluated again, or remove text first.",
};

/**
 * Whether a session is the one that was shown, as it was.
 * @param {Memory | null | undefined} shown @param {Memory | null | undefined} now
 */
export const isUnchanged = (shown, now) => shown?.created === now?.created && shown?.revision === now?.revision && shown?.tokens === now?.tokens;

/**
 * Returns the message for a failed change. Status 412: the session is at another revision.
 * @param {unknown} error
 */
export function changeError(error) {
  if (error instanceof ApiError && error.status === 412) return CHANGED;
  const code = error instanceof ApiError ? error.code : "";
  return (code && TEXTS[code]) || messageOf(error);
}

/**
 * Returns the headers of a change for one revision, under a key that lets it be repeated.
 * @param {number} revision
 */
export const changeHeaders = (revision) => ({
  "If-Match": `"${revision}"`,
  "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()),
});
