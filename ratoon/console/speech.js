// @ts-check
// What a screen reader is told of an answer while it is written: whole sentences and lines, some seconds apart. Told token by
// token, it would begin anew with each.

const PAUSE = 2; // seconds from one piece to the next
const KEPT = 4; // pieces that stay in the page: a screen reader has said the others
const END = /[.!?…]["'”’)\]]*\s|[。！？\n]/g;

/** Where the last sentence or line ends that is whole. @param {string} text @param {number} from */
export function wholeUntil(text, from) {
  let end = from;
  for (const match of text.slice(from).matchAll(END)) end = from + match.index + match[0].length;
  return end;
}

export class Speech {
  /** @param {number} place where the new text begins: what an answer has of another one was told with that */
  constructor(place) {
    this.place = place;
    this.last = -Infinity;
    /** @type {{at: number, text: string}[]} */
    this.pieces = [];
  }

  /** Takes the text so far. The text that the last piece ends at is all of it when the answer is.
   * @param {string} text @param {number} now seconds @param {boolean} isDone */
  take(text, now, isDone) {
    const end = isDone ? text.length : now - this.last >= PAUSE ? wholeUntil(text, this.place) : this.place;
    const piece = text.slice(this.place, end).trim();
    if (piece) {
      this.pieces = [...this.pieces, { at: this.place, text: piece }].slice(-KEPT);
      this.last = now;
    }
    this.place = Math.max(this.place, end);
  }
}
