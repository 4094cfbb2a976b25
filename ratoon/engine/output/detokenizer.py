"""Token ids to text, one step at a time, and the stop strings found in that text.

A piece of text never ends inside a character, and never holds the beginning of a stop string that may yet be completed:
the pieces, joined, are exactly the text. What ends a request for other reasons is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tokenizers.decoders import DecodeStream

from ratoon.core.params import GenerationParams, SamplingParams

REPLACEMENT = "\ufffd"  # the decoding of bytes that are not, or not yet, a whole character
CONTEXT_TOKENS = 6  # of the prompt: enough to decide how the text of the first new token begins
LONGEST_STALL = 16  # tokens without a whole character at their end, before what is certain is let out

Decode = Callable[[list[int]], str]


def make_detokenizer(tokenizer: Any | None, prompt_token_ids: Sequence[int], params: GenerationParams) -> Detokenizer:
    """The right form: none, fast (the tokenizer has a `tokenizers` backend) or slow."""
    if tokenizer is None or not params.detokenize:
        return Detokenizer()
    if getattr(tokenizer, "backend", None) is None:
        return SlowDetokenizer(tokenizer, prompt_token_ids, params)
    return FastDetokenizer(tokenizer, prompt_token_ids, params)


class Detokenizer:
    """The form without a tokenizer: it keeps the token ids, and its text stays empty."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return ""

    def update(self, new_token_ids: Sequence[int], ended_by_token: bool = False) -> str | None:
        """Take tokens in, up to the first stop string, which is returned. Tokens after it are left out."""
        self.token_ids.extend(new_token_ids)
        return None

    def finish(self) -> str | None:
        """Releases the text that was held back, because no more tokens will come."""
        return None

    def next_text(self, finished: bool, delta: bool) -> str:
        """The text so far, or what is new of it since the last call."""
        return ""


