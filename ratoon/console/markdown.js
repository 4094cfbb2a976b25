// @ts-check
// A small Markdown: from text to a tree of blocks, and from that to elements. What a model writes is hostile, so nothing
// is ever parsed as HTML: tags in the text are text, links lead to http and https only, and no image is loaded.
//
// Every piece of text keeps its place in the source, so that the view can show which token it came from.
// All passes are linear in the length of the text, and nesting is bounded.

import { html } from "./dom.js";

/** @typedef {{start: number, end: number}} Line a part of the source without its line break */
/** @typedef {{type: "text", pieces: Line[]} | {type: "code", pieces: Line[]} | {type: "break"} | {type: "strong", children: Inline[]} | {type: "em", children: Inline[]} | {type: "del", children: Inline[]}
 *   | {type: "link", href: string, children: Inline[]}} Inline */
/** @typedef {{type: "heading", level: number, children: Inline[]} | {type: "paragraph", children: Inline[]}
 *   | {type: "code", language: string, lines: Line[]} | {type: "quote", blocks: Block[]} | {type: "rule"}
 *   | {type: "list", ordered: boolean, start: number, items: Block[][]}
 *   | {type: "table", head: Inline[][], rows: Inline[][][]}} Block */

const MAX_DEPTH = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const BULLET = /^( {0,9})([-*+])([ \t]+|$)/;
const NUMBER = /^( {0,9})(\d{1,9})[.)]([ \t]+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** @param {string} source
 * @returns {Block[]} */
export function parse(source) {
  /** @type {Line[]} */
  const lines = [];
  for (let start = 0; start <= source.length; ) {
    let end = source.indexOf("\n", start);
    if (end < 0) end = source.length;
    lines.push({ start, end: source[end - 1] === "\r" && end > start ? end - 1 : end });
    start = end + 1;
  }
  return parseBlocks(source, lines, 0);
}

/** @param {string} source @param {Line[]} lines @param {number} depth
 * @returns {Block[]} */
function parseBlocks(source, lines, depth) {
  /** @type {Block[]} */
  const blocks = [];
  const text = (/** @type {number} */ at) => source.slice(lines[at].start, lines[at].end);
  let at = 0;
  while (at < lines.length) {
    const line = text(at);
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      const closing = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      let end = at + 1;
      while (end < lines.length && !closing.test(text(end))) end += 1;
      blocks.push({ type: "code", language: fence[2], lines: lines.slice(at + 1, end) });
      at = end + 1;
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      const begin = lines[at].start + heading[0].length;
      blocks.push({ type: "heading", level: heading[1].length, children: parseInline(source, [{ start: begin, end: lines[at].end }]) });
      at += 1;
      continue;
    }
    if (RULE.test(line)) {
      blocks.push({ type: "rule" });
      at += 1;
      continue;
    }
    if (depth < MAX_DEPTH && QUOTE.test(line)) {
      const inner = [];
      for (let match; at < lines.length && (match = QUOTE.exec(text(at))); at += 1) {
        inner.push({ start: lines[at].start + match[0].length, end: lines[at].end });
      }
      blocks.push({ type: "quote", blocks: parseBlocks(source, inner, depth + 1) });
      continue;
    }
    if (depth < MAX_DEPTH && (BULLET.test(line) || NUMBER.test(line))) {
      at = parseList(source, lines, at, depth, blocks);
      continue;
    }
    if (line.includes("|") && at + 1 < lines.length && TABLE_RULE.test(text(at + 1)) && text(at + 1).includes("-")) {
      const head = cells(source, lines[at]);
      at += 2;
      const rows = [];
      for (; at < lines.length && text(at).includes("|") && text(at).trim(); at += 1) rows.push(cells(source, lines[at]));
      blocks.push({ type: "table", head, rows });
      continue;
    }
    const begin = at;
    at += 1;
    while (at < lines.length && !startsBlock(text(at))) at += 1;
    blocks.push({ type: "paragraph", children: parseInline(source, lines.slice(begin, at)) });
  }
  return blocks;
}

