// Live operations on sessions: one event stream for all views.

import { ApiError, streamEvents } from "./api.js";

const READING = ["generate", "feed"]; // operations whose tokens are all those that were evaluated
const RATE_WINDOW = 10_000; // milliseconds
const LONGEST_WAIT = 8000; // milliseconds between two attempts to connect
/** What listeners receive once a page that was hidden follows operations again. */
export const SHOWN_AGAIN = "shown again";

/** @typedef {Operation | typeof SHOWN_AGAIN | null} Event  null: after a reconnection, perhaps to a server that was restarted. */

/** @type {Set<(event: Event) => void>} */
const listeners = new Set();
/** @type {Map<string, [number, number][]>} */
const recentTokens = new Map(); // by session: [time, tokens] of each operation

/**
 * Calls a listener for each operation, and once some may have been missed, until the signal aborts.
 * @param {(event: Event) => void} listener @param {AbortSignal} signal
 */
export function onOperation(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
}

/** @param {string} session */
const recentOf = (session) => (recentTokens.get(session) || []).filter(([time]) => time > performance.now() - RATE_WINDOW);

// Returns a session's tokens per second over the last ten seconds.
/** @param {string} session */
export const rate = (session) => recentOf(session).reduce((sum, [, tokens]) => sum + tokens, 0) / (RATE_WINDOW / 1000);

let live = false;

/** Whether the server answers; while it does not, nothing is polled. */
export const isLive = () => live;

// Resolves once the page is in view. Returns whether it had to wait.
async function waitUntilShown() {
  if (!document.hidden) return false;
  await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  await waitUntilShown();
  return true;
}

export const KEY_REFUSED = "key refused";

/**
 * Follows the server's operations while the page is in view, reconnecting for ever: a browser has few connections to a host, for all its tabs.
 * Ends once the server refuses the API key.
 * @param {(state: string) => void} onState  receives "live", "not connected" or KEY_REFUSED
 */
export async function followOperations(onState) {
  let [failures, wasHidden] = [0, false];
  const onOpen = () => {
    const [hasFailed, hadPause] = [failures > 0, wasHidden];
    [live, failures, wasHidden] = [true, 0, false];
    onState("live");
    if (hasFailed || hadPause) notify(hasFailed ? null : SHOWN_AGAIN);
  };
  for (;;) {
    wasHidden = (await waitUntilShown()) || wasHidden;
    const ended = new AbortController();
    document.addEventListener("visibilitychange", () => document.hidden && ended.abort(), { signal: ended.signal });
    try {
      for await (const [, operation] of streamEvents("GET", "/v1/events", null, { onOpen, signal: ended.signal })) dispatch(operation);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return onState(KEY_REFUSED);
    }
    live = false;
    if (ended.signal.aborted) {
      wasHidden = true;
      continue;
    }
    ended.abort();
    onState("not connected");
    await new Promise((resolve) => setTimeout(resolve, Math.min(LONGEST_WAIT, 1000 * 2 ** failures)));
    failures += 1;
  }
}

/** @param {Operation} operation */
function dispatch(operation) {
  if (READING.includes(operation.what)) recentTokens.set(operation.session, [...recentOf(operation.session), [performance.now(), operation.tokens]]);
  notify(operation);
}

/** @param {Event} event */
function notify(event) {
  for (const listener of listeners) listener(event);
}

/**
 * Returns a function that calls `work` once, `wait` milliseconds after its own last call.
 * @param {() => unknown} work
 */
export function debounce(work, wait = 150) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = window.setTimeout(work, wait);
  };
}