class TextDetokenizer(Detokenizer):
    """What the fast and the slow form share. They differ in how a token becomes text (`_decode_token`)."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: GenerationParams) -> None:
        super().__init__()
        stop, self._include_stop = [], False  # a search has no stop strings
        if isinstance(params, SamplingParams):
            stop, self._include_stop = params.stop or [], params.include_stop_str_in_output
        self._stop_strings = StopStrings(stop, self._include_stop) if stop else None
        self._min_tokens = params.min_tokens
        # The text: pieces that were given out, and the rest. Where stop strings are looked for, all of it is the rest.
        self._delivered: list[str] = []
        self._rest = ""
        self._num_chars_delivered = 0  # of the rest
        self._num_decoded = 0  # tokens; without stop strings, text is made when it is asked for
        special_ids = frozenset(tokenizer.special_token_ids)
        self._skipped_ids = special_ids if params.skip_special_tokens else frozenset()
        self._glued_ids = frozenset() if params.spaces_between_special_tokens else special_ids - self._skipped_ids
        context = [token for token in prompt_token_ids[-CONTEXT_TOKENS:] if token not in self._skipped_ids]
        decode = _bind_decode(tokenizer, params.skip_special_tokens)
        # A prompt that ends inside a character can't tell how the next text begins, and would leak into it.
        if decode(context).endswith(REPLACEMENT):
            context = []
        self._window = DecodeWindow(decode, context)

    def update(self, new_token_ids: Sequence[int], ended_by_token: bool = False) -> str | None:
        left_out = ended_by_token and not self._include_stop  # a stop token ends the text without being part of it
        if self._stop_strings is None:
            self.token_ids.extend(new_token_ids)
            if left_out and new_token_ids:
                self._decode_up_to(len(self.token_ids) - 1)
                self._num_decoded = len(self.token_ids)
            return None
        last = len(new_token_ids) - 1
        for position, token in enumerate(new_token_ids):
            self.token_ids.append(token)
            if left_out and position == last:
                break
            if token in self._skipped_ids:
                continue
            stop = self._append(self._glued(self._decode_token(token), len(self.token_ids) - 1))
            if stop is not None:
                return stop
        return None

    def finish(self) -> str | None:
        self._decode_up_to(len(self.token_ids))
        return self._append(self._glued(self._window.flush(), len(self.token_ids) - 1))

    @property
    def text(self) -> str:
        self._decode_up_to(len(self.token_ids))
        return "".join([*self._delivered, self._rest]) if self._delivered else self._rest

    def next_text(self, finished: bool, delta: bool) -> str:
        if self._stop_strings is None:
            if not delta:
                return self.text
            self._decode_up_to(len(self.token_ids))
            piece, self._rest = self._rest, ""
            self._delivered.append(piece)
            return piece
        visible = len(self._rest)
        if not finished:
            visible -= self._stop_strings.num_held_back(self._rest)
        if not delta:
            return self._rest[:visible]
        start = self._num_chars_delivered
        self._num_chars_delivered = visible
        return self._rest[start:visible]

    def _append(self, piece: str) -> str | None:
        """Add a piece of text; if it completes a stop string, cut the text there and return that string."""
        checked = len(self._rest)
        self._rest += piece
        if self._stop_strings is None:
            return None
        # Like an eos token, a stop string counts only once min_tokens have gone before it.
        if len(self.token_ids) <= self._min_tokens:
            self._stop_strings.first_char = len(self._rest)
            return None
        if not piece:
            return None
        found = self._stop_strings.find(self._rest, checked)
        if found is None:
            return None
        stop, self._rest = found
        return stop

    def _decode_up_to(self, end: int) -> None:
        """Adds the text of the tokens up to this place that have none yet. Where stop strings are looked for, there are
        none of these."""
        start = self._num_decoded
        if self._stop_strings is not None or start >= end:
            return
        self._num_decoded = end
        text = self._decode_run(self.token_ids[start:end])
        if text is not None:
            self._rest += text
            return
        for place in range(start, end):
            token = self.token_ids[place]
            if token not in self._skipped_ids:
                self._rest += self._glued(self._decode_token(token), place)

    def _glued(self, piece: str, place: int) -> str:
        """Returns the text of the token at a place: a special token that follows another one begins without a space,
        where the caller wants none between them."""
        if self._glued_ids and place >= 1 and self._glued_ids.issuperset(self.token_ids[place - 1 : place + 1]):
            return piece.lstrip(" ")
        return piece

    def _decode_run(self, token_ids: list[int]) -> str | None:
        """Returns the text of several tokens at once. None: they must be decoded one by one."""
        return None

    def _decode_token(self, token: int) -> str:
        raise NotImplementedError


class SlowDetokenizer(TextDetokenizer):
    """The detokenizer for a tokenizer that has `decode` and nothing more."""

    def _decode_token(self, token: int) -> str:
        return self._window.push(token)


class FastDetokenizer(TextDetokenizer):
    """The detokenizer that uses a table of whole texts, where the tokenizer has one, and the incremental decoder of
    `tokenizers`.

    The window runs beside them (it only notes the tokens), for three things that the stream can't do: let out the rest
    at the end, go on after text that contradicts what was already let out, and bound the wait for a whole character.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: GenerationParams) -> None:
        super().__init__(tokenizer, prompt_token_ids, params)
        self._backend = tokenizer.backend
        self._whole_texts: Mapping[int, str | None] | None = getattr(tokenizer, "whole_texts", None)
        self._skip_special_tokens = params.skip_special_tokens
        self._stream: DecodeStream | None = None  # None: made anew when it is needed
        self._window_alone = False  # it has released other text; a stream can't follow it

    def _decode_run(self, token_ids: list[int]) -> str | None:
        window, whole_texts = self._window, self._whole_texts
        if whole_texts is None or window.pending or self._window_alone or self._glued_ids:
            return None
        if not self._skipped_ids.isdisjoint(token_ids):
            return None
        texts = [whole_texts[token] for token in token_ids]
        if None in texts:
            return None
        self._stream = None  # it has not seen these tokens
        window.restart(token_ids[-1])
        return "".join(cast("list[str]", texts))

    def _decode_token(self, token: int) -> str:
        window = self._window
        if not window.pending and self._whole_texts is not None and not self._window_alone:
            text = self._whole_texts[token]
            if text is not None:
                self._stream = None  # it has not seen this token
                window.restart(token)
                return text
        if self._window_alone or len(window.pending) >= LONGEST_STALL:
            self._window_alone = True
            return window.push(token)
        if self._stream is None:
            self._stream = DecodeStream(ids=list(window.context), skip_special_tokens=self._skip_special_tokens)
        try:
            piece: str | None = self._stream.step(self._backend, token)
        except Exception:  # the stream knows no narrower type: the new text does not begin with the old
            self._window_alone = True
            return window.push(token)
        window.pending.append(token)
        if piece is None:
            return ""
        window.advance()
        return piece