/** @param {string} line */
function startsBlock(line) {
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || BULLET.test(line) || NUMBER.test(line);
}

/** @param {string} source @param {Line[]} lines @param {number} at @param {number} depth @param {Block[]} blocks
 * @returns {number} the line after the list */
function parseList(source, lines, at, depth, blocks) {
  const text = (/** @type {number} */ index) => source.slice(lines[index].start, lines[index].end);
  const marker = (/** @type {string} */ line) => BULLET.exec(line) ?? NUMBER.exec(line);
  const first = /** @type {RegExpExecArray} */ (marker(text(at)));
  const ordered = !BULLET.test(text(at));
  const indent = first[1].length;
  /** @type {Block[][]} */
  const items = [];
  while (at < lines.length) {
    const match = marker(text(at));
    if (!match || match[1].length > indent + 1 || match[1].length < indent || !BULLET.test(text(at)) !== ordered) break;
    const width = match[0].length;
    const inner = [{ start: lines[at].start + width, end: lines[at].end }];
    at += 1;
    while (at < lines.length) {
      const line = text(at);
      const blanks = line.length - line.trimStart().length;
      if (!line.trim()) {
        const next = lines[at + 1] && text(at + 1);
        if (!next || (next.trim() && next.length - next.trimStart().length <= indent)) break;
      } else if (blanks <= indent && startsBlock(line)) break;
      else if (blanks <= indent && !source.slice(lines[at - 1].start, lines[at - 1].end).trim()) break;
      const removed = Math.min(blanks, width);
      inner.push({ start: lines[at].start + removed, end: lines[at].end });
      at += 1;
    }
    items.push(parseBlocks(source, inner, depth + 1));
    while (at + 1 < lines.length && !text(at).trim() && marker(text(at + 1))?.[1].length === indent) at += 1;
  }
  blocks.push({ type: "list", ordered, start: ordered ? Number(first[2]) : 1, items });
  return at;
}

/** @param {string} source @param {Line} line
 * @returns {Inline[][]} */
function cells(source, line) {
  const found = [];
  let { start, end } = line;
  while (start < end && " \t".includes(source[start])) start += 1;
  while (end > start && " \t".includes(source[end - 1])) end -= 1;
  if (source[start] === "|") start += 1;
  if (end > start && source[end - 1] === "|") end -= 1;
  for (let begin = start; begin <= end; ) {
    let stop = begin;
    while (stop < end && !(source[stop] === "|" && source[stop - 1] !== "\\")) stop += 1;
    found.push(parseInline(source, [{ start: begin, end: stop }]));
    begin = stop + 1;
  }
  return found;
}

/** Inline text of some lines of the source, with the marks of blocks already cut away.
 * @param {string} source @param {Line[]} lines
 * @returns {Inline[]} */
