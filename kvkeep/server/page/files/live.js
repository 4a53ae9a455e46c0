// What is done to sessions, as it is done: one stream for all views.

import { Refused, streamed } from "./api.js";

const RATE_OVER = 10_000; // milliseconds
const listeners = new Set();
const lately = new Map(); // by session: [when, tokens] of each operation

export function listen(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
}

// Tokens per second, of the last ten seconds.
export function rate(session) {
  const since = performance.now() - RATE_OVER;
  const kept = (lately.get(session) || []).filter(([when]) => when > since);
  lately.set(session, kept);
  return kept.reduce((sum, [, tokens]) => sum + tokens, 0) / (RATE_OVER / 1000);
}

export async function follow(onState) {
  for (;;) {
    try {
      const events = streamed("GET", "/v1/events");
      onState("live");
      for await (const [, operation] of events) heard(operation);
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return;
    }
    onState("not connected");
    await new Promise((resolve) => setTimeout(resolve, 2000));
    for (const listener of listeners) listener(null); // much may have changed meanwhile
  }
}

function heard(operation) {
  const done = lately.get(operation.session) || [];
  done.push([performance.now(), Math.max(0, operation.tokens)]);
  lately.set(operation.session, done);
  for (const listener of listeners) listener(operation);
}

// Calls a function once, a little after the last of many reasons to.
export function soon(work, wait = 150) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
}
