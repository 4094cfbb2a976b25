"""Token ids to text, one step at a time, and the stop strings found in that text.

A piece of text never ends inside a character, and never holds the beginning of a stop string that may yet be completed:
the pieces, joined, are exactly the text. What ends a request for other reasons is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
        self.text = ""

    def update(self, new_token_ids: Sequence[int], ended_by_token: bool = False) -> str | None:
        """Take tokens in, up to the first stop string, which is returned. Tokens after it are left out."""
        self.token_ids.extend(new_token_ids)
        return None

    def finish(self) -> str | None:
        """No more tokens will come: release the text that was held back."""
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
        self._stop_strings = StopStrings(stop, self._include_stop)
        self._min_tokens = params.min_tokens
        self._num_chars_delivered = 0
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
        last = len(new_token_ids) - 1
        for position, token in enumerate(new_token_ids):
            self.token_ids.append(token)
            if ended_by_token and position == last and not self._include_stop:
                break  # a stop token ends the text without being part of it
            if token in self._skipped_ids:
                continue
            stop = self._append(self._decode_token(token))
            if stop is not None:
                return stop
        return None

    def finish(self) -> str | None:
        return self._append(self._window.flush())

    def next_text(self, finished: bool, delta: bool) -> str:
        visible = len(self.text)
        if not finished:
            visible -= self._stop_strings.num_held_back(self.text)
        if not delta:
            return self.text[:visible]
        start = self._num_chars_delivered
        self._num_chars_delivered = visible
        return self.text[start:visible]

    def _append(self, piece: str) -> str | None:
        """Add a piece of text; if it completes a stop string, cut the text there and return that string."""
        if len(self.token_ids) >= 2 and self.token_ids[-1] in self._glued_ids and self.token_ids[-2] in self._glued_ids:
            piece = piece.lstrip(" ")
        checked = len(self.text)
        self.text += piece
        # Like an eos token, a stop string counts only once min_tokens have gone before it.
        if len(self.token_ids) <= self._min_tokens:
            self._stop_strings.first_char = len(self.text)
            return None
        if not piece:
            return None
        found = self._stop_strings.find(self.text, checked)
        if found is None:
            return None
        stop, self.text = found
        return stop

    def _decode_token(self, token: int) -> str:
        raise NotImplementedError


class SlowDetokenizer(TextDetokenizer):
    """For a tokenizer that has `decode` and nothing more."""

    def _decode_token(self, token: int) -> str:
        return self._window.push(token)


class FastDetokenizer(TextDetokenizer):
    """On the incremental decoder of `tokenizers`.

    The window runs beside it (it only notes the tokens), for three things that the stream can't do: let out the rest at
    the end, go on after text that contradicts what was already let out, and bound the wait for a whole character.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: GenerationParams) -> None:
        super().__init__(tokenizer, prompt_token_ids, params)
        self._backend = tokenizer.backend
        self._stream: DecodeStream | None = DecodeStream(
            ids=list(self._window.context), skip_special_tokens=params.skip_special_tokens
        )

    def _decode_token(self, token: int) -> str:
        if self._stream is None or len(self._window.pending) >= LONGEST_STALL:
            self._stream = None  # the window has released other text; the stream can't follow it
            return self._window.push(token)
        try:
            piece: str | None = self._stream.step(self._backend, token)
        except Exception:  # the stream knows no narrower type: the new text does not begin with the old
            self._stream = None
            return self._window.push(token)
        self._window.pending.append(token)
        if piece is None:
            return ""
        self._window.advance()
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