function parseInline(source, lines) {
  // The lines as one text; `origin` has the place of each of its characters in the source.
  const parts = lines.map((line) => source.slice(line.start, line.end).replace(/^[ \t]+/, ""));
  const text = parts.join("\n").replace(/[ \t]+$/, "");
  const origin = new Int32Array(text.length + 1);
  let place = 0;
  lines.forEach((line, index) => {
    const skipped = line.end - line.start - parts[index].length;
    for (let i = 0; i <= parts[index].length && place < origin.length; i += 1) origin[place++] = line.start + skipped + i;
  });
  /** The parts of the source that characters [from, to) of the text are. */
  const pieces = (/** @type {number} */ from, /** @type {number} */ to) => {
    /** @type {Line[]} */
    const found = [];
    for (let i = from; i < to; i += 1) {
      const last = found[found.length - 1];
      if (last && last.end === origin[i]) last.end += 1;
      else found.push({ start: origin[i], end: origin[i] + 1 });
    }
    return found;
  };

  /** @type {Inline[]} */
  const out = [];
  /** @type {{mark: string, index: number}[]} */
  const open = [];
  /** @type {Record<string, number>} */
  const counts = {};
  const unclosed = new Set();
  let begin = 0;
  let at = 0;
  const flush = (/** @type {number} */ to) => {
    if (to > begin) out.push({ type: "text", pieces: pieces(begin, to) });
  };
  const closeDownTo = (/** @type {number} */ index) => {
    while (open.length > index) counts[/** @type {{mark: string}} */ (open.pop()).mark] -= 1;
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && /[\\`*_~[\]()#|<>!-]/.test(text[at + 1] ?? "")) {
      flush(at);
      begin = at + 1;
      at += 2;
    } else if (char === "`") {
      const run = /** @type {RegExpExecArray} */ (/`+/.exec(text.slice(at, at + 40)))[0];
      const from = at + run.length;
      let stop = unclosed.has(run.length) ? -1 : text.indexOf(run, from);
      while (stop >= 0 && text[stop + run.length] === "`") {
        let after = stop + run.length;
        while (text[after] === "`") after += 1;
        stop = text.indexOf(run, after);
      }
      if (stop < 0) {
        unclosed.add(run.length);
        at = from;
      } else {
        flush(at);
        out.push({ type: "code", pieces: pieces(from, stop) });
        at = begin = stop + run.length;
      }
    } else if (char === "\n") {
      flush(at);
      out.push({ type: "break" });
      at = begin = at + 1;
    } else if (char === "*" || char === "_" || (char === "~" && text[at + 1] === "~")) {
      const mark = text[at + 1] === char ? char + char : char;
      const before = text[at - 1] ?? " ";
      const after = text[at + mark.length] ?? " ";
      const inWord = char === "_" && /\w/.test(before) && /\w/.test(after);
      if (!inWord && counts[mark] && !/\s/.test(before)) {
        flush(at);
        let index = open.length - 1;
        while (open[index].mark !== mark) index -= 1;
        const children = out.splice(open[index].index);
        children.shift(); // the mark itself
        closeDownTo(index);
        out.push({ type: mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em", children });
        begin = at + mark.length;
      } else if (!inWord && !/\s/.test(after) && open.length < 64) {
        flush(at);
        open.push({ mark, index: out.length });
        counts[mark] = (counts[mark] ?? 0) + 1;
        out.push({ type: "text", pieces: pieces(at, at + mark.length) });
        begin = at + mark.length;
      }
      at += mark.length;
    } else if (char === "[") {
      flush(at);
      if (open.length < 64) {
        open.push({ mark: "[", index: out.length });
        counts["["] = (counts["["] ?? 0) + 1;
      }
      out.push({ type: "text", pieces: pieces(at, at + 1) });
      at = begin = at + 1;
    } else if (char === "]" && counts["["] && text[at + 1] === "(") {
      const target = /^\(\s*<?([^\s<>()]{1,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)>?(?:\s+["'][^"'\n]{0,300}["'])?\s*\)/.exec(text.slice(at + 1, at + 2600));
      const href = target && safeHref(target[1]);
      if (target && href) {
        flush(at);
        let index = open.length - 1;
        while (open[index].mark !== "[") index -= 1;
        const children = out.splice(open[index].index);
        children.shift();
        closeDownTo(index);
        out.push({ type: "link", href, children });
        at = begin = at + 1 + target[0].length;
      } else at += 1;
    } else if (char === "h" && /^https?:\/\/[^\s<>"'`*)\]]{2,}/.test(text.slice(at, at + 12)) && !counts["["]) {
      const found = /** @type {RegExpExecArray} */ (/^https?:\/\/[^\s<>"'`*)\]]{2,2000}/.exec(text.slice(at, at + 2100)))[0].replace(/[.,;:!?]+$/, "");
      const href = safeHref(found);
      if (href) {
        flush(at);
        out.push({ type: "link", href, children: [{ type: "text", pieces: pieces(at, at + found.length) }] });
        at = begin = at + found.length;
      } else at += 1;
    } else at += 1;
  }
  flush(text.length);
  return out;
}

/** An address of the web, or null: scripts, data, files and everything else lead nowhere.
 * @param {string} text
 * @returns {string | null} */
export function safeHref(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    if (url.protocol !== "http:" && url.protocol !== "https:") return null;
    return url.username || url.password ? null : url.href;
  } catch {
    return null;
  }
}

/** @param {Inline[]} children @param {string} source
 * @returns {string} */
function plain(children, source) {
  return children
    .map((child) => {
      if (child.type === "break") return "\n";
      if (child.type === "text" || child.type === "code") return child.pieces.map((piece) => source.slice(piece.start, piece.end)).join("");
      return plain(child.children, source);
    })
    .join("");
}

/** @param {string} source
 * @param {(start: number, end: number) => any} leaf what stands for characters [start, end) of the source
 * @param {(text: string) => void} copy */
export function renderMarkdown(source, leaf, copy) {
  const inline = (/** @type {Inline[]} */ children) =>
    children.map((/** @type {Inline} */ child) => {
      switch (child.type) {
        case "text":
          return child.pieces.map((piece) => leaf(piece.start, piece.end));
        case "code":
          return html`<code>${child.pieces.map((piece) => leaf(piece.start, piece.end))}</code>`;
        case "break":
          return html`<br />`;
        case "link": {
          const shown = plain(child.children, source);
          const target = shown.trim() === child.href || `${shown.trim()}/` === child.href ? "" : child.href;
          return html`<a href=${child.href} rel="noopener noreferrer nofollow" target="_blank">${inline(child.children)}</a
            >${target && html`<span class="target"> (${target})</span>`}`;
        }
        case "strong":
          return html`<strong>${inline(child.children)}</strong>`;
        case "em":
          return html`<em>${inline(child.children)}</em>`;
        default:
          return html`<del>${inline(child.children)}</del>`;
      }
    });
  const block = (/** @type {Block} */ item) => {
    switch (item.type) {
      case "heading":
        // The page has headings of its own: those of an answer begin below them.
        return html`<div class=${`heading h${item.level}`} role="heading" aria-level=${Math.min(6, item.level + 2)}>${inline(item.children)}</div>`;
      case "paragraph":
        return html`<p>${inline(item.children)}</p>`;
      case "rule":
        return html`<hr />`;
      case "quote":
        return html`<blockquote>${item.blocks.map(block)}</blockquote>`;
      case "list": {
        const items = item.items.map((blocks) => html`<li>${tight(blocks)}</li>`);
        return item.ordered ? html`<ol start=${item.start}>${items}</ol>` : html`<ul>${items}</ul>`;
      }
      case "table":
        return html`<div class="table" tabindex="0" role="region" aria-label="Table"><table>
          <thead><tr>${item.head.map((cell) => html`<th scope="col">${inline(cell)}</th>`)}</tr></thead>
          <tbody>${item.rows.map((row) => html`<tr>${row.map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody>
        </table></div>`;
      default: {
        const text = item.lines.map((line) => source.slice(line.start, line.end)).join("\n");
        return html`<figure class="code">
          <figcaption><span>${item.language || "text"}</span><button type="button" class="quiet" onClick=${() => copy(text)}>Copy</button></figcaption>
          <pre tabindex="0"><code>${item.lines.map((line, index) => [leaf(line.start, line.end), index + 1 < item.lines.length ? "\n" : ""])}</code></pre>
        </figure>`;
      }
    }
  };
  /** An item of a list that is one paragraph has no paragraph in it. */
  const tight = (/** @type {Block[]} */ blocks) =>
    blocks.map((item, index) => (index === 0 && item.type === "paragraph" ? inline(item.children) : block(item)));
  return parse(source).map(block);
}
