// Requests to the server that this page came from.

const KEY = "kvkeep key";

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
}

async function sent(method, path, body, more = {}) {
  const options = { method, headers: headers(more.headers), signal: more.signal };
  if (body !== undefined && body !== null) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (!response.ok) {
    let error = {};
    try {
      error = (await response.json()).error;
    } catch {
      // an answer that is no JSON: its status says all
    }
    throw new Refused(response.status, error.message || `status ${response.status}`, error.code);
  }
  return response;
}

export const get = async (path) => (await sent("GET", path)).json();

export const send = async (method, path, body, more) => (await sent(method, path, body, more)).json();

// The events of an answer, or of the server: pairs of a name and what came with it.
export async function* streamed(method, path, body, more) {
  const response = await sent(method, path, body, more);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const blocks = held.split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? [name, JSON.parse(data.join("\n"))] : null;
}
