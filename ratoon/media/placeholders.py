"""The tokens of a prompt with one placeholder for each image or video, expanded to a token for each row of embeddings.

Where a family puts text around the rows, it is tokenised together with the ordinary text beside it, as if the whole
prompt had been written out and tokenised, which is what transformers' processors do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO, MediaConfig, MediaFeature
from ratoon.media.families.base import Family, Preprocessed

WRITTEN_VIDEO = -1  # in the place of a placeholder that is ordinary text; no token has this id


class TextTokens(Protocol):
    """What is needed of a model's tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def special_token_id(self, text: str) -> int | None: ...

    def id_to_token(self, id: int) -> str | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Placeholders:
    """The placeholders of one model. Prompts are given to `mark`, then to `find`, then to `expand`."""

    def __init__(self, config: MediaConfig, family: Family, tokenizer: TextTokens | None) -> None:
        self._config = config
        self._family = family
        self._tokenizer = tokenizer
        self._modalities = [one for one in family.modalities if family.placeholder(one, config) is not None]
        self._ids = {modality: self._find(modality) for modality in self._modalities}

    @property
    def modalities(self) -> list[str]:
        """What the model reads besides text."""
        return self._modalities

    def mark(self, token_ids: list[int], wanted: Counter[str]) -> list[int]:
        """The tokens of a prompt with WRITTEN_VIDEO for each placeholder of a video that is ordinary text to the
        tokenizer. They are to be found by their text, because their tokens depend on the letters beside them."""
        tokenizer = self._tokenizer
        if tokenizer is None or not wanted[VIDEO] or self._ids.get(VIDEO) != WRITTEN_VIDEO:
            return token_ids
        marked: list[int] = []
        ordinary: list[int] = []
        for token_id in token_ids:
            if token_id in tokenizer.special_token_ids:
                marked += self._mark_ordinary(tokenizer, ordinary)
                marked.append(token_id)
                ordinary = []
            else:
                ordinary.append(token_id)
        return marked + self._mark_ordinary(tokenizer, ordinary)

    def _mark_ordinary(self, tokenizer: TextTokens, token_ids: list[int]) -> list[int]:
        """Tokens that are not those of their text stay as they are."""
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        before, *behind = text.split(self._shown(VIDEO))
        if not behind or tokenizer.encode(text, add_special_tokens=False) != token_ids:
            return token_ids
        marked = tokenizer.encode(before, add_special_tokens=False)
        for piece in behind:
            marked += [WRITTEN_VIDEO, *tokenizer.encode(piece, add_special_tokens=False)]
        return marked

    def find(self, field: str, token_ids: list[int], wanted: Counter[str]) -> list[tuple[int, str]]:
        """Where the placeholders are, and for what, in their order. RequestError: they are not as many as there are
        images and videos."""
        modality_of = {id: modality for modality, id in self._ids.items() if id is not None}
        for modality in self._modalities:
            id = self._ids[modality]
            found = 0 if id is None else token_ids.count(id)
            if found != wanted[modality]:
                raise self._wrong_number(field, modality, found, wanted[modality])
        rows_id = self._config.image_token_id
        if rows_id not in modality_of and rows_id in token_ids:
            problem = f"has the token {rows_id} at {token_ids.index(rows_id)}, which stands for a row of an image"
            raise RequestError(field, problem, f"{self._shown(IMAGE)} for each image")
        if not wanted.total():
            return []
        return [(index, modality_of[id]) for index, id in enumerate(token_ids) if id in modality_of]

    def expand(
        self, token_ids: list[int], found: Sequence[tuple[int, str]], media: Sequence[Preprocessed]
    ) -> tuple[list[int], list[MediaFeature]]:
        """`media` are those of the placeholders that were found, in the same order."""
        text = _Written(self._tokenizer)
        begin = 0
        for (index, modality), preprocessed in zip(found, media):
            text.add_tokens(token_ids[begin:index])
            begin = index + 1
            marker = self._rows_token(modality)
            image_token = "" if self._tokenizer is None else self._tokenizer.id_to_token(marker) or ""
            replacement = self._family.replacement(modality, preprocessed, image_token)
            if replacement is None:
                text.add_tokens([marker] * len(preprocessed.inputs))
            else:
                text.add_text(replacement)
        text.add_tokens(token_ids[begin:])
        return self._with_rows(text.finish(), media)

    def _with_rows(self, token_ids: list[int], media: Sequence[Preprocessed]) -> tuple[list[int], list[MediaFeature]]:
        """Every token that stands for rows, as often as its input has rows."""
        markers = {self._rows_token(modality) for modality in self._modalities}
        inputs = iter(
            [
                (data, content_hash, place == 0)
                for one in media
                for place, (data, content_hash) in enumerate(zip(one.inputs, one.content_hashes, strict=True))
            ]
        )
        expanded: list[int] = []
        features: list[MediaFeature] = []
        for token_id in token_ids:
            if token_id not in markers:
                expanded.append(token_id)
                continue
            data, content_hash, is_first = next(inputs)
            features.append(MediaFeature(len(expanded), data.num_rows, content_hash, data, is_first))
            expanded += [token_id] * data.num_rows
        assert next(inputs, None) is None, "each input has a token that stands for its rows"
        return expanded, features

    def _rows_token(self, modality: str) -> int:
        video_token = self._config.video_token_id
        return video_token if modality == VIDEO and video_token is not None else self._config.image_token_id

    def _find(self, modality: str) -> int | None:
        """None: it can't be in a prompt."""
        placeholder = self._family.placeholder(modality, self._config)
        if placeholder is None or isinstance(placeholder, int):
            return placeholder
        if self._tokenizer is None:
            return None
        own = self._tokenizer.special_token_id(placeholder)
        return WRITTEN_VIDEO if own is None and modality == VIDEO else own

    def _wrong_number(self, field: str, modality: str, found: int, wanted: int) -> RequestError:
        if self._ids[modality] is None:
            missing = "no tokenizer is loaded" if self._tokenizer is None else "the tokenizer has no such token"
            return RequestError(field, f"can't have {self._shown(modality)}: {missing}", "text alone")
        problem = f"has {found} placeholders of the kind {modality}, and {wanted} are given"
        return RequestError(field, problem, f"{self._shown(modality)} once for each {modality}")

    def _shown(self, modality: str) -> str:
        placeholder = self._family.placeholder(modality, self._config)
        if isinstance(placeholder, int) and self._tokenizer is not None:
            placeholder = self._tokenizer.id_to_token(placeholder) or placeholder
        return placeholder if isinstance(placeholder, str) else f"the token {placeholder}"


