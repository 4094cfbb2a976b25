// The page /docs: shows openapi.json, and sends its examples. All text goes in as text, never as HTML.
"use strict";

const KEY_NAMES = { key: "API key", adminKey: "Admin key" };
const MAX_SHOWN = 20000; // characters of an answer
const keys = {}; // by security scheme; they live as long as the page
let spec = null;
let lastId = ""; // of an answer: what can be continued or forgotten

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

function headersFor(operation) {
  const scheme = Object.keys((operation.security || [{}])[0])[0];
  return scheme && keys[scheme] ? { Authorization: `Bearer ${keys[scheme]}` } : {};
}

async function load() {
  byId("problem").textContent = "";
  let answer;
  try {
    answer = await fetch("openapi.json", { headers: keys.key ? { Authorization: `Bearer ${keys.key}` } : {} });
  } catch {
    byId("problem").textContent = "The server can't be reached.";
    return;
  }
  const body = await answer.json();
  if (answer.ok) {
    spec = body;
    show();
  } else {
    if (answer.status === 401) showKeys({ key: {} });
    byId("problem").textContent = answer.status === 401 && !keys.key ? "" : body.error.message;
  }
}

function showKeys(schemes) {
  const form = byId("keys");
  form.replaceChildren(make("p", { textContent: "This server asks for a key. It is kept by this page alone, until it is closed." }));
  for (const name of Object.keys(schemes)) {
    const field = make("input", { type: "password", name, autocomplete: "off", size: 40, value: keys[name] || "" });
    form.append(make("label", {}, `${KEY_NAMES[name] || name} `, field));
    field.addEventListener("input", () => { keys[name] = field.value.trim(); });
  }
  form.append(make("button", { textContent: "Authorize" }));
  form.hidden = Object.keys(schemes).length === 0;
  form.onsubmit = (event) => { event.preventDefault(); load(); };
}

function show() {
  byId("version").textContent = spec.info.version;
  byId("about").textContent = spec.info.description || "";
  showKeys((spec.components || {}).securitySchemes || {});
  const groups = new Map();
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = (operation.tags || ["Other"])[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(describe(method, path, operation));
    }
  }
  const main = byId("operations");
  main.replaceChildren();
  for (const [tag, items] of groups) main.append(make("h2", { textContent: tag }), ...items);
}

function describe(method, path, operation) {
  const title = make("summary", {}, make("span", { className: `method ${method}`, textContent: method.toUpperCase() }),
    make("code", { textContent: path }), make("span", { className: "soft", textContent: `  ${operation.summary || ""}` }));
  const item = make("details", {}, title);
  item.addEventListener("toggle", () => {
    if (item.open && item.childElementCount === 1) item.append(details(method, path, operation));
  });
  return item;
}

