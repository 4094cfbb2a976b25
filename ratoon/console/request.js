// @ts-check
// Bodies of requests, and the same requests as programs to copy. Pure: from the tree and the settings to JSON.

import { pathTo } from "./tree.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Settings} Settings */
/** @typedef {import("./types").Tree} Tree */

/** @typedef {{name: string, label: string, hint: string, kind: "number" | "integer" | "lines" | "choice", options?: string[], own?: boolean, search?: boolean, both?: boolean}} PanelField */

/** Fields of the panel. The hint is what counts where one is left empty; `own`: a model's files may say otherwise.
 * @type {PanelField[]} */
export const FIELDS = [
  { name: "temperature", label: "Temperature", hint: "1 (0: the likeliest token)", kind: "number", own: true },
  { name: "top_p", label: "Top p", hint: "1: all", kind: "number", own: true },
  { name: "top_k", label: "Top k", hint: "0: all", kind: "integer", own: true },
  { name: "min_p", label: "Min p", hint: "0: all", kind: "number", own: true },
  { name: "seed", label: "Seed", hint: "none: another one each time", kind: "integer" },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1: none", kind: "number", own: true, both: true },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "0: none", kind: "number", both: true },
  { name: "presence_penalty", label: "Presence penalty", hint: "0: none", kind: "number", both: true },
  { name: "beam_width", label: "Beam width", hint: "the number of answers", kind: "integer", search: true },
  { name: "length_penalty", label: "Length penalty", hint: "1", kind: "number", own: true, search: true },
  { name: "early_stopping", label: "Early stopping", hint: "false", kind: "choice", options: ["true", "false", "never"], search: true },
  { name: "n", label: "Answers (n)", hint: "1", kind: "integer", both: true },
  { name: "max_tokens", label: "Max tokens", hint: "what the context leaves", kind: "integer", own: true, both: true },
  { name: "stop", label: "Stop texts, one per line", hint: "none", kind: "lines" },
];

/** What counts where a field is left empty, by the defaults that the server tells of the model, if it does.
 * @param {PanelField} field @param {Record<string, number | null> | undefined} defaults */
export function hintOf(field, defaults) {
  const own = defaults?.[field.name];
  if (own === undefined) return field.own ? `${field.hint}, or the model's own` : field.hint;
  return own === null || own === Number.parseFloat(field.hint) ? field.hint : `${own}, the model's own`;
}

/** What the answer must match: the label, and the field that the text goes into. */
export const FORMATS = /** @type {Record<string, {label: string, example: string}>} */ ({
  text: { label: "Free text", example: "" },
  json_object: { label: "Any JSON object", example: "" },
  json_schema: {
    label: "JSON schema",
    example: JSON.stringify(
      {
        type: "object",
        properties: { name: { type: "string", maxLength: 40 }, population: { type: "integer", minimum: 0, maximum: 99999999 } },
        required: ["name", "population"],
      },
      null,
      2,
    ),
  },
  regex: { label: "Regular expression", example: "(yes|no), because [a-z ,]{10,80}\\." },
  choice: { label: "One of these lines", example: "positive\nnegative" },
  grammar: { label: "Grammar (Lark or GBNF)", example: 'start: "I like " COLOUR " and " COLOUR "."\nCOLOUR: "red" | "green" | "blue"' },
});

/** A setting whose text is not what the field takes. The panel shows it beside the field. */
export class SettingError extends Error {
  /** @param {string} param @param {string} message */
  constructor(param, message) {
    super(message);
    this.param = param;
  }
}

/** Sampling, search and format, as fields of either endpoint.
 * @param {Settings} settings */
export function optionFields(settings) {
  /** @type {Record<string, unknown>} */
  const body = {};
  for (const field of FIELDS) {
    const text = (settings.fields[field.name] ?? "").trim();
    if (!text || (!field.both && settings.beams !== Boolean(field.search))) continue;
    if (field.kind === "lines") body[field.name] = text.split("\n").filter(Boolean);
    else if (field.kind === "choice") body[field.name] = text === "true" ? true : text === "false" ? false : text;
    else {
      const number = Number(text);
      if (!Number.isFinite(number) || (field.kind === "integer" && !Number.isInteger(number))) {
        throw new SettingError(field.name, `${field.label}: ${text} is no ${field.kind === "integer" ? "whole number" : "number"}`);
      }
      body[field.name] = number;
    }
  }
  if (settings.beams) body.use_beam_search = true;
  return { ...body, ...formatFields(settings) };
}

/** @param {Settings} settings
 * @returns {Record<string, unknown>} */