class _Written:
    """Tokens and texts one after the other, as tokens. Ordinary tokens beside a text are tokenised again with it; what
    is between two special tokens never depends on what is outside of them."""

    def __init__(self, tokenizer: TextTokens | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._stretch: list[list[int] | str] = []  # since the last special token

    def add_tokens(self, token_ids: list[int]) -> None:
        if self._tokenizer is None:
            self._tokens += token_ids
            return
        special = self._tokenizer.special_token_ids
        begin = 0
        for index, token_id in enumerate(token_ids):
            if token_id in special:
                self._add_ordinary(token_ids[begin:index])
                self._close_stretch()
                self._tokens.append(token_id)
                begin = index + 1
        self._add_ordinary(token_ids[begin:])

    def add_text(self, text: str) -> None:
        """A text that has special tokens in it."""
        assert self._tokenizer is not None, "families with texts have placeholders that a tokenizer finds"
        special = self._tokenizer.special_token_ids
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        names = [self._tokenizer.id_to_token(id) or "" for id in token_ids if id in special]
        if not names:
            self._stretch.append(text)
            return
        lead, trail = text[: text.index(names[0])], text[text.rindex(names[-1]) + len(names[-1]) :]
        places = [index for index, id in enumerate(token_ids) if id in special]
        if lead:
            self._stretch.append(lead)
        self._close_stretch()
        self._tokens += token_ids[places[0] : places[-1] + 1]
        if trail:
            self._stretch.append(trail)

    def finish(self) -> list[int]:
        self._close_stretch()
        return self._tokens

    def _add_ordinary(self, token_ids: list[int]) -> None:
        if token_ids:
            self._stretch.append(token_ids)

    def _close_stretch(self) -> None:
        if any(isinstance(part, str) for part in self._stretch) and len(self._stretch) > 1:
            text = self._as_text()
            if text is not None:
                self._stretch = [text]
        for part in self._stretch:
            self._tokens += self._encode(part) if isinstance(part, str) else part
        self._stretch = []

    def _as_text(self) -> str | None:
        """None: the text of the tokens has other tokens than these."""
        assert self._tokenizer is not None
        texts = []
        for part in self._stretch:
            text = part if isinstance(part, str) else self._tokenizer.decode(part, skip_special_tokens=False)
            if not isinstance(part, str) and self._encode(text) != part:
                return None
            texts.append(text)
        return "".join(texts)

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False)
