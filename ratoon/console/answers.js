// @ts-check
// Asking: sends what the reader wants to know, and writes what comes back into the tree.

import { ApiError, call, chunks } from "./api.js";
import { keepRecording, listener, recordingOf } from "./recordings.js";
import { branchRequest, chatRequest, modelOf, SettingError } from "./request.js";
import { Speech } from "./speech.js";
import { announce, changed, state, touch } from "./store.js";
import { addMessage, leafOf, newId, readSegment } from "./tree.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Token} Token */
/** @typedef {import("./types").Attachment} Attachment */

const MAX_ROUNDS = 8; // of canned answers in a row: a model that calls the same tool forever ends here

const WAITING = "waiting for "; // that comments of a stream begin with

/** What is done when an answer has ended: it may have loaded its model. */
let onAnswered = () => {};

export function whenAnswered(/** @type {() => void} */ action) {
  onAnswered = action;
}

/** Running requests, by the id of the first message that they write.
 * @type {Map<string, AbortController>} */
const running = new Map();

export function isRunning() {
  return running.size > 0;
}

/** Closes the connections, by which the server aborts the requests. */
export function stopAll() {
  for (const controller of running.values()) controller.abort();
}

/** A new message of the reader below the cursor, and the answer to it.
 * @param {string} text @param {Attachment[]} attachments */
export async function send(text, attachments) {
  const cursor = state.tree.cursor ? state.tree.messages[state.tree.cursor] : null;
  const parent = cursor && cursor.role !== "assistant" ? cursor.parent : cursor?.id ?? null;
  await ask(parent, text, attachments);
}

/** Another version of a message of the reader: a sibling. The old one and its answers stay.
 * @param {Message} message @param {string} text */
export async function edit(message, text) {
  await ask(message.parent, text, message.attachments ?? []);
}

/** @param {string | null} parent @param {string} text @param {Attachment[]} attachments */
async function ask(parent, text, attachments) {
  const system = parent === null && state.settings.system ? { system: state.settings.system } : {};
  const message = addMessage(state.tree, { role: "user", parent, text, attachments, ...system });
  state.tree.cursor = message.id;
  changed();
  await answer(message);
}

/** Another answer to the same message. The first answer's prompt is inherited where that is possible without the chat
 * template; with tools the template is needed, and the request is made again.
 * @param {Message} old */
export async function retry(old) {
  const asked = state.tree.messages[/** @type {string} */ (old.parent)];
  const first = pathHasNoAnswer(asked);
  const same = (modelOf(old) || state.model) === state.model; // another model has a template and tokens of its own
  if (first && same && old.requestId && old.promptIds?.length && !state.settings.tools.length && !asked.attachments?.length) {
    await branch(old, 0, null);
  } else {
    await answer(asked);
  }
}

/** @param {Message} message */
function pathHasNoAnswer(message) {
  for (let at = /** @type {Message | undefined} */ (message); at; at = at.parent ? state.tree.messages[at.parent] : undefined) {
    if (at.role === "assistant") return false;
  }
  return true;
}

/** The answer to a message of the reader or to the results of tools.
 * @param {Message} asked @param {number} [round] */
export async function answer(asked, round = 0) {
  if (asked.recording) return hear(asked);
  const blank = () => ({ role: /** @type {const} */ ("assistant"), parent: asked.id, tokens: [], calls: [] });
  // With results at hand a call is no longer required: else the model could never answer.
  const settings = asked.role === "tool" && state.settings.toolChoice === "required" ? { ...state.settings, toolChoice: "auto" } : state.settings;
  const request = prepared(() => chatRequest(state.tree, asked, settings, state.model));
  if (!request) return;
  const written = await run(request, blank, null);
  const only = written.length === 1 ? written[0] : null;
  if (only?.calls?.length && only.status === "done" && round < MAX_ROUNDS) {
    const results = only.calls.map((called) => state.settings.tools.find((tool) => tool.name === called.name && tool.canned));
    if (results.every(Boolean)) await giveResults(only, only.calls.map((_, index) => /** @type {any} */ (results[index]).canned), round + 1);
  }
}

/** What the tools that an answer called have returned; the model goes on with it.
 * @param {Message} called @param {string[]} results @param {number} [round] */
export async function giveResults(called, results, round = 0) {
  let parent = called.id;
  for (const [index, result] of results.entries()) {
    parent = addMessage(state.tree, { role: "tool", parent, text: result, callId: (called.calls ?? [])[index].id }).id;
  }
  state.tree.cursor = parent;
  await answer(state.tree.messages[parent], round);
}

