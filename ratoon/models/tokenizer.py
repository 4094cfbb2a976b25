"""Text to token ids and back, over the `tokenizers` library, with the model's special tokens and chat template.

Built from the files of a Hugging Face folder here, from GGUF metadata in gguf_tokenizer.py. Incremental decoding is in
the detokenizer, which uses `backend`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.core.errors import ModelError, RequestError
from ratoon.models.chat_template import RenderedChat, TrustedTemplate, render_chat
from ratoon.models.conversation import check_tools
from ratoon.models.damage import FETCH_AGAIN, is_panic, reading, shorten, show, without_panic_messages
from ratoon.models.media_parts import without_data
from ratoon.models.template_process import render_in_child
from ratoon.models.token_bound import MinTokens, find_bound
from ratoon.observe.logging import get_logger

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"  # preferred where tools are passed, if the model has one of this name
REPLACEMENT = "\ufffd"  # the decoding of bytes that are not a whole character
LONG_TEXT = 10_000  # characters; tokenising more takes long, so other threads should run

logger = get_logger(__name__)


class WholeTexts(dict[int, str | None]):
    """Filled as tokens are looked up. None: a part of a character, or no text at all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, id: int) -> str | None:
        text = self._tokenizer.token_text(id)
        self[id] = whole = None if REPLACEMENT in text or not text else text
        return whole


