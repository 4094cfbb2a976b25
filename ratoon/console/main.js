// @ts-check
// The page: its frame, its views, its keys. Everything that is drawn begins here.

import { isRunning, retry, stopAll, whenAnswered } from "./answers.js";
import { call } from "./api.js";
import { Compare } from "./compare.js";
import { classes, html, render, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { Engine } from "./engine.js";
import { focusNext, keepFocus, watchFocus } from "./focus.js";
import { Lens } from "./lens.js";
import { Outline } from "./outline.js";
import { Panel } from "./panel.js";
import { announce, changed, onChange, readSettings, restore, state } from "./store.js";
import { mark, Thread } from "./thread.js";
import { focusAnswer, TokenCard } from "./tokens.js";
import { emptyTree, pathTo, readTree, walk, writeTree } from "./tree.js";

const VIEWS = /** @type {[string, string][]} */ ([
  ["talk", "Conversation"],
  ["compare", "Compare"],
  ["engine", "Engine"],
]);

const NARROW = matchMedia("(max-width: 760px)"); // as in the style sheet

const KEYS = [
  ["/", "write a message"],
  ["Escape", "stop the answer; close what is open"],
  ["1 2 3", "conversation, compare, engine"],
  ["j k", "one message down or up the branch"],
  ["[ ]", "previous or next version of the message"],
  ["a", "go to the newest answer's text; then ← → walk its tokens, Enter opens the alternatives, i looks inside"],
  ["t", "colour tokens by their probability"],
  ["d", "rendered text, or exactly as written"],
  ["r", "retry the answer"],
  ["m", "mark the answer, to compare it"],
  ["o s", "show or hide the tree, the settings"],
  ["n", "begin a new conversation"],
  ["In the tree: ← → ↑ ↓", "siblings, parent, child; Home: the root; End: the newest; Delete: remove the branch"],
  ["In the engine's blocks, steps: ← → ↑ ↓", "one block or step; a row of blocks, ten steps; Home, End; Escape lets go"],
];

function App() {
  const [, draw] = useState(0);
  useEffect(() => onChange(() => draw((/** @type {number} */ old) => old + 1)), []);
  useEffect(() => {
    document.addEventListener("keydown", onKey);
    watchFocus();
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  useLayoutEffect(keepFocus);
  const talking = state.view === "talk";
  return html`
    <header class="bar">
      <h1><span class="mark" aria-hidden="true"></span>Ratoon</h1>
      <${ModelPicker} />
      <nav aria-label="Views">
        ${VIEWS.map(([name, label]) => html`<button type="button" key=${name} aria-current=${state.view === name ? "page" : undefined} onClick=${() => show(name)}>${label}</button>`)}
      </nav>
      <span class="spring"></span>
      ${talking && html`<div class="tools" role="group" aria-label="View of the conversation">
        <button type="button" class="quiet" aria-pressed=${state.outline} onClick=${() => toggle("outline")}>Tree</button>
        <button type="button" class="quiet" aria-pressed=${state.coloured} onClick=${() => toggle("coloured")}>Probabilities</button>
        <button type="button" class="quiet" aria-pressed=${!state.rendered} onClick=${() => toggle("rendered")}>Verbatim</button>
        <button type="button" class="quiet" aria-pressed=${state.panel === "settings"} onClick=${() => panel("settings")}>Settings</button>
        <button type="button" class="quiet" aria-pressed=${state.panel === "lens"} onClick=${() => panel("lens")}>Inside</button>
      </div>`}
      <${Menu} />
    </header>
    <main class=${classes(state.view, state.outline && "with-outline", state.panel && "with-panel")}>
      ${talking && state.outline && html`<aside class="left" aria-label="Tree"><${Outline} /></aside>`}
      ${talking && html`<${Thread} />`}
      ${talking && state.panel && html`<aside class="right" aria-label=${state.panel === "lens" ? "Inside" : "Settings"}>${state.panel === "lens" ? html`<${Lens} />` : html`<${Panel} />`}</aside>`}
      ${state.view === "compare" && html`<${Compare} />`}
      ${state.view === "engine" && html`<${Engine} />`}
    </main>
    ${talking && html`<${TokenCard} />`}
    ${state.askKey && html`<${KeyDialog} />`}
    ${state.help && html`<${Help} />`}
    <div class=${classes("toast", state.notice && "shown")} aria-hidden="true">${state.notice}</div>
    <div class="visually-hidden" role="status" aria-live="polite">${state.announcement}</div>
    <p id="token-keys" hidden>Left and right arrow go through its tokens, Enter shows alternatives, I looks inside.</p>
    <div class="visually-hidden" role="log" aria-label="Answer, as it is written">${state.speech.pieces.map((piece) => html`<p key=${piece.at}>${piece.text}</p>`)}</div>`;
}

function ModelPicker() {
  if (state.models.length < 2) return html`<span class="model">${state.model}</span>`;
  return html`<select class="model" aria-label="Model" value=${state.model} onChange=${(/** @type {any} */ event) => {
    state.model = event.target.value;
    changed();
  }}>${state.models.map((name) => html`<option value=${name} selected=${name === state.model}>${name}${stateOf(name)}</option>`)}</select>`;
}

/** What stands behind a model's name that is not loaded: " (unloaded)". @param {string} name */
function stateOf(name) {
  const found = state.modelStates[name];
  return found && found !== "loaded" ? ` (${found})` : "";
}

function Menu() {
  const box = useRef(/** @type {HTMLDetailsElement | null} */ (null));
  const file = useRef(/** @type {HTMLInputElement | null} */ (null));
  const shut = () => {
    if (!box.current?.open) return;
    // A dialog gives the focus back to what had it: the closed menu has nothing that can take it.
    if (box.current.contains(document.activeElement)) box.current.querySelector("summary")?.focus();
    box.current.open = false;
  };
  const act = (/** @type {() => void} */ action) => () => {
    shut();
    action();
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape" || !box.current?.open) return;
    event.stopPropagation(); // it would stop an answer
    shut();
  };
  useEffect(() => {
    const outside = (/** @type {Event} */ event) => box.current?.contains(/** @type {Node} */ (event.target)) || shut();
    for (const name of ["mousedown", "focusin"]) document.addEventListener(name, outside);
    return () => ["mousedown", "focusin"].forEach((name) => document.removeEventListener(name, outside));
  }, []);
  return html`<details class="menu" ref=${box} onKeyDown=${onKeyDown}>
    <summary>Menu</summary>
    <div class="entries">
      <button type="button" onClick=${act(begin)}>New conversation</button>
      <button type="button" onClick=${act(save)}>Export as JSON</button>
      <button type="button" onClick=${act(() => file.current?.click())}>Import…</button>
      <button type="button" onClick=${act(clear)}>Clear everything</button>
      <button type="button" onClick=${act(theme)}>Light or dark</button>
      <button type="button" onClick=${act(() => ((state.askKey = true), changed()))}>API key…</button>
      <button type="button" onClick=${act(() => ((state.help = true), changed()))}>Keys (?)</button>
      <a href="docs" target="_blank" rel="noopener">The API</a>
    </div>
    <input ref=${file} class="visually-hidden" type="file" accept="application/json,.json" aria-label="File to import" tabindex="-1" onChange=${open} />
  </details>`;
}

/** A dialog of the browser: it keeps the focus, and Escape closes it. @param {{title: string, close: () => void, children?: any}} props */
function Dialog({ title, close, children }) {
  const box = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    if (box.current && !box.current.open) box.current.showModal();
  }, []);
  return html`<dialog ref=${box} aria-label=${title} onClose=${close}>
    <header><h2>${title}</h2><button type="button" class="quiet" aria-label="Close" onClick=${() => box.current?.close()}>×</button></header>
    ${children}
  </dialog>`;
}

function KeyDialog() {
  const close = () => {
    state.askKey = false;
    changed();
  };
  return html`<${Dialog} title="API key" close=${close}>
    <form onSubmit=${(/** @type {any} */ event) => {
      event.preventDefault();
      state.key = String(new FormData(event.target).get("key") ?? "").trim();
      event.target.closest("dialog").close(); // which gives the focus back
      loadModels();
    }}>
      <p>This server asks for a key. It is kept in memory until the page is closed or reloaded, and sent to this server only.</p>
      <label class="field wide"><span>Key</span><input name="key" type="password" autocomplete="off" autofocus /></label>
      <button type="submit" class="primary">Use it</button>
    </form>
  <//>`;
}

function Help() {
  const close = () => {
    state.help = false;
    changed();
  };
  return html`<${Dialog} title="Keys" close=${close}>
    <label class="check"><input type="checkbox" checked=${state.settings.keys} onChange=${(/** @type {any} */ event) => {
      state.settings.keys = event.target.checked;
      changed();
    }} /> Letters, digits and signs are commands (outside of fields)</label>
    <dl class="keys">${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
  <//>`;
}

/** @param {string} view */
function show(view) {
  state.view = view;
  state.touched = null;
  changed();
}

/** @param {"outline" | "coloured" | "rendered"} name */
function toggle(name) {
  state[name] = !state[name];
  if (name === "outline" && narrow()) state.panel = "";
  changed();
}

/** @param {string} name */
function panel(name) {
  state.panel = state.panel === name ? "" : name;
  if (narrow()) state.outline = false;
  changed();
}

function narrow() {
  return NARROW.matches;
}

/** In a window that becomes narrow, or is magnified, what stood beside the conversation would cover it. */
function onWidth() {
  if (!narrow()) return;
  state.panel = "";
  state.outline = false;
  changed();
}

/** The next message begins another conversation: a further root of the tree. */
function begin() {
  state.tree.cursor = null;
  state.view = "talk";
  changed();
  focusNext("#composer");
}

function clear() {
  stopAll();
  state.tree = emptyTree();
  state.marked = state.inspected = state.touched = null;
  announce("Cleared", true);
}

function save() {
  const data = { ...writeTree(state.tree), settings: state.settings, model: state.model, written: new Date().toISOString() };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  announce("Exported", true);
}

/** @param {any} event */
async function open(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const data = JSON.parse(await file.text());
    stopAll();
    state.tree = readTree(data);
    state.settings = readSettings(data.settings);
    state.marked = state.inspected = state.touched = null;
    announce(`Imported ${Object.keys(state.tree.messages).length} messages`, true);
  } catch (error) {
    announce(`It could not be imported: ${/** @type {Error} */ (error).message}`, true);
  }
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  changed();
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.key === "Escape") {
    if (state.touched) state.touched = null;
    else if (isRunning()) stopAll();
    else if (target.matches("input, textarea, select")) target.blur();
    return changed();
  }
  if (!state.settings.keys || event.ctrlKey || event.metaKey || event.altKey || target.closest("input, textarea, select, dialog, [contenteditable]")) return;
  const path = pathTo(state.tree, state.tree.cursor);
  const answered = [...path].reverse().find((message) => message.role === "assistant");
  const last = path[path.length - 1];
  const move = (/** @type {"up" | "down" | "left" | "right"} */ way) => () => {
    if (last) state.tree.cursor = walk(state.tree, last.id, way);
    changed();
  };
  /** @type {Record<string, () => void>} */
  const actions = {
    "/": () => (show("talk"), focusNext("#composer")),
    "?": () => ((state.help = true), changed()),
    1: () => show("talk"),
    2: () => show("compare"),
    3: () => show("engine"),
    j: move("down"),
    k: move("up"),
    "[": move("left"),
    "]": move("right"),
    a: () => answered && focusAnswer(answered.id),
    t: () => toggle("coloured"),
    d: () => toggle("rendered"),
    o: () => toggle("outline"),
    s: () => panel("settings"),
    n: begin,
    r: () => answered && !isRunning() && retry(answered),
    m: () => answered && mark(answered.id),
  };
  if (!Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
}