/** Another answer that keeps the first `at` tokens of one, then has `token`, or whatever the model says there.
 * @param {Message} old @param {number} at @param {import("./types").Alternative | null} token */
export async function branch(old, at, token) {
  const kept = (old.tokens ?? []).slice(0, at).map((other) => ({ ...other }));
  if (token) kept.push({ text: token.text, id: token.id, logprob: token.logprob, top: old.tokens?.[at]?.top ?? [], forced: true });
  const text = textOf(kept);
  const promptIds = old.promptIds ?? [];
  const blank = () => ({
    role: /** @type {const} */ ("assistant"),
    parent: old.parent,
    tokens: [...kept],
    text,
    promptIds,
    calls: [],
    branchOf: old.id,
    branchAt: at,
  });
  const request = prepared(() => branchRequest(old, at, token?.id ?? null, state.settings, modelOf(old) || state.model));
  if (request) await run(request, blank, promptIds);
}

/** The same answer, longer: it had ended at its limit.
 * @param {Message} old */
export async function goOn(old) {
  await branch(old, old.tokens?.length ?? 0, null);
}

/** A request, or null where the settings can't be sent; the panel then says why.
 * @template T @param {() => T} build
 * @returns {T | null} */
function prepared(build) {
  try {
    state.formatError = null;
    return build();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    state.formatError = { message: error.message, param: error.param };
    state.panel = "settings";
    announce(error.message, true);
    return null;
  }
}

/** @param {{path: string, body: Record<string, unknown>}} request
 * @param {() => any} blank what each answer begins with
 * @param {number[] | null} promptIds tokens before the answer, where they are known: those of a branch are its parent's
 * @returns {Promise<Message[]>} */
async function run(request, blank, promptIds) {
  const { tree } = state;
  const controller = new AbortController();
  const group = Number(request.body.n ?? 1) > 1 ? newId() : null;
  /** @type {Message[]} */
  const written = [];
  const started = performance.now();
  const at = (/** @type {number} */ index) => {
    while (written.length <= index) {
      // What the first chunk said holds for all choices, also for those that come later.
      const { requestId, promptIds: before, continuation } = written[0] ?? {};
      const known = written.length ? { requestId, continuation, ...(before ? { promptIds: before } : {}) } : {};
      const fields = { ...blank(), ...known, status: /** @type {const} */ ("running"), choice: written.length, group, sent: request };
      written.push(addMessage(tree, fields));
    }
    return written[index];
  };
  tree.cursor = at(0).id;
  const speech = (state.speech = new Speech(written[0].text.length));
  running.set(tree.cursor, controller);
  changed();
  try {
    for await (const chunk of chunks(request.path, request.body, controller.signal, (text) => wait(written[0], text))) {
      written[0].waiting = undefined;
      for (const choice of chunk.choices ?? []) {
        const message = at(choice.index);
        message.firstSeconds ??= choice.token_ids?.length || choice.best_so_far ? (performance.now() - started) / 1000 : null;
        readChoice(message, choice);
        touch(message);
      }
      for (const message of written) readWhole(message, chunk, promptIds);
      speech.take(written[0].text, performance.now() / 1000, false);
    }
    for (const message of written) if (message.status === "running") message.status = "done";
  } catch (error) {
    for (const message of written) fail(message, error, controller.signal.aborted);
  }
  running.delete(written[0].id);
  speech.take(written[0].text, performance.now() / 1000, true);
  for (const message of written) {
    message.seconds = (performance.now() - started) / 1000;
    message.preview = message.waiting = undefined;
    touch(message);
  }
  onAnswered();
  const [first] = written;
  announce(
    first.status === "failed"
      ? `The request failed: ${first.error?.message}`
      : `${written.length > 1 ? `${written.length} answers` : "Answer"} complete: ${first.usage?.completion ?? first.tokens?.length} tokens`,
  );
  if (request.body.use_beam_search && first.status === "done") await score(written);
  return written;
}

/** The server says that the request waits for its model, which has to be loaded.
 * @param {Message} message @param {string} text */
function wait(message, text) {
  if (!text.startsWith(WAITING)) return;
  const shown = text[0].toUpperCase() + text.slice(1);
  if (!message.waiting) announce(shown);
  message.waiting = shown;
  touch(message);
}

