// Live operations on sessions: one event stream for all views.

import { ApiError, streamEvents } from "./api.js";

const RATE_WINDOW = 10_000; // milliseconds
/** @type {Set<(operation: Operation | null) => void>} */
const listeners = new Set();
/** @type {Map<string, [number, number][]>} */
const recentTokens = new Map(); // by session: [time, tokens] of each operation

/**
 * Calls a listener for each operation, or with null after a reconnection, until the signal aborts.
 * @param {(operation: Operation | null) => void} listener @param {AbortSignal} signal
 */
export function onOperation(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
}

// Returns a session's tokens per second over the last ten seconds.
/** @param {string} session */
export function rate(session) {
  const start = performance.now() - RATE_WINDOW;
  const recent = (recentTokens.get(session) || []).filter(([time]) => time > start);
  recentTokens.set(session, recent);
  return recent.reduce((sum, [, tokens]) => sum + tokens, 0) / (RATE_WINDOW / 1000);
}

// Follows the server's operations, reconnecting for ever. onState receives "live" or "not connected".
/** @param {(state: string) => void} onState */
export async function followOperations(onState) {
  for (;;) {
    try {
      const events = streamEvents("GET", "/v1/events");
      onState("live");
      for await (const [, operation] of events) dispatch(operation);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return;
    }
    onState("not connected");
    await new Promise((resolve) => setTimeout(resolve, 2000));
    for (const listener of listeners) listener(null); // operations may have been missed
  }
}

/** @param {Operation} operation */
function dispatch(operation) {
  const recent = recentTokens.get(operation.session) || [];
  recent.push([performance.now(), Math.max(0, operation.tokens)]);
  recentTokens.set(operation.session, recent);
  for (const listener of listeners) listener(operation);
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