async function loadModels() {
  try {
    const { data } = await (await call("/v1/models")).json();
    state.models = data.map((/** @type {any} */ model) => String(model.id));
    state.modalities = Object.fromEntries(
      data.filter((/** @type {any} */ model) => Array.isArray(model.input_modalities)).map((/** @type {any} */ model) => [String(model.id), model.input_modalities]),
    );
    state.defaults = Object.fromEntries(
      data.filter((/** @type {any} */ model) => model.sampling_defaults).map((/** @type {any} */ model) => [String(model.id), model.sampling_defaults]),
    );
    state.modelStates = Object.fromEntries(
      data.filter((/** @type {any} */ model) => typeof model.state === "string").map((/** @type {any} */ model) => [String(model.id), model.state]),
    );
    if (!state.models.includes(state.model)) state.model = state.models[0] ?? "";
  } catch (error) {
    announce(/** @type {Error} */ (error).message, !state.askKey);
  }
  changed();
}

async function start() {
  restore();
  whenAnswered(() => {
    if (Object.keys(state.modelStates).length) loadModels();
  });
  NARROW.addEventListener("change", onWidth);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed); // canvases have no style sheet
  render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
  try {
    state.config = await (await call("/console/config.json")).json();
  } catch (error) {
    announce(/** @type {Error} */ (error).message, true);
  }
  if (state.config?.needs_key) {
    state.askKey = true;
    changed();
  } else await loadModels();
}

start();
