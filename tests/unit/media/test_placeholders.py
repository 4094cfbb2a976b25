"""Placeholders become tokens for rows of embeddings, as transformers' processors write and tokenise them."""

from collections import Counter

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO, MediaInput
from ratoon.core.wire import WireTensor
from ratoon.media.families import family_of
from ratoon.media.families.base import Preprocessed
from ratoon.media.placeholders import Placeholders
from ratoon.models.tokenizer import Tokenizer
from tests.golden.media_oracle import GEMMA, IDEFICS, QWEN

MERGED = ["user", "see", "\n\n", "\n\n\n", "\n"]
SPECIAL = [
    "<bos>", "<pad1>", "<pad2>", "<pad3>", "<pad4>", "<|image_pad|>", "<|video_pad|>", "<image_soft_token>", "<image>",
    "<start_of_image>", "<end_of_image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]  # fmt: skip


def tokenizer() -> Tokenizer:
    """Special tokens first, by their place in the list; then bytes, and merges of newlines and some words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoded = {text: "".join("Ċ" if letter == "\n" else letter for letter in text) for text in MERGED}
    merges: list[tuple[str, str]] = []
    for text in encoded.values():
        for end in range(2, len(text) + 1):
            if (text[: end - 1], text[end - 1]) not in merges:
                merges.append((text[: end - 1], text[end - 1]))
    pieces = [*SPECIAL, *letters, *dict.fromkeys(left + right for left, right in merges)]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(backend, {})


TOKENIZER = tokenizer()


def read(num_rows: int = 2, number: int = 1, modality: str = IMAGE, **layout: int) -> Preprocessed:
    inputs = [MediaInput(modality, num_rows, WireTensor("uint8", (1,), bytes([index]))) for index in range(number)]
    return Preprocessed(inputs, content_hashes=[f"{modality} {index}" for index in range(number)], **layout)


def expand(config, text: str, media: list[Preprocessed]):
    placeholders = Placeholders(config, family_of(config.family), TOKENIZER)
    wanted = Counter(one.inputs[0].modality for one in media)
    token_ids = placeholders.mark(TOKENIZER.encode(text, add_special_tokens=False), wanted)
    found = placeholders.find("prompt", token_ids, wanted)
    return placeholders.expand(token_ids, found, media)


def written_out(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_special_tokens_of_the_test_are_where_configs_say() -> None:
    assert TOKENIZER.id_to_token(QWEN.image_token_id) == "<|image_pad|>"
    assert TOKENIZER.id_to_token(GEMMA.image_token_id) == "<image_soft_token>"
    assert TOKENIZER.id_to_token(IDEFICS.image_token_id) == "<image>"
    assert len(written_out("\n\n\n")) == 1


def test_rows_take_the_place_of_qwens_placeholders_in_their_order() -> None:
    media = [read(3), read(4, modality=VIDEO), read(2)]
    ids, features = expand(QWEN, "a<|image_pad|>b<|video_pad|><|image_pad|>c", media)
    assert ids == written_out("a" + "<|image_pad|>" * 3 + "b" + "<|video_pad|>" * 4 + "<|image_pad|>" * 2 + "c")
    assert [(one.offset, one.length, one.content_hash) for one in features] == [
        (1, 3, "image 0"), (5, 4, "video 0"), (9, 2, "image 0"),
    ]  # fmt: skip
    assert all(set(ids[one.offset : one.offset + one.length]) <= {5, 6} for one in features)


@pytest.mark.parametrize(
    ("before", "behind"), [("user\n", "see"), ("", ""), ("\n", "\nsee"), ("user", "\n\nuser"), ("<bos>", "<bos>")]
)
def test_text_around_gemmas_rows_is_tokenised_with_its_neighbours(before: str, behind: str) -> None:
    ids, features = expand(GEMMA, f"{before}<start_of_image>{behind}", [read(16)])
    rows = "<image_soft_token>" * 16
    assert ids == written_out(f"{before}\n\n<start_of_image>{rows}<end_of_image>\n\n{behind}")
    assert [ids[one.offset : one.offset + one.length] for one in features] == [[7] * 16]


def test_images_side_by_side_and_crops_of_gemma() -> None:
    ids, features = expand(GEMMA, "see<start_of_image>\n<start_of_image>", [read(2, 3, tile_columns=2), read(2)])
    one = "\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\n"
    crops = f"Here is the original image {one} and here are some crops to help you see better {one} {one}"
    assert ids == written_out(f"see{crops}\n{one}")
    assert len(features) == 4


def test_tokens_that_are_not_those_of_their_text_stay_as_they_are() -> None:
    placeholders = Placeholders(GEMMA, family_of("gemma3"), TOKENIZER)
    newline = written_out("\n")
    token_ids = [*newline, *newline, *written_out("<start_of_image>")]  # one token, were it tokenised
    found = placeholders.find("prompt", token_ids, Counter({IMAGE: 1}))
    ids, _ = placeholders.expand(token_ids, found, [read(1)])
    assert ids[:3] == [*newline, *newline, *written_out("\n\n")]


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (2, 2), (1, 2)])
def test_tiles_of_idefics(rows: int, columns: int) -> None:
    ids, features = expand(
        IDEFICS, "user<image>see", [read(4, rows * columns + 1, tile_rows=rows, tile_columns=columns)]
    )
    tiles = "<image>" * 4
    text = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            text += f"<fake_token_around_image><row_{row}_col_{column}>{tiles}"
        text += "\n"
    text += ("\n" if rows else "") + f"<fake_token_around_image><global-img>{tiles}<fake_token_around_image>"
    assert ids == written_out(f"user{text}see")
    assert [one.length for one in features] == [4] * (rows * columns + 1)
    assert all(ids[one.offset : one.offset + 4] == [8] * 4 and ids[one.offset + 4] != 8 for one in features)


def video_of(number: int) -> Preprocessed:
    read_one = read(4, number, VIDEO)
    read_one.frame_seconds, read_one.duration = [65.0 + index for index in range(number)], 70.9
    return read_one


FRAME = "<fake_token_around_image><global-img>" + "<image>" * 4 + "<fake_token_around_image>"
TWO_FRAMES = (
    "You are provided the following series of two frames from a 0:01:10 [H:MM:SS] video.\n"
    f"\nFrame from 01:05:{FRAME}\nFrame from 01:06:{FRAME}\n\n"
)


@pytest.mark.parametrize(
    ("before", "behind"), [("user\n", "see"), ("", ""), ("\n", "\nsee"), ("<video", "video>\n"), ("<bos>", "<bos>a")]
)
def test_a_video_whose_placeholder_is_ordinary_text(before: str, behind: str) -> None:
    """Its tokens depend on the letters beside it: of ">" and a newline, one token may have been made."""
    ids, features = expand(IDEFICS, f"{before}<video>{behind}", [video_of(2)])
    assert ids == written_out(f"{before}{TWO_FRAMES}{behind}")
    assert [one.is_first for one in features] == [True, False], "it counts as one video"
    assert [ids[one.offset : one.offset + one.length] for one in features] == [[8] * 4] * 2


def test_videos_and_pictures_stand_side_by_side() -> None:
    media = [read(4), video_of(2), read(4), video_of(2)]
    ids, features = expand(IDEFICS, "<image><video>a<image><video>\n", media)
    assert ids == written_out(f"{FRAME}{TWO_FRAMES}a{FRAME}{TWO_FRAMES}\n")
    assert len(features) == 6


def test_a_video_whose_placeholder_is_a_token_of_its_own() -> None:
    backend = Backend.from_str(TOKENIZER.backend.to_str())
    backend.add_special_tokens(["<video>"])
    known = Tokenizer(backend, {})
    placeholders = Placeholders(IDEFICS, family_of("idefics3"), known)
    wanted, token_ids = Counter({VIDEO: 1}), known.encode("a<video>b", add_special_tokens=False)
    assert placeholders.mark(token_ids, wanted) is token_ids
    ids, _ = placeholders.expand(token_ids, placeholders.find("prompt", token_ids, wanted), [video_of(2)])
    assert ids == written_out(f"a{TWO_FRAMES}b")


def test_the_word_for_a_video_is_ordinary_text_where_none_is_given() -> None:
    assert expand(IDEFICS, "a<video>b<image>", [read(4)])[0] == written_out(f"a<video>b{FRAME}")
    for text, number in (("a", 1), ("<video><video>", 1)):
        with pytest.raises(RequestError, match=rf"has {text.count('<')} placeholders of the kind video, and {number}"):
            expand(IDEFICS, text, [video_of(2)] * number)


def test_tokens_that_are_not_those_of_their_text_have_no_written_placeholder() -> None:
    placeholders = Placeholders(IDEFICS, family_of("idefics3"), TOKENIZER)
    newline = written_out("\n")
    token_ids = [*newline, *newline, *written_out("<video>")]
    assert placeholders.mark(token_ids, Counter({VIDEO: 1})) == token_ids
    with pytest.raises(RequestError, match="has 0 placeholders of the kind video"):
        placeholders.find("prompt", token_ids, Counter({VIDEO: 1}))


@pytest.mark.parametrize(("text", "number"), [("a", 1), ("<|image_pad|>", 0), ("<|image_pad|><|image_pad|>", 1)])
def test_another_number_of_placeholders_is_refused_with_both_numbers(text: str, number: int) -> None:
    with pytest.raises(RequestError) as error:
        expand(QWEN, text, [read() for _ in range(number)])
    assert error.value.field == "prompt"
    assert f"has {text.count('<')} placeholders" in error.value.problem and f"{number} are given" in error.value.problem
    assert "<|image_pad|>" in error.value.expected


def test_tokens_that_stand_for_rows_of_gemma_are_refused() -> None:
    with pytest.raises(RequestError, match="row of an image"):
        expand(GEMMA, "<start_of_image><image_soft_token>", [read()])


def test_a_placeholder_that_is_a_text_needs_a_tokenizer() -> None:
    placeholders = Placeholders(GEMMA, family_of("gemma3"), None)
    with pytest.raises(RequestError, match="no tokenizer is loaded"):
        placeholders.find("prompt_token_ids", [9], Counter({IMAGE: 1}))
    assert Placeholders(QWEN, family_of("qwen2_vl"), None).find("p", [1, 5], Counter({IMAGE: 1})) == [(1, IMAGE)]
