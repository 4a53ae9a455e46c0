// Requests to the server that this page came from.

const KEY = "kvkeep key";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function withKey(headers) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...headers };
}

// Sends a request and returns the response. Throws ApiError for an error status.
async function request(method, path, body, { headers, signal } = {}) {
  const options = { method, headers: withKey(headers), signal };
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
      // The body is not JSON: the status has to do.
    }
    throw new ApiError(response.status, error.message || `status ${response.status}`, error.code);
  }
  return response;
}

export const get = async (path) => (await request("GET", path)).json();

export const send = async (method, path, body, options) => (await request(method, path, body, options)).json();

// Yields server-sent events: pairs of a name and its data.
export async function* streamEvents(method, path, body, options) {
  const response = await request(method, path, body, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? [name, JSON.parse(data.join("\n"))] : null;
}
