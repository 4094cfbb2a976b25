// @ts-check
// The panel of settings: system prompt, sampling, search, the form of answers with the server's errors, tools.

import { call } from "./api.js";
import { classes, html, useState } from "./dom.js";
import { focusNext } from "./focus.js";
import { FIELDS, formatFields, FORMATS, hintOf, SettingError } from "./request.js";
import { changed, state } from "./store.js";

/** @param {(value: any) => void} set */
function bind(set) {
  return (/** @type {any} */ event) => {
    set(event.target.type === "checkbox" ? event.target.checked : event.target.value);
    changed();
  };
}

export function Panel() {
  const { settings } = state;
  const shown = FIELDS.filter((field) => field.both || Boolean(field.search) === settings.beams);
  const wrong = state.formatError?.param ?? "";
  const hint = (/** @type {import("./request.js").PanelField} */ field) => hintOf(field, state.defaults[state.model]);
  return html`<div class="settings">
    <details open>
      <summary>System prompt</summary>
      <textarea rows="3" aria-label="System prompt" placeholder="The model's own" value=${settings.system} onInput=${bind((value) => (settings.system = value))}></textarea>
      <p class="hint">It holds for conversations that begin after this.</p>
    </details>
    <details open>
      <summary>Sampling</summary>
      <label class="check"><input type="checkbox" checked=${settings.beams} onChange=${bind((value) => (settings.beams = value))} /> Search with beams instead of sampling</label>
      <div class="fields">
        ${shown.map((field) => html`<label key=${field.name} class=${classes("field", field.kind === "lines" && "wide", wrong === field.name && "wrong")}>
          <span>${field.label}</span>
          ${field.kind === "lines"
            ? html`<textarea rows="2" placeholder=${hint(field)} value=${settings.fields[field.name] ?? ""} onInput=${bind((value) => (settings.fields[field.name] = value))}></textarea>`
            : field.kind === "choice"
              ? html`<select value=${settings.fields[field.name] ?? ""} onChange=${bind((value) => (settings.fields[field.name] = value))}>
                  <option value="">Default: ${hint(field)}</option>${field.options?.map((option) => html`<option value=${option}>${option}</option>`)}
                </select>`
              : html`<input inputmode="decimal" name=${field.name} placeholder=${hint(field)} title=${hint(field)} value=${settings.fields[field.name] ?? ""} onInput=${bind((value) => (settings.fields[field.name] = value))} />`}
        </label>`)}
        <label class="field"><span>Alternatives shown</span><input inputmode="numeric" value=${settings.alternatives} onInput=${bind((value) => (settings.alternatives = Number.parseInt(value, 10) || 0))} /></label>
        <label class="field"><span>Keep memory, seconds</span><input inputmode="numeric" title="retain_kv: how long an answer's keys and values are kept for branches" value=${settings.retain} onInput=${bind((value) => (settings.retain = Number.parseFloat(value) || 0))} /></label>
      </div>
      <p class="hint">An empty field is not sent; grey text is the default.</p>
    </details>
    <${Format} />
    <${Tools} />
  </div>`;
}

function Format() {
  const { settings } = state;
  const [checked, setChecked] = useState("");
  const error = state.formatError;
  const choose = (/** @type {string} */ value) => {
    if (!settings.formatText.trim() || Object.values(FORMATS).some((other) => other.example === settings.formatText)) settings.formatText = FORMATS[value].example;
    settings.format = value;
    state.formatError = null;
    setChecked("");
  };
  const check = async () => {
    setChecked("…");
    state.formatError = null;
    try {
      // The least that the server can be asked: it refuses a wrong format before anything runs.
      const json = { ...(state.model ? { model: state.model } : {}), prompt: "a", max_tokens: 1, ...formatFields(settings) };
      await call("/v1/completions", { json });
      setChecked("The server accepts it.");
    } catch (problem) {
      const found = /** @type {any} */ (problem);
      state.formatError = { message: found.message, param: found instanceof SettingError ? found.param : found.param };
      setChecked("");
    }
    changed();
  };
  const editable = !["text", "json_object"].includes(settings.format);
  return html`<details open=${settings.format !== "text"}>
    <summary>Form of the answer${settings.format === "text" ? "" : `: ${FORMATS[settings.format]?.label}`}</summary>
    <label class="field wide"><span>It must be</span>
      <select value=${settings.format} onChange=${bind(choose)}>${Object.entries(FORMATS).map(([name, format]) => html`<option value=${name} selected=${name === settings.format}>${format.label}</option>`)}</select>
    </label>
    ${editable && html`<textarea
      class=${classes("editor", error && "wrong")}
      rows="9"
      spellcheck="false"
      aria-label=${FORMATS[settings.format].label}
      aria-invalid=${Boolean(error)}
      aria-describedby="format-error"
      value=${settings.formatText}
      onInput=${bind((value) => {
        settings.formatText = value;
        state.formatError = null;
        setChecked("");
      })}
    ></textarea>`}
    ${settings.format !== "text" && html`<div class="line"><button type="button" onClick=${check}>Check</button><span class="muted" role="status">${checked}</span></div>`}
    <p id="format-error" class="error" role="alert" hidden=${!error}>${error?.param && html`<code>${error.param}</code> `}${error?.message}</p>
  </details>`;
}

function Tools() {
  const { settings } = state;
  const add = () => {
    settings.tools.push({
      name: settings.tools.length ? "" : "weather",
      description: settings.tools.length ? "" : "The weather in a city",
      parameters: settings.tools.length
        ? '{"type": "object", "properties": {}}'
        : '{\n  "type": "object",\n  "properties": {"city": {"type": "string", "maxLength": 30}},\n  "required": ["city"]\n}',
      canned: settings.tools.length ? "" : '{"celsius": 21, "sky": "clear"}',
    });
    changed();
  };
  const remove = (/** @type {number} */ index) => {
    settings.tools.splice(index, 1);
    focusNext(settings.tools.length ? "#add-tool" : "#tools"); // without a tool the part is closed
    changed();
  };
  return html`<details open=${settings.tools.length > 0}>
    <summary id="tools">Tools${settings.tools.length ? ` (${settings.tools.length})` : ""}</summary>
    ${settings.tools.map((tool, index) => html`<fieldset key=${index} class="tool">
      <legend>Tool ${index + 1}</legend>
      <label class="field wide"><span>Name</span><input value=${tool.name} onInput=${bind((value) => (tool.name = value))} /></label>
      <label class="field wide"><span>Description</span><input value=${tool.description} onInput=${bind((value) => (tool.description = value))} /></label>
      <label class="field wide"><span>Parameters (a JSON schema)</span><textarea class="editor" rows="5" spellcheck="false" value=${tool.parameters} onInput=${bind((value) => (tool.parameters = value))}></textarea></label>
      <label class="field wide"><span>Canned result; empty: you are asked for it</span><textarea class="editor" rows="2" spellcheck="false" value=${tool.canned} onInput=${bind((value) => (tool.canned = value))}></textarea></label>
      <button type="button" class="quiet" aria-label=${`Remove tool ${index + 1}`} onClick=${() => remove(index)}>Remove</button>
    </fieldset>`)}
    <div class="line">
      <button type="button" id="add-tool" onClick=${add}>Add a tool</button>
      ${settings.tools.length > 0 && html`<label class="inline">Choice <select value=${settings.toolChoice} onChange=${bind((value) => (settings.toolChoice = value))}>
        ${["auto", "required", "none"].map((name) => html`<option value=${name} selected=${name === settings.toolChoice}>${name}</option>`)}
      </select></label>`}
    </div>
  </details>`;
}