export function formatFields(settings) {
  const text = settings.formatText;
  switch (settings.format) {
    case "json_object":
      return { response_format: { type: "json_object" } };
    case "json_schema":
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed(text, "response_format", "The schema") } } };
    case "regex":
      return { structured_outputs: { regex: text } };
    case "choice":
      return { structured_outputs: { choice: text.split("\n").filter(Boolean) } };
    case "grammar":
      return { structured_outputs: { grammar: text } };
    default:
      return {};
  }
}

/** @param {string} text @param {string} param @param {string} what */
function parsed(text, param, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(param, `${what} is not JSON: ${/** @type {Error} */ (error).message}`);
  }
}

/** @param {Settings} settings */
export function toolFields(settings) {
  const tools = settings.tools.filter((tool) => tool.name.trim());
  if (!tools.length) return {};
  const functions = tools.map((tool, index) => ({
    type: "function",
    function: {
      name: tool.name.trim(),
      ...(tool.description ? { description: tool.description } : {}),
      parameters: parsed(tool.parameters || "{}", `tools[${index}]`, `The parameters of ${tool.name}`),
    },
  }));
  return { tools: functions, ...(settings.toolChoice === "auto" ? {} : { tool_choice: settings.toolChoice }) };
}

/** How tokens, their alternatives and their memory come with an answer.
 * @param {Settings} settings @param {boolean} chat */