class DecodeWindow:
    """Text of a growing sequence of tokens, decoded from a few tokens back.

    `context` are tokens whose text is out; they decide how the next text begins (a leading space, say). `pending` are
    tokens after them whose text is not, because it does not end with a whole character.
    """

    def __init__(self, decode: Decode, context: list[int]) -> None:
        self.context = context
        self.pending: list[int] = []
        self._decode = decode
        self._context_text: str | None = None  # None: not decoded yet

    def push(self, token: int) -> str:
        self.pending.append(token)
        text = self._decode(self.context + self.pending)
        if text.endswith(REPLACEMENT):
            return self._let_out_what_is_certain(text) if len(self.pending) > LONGEST_STALL else ""
        piece = self._new_part(text)
        if piece:
            self.advance()
        elif len(self.pending) > LONGEST_STALL:
            self.pending.clear()  # tokens that have no text
        return piece

    def restart(self, token: int) -> None:
        """The text of this token is out, and it decides alone how the next text begins."""
        self.context = [token]
        self._context_text = None

    def advance(self) -> None:
        """All pending text is out."""
        self.context = self.pending
        self.pending = []
        self._context_text = None

    def flush(self) -> str:
        """All that is left, whole or not."""
        piece = self._new_part(self._decode(self.context + self.pending))
        self.advance()
        return piece

    def _new_part(self, text: str) -> str:
        if self._context_text is None:
            self._context_text = self._decode(self.context)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self.pending)  # the decoding of released text has changed

    def _let_out_what_is_certain(self, text: str) -> str:
        """The last character may still become another; all before it can't. Without this a long run of broken
        bytes would be decoded again in full with each token."""
        piece = self._new_part(text[: -len(REPLACEMENT)])
        self.context = (self.context + self.pending)[-LONGEST_STALL // 2 :]
        self.pending = []
        self._context_text = self._decode(self.context).removesuffix(REPLACEMENT)
        return piece


class StopStrings:
    """Finds stop strings in a growing text. What it finds does not depend on the pieces in which the text came."""

    def __init__(self, strings: Sequence[str], include_in_text: bool) -> None:
        self._strings = tuple(strings)
        self._include_in_text = include_in_text
        self.first_char = 0  # a stop string must end after this place

    def find(self, text: str, checked: int) -> tuple[str, str] | None:
        """The stop string that is complete first, and the text cut at it. `text[:checked]` was searched before."""
        best: tuple[int, int, str] | None = None  # (end, start, string): earliest end, then the longest string
        for stop in self._strings:
            start = text.find(stop, max(0, max(checked, self.first_char) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        return stop, text[:end] if self._include_in_text else text[:start]

    def num_held_back(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = 0
        if self._include_in_text:
            return longest
        for stop in self._strings:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _bind_decode(tokenizer: Any, skip_special_tokens: bool) -> Decode:
    def decode(token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    return decode