function details(method, path, operation) {
  const box = make("div");
  const inputs = (operation.parameters || []).map((parameter) => {
    const preset = parameter.example ?? parameter.schema?.default ?? (parameter.name === "request_id" ? lastId : "");
    const field = make("input", { value: preset, size: 40 });
    box.append(make("label", {}, `${parameter.name} `, field));
    return { parameter, field };
  });
  const content = operation.requestBody ? operation.requestBody.content : {};
  const json = content["application/json"], form = content["multipart/form-data"];
  let area = null, file = null;
  if (json) {
    const text = JSON.stringify(json.example || {}, null, 2);
    area = make("textarea", { value: text, rows: text.split("\n").length + 1, spellcheck: false, ariaLabel: "Body" });
    box.append(area);
  }
  if (form) {
    file = make("input", { type: "file" });
    area = make("textarea", { value: JSON.stringify(form.example || {}, null, 2), rows: 5, spellcheck: false });
    box.append(make("label", {}, "file ", file), area);
  }
  const result = make("div");
  const request = () => {
    let target = path;
    const query = new URLSearchParams();
    for (const { parameter, field } of inputs) {
      if (parameter.in === "path") {
        target = target.replace(`{${parameter.name}}`, field.value.split("/").map(encodeURIComponent).join("/"));
      } else if (field.value !== "") {
        query.set(parameter.name, field.value);
      }
    }
    const options = { method: method.toUpperCase(), headers: headersFor(operation) };
    if (json) {
      options.headers["Content-Type"] = "application/json";
      options.body = area.value;
    } else if (form) {
      options.body = new FormData();
      for (const [name, value] of Object.entries(JSON.parse(area.value || "{}"))) options.body.set(name, value);
      if (file.files.length) options.body.set("file", file.files[0]);
    }
    return [`.${target}${query.size ? `?${query}` : ""}`, options];
  };
  const send = make("button", { textContent: "Send" });
  send.addEventListener("click", async () => {
    send.disabled = true;
    try {
      await ask(...request(), result);
    } catch (error) {
      result.replaceChildren(make("p", { className: "bad", textContent: `Not sent: ${error.message}` }));
    }
    send.disabled = false;
  });
  box.append(send);
  if (!form) {
    const copy = make("button", { className: "plain", textContent: "Show as curl" });
    copy.addEventListener("click", () => result.replaceChildren(make("pre", { textContent: asCurl(...request()) })));
    box.append(copy);
  }
  box.append(result);
  const schema = resolve((json || form || {}).schema);
  if (schema && schema.properties) box.append(fields(schema));
  return box;
}

async function ask(url, options, result) {
  const line = make("p", { className: "soft", textContent: "…" });
  const output = make("pre");
  result.replaceChildren(line, output);
  const begin = performance.now();
  const answer = await fetch(url, options);
  const seconds = () => ((performance.now() - begin) / 1000).toFixed(2);
  const note = answer.headers.get("X-Ratoon-Note");
  const head = `${answer.status} ${answer.statusText}`;
  line.className = answer.ok ? "soft" : "bad";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
    line.textContent = `${head}, ${seconds()} s …`;
    if (text.length < MAX_SHOWN) output.textContent = text;
  }
  line.textContent = `${head}, ${seconds()} s${note ? `; ${note}` : ""}`;
  output.textContent = shorten(pretty(text));
}

function pretty(text) {
  try {
    const value = JSON.parse(text);
    if (typeof value.id === "string") lastId = value.id;
    return JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}

const shorten = (text) => (text.length <= MAX_SHOWN ? text : `${text.slice(0, MAX_SHOWN)}\n… (${text.length} characters)`);

function asCurl(url, options) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = [`curl -s ${options.method === "GET" ? "" : `-X ${options.method} `}${quote(new URL(url, location.href).href)}`];
  for (const [name, value] of Object.entries(options.headers)) {
    parts.push(`-H ${name === "Authorization" ? "\"Authorization: Bearer $RATOON_API_KEY\"" : quote(`${name}: ${value}`)}`);
  }
  if (options.body) parts.push(`-d ${quote(options.body)}`);
  return parts.join(" \\\n  ");
}

function resolve(schema) {
  while (schema && schema.$ref) schema = spec.components.schemas[schema.$ref.split("/").pop()];
  return schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return [...new Set(schema.anyOf.map(typeOf))].filter((name) => name !== "null").join(" or ");
  if (schema.enum || "const" in schema) {
    return (schema.enum || [schema.const]).filter((value) => value !== null).map((value) => JSON.stringify(value)).join(", ");
  }
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "any"}`;
  return schema.type || "any";
}

function fields(schema) {
  const required = new Set(schema.required || []);
  const order = ([one], [other]) => required.has(other) - required.has(one);
  const rows = Object.entries(schema.properties).sort(order).map(([name, field]) => make("tr", {},
    make("td", {}, make("code", { textContent: name + (required.has(name) ? " *" : "") })),
    make("td", { className: "soft", textContent: typeOf(field) }),
    make("td", { textContent: field.description || "" })));
  return make("div", {}, make("h2", { textContent: "Fields" }), make("table", {}, make("tbody", {}, ...rows)));
}

load();
