// @ts-check
// The branch of the tree that is read: its messages, what can be done with each, and the field for the next one.

import { answer, edit, giveResults, goOn, goTo, isRunning, retry, send, stopAll, transcribe } from "./answers.js";
import { classes, html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { focusNext } from "./focus.js";
import { listener, modalitiesOf, Player, Segments } from "./recordings.js";
import { asCurl, asPython, modelOf } from "./request.js";
import { announce, changed, state } from "./store.js";
import { AnswerText, copyText, forksOf } from "./tokens.js";
import { pathTo, removeBranch, siblingsOf, walk } from "./tree.js";
import { Choices } from "./choices.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Attachment} Attachment */

const IMAGE = /^image\/(png|jpeg|webp|gif|bmp)$/;
const RECORDING = /^(audio|video)\//;
const RECORDING_NAME = /\.(wav|mp3|m4a|aac|flac|ogg|opus|webm|mp4|mkv)$/i; // where the system knows no type

export function Thread() {
  const { tree } = state;
  const path = pathTo(tree, tree.cursor);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const follows = useRef(true);
  const last = path[path.length - 1];
  useLayoutEffect(() => {
    if (box.current && follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [tree.cursor, last?.version]);
  const hidden = last?.children.length ?? 0;
  return html`<section class="thread" aria-label="Conversation" tabindex="-1">
    <div
      class="messages"
      ref=${box}
      onScroll=${(/** @type {Event} */ event) => {
        const element = /** @type {HTMLElement} */ (event.currentTarget);
        follows.current = element.scrollHeight - element.scrollTop - element.clientHeight < 60;
        if (state.touched && !state.touched.pinned) {
          state.touched = null;
          changed();
        }
      }}
    >
      ${path.length === 0 && html`<${Welcome} />`}
      ${path[0]?.system && html`<article class="message system" aria-label="System"><header><h2 class="who">System</h2></header><p class="said">${path[0].system}</p></article>`}
      ${path.map((message) => html`<${MessageView} key=${message.id} message=${message} />`)}
      ${hidden > 0 &&
      html`<p class="muted padded">
        ${hidden === 1 ? "A message follows" : `${hidden} versions follow`}; the next one that you send branches off here.
        <button type="button" class="quiet" onClick=${() => goTo(last.id)}>Go to the newest</button>
      </p>`}
    </div>
    <${Composer} />
  </section>`;
}

function Welcome() {
  const model = state.model || state.models[0];
  if (hearsOnly(model)) {
    return html`<div class="welcome">
      <h2>${model}</h2>
      <p>This model writes down what is said. Drop a recording anywhere below, or attach one: its text appears segment by segment, with the times.</p>
    </div>`;
  }
  return html`<div class="welcome">
    <h2>${model ? model : "No model is known yet"}</h2>
    <p>A finished answer is a root. Ask something, then touch any token of the answer: its alternatives, what each layer would have said, and a branch with another token that computes only what is new.</p>
    <ul class="starts">
      ${["What is gravity?", "Write a two-sentence story about a lighthouse.", "Name three colours, as a list."].map(
        (text) => html`<li><button type="button" onClick=${() => send(text, [])}>${text}</button></li>`,
      )}
    </ul>
  </div>`;
}

/** Whether it is known that a model reads recordings and no text. @param {string} model */
function hearsOnly(model) {
  const reads = modalitiesOf(model);
  return Boolean(reads?.includes("audio") && !reads.includes("text"));
}

/** @param {{message: Message}} props */
function MessageView({ message }) {
  const name = message.role === "user" ? "You" : message.role === "tool" ? "Tool result" : modelOf(message) || state.model || "Model";
  const marked = state.marked === message.id;
  return html`<article
    class=${classes("message", message.role, marked && "marked")}
    data-message=${message.id}
    aria-label=${name}
    tabindex="-1"
    aria-busy=${message.status === "running"}
  >
    <header><h2 class="who">${name}</h2><${Versions} message=${message} />${message.role === "assistant" && html`<${Cost} message=${message} />`}</header>
    ${message.role === "assistant" ? html`<${Answer} message=${message} />` : html`<${Said} message=${message} />`}
  </article>`;
}

/** Which of the versions this is, and the way to the others. @param {{message: Message}} props */
function Versions({ message }) {
  const siblings = siblingsOf(state.tree, message);
  if (siblings.length < 2) return null;
  const go = (/** @type {"left" | "right"} */ direction) => (/** @type {any} */ event) => {
    const id = walk(state.tree, message.id, direction);
    focusNext(`[data-message="${CSS.escape(id)}"] .versions [aria-label="${event.currentTarget.ariaLabel}"]:enabled`);
    goTo(id);
  };
  const place = siblings.indexOf(message.id);
  return html`<span class="versions" role="group" aria-label=${`Version ${place + 1} of ${siblings.length}`}>
    <button type="button" class="quiet" aria-label="Previous version" disabled=${place === 0} onClick=${go("left")}>‹</button>
    <span>${place + 1}/${siblings.length}</span>
    <button type="button" class="quiet" aria-label="Next version" disabled=${place === siblings.length - 1} onClick=${go("right")}>›</button>
  </span>`;
}

/** What the answer cost: tokens that were inherited and tokens that were computed. @param {{message: Message}} props */
function Cost({ message }) {
  const { continuation, usage } = message;
  const inherited = continuation?.inherited ?? usage?.cached ?? null;
  const computed = continuation?.computed ?? (usage ? usage.prompt - usage.cached : null);
  // Usage counts the answers of one request together.
  const written = message.group && message.status !== "running" ? message.tokens?.length ?? null : usage?.completion ?? null;
  const source = continuation?.fallback
    ? "the answer was no longer known: its text was sent again"
    : continuation
      ? { lease: "from a lease", prefix_cache: "from the prefix cache", recomputed: "computed again", host: "from a lease in host memory", files: "from a lease in files" }[continuation.source] ?? continuation.source
      : "from the prefix cache";
  const rate = written && message.seconds && message.seconds > 0 ? `${(written / message.seconds).toFixed(0)} tok/s` : "";
  return html`<span class="cost">
    ${message.score !== null && message.score !== undefined && html`<span class="chip" title="What the search ranks answers by">score ${message.score.toFixed(3)}</span>`}
    ${inherited !== null && html`<span class="chip inherited" title=${`Tokens before the answer whose keys and values were there: ${source}`}>${inherited} inherited</span>`}
    ${computed !== null && html`<span class="chip computed" title="Tokens before the answer that were computed">${computed} computed</span>`}
    ${written !== null && html`<span class="muted">${written} written</span>`}
    ${rate && html`<span class="muted wide">${rate}</span>`}
  </span>`;
}

/** @param {{message: Message}} props */
function Answer({ message }) {
  const running = message.status === "running";
  const known = Boolean(message.requestId) && !running;
  const group = message.group ? siblingsOf(state.tree, message).filter((id) => state.tree.messages[id].group === message.group) : [];
  const touched = state.touched?.id === message.id ? state.touched.index : -1;
  return html`
    <${AnswerText} message=${message} version=${message.version} coloured=${state.coloured} rendered=${state.rendered} touched=${touched} forks=${forksOf(message)} />
    ${running && html`<span class="caret" aria-hidden="true"></span>`}
    ${running && message.waiting && html`<p class="muted waiting">${message.waiting}</p>`}
    ${(message.segments?.length ?? 0) > 0 && html`<${Segments} message=${message} />`}
    ${(message.calls ?? []).map((called) => html`<div class="call"><span class="badge">call</span> <code>${called.name}(${called.arguments})</code></div>`)}
    ${message.error && html`<p class="error" role="alert">${message.error.param && html`<code>${message.error.param}</code> `}${message.error.message}</p>`}
    ${message.status === "stopped" && html`<p class="muted">Stopped.</p>`}
    ${group.length > 1 && !running && html`<${Choices} ids=${group} here=${message.id} />`}
    ${known && (message.calls?.length ?? 0) > 0 && message.children.length === 0 && html`<${Results} message=${message} />`}
    <div class="actions" role="group" aria-label="Actions">
      <button type="button" class="quiet" disabled=${running} onClick=${() => retry(message)}>Retry</button>
      ${message.finish === "length" && known && html`<button type="button" class="quiet" onClick=${() => goOn(message)}>Go on</button>`}
      <button type="button" class="quiet" onClick=${() => copyText(message.text)}>Copy</button>
      ${message.sent && html`<button type="button" class="quiet" onClick=${() => copyText(asCurl(message.sent ?? never(), document.baseURI, needsKey()))}>Copy as curl</button>
        <button type="button" class="quiet" onClick=${() => copyText(asPython(message.sent ?? never(), document.baseURI, needsKey()))}>Copy as Python</button>`}
      <button type="button" class="quiet" aria-pressed=${state.marked === message.id} onClick=${() => mark(message.id)}>Mark to compare</button>
      <button type="button" class="quiet" disabled=${running} onClick=${() => remove(message.id)}>Delete</button>
    </div>`;
}

/** @returns {never} */
function never() {
  throw new Error("An answer without a request has no such button");
}

function needsKey() {
  return Boolean(state.config?.needs_key);
}

/** Marks an answer; the view Compare shows it beside the one that is read. @param {string} id */
export function mark(id) {
  state.marked = state.marked === id ? null : id;
  announce(state.marked ? "Marked: the view Compare shows it beside the answer that you go to" : "The mark is removed", true);
}

/** @param {string} id */
function remove(id) {
  if (isRunning()) return;
  removeBranch(state.tree, id);
  if (state.marked && !state.tree.messages[state.marked]) state.marked = null;
  if (state.inspected && !state.tree.messages[state.inspected.id]) state.inspected = null;
  announce("Deleted");
}

/** Results of tools that have no canned answer. @param {{message: Message}} props */
function Results({ message }) {
  const calls = message.calls ?? [];
  const canned = (/** @type {string} */ name) => state.settings.tools.find((tool) => tool.name === name)?.canned ?? "";
  const [results, setResults] = useState(calls.map((called) => canned(called.name)));
  return html`<form
    class="results"
    onSubmit=${(/** @type {Event} */ event) => {
      event.preventDefault();
      giveResults(message, results);
    }}
  >
    ${calls.map((called, index) => html`<label>Result of <code>${called.name}</code>
      <textarea rows="2" value=${results[index]} onInput=${(/** @type {any} */ event) => setResults(results.map((old, at) => (at === index ? event.target.value : old)))}></textarea>
    </label>`)}
    <button type="submit">Give results</button>
  </form>`;
}

/** What the reader, or a tool, said. @param {{message: Message}} props */
function Said({ message }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null));
  if (draft !== null) {
    const cancel = () => {
      focusNext(`[data-message="${CSS.escape(message.id)}"] .actions button`);
      setDraft(null);
      changed();
    };
    const done = () => {
      setDraft(null);
      edit(message, draft);
    };
    return html`<form class="edit" onSubmit=${(/** @type {Event} */ event) => (event.preventDefault(), done())}>
      <textarea
        aria-label="Edit the message"
        rows=${Math.min(12, draft.split("\n").length + 1)}
        value=${draft}
        ref=${(/** @type {HTMLTextAreaElement | null} */ element) => element && element !== document.activeElement && element.focus()}
        onInput=${(/** @type {any} */ event) => setDraft(event.target.value)}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
          if (event.key === "Escape") cancel();
          else if (event.key === "Enter" && !event.shiftKey) {
            event.preventDefault();
            done();
          }
        }}
      ></textarea>
      <div class="actions"><button type="submit">Send as a new version</button><button type="button" class="quiet" onClick=${cancel}>Cancel</button></div>
    </form>`;
  }
  return html`
    ${(message.attachments ?? []).map((part) => html`<img class="attached" src=${part.url} alt=${part.name} />`)}
    ${message.recording && html`<${Player} message=${message} />`}
    ${(message.text || !message.recording) && html`<p class="said">${message.text}</p>`}
    <div class="actions" role="group" aria-label="Actions">
      ${message.role === "user" && !message.recording && html`<button type="button" class="quiet" onClick=${() => setDraft(message.text)}>Edit</button>`}
      ${message.children.length === 0 && !isRunning() && html`<button type="button" class="quiet" onClick=${() => answer(message)}>Answer</button>`}
      <button type="button" class="quiet" onClick=${() => copyText(message.text)}>Copy</button>
      <button type="button" class="quiet" disabled=${isRunning()} onClick=${() => remove(message.id)}>Delete</button>
    </div>`;
}

function Composer() {
  const [text, setText] = useState("");
  const [attached, setAttached] = useState(/** @type {Attachment[]} */ ([]));
  const [over, setOver] = useState(false);
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const running = isRunning();
  useEffect(() => {
    if (field.current) {
      field.current.style.height = "auto";
      field.current.style.height = `${Math.min(220, field.current.scrollHeight + 2)}px`;
    }
  }, [text]);
  const reads = modalitiesOf(state.model);
  const kinds = attachable(reads);
  const silent = hearsOnly(state.model);
  const submit = () => {
    if (running || (!text.trim() && !attached.length)) return;
    if (silent) return announce(`${state.model} reads recordings: drop or attach one. The text here then stands before it`, true);
    send(text, attached);
    setText("");
    setAttached([]);
  };
  const take = async (/** @type {FileList | null | undefined} */ files) => {
    for (const file of files ?? []) {
      if (IMAGE.test(file.type)) {
        const url = await dataUrl(file);
        setAttached((/** @type {Attachment[]} */ old) => [...old, { kind: "image", name: file.name, url }]);
      } else if (RECORDING.test(file.type) || (!file.type && RECORDING_NAME.test(file.name))) {
        // Text in the field is the context of a recording only where it can be nothing else.
        const context = silent ? text.trim() : "";
        if (context) setText("");
        await transcribe(file, context);
      } else announce(`${file.name} is neither an image nor a recording`, true);
    }
  };
  return html`<form
    class=${classes("composer", over && "over")}
    onSubmit=${(/** @type {Event} */ event) => (event.preventDefault(), submit())}
    onDragOver=${(/** @type {DragEvent} */ event) => (event.preventDefault(), setOver(true))}
    onDragLeave=${() => setOver(false)}
    onDrop=${(/** @type {DragEvent} */ event) => {
      event.preventDefault();
      setOver(false);
      take(event.dataTransfer?.files);
    }}
  >
    ${attached.length > 0 && html`<div class="attachments">${attached.map((part, index) => html`<span class="attachment">
      <img src=${part.url} alt=${part.name} />
      <button type="button" class="quiet" aria-label=${`Remove ${part.name}`} onClick=${() => {
        focusNext("#composer");
        setAttached(attached.filter((_, at) => at !== index));
        changed();
      }}>×</button>
    </span>`)}</div>`}
    <div class="line">
      <textarea
        id="composer"
        ref=${field}
        rows="1"
        aria-label="Message"
        placeholder=${placeholderFor(kinds, silent)}
        value=${text}
        onInput=${(/** @type {any} */ event) => setText(event.target.value)}
        onPaste=${(/** @type {ClipboardEvent} */ event) => event.clipboardData?.files.length && take(event.clipboardData.files)}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            submit();
          }
        }}
      ></textarea>
      ${kinds && html`<label class="attach quiet" title=${`Attach ${kinds}`}>Attach<input type="file" class="visually-hidden" aria-label=${`Attach ${kinds}`} accept=${acceptedBy(kinds)} multiple onChange=${(/** @type {any} */ event) => {
        take(event.target.files);
        event.target.value = "";
      }} /></label>`}
      ${running
        ? html`<button type="button" class="stop" onClick=${stopAll}>Stop</button>`
        : html`<button type="submit" class="primary" disabled=${silent || (!text.trim() && !attached.length)}>Send</button>`}
    </div>
  </form>`;
}

/** What can be attached for a model, in words; empty: nothing. What is not known is offered, and the server may refuse it;
 * a recording goes to whichever model hears. @param {string[] | null} reads */
function attachable(reads) {
  const audio = !reads || modalitiesOf(listener())?.includes("audio");
  const image = !reads || reads.includes("image");
  return [image && "an image", audio && "a recording"].filter(Boolean).join(" or ");
}

/** @param {string} kinds @param {boolean} silent */
function placeholderFor(kinds, silent) {
  if (silent) return "Drop a recording; text here stands before it, such as names";
  return kinds ? `Message, or drop ${kinds}` : "Message";
}

/** @param {string} kinds */
function acceptedBy(kinds) {
  return [kinds.includes("image") && "image/*", kinds.includes("recording") && "audio/*,video/*"].filter(Boolean).join(",");
}

/** @param {File} file
 * @returns {Promise<string>} */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
