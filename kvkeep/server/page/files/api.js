// Requests to the server that this page came from.

const KEY = "kvkeep key";

/** Of a part of the page that is loaded when it is asked for: browsers do not load it again by themselves. */
export const NOT_LOADED = "The server does not answer. Load this page again once it does.";

export const NO_ANSWER = "The server does not answer.";
export const BROKEN_OFF = "The connection to the server was lost.";

/** Returns the message of what was thrown. @param {unknown} error */
export const messageOf = (error) => (error instanceof Error ? error.message : String(error));

export class ApiError extends Error {
  /** @param {number} status @param {string} message @param {string} [code] */
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Returns null for the error that there is no such thing; throws another one. @param {unknown} error */
export function nullIfMissing(error) {
  if (error instanceof ApiError && error.status === 404) return null;
  throw error;
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

/** @param {string} key */
export const setKey = (key) => sessionStorage.setItem(KEY, key.trim());

/** Returns why a text cannot be an API key; "" if it can: headers have no other characters. @param {string} key */
export const keyProblem = (key) => (/^[ -~]*$/.test(key) ? "" : "A key has letters, digits and signs of ASCII alone: copy it again.");

/** @param {Record<string, string>} [headers] @returns {Record<string, string>} */
function withKey(headers) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key && !keyProblem(key) ? { Authorization: `Bearer ${key}` } : {}), ...headers };
}

/** @typedef {{headers?: Record<string, string>, signal?: AbortSignal, onOpen?: () => void}} Options  onOpen: called when a stream begins. */

/**
 * Sends a request and returns the response. Throws ApiError for an error status.
 * @param {string} method @param {string} path @param {any} [body] @param {Options} [options]
 */
async function request(method, path, body, { headers, signal } = {}) {
  /** @type {RequestInit & {headers: Record<string, string>}} */
  const options = { method, headers: withKey(headers), signal };
  if (body !== undefined && body !== null) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Error(NO_ANSWER);
  });
  if (!response.ok) {
    /** @type {{message?: string, code?: string}} */
    let error = {};
    try {
      error = (await response.json()).error;
    } catch {
      // The body is not JSON: the status has to do.
    }
    throw new ApiError(response.status, error.message || `status ${response.status}`, error.code);
  }
  return response;
}

/** @param {string} path */
export const get = async (path) => (await request("GET", path)).json();

/** @param {string} method @param {string} path @param {any} [body] @param {Options} [options] */
export const send = async (method, path, body, options) => (await request(method, path, body, options)).json();

let streams = 0;

/** Whether a stream is open: of an answer, while the server's operations are not followed. */
export const isReceiving = () => streams > 0;

// Counts an open stream, or one that has ended.
/** @param {1 | -1} change */
function countStream(change) {
  streams += change;
  document.dispatchEvent(new CustomEvent("streams"));
}

/**
 * Yields server-sent events: pairs of a name and its data.
 * @param {string} method @param {string} path @param {any} [body] @param {Options} [options]
 * @returns {AsyncGenerator<[string, any]>}
 */
export async function* streamEvents(method, path, body, options) {
  const response = await request(method, path, body, options);
  options?.onOpen?.();
  const stream = /** @type {ReadableStream<any>} */ (response.body);
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  countStream(1);
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Error(BROKEN_OFF); // browsers say "network error"
      });
      if (done) return;
      buffer += value;
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop() || "";
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event) yield event;
      }
    }
  } finally {
    countStream(-1);
    reader.cancel().catch(() => {});
  }
}

/** @param {string} block @returns {[string, any] | null} */
function parseEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? [name, JSON.parse(data.join("\n"))] : null;
}
