// @ts-check
// Requests to the server that the page came from, and to no other. The key is sent as a header and kept in memory.

import { state } from "./store.js";

export class ApiError extends Error {
  /** @param {number} status @param {any} body */
  constructor(status, body) {
    const error = body?.error ?? body;
    super(typeof error?.message === "string" ? error.message : `The server answered with status ${status}`);
    this.status = status;
    this.param = /** @type {string | null} */ (error?.param ?? null);
    this.code = /** @type {string | null} */ (error?.code ?? null);
  }
}

/** Paths are relative to the page, so that a proxy may serve it below a prefix. */
function address(/** @type {string} */ path) {
  return new URL(path.replace(/^\//, ""), document.baseURI).href;
}

/** @param {string} path @param {{method?: string, json?: unknown, form?: FormData, signal?: AbortSignal, admin?: boolean}} [options] */
export async function call(path, { method, json, form, signal, admin = false } = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  const key = (admin && state.adminKey) || state.key;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (json !== undefined) headers["Content-Type"] = "application/json";
  const body = json === undefined ? form : JSON.stringify(json);
  const response = await fetch(address(path), {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers,
    body,
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (response.ok) return response;
  let problem = null;
  try {
    problem = await response.json();
  } catch {
    // Not JSON: the status has to do.
  }
  if (response.status === 401 && !admin) state.askKey = true;
  throw new ApiError(response.status, problem);
}

/** Server-sent events as they arrive: their name and their data. Comments go to `onComment`.
 * @param {Response} response @param {(text: string) => void} [onComment]
 * @returns {AsyncGenerator<{event: string, data: string}>} */
export async function* events(response, onComment) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A single \r at the end may be the first half of \r\n.
      rest = rest.replace(/\r\n/g, "\n");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const found = readEvent(rest.slice(0, end), onComment);
        rest = rest.slice(end + 2);
        if (found) yield found;
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** @param {string} block @param {(text: string) => void} [onComment] */
function readEvent(block, onComment) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith(":")) onComment?.(line.slice(1).trim());
  }
  return data.length ? { event, data: data.join("\n") } : null;
}

/** The chunks of a streamed answer to JSON or to a form. An error within the stream is thrown. Comments, by which a server
 * says that a request waits for its model, go to `onComment`.
 * @param {string} path @param {unknown} body @param {AbortSignal} signal @param {(text: string) => void} [onComment] */
export async function* chunks(path, body, signal, onComment) {
  const response = await call(path, { ...(body instanceof FormData ? { form: body } : { json: body }), signal });
  for await (const { data } of events(response, onComment)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.status ?? 500, chunk);
    yield chunk;
  }
}