export function answerFields(settings, chat) {
  const alternatives = Math.max(0, Math.min(20, settings.alternatives));
  const logprobs = settings.beams ? {} : chat ? { logprobs: true, top_logprobs: alternatives } : { logprobs: alternatives };
  return {
    ...logprobs,
    return_token_ids: true,
    ...(settings.retain > 0 ? { retain_kv: settings.retain } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** A message as the protocol has it.
 * @param {Message} message */
export function protocolMessage(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  if (message.recording) return { role: "user", content: `Transcribe the recording ${message.recording}. ${message.text}`.trim() };
  if (message.role === "user") {
    const images = (message.attachments ?? []).map((part) => ({ type: "image_url", image_url: { url: part.url } }));
    return { role: "user", content: images.length ? [...images, { type: "text", text: message.text }] : message.text };
  }
  const calls = (message.calls ?? []).map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return {
    role: "assistant",
    content: calls.length && !message.text ? null : message.text,
    ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}

/** All of a path, with its system message first.
 * @param {Message[]} path */
export function protocolMessages(path) {
  const system = path[0]?.system;
  return [...(system ? [{ role: "system", content: system }] : []), ...path.map(protocolMessage)];
}

/** The model that an answer was asked of; empty where that was left to the server. @param {Message} answer */
export function modelOf(answer) {
  const model = answer.sent?.body.model;
  return typeof model === "string" ? model : "";
}

/** The request for the answer to a message: a continuation of the answer before it, where there is one.
 * @param {Tree} tree @param {Message} message @param {Settings} settings @param {string} model */
export function chatRequest(tree, message, settings, model) {
  const path = pathTo(tree, message.id);
  const last = path.map((other) => other.role).lastIndexOf("assistant");
  const parent = last >= 0 ? path[last] : null;
  const added = path.slice(last + 1);
  const options = { ...(model ? { model } : {}), ...optionFields(settings), ...toolFields(settings), ...answerFields(settings, true) };
  // Another model has nothing of an answer to inherit: it reads the whole conversation.
  const inherits = parent?.requestId && (modelOf(parent) || model) === model;
  const body = inherits
    ? {
        messages: added.map(protocolMessage),
        continuation_of: parent.requestId,
        ...(parent.choice ? { continuation_choice: parent.choice } : {}),
        fallback_messages: protocolMessages(path),
        ...options,
      }
    : { messages: protocolMessages(path), ...options };
  return { path: "/v1/chat/completions", body };
}

/** The request for a branch of an answer: after `at` of its tokens comes `token`, or what the model chooses.
 * Where the server no longer knows the answer, the same tokens as a prompt take its place.
 * @param {Message} answer @param {number} at @param {number | null} token @param {Settings} settings @param {string} model */
export function branchRequest(answer, at, token, settings, model) {
  const kept = (answer.tokens ?? []).slice(0, at).map((other) => other.id);
  const known = answer.promptIds?.length && kept.every((id) => id !== null);
  const suffix = token === null ? [] : [token];
  // An answer that had to match something goes on in its grammar, from the place of the branch. That needs the answer
  // itself: a prompt of the same tokens has no grammar to go on in.
  const constrained = isConstrained(answer);
  const format = constrained ? { structured_outputs: { continue_grammar: true } } : {};
  const body = {
    ...(model ? { model } : {}),
    continuation_of: answer.requestId,
    ...(answer.choice ? { continuation_choice: answer.choice } : {}),
    continuation_at: (answer.promptIds?.length ?? 0) + at,
    ...(suffix.length ? { continuation_suffix: suffix } : {}),
    ...(known && !constrained ? { prompt: [...(answer.promptIds ?? []), ...kept, ...suffix] } : {}),
    max_tokens: 256,
    ...optionFields({ ...settings, format: "text" }),
    ...format,
    ...answerFields(settings, false),
  };
  return { path: "/v1/completions", body };
}

/** Whether the text of an answer had to match a schema, an expression or a grammar.
 * @param {Message} answer */
function isConstrained(answer) {
  const body = answer.sent?.body ?? {};
  return Boolean(body.response_format || body.structured_outputs);
}

/** @param {import("./types").Sent} sent @param {string} base @param {boolean} withKey */
export function asCurl(sent, base, withKey) {
  if (sent.file !== undefined) return formAsCurl(sent, base, withKey);
  const quoted = JSON.stringify(sent.body, null, 2).replaceAll("'", `'\\''`);
  const key = withKey ? `  -H "Authorization: Bearer $RATOON_API_KEY" \\\n` : "";
  return `curl -N '${target(sent, base).replaceAll("'", "%27")}' \\\n${key}  -H 'Content-Type: application/json' \\\n  -d '${quoted}'\n`;
}

/** A form with a file: `-F` for each field; `@` reads the file of that name from the current folder.
 * @param {import("./types").Sent} sent @param {string} base @param {boolean} withKey */
function formAsCurl(sent, base, withKey) {
  const quote = (/** @type {string} */ text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const key = withKey ? `  -H "Authorization: Bearer $RATOON_API_KEY" \\\n` : "";
  const fields = Object.entries(sent.body).map(([name, value]) => `  --form-string ${quote(`${name}=${value}`)} \\\n`);
  const path = `"${String(sent.file).replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`; // with ; and , in it, too
  return `curl -N ${quote(target(sent, base))} \\\n${key}${fields.join("")}  -F ${quote(`file=@${path}`)}\n`;
}

/** @param {import("./types").Sent} sent @param {string} base @param {boolean} withKey */
export function asPython(sent, base, withKey) {
  if (sent.file !== undefined) return formAsPython(sent, base, withKey);
  const key = withKey ? `headers = {"Authorization": f"Bearer {os.environ['RATOON_API_KEY']}"}\n` : "headers = {}\n";
  return [
    `import json`,
    ...(withKey ? [`import os`] : []),
    `import urllib.request`,
    ``,
    `url = ${pythonLiteral(target(sent, base))}`,
    `body = ${pythonLiteral(sent.body)}`,
    `${key}headers["Content-Type"] = "application/json"`,
    `request = urllib.request.Request(url, json.dumps(body).encode(), headers)`,
    `with urllib.request.urlopen(request) as response:`,
    `    for line in response:`,
    `        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":`,
    `            print(json.loads(line[6:]))`,
    ``,
  ].join("\n");
}

/** @param {import("./types").Sent} sent @param {string} base @param {boolean} withKey */
function formAsPython(sent, base, withKey) {
  return [
    `import json`,
    ...(withKey ? [`import os`] : []),
    ``,
    `import httpx`,
    ``,
    `url = ${pythonLiteral(target(sent, base))}`,
    `fields = ${pythonLiteral(sent.body)}`,
    withKey ? `headers = {"Authorization": f"Bearer {os.environ['RATOON_API_KEY']}"}` : `headers = {}`,
    `with open(${pythonLiteral(sent.file)}, "rb") as file:`,
    `    with httpx.stream("POST", url, data=fields, files={"file": file}, headers=headers, timeout=None) as response:`,
    `        for line in response.iter_lines():`,
    `            if line.startswith("data: ") and line != "data: [DONE]":`,
    `                print(json.loads(line[6:]))`,
    ``,
  ].join("\n");
}

/** @param {{path: string}} sent @param {string} base */
function target(sent, base) {
  return new URL(sent.path.replace(/^\//, ""), base).href;
}

/** JSON as a literal of Python. Strings of JSON are strings of Python.
 * @param {any} value @param {string} [indent]
 * @returns {string} */
export function pythonLiteral(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (value.every((item) => typeof item === "number")) return `[${value.join(", ")}]`;
    return `[\n${value.map((item) => `${indent}    ${pythonLiteral(item, `${indent}    `)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const items = Object.entries(value).map(
      ([name, item]) => `${indent}    ${JSON.stringify(name)}: ${pythonLiteral(item, `${indent}    `)},\n`,
    );
    return items.length ? `{\n${items.join("")}${indent}}` : "{}";
  }
  return JSON.stringify(value);
}
