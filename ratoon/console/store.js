// @ts-check
// The page's state, and the way to say that it changed. It lives in memory. The tree and the settings are also written
// to sessionStorage, which ends with the tab, so that a reload loses nothing; the key never is.

import { Speech } from "./speech.js";
import { emptyTree, readTree, writeTree } from "./tree.js";

/** @typedef {import("./types").Settings} Settings */

const STORED = "ratoon";

/** @returns {Settings} */
export function defaultSettings() {
  return {
    system: "",
    fields: {},
    beams: false,
    format: "text",
    formatText: "",
    tools: [],
    toolChoice: "auto",
    alternatives: 5,
    retain: 600,
    keys: true,
  };
}

export const state = {
  /** @type {import("./types").Config | null} */
  config: null,
  key: "",
  adminKey: "",
  model: "",
  /** @type {string[]} */
  models: [],
  /** What each model reads, where the server says it.
   * @type {Record<string, string[]>} */
  modalities: {},
  /** What counts where a request leaves a field out, for each model whose files the server has read.
   * @type {Record<string, Record<string, number | null>>} */
  defaults: {},
  /** Whether each model is loaded, where the server has several: its word for it.
   * @type {Record<string, string>} */
  modelStates: {},
  view: "talk",
  tree: emptyTree(),
  settings: defaultSettings(),
  coloured: false,
  rendered: true,
  /** @type {string | null} */
  marked: null,
  /** @type {{id: string, index: number} | null} */
  inspected: null,
  /** The token under the pointer or the keyboard, and whether it stays.
   * @type {{id: string, index: number, pinned: boolean} | null} */
  touched: null,
  panel: wide() ? "settings" : "",
  outline: wide(),
  help: false,
  askKey: false,
  /** @type {{message: string, param?: string | null} | null} */
  formatError: null,
  announcement: "",
  /** What a screen reader is told of the answer that is written. */
  speech: new Speech(0),
  notice: "",
};

function wide() {
  return typeof matchMedia === "function" && matchMedia("(min-width: 1000px)").matches;
}

/** @type {Set<() => void>} */
const listeners = new Set();
let scheduled = false;
let saving = 0;

export function onChange(/** @type {() => void} */ listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Draws the page anew, once for all changes of a frame. */
export function changed() {
  if (scheduled) return;
  scheduled = true;
  // A hidden tab gets no animation frames.
  const later = document.hidden ? (/** @type {any} */ f) => setTimeout(f, 100) : requestAnimationFrame;
  later(() => {
    scheduled = false;
    for (const listener of listeners) listener();
    if (!saving) saving = setTimeout(save, 500);
  });
}

/** A message changed: views of it are drawn anew. */
export function touch(/** @type {import("./types").Message} */ message) {
  message.version += 1;
  changed();
}

/** Tells a screen reader, and shows for some seconds what a button did. */
export function announce(/** @type {string} */ text, visible = false) {
  // What stays the same is not told again: the space makes it another text.
  state.announcement = text === state.announcement ? `${text}\u00a0` : text;
  if (visible) {
    state.notice = text;
    setTimeout(() => {
      if (state.notice === text) {
        state.notice = "";
        changed();
      }
    }, 2500);
  }
  changed();
}

function save() {
  saving = 0;
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ tree: writeTree(state.tree), settings: state.settings }));
  } catch {
    // Full, or switched off: the tree stays in memory, and can be exported.
  }
}

export function restore() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORED) || "null");
    if (!stored) return;
    state.tree = readTree(stored.tree);
    state.settings = readSettings(stored.settings);
  } catch {
    sessionStorage.removeItem(STORED);
  }
}

/** Settings from a file: what has another type than expected is left at its default.
 * @param {any} data
 * @returns {Settings} */
export function readSettings(data) {
  const settings = defaultSettings();
  if (!data || typeof data !== "object") return settings;
  for (const name of /** @type {const} */ (["system", "format", "formatText", "toolChoice"])) {
    if (typeof data[name] === "string") settings[name] = data[name];
  }
  for (const name of /** @type {const} */ (["alternatives", "retain"])) {
    if (Number.isFinite(data[name])) settings[name] = data[name];
  }
  settings.beams = data.beams === true;
  settings.keys = data.keys !== false;
  for (const [name, value] of Object.entries(data.fields || {})) {
    if (/^[a-z_]{1,40}$/.test(name) && typeof value === "string") settings.fields[name] = value;
  }
  if (Array.isArray(data.tools)) {
    settings.tools = data.tools.slice(0, 64).map((/** @type {any} */ tool) => ({
      name: String(tool?.name ?? ""),
      description: String(tool?.description ?? ""),
      parameters: String(tool?.parameters ?? ""),
      canned: String(tool?.canned ?? ""),
    }));
  }
  return settings;
}