/** @param {Message} message @param {unknown} error @param {boolean} stopped */
function fail(message, error, stopped) {
  if (stopped) {
    message.status = "stopped";
    return;
  }
  message.status = "failed";
  const known = error instanceof ApiError ? error : null;
  message.error = { message: /** @type {Error} */ (error).message, param: known?.param, status: known?.status };
  if (known?.param && /^(response_format|structured_outputs|tools)/.test(known.param)) {
    state.formatError = { message: known.message, param: known.param };
  }
}

/** What belongs to one choice of a chunk, of either endpoint.
 * @param {Message} message @param {any} choice */
function readChoice(message, choice) {
  const delta = choice.delta ?? { content: choice.text };
  if (delta.content) message.text += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    const calls = (message.calls ??= []);
    const called = (calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) called.id = part.id;
    if (part.function?.name) called.name += part.function.name;
    if (part.function?.arguments) called.arguments += part.function.arguments;
  }
  (message.tokens ??= []).push(...readTokens(choice));
  if (choice.best_so_far !== undefined && choice.best_so_far !== null) message.preview = choice.best_so_far;
  if (choice.finish_reason) message.finish = choice.finish_reason;
  if (Number.isFinite(choice.score)) message.score = choice.score;
  if (Number.isFinite(choice.cumulative_logprob)) message.cumulative = choice.cumulative_logprob;
}

/** @param {any} choice
 * @returns {Token[]} */
export function readTokens(choice) {
  const ids = choice.token_ids ?? [];
  const content = choice.logprobs?.content;
  if (content) {
    return content.map((/** @type {any} */ entry, /** @type {number} */ index) => ({
      text: entry.token,
      bytes: entry.bytes,
      id: entry.token_id ?? (ids.length === content.length ? ids[index] : null),
      logprob: entry.logprob,
      top: (entry.top_logprobs ?? []).map((/** @type {any} */ other) => ({
        text: other.token,
        id: other.token_id ?? null,
        logprob: other.logprob,
      })),
    }));
  }
  const texts = choice.logprobs?.tokens;
  if (texts) {
    return texts.map((/** @type {string} */ text, /** @type {number} */ index) => ({
      text,
      bytes: null,
      id: ids[index] ?? null,
      logprob: choice.logprobs.token_logprobs[index],
      top: readAlternatives(choice.logprobs, index),
    }));
  }
  return ids.map((/** @type {number} */ id) => ({ text: "", bytes: null, id, logprob: null, top: [] }));
}

/** The alternatives of a completion are an object by text; their ids stand beside it, in the same order.
 * @param {any} logprobs @param {number} index */
function readAlternatives(logprobs, index) {
  const ids = logprobs.top_token_ids?.[index] ?? [];
  return Object.entries(logprobs.top_logprobs?.[index] ?? {})
    .map(([text, logprob], place) => ({ text, id: (Array.isArray(ids) ? ids[place] : ids[text]) ?? null, logprob: Number(logprob) }))
    .sort((a, b) => b.logprob - a.logprob);
}

/** What belongs to the whole answer.
 * @param {Message} message @param {any} chunk @param {number[] | null} promptIds */
function readWhole(message, chunk, promptIds) {
  if (chunk.id) message.requestId = chunk.id;
  const ids = chunk.prompt_token_ids ?? chunk.choices?.[0]?.prompt_token_ids;
  if (ids && !promptIds) message.promptIds = ids;
  if (chunk.continuation) {
    message.continuation = {
      inherited: chunk.continuation.inherited_tokens,
      computed: chunk.continuation.computed_tokens,
      source: chunk.continuation.source,
      fallback: chunk.continuation.fallback,
    };
  }
  if (chunk.usage) {
    message.usage = {
      prompt: chunk.usage.prompt_tokens,
      completion: chunk.usage.completion_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
    };
  }
}

/** The model of an answer as a field of requests about it. @param {Message} message */
function modelField(message) {
  const model = modelOf(message) || state.model;
  return model ? { model } : {};
}

/** A search returns no log-probabilities of single tokens: one request reads them for all of its answers.
 * @param {Message[]} found */