class Tokenizer:
    """One model's tokenizer. `special_tokens` maps bos_token, eos_token, … to their text, for those that exist."""

    def __init__(
        self, backend: Backend, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str] | None = None
    ) -> None:
        backend.no_truncation()  # files may set truncation and padding; a prompt is never changed silently
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates or {})
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self._token_id(self.bos_token)
        self.eos_token_id = self._token_id(self.eos_token)
        self._token_texts: dict[int, str] = {}
        self._logged_notes: set[str] = set()
        # By kind of media that the model reads, what stands for it in a prompt; empty: the model reads text only.
        self.media_placeholders: dict[str, str] = {}

    def _token_id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one: ids may have gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def special_token_id(self, text: str) -> int | None:
        """The special token of this text, which `skip_special_tokens` leaves out; None if there is none."""
        token_id = self._token_id(text)
        return token_id if token_id in self.special_token_ids else None

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def template_text(self, asked: str | None = None, has_tools: bool = False) -> str | None:
        """The template that `render_chat` would use; None: there is none."""
        if asked is None and has_tools and TOOL_TEMPLATE in self.chat_templates:
            return self.chat_templates[TOOL_TEMPLATE]
        return self.chat_template if asked is None else self.chat_templates.get(asked, asked)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text. With `add_special_tokens`, those that the model expects around a text (often
        bos) are added."""
        with self._errors_about(text):
            if isinstance(text, str) and len(text) > LONG_TEXT:  # as a batch of one, which releases the GIL
                return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encoding(self, text: str) -> Encoding:
        """The tokens of a text alone, without special ones around it, with their places in it."""
        with self._errors_about(text):
            return self.backend.encode_batch([text], add_special_tokens=False)[0]

    def encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """Returns the tokens of several texts without special ones. The library tokenises them on all cores."""
        try:
            return self.backend.encode_batch(texts, add_special_tokens=False)
        except BaseException as error:  # one of the texts is bad: its error is that of a single text
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return [self.encoding(text) for text in texts]

    def encode_beginning(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of as much of a text as makes at most so many with the special ones around it."""
        num_special = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        found, room = self.encoding(text), most - num_special
        if len(found) > room:
            found.truncate(max(0, room))
        return self.backend.post_process(found, None, add_special_tokens).ids

    @contextmanager
    def _errors_about(self, text: str) -> Iterator[None]:
        """Turns what the library raises for a text into a RequestError."""
        try:
            yield
        except (TypeError, UnicodeError) as error:  # JSON can contain a lone surrogate: "\\ud800"
            problem = f"{type(text).__name__} is no text" if not isinstance(text, str) else "is no valid Unicode"
            raise RequestError("prompt", problem, "expected a text of whole characters") from error
        except BaseException as error:
            # A vocabulary that has no token for unknown words raises a bare Exception, and a damaged one panics.
            if type(error) is not Exception and not is_panic(error):
                raise
            problem = f"the model's tokenizer has no tokens for it: {shorten(str(error))}"
            raise RequestError("prompt", problem, "expected words that the model knows") from error

    def min_tokens(self, text: str, enough: int) -> int:
        """A lower bound on its tokens, not counted far beyond `enough`. 0: unknown without tokenising."""
        return self._bound(text, enough) if len(text) > enough else 0

    def refuse_early(self, text: str, longest: int) -> int | None:
        """Returns a lower bound on the tokens of a text that certainly has more than `longest`: such a text is refused
        before it is tokenised, which would take long and much memory. None: tokenise it. Short texts always are, so
        that errors have the exact number."""
        if len(text) <= LONG_TEXT:
            return None
        num_tokens = self.min_tokens(text, longest)
        return num_tokens if num_tokens > longest else None

    @cached_property
    def _bound(self) -> MinTokens:
        return find_bound(self.backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary has it (`Ġhello`, `▁hello`); None for an id that does not exist."""
        return self.backend.id_to_token(id) if id >= 0 else None

    def token_text(self, id: int) -> str:
        """The text of the token; � for bytes that are not a whole character, "" for an unknown id."""
        text = self._token_texts.get(id)
        if text is None:
            text = self._token_texts[id] = self._find_token_text(id)
        return text

    def _find_token_text(self, id: int) -> str:
        if self.id_to_token(id) is None:
            return ""
        # Some decoders drop a space at the start of a text, so the token is decoded after another one.
        anchor = self._anchor
        if anchor is not None:
            before, both = self.decode([anchor], False), self.decode([anchor, id], False)
            if both.startswith(before):
                return both[len(before) :]
        return self.decode([id], False)

    @cached_property
    def whole_texts(self) -> WholeTexts | None:
        """The text of each token, if that is whole characters. None: the text of several tokens is more than their
        texts one after the other, because the decoder is not one of bytes."""
        from tokenizers.decoders import ByteLevel

        return WholeTexts(self) if isinstance(self.backend.decoder, ByteLevel) else None

    @cached_property
    def _anchor(self) -> int | None:
        ids = self.encode("a", add_special_tokens=False)
        return ids[-1] if ids else None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt for these messages. Options as in render_chat."""
        return self.render_chat(messages, **options).text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> RenderedChat:
        """The prompt for these messages, and notes on what the template does not support (also logged, once).

        `add_generation_prompt`, the default, ends it where the answer begins; `continue_final_message` ends it after
        the text of the last message, the assistant's, for the model to continue. `chat_template`: another template, or
        the name of one of the model's own. Another one runs in a child process with limits on time and memory, unless
        it is a TrustedTemplate.
        """
        if add_generation_prompt and continue_final_message:
            problem = "contradicts continue_final_message: an answer begins or goes on"
            raise RequestError("add_generation_prompt", problem, "set one of the two to false")
        template = self._choose_template(chat_template, bool(tools))
        known: dict[str, Any] = {**self.special_tokens, "documents": None, **variables}
        known["tools"] = check_tools(tools) if tools else None
        known["add_generation_prompt"] = (
            not continue_final_message if add_generation_prompt is None else add_generation_prompt
        )
        known.pop("messages", None)
        render = render_chat if isinstance(template, TrustedTemplate) else render_in_child
        media = self.media_placeholders
        rendered = render(
            template,
            without_data(messages) if media else messages,
            known,
            continue_final_message=continue_final_message,
            placeholders=media,
        )
        for note in set(rendered.notes) - self._logged_notes:
            self._logged_notes.add(note)
            logger.warning("%s", note)
        return rendered

    def _choose_template(self, asked: str | None, has_tools: bool) -> str:
        if asked is not None:
            if not isinstance(asked, str):
                raise RequestError("chat_template", f"{type(asked).__name__} is no text")
            return TrustedTemplate(self.chat_templates[asked]) if asked in self.chat_templates else asked
        template = self.template_text(None, has_tools)
        if template is None:
            raise RequestError("messages", "this model has no chat template", "send a prompt, or a chat_template")
        return TrustedTemplate(template)


def find_other_token(one: Tokenizer, other: Tokenizer) -> tuple[int, str, str] | None:
    """Returns the first id that is another token in the other vocabulary, with both tokens; None: there is none. Added
    and special tokens are left out, which models of a family name differently, and formats of files keep apart."""
    vocabularies = [each.backend.get_vocab(with_added_tokens=True) for each in (one, other)]
    if vocabularies[0] == vocabularies[1]:
        return None
    added = {id for each in (one, other) for id in each.backend.get_added_tokens_decoder()}
    first, second = ({id: token for token, id in found.items() if id not in added} for found in vocabularies)
    differing = (id for id in sorted(first.keys() & second.keys()) if first[id] != second[id])
    return next(((id, first[id], second[id]) for id in differing), None)


def load_tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Loads a tokenizer from tokenizer.json and the small files beside it."""
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(str(folder), "has no tokenizer.json" + _other_tokenizer_files(folder), _how_to_convert())
    special_tokens, chat_templates = _read_special_tokens(folder), read_chat_templates(folder)
    with reading(str(path)):
        _check_merges(path)
    try:
        with without_panic_messages():
            tokenizer = Tokenizer(Backend.from_file(str(path)), special_tokens, chat_templates)
            try_out(tokenizer)
    except BaseException as error:  # the library raises bare Exception for invalid files, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(str(path), f"is no valid tokenizer: {shorten(str(error))}", FETCH_AGAIN) from error
    return tokenizer


def try_out(tokenizer: Tokenizer) -> None:
    """Tokenise a text at load time, because some damage shows only then."""
    try:
        ids = tokenizer.backend.encode("Hello, 1 wörld").ids
        tokenizer.backend.decode(ids)
    except Exception:
        pass


def _check_merges(path: Path) -> None:
    """The library strips the continuing-subword prefix from the second half of each merge, and aborts the process if it
    is missing."""
    if re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', path.read_bytes()) is None:
        return
    model = read_json(path).get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("merges"), list):
        return
    prefix = model.get("continuing_subword_prefix")
    for merge in model["merges"]:
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if isinstance(prefix, str) and not second.startswith(prefix):
            raise ModelError(str(path), f"has the merge {show(merge)}", f"the second half begins with {show(prefix)}")


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Templates by name, "default" being the usual one. Separate files take precedence over tokenizer_config.json."""
    templates: dict[str, str] = {}
    for file in ("tokenizer_config.json", "chat_template.json"):
        templates.update(_configured_templates(folder / file))
    if (folder / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = _read_template(folder / "chat_template.jinja")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = _read_template(path)
    return templates


def _configured_templates(path: Path) -> dict[str, str]:
    """One template, or a list of them with names."""
    configured = read_json(path).get("chat_template")
    if configured is None:
        return {}
    if isinstance(configured, str):
        return {DEFAULT_TEMPLATE: configured}
    found = {}
    for entry in configured if isinstance(configured, list) else [None]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            problem = f"chat_template is {show(configured)}"
            raise ModelError(str(path), problem, "expected a template, or a list of objects with name and template")
        found[name] = template
    return found


def _read_template(path: Path) -> str:
    with reading(str(path), "expected a Jinja template in UTF-8"):
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    found = _read_any_json(path, {})
    if not isinstance(found, dict):
        raise ModelError(str(path), f"holds a {type(found).__name__}", "expected a JSON object")
    return found


def read_json_list(path: Path) -> list[Any]:
    """The list in a JSON file; empty when there is no such file."""
    found = _read_any_json(path, [])
    if not isinstance(found, list):
        raise ModelError(str(path), f"holds a {type(found).__name__}", "expected a JSON list")
    return found


def _read_any_json(path: Path, default: Any) -> Any:
    with reading(str(path)):
        if not path.is_file():
            return default
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(str(path), f"can't be read as JSON: {shorten(str(error))}", FETCH_AGAIN) from error


def _read_special_tokens(folder: Path) -> dict[str, str]:
    """bos_token and so on, as text or as an object with its text in `content`."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one wins
        entries = read_json(folder / file)
        for name in SPECIAL_TOKEN_NAMES:
            value = entries.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _other_tokenizer_files(folder: Path) -> str:
    others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
    return f" (only {', '.join(others)})" if others else ""


def _how_to_convert() -> str:
    return "transformers writes one: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