async function score(found) {
  const prompts = found.map((message) => [...(message.promptIds ?? []), ...(message.tokens ?? []).map((token) => token.id)]);
  if (prompts.some((ids) => ids.includes(null)) || !found[0].promptIds?.length) return;
  try {
    const alternatives = Math.max(1, Math.min(20, state.settings.alternatives));
    const json = { prompt: prompts, echo: true, max_tokens: 0, prompt_logprobs: alternatives, ...modelField(found[0]) };
    const { choices } = await (await call("/v1/completions", { json })).json();
    for (const [index, message] of found.entries()) {
      const begin = message.promptIds?.length ?? 0;
      (message.tokens ?? []).forEach((token, place) => readScored(token, choices[index].prompt_logprobs?.[begin + place] ?? {}));
      touch(message);
    }
  } catch {
    // The answers are whole without it; their tokens just have no colours.
  }
}

/** @param {Token} token @param {Record<string, {logprob: number, decoded_token: string}>} entries */
function readScored(token, entries) {
  const own = entries[String(token.id)];
  if (!own) return;
  token.text = own.decoded_token;
  token.logprob = own.logprob;
  token.top = Object.entries(entries)
    .map(([id, entry]) => ({ id: Number(id), text: entry.decoded_token, logprob: entry.logprob }))
    .sort((a, b) => b.logprob - a.logprob);
}

const ESCAPED = /^bytes:((?:\\x[0-9a-f]{2})+)$/;

/** @param {Token} token
 * @returns {Uint8Array} */
export function bytesOf(token) {
  if (token.bytes?.length) return Uint8Array.from(token.bytes);
  const escaped = ESCAPED.exec(token.text);
  if (escaped) return Uint8Array.from(escaped[1].match(/[0-9a-f]{2}/g) ?? [], (pair) => parseInt(pair, 16));
  return new TextEncoder().encode(token.text);
}

/** @param {Token[]} tokens */
export function textOf(tokens) {
  const decoder = new TextDecoder();
  return tokens.map((token) => decoder.decode(bytesOf(token), { stream: true })).join("") + decoder.decode();
}

/** A recording: a new root of the tree, and below it what the model hears. `text` is what the recording follows: it shows
 * the model how names are spelt.
 * @param {File} file @param {string} [text] */
export async function transcribe(file, text = "") {
  const asked = addMessage(state.tree, { role: "user", parent: null, text, recording: file.name });
  keepRecording(asked.id, file);
  await hear(asked);
}

/** The transcript of a message's recording.
 * @param {Message} asked */
async function hear(asked) {
  const { tree } = state;
  const file = recordingOf(asked.id);
  if (!file) return announce(`The recording ${asked.recording} is no longer in this page: drop it again`, true);
  const model = listener();
  const fields = { ...(model ? { model } : {}), ...(asked.text ? { prompt: asked.text } : {}), response_format: "verbose_json", stream: "true" };
  const sent = { path: "/v1/audio/transcriptions", body: fields, file: file.name };
  const written = addMessage(tree, { role: "assistant", parent: asked.id, status: "running", tokens: [], calls: [], segments: [], sent });
  tree.cursor = written.id;
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.set(name, value);
  form.set("file", file, file.name);
  const controller = new AbortController();
  const speech = (state.speech = new Speech(0));
  running.set(written.id, controller);
  changed();
  const started = performance.now();
  try {
    for await (const chunk of chunks(sent.path, form, controller.signal, (text) => wait(written, text))) {
      written.waiting = undefined;
      readHeard(written, chunk);
      speech.take(written.text, performance.now() / 1000, false);
      touch(written);
    }
    written.status = "done";
  } catch (error) {
    fail(written, error, controller.signal.aborted);
  }
  written.seconds = (performance.now() - started) / 1000;
  running.delete(written.id);
  speech.take(written.text, performance.now() / 1000, true);
  announce(written.status === "done" ? `The recording is transcribed: ${written.segments?.length} segments` : "The recording could not be transcribed");
  touch(written);
}

/** One event of a transcription. @param {Message} message @param {any} chunk */
function readHeard(message, chunk) {
  if (chunk.type === "transcript.text.delta") message.text += String(chunk.delta ?? "");
  else if (chunk.type === "transcript.text.segment") (message.segments ??= []).push(readSegment(chunk));
  else if (chunk.type === "transcript.text.done") {
    message.text = String(chunk.text ?? message.text);
    if (typeof chunk.language === "string") message.language = chunk.language;
    if (Number.isFinite(chunk.duration)) message.duration = chunk.duration;
  }
}

/** Goes to a message and to what follows it. @param {string} id */
export function goTo(id) {
  state.tree.cursor = leafOf(state.tree, id);
  state.touched = null;
  changed();
}
