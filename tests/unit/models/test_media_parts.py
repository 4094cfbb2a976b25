"""Images in conversations: what chat templates of several forms make of them, and where they are found."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO, MediaConfig, VisionConfig
from ratoon.models.chat_template import render_chat
from ratoon.models.media_parts import (
    MediaPart,
    check_data_url,
    decode_data_url,
    find_media,
    placeholder_texts,
    without_data,
)
from ratoon.models.template_process import render_in_child

PLACEHOLDERS = {IMAGE: "<own-image>", VIDEO: "<own-video>"}
# Qwen2-VL's, Gemma's: content is text or a list
TEXT_OR_PARTS = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}<img>"
    "{% elif part.type == 'video' %}<vid>{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
)
# SmolVLM's: content is always a list
PARTS = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end>{{ '\n' }}{% endfor %}"
)
# Without an idea of images
TEXTS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ '\n' }}{% endfor %}"
TEXT_PARTS = (  # reads parts, and drops those that are not text
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


IMAGE_PART, VIDEO_PART = {"type": "image"}, {"type": "video"}
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [text("This"), IMAGE_PART, text("and"), VIDEO_PART]},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": [text("Why"), text("so?")]},
]


@pytest.mark.parametrize("render", [render_chat, render_in_child])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEXT_OR_PARTS, "[system]Be short.\n[user]This<img>and<vid>\n[assistant]Fine.\n[user]Why\nso?\n"),
        (
            PARTS,
            "System: Be short.<end>\nUser: This<image>and<own-video><end>\n"
            "Assistant: Fine.<end>\nUser: Why\nso?<end>\n",
        ),
        (TEXTS, "[system]Be short.\n[user]This<own-image>and<own-video>\n[assistant]Fine.\n[user]Why\nso?\n"),
        (TEXT_PARTS, "Be short.\nThis<own-image>and<own-video>\nFine.\nWhy\nso?\n"),
    ],
    ids=["text or parts", "parts", "text", "parts of text"],
)
def test_a_template_gets_content_in_the_form_that_it_reads(render: Any, template: str, expected: str) -> None:
    assert render(template, MESSAGES, {}, placeholders=PLACEHOLDERS).text == expected


def test_without_media_nothing_changes_for_models_of_text() -> None:
    messages = [{"role": "user", "content": [text("a"), text("b")]}]
    assert render_chat(TEXTS, messages, {}).text == "[user]a\nb\n"
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\]: is an image; this model reads text only"):
        render_chat(TEXTS, [{"role": "user", "content": [IMAGE_PART]}], {})
    with pytest.raises(RequestError, match="is a video; this model reads text and images"):
        render_chat(TEXTS, [{"role": "user", "content": [VIDEO_PART]}], {}, placeholders={IMAGE: "<i>"})


def test_tools_and_begun_answers_go_with_images() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [IMAGE_PART, text("What?")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [IMAGE_PART]},
        {"role": "tool", "content": "nothing"},
        {"role": "assistant", "content": "It is"},
    ]
    two_roles = (
        "{% for message in messages %}"
        "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('') }}{% endif %}"
    )
    for plain, image in ((PARTS, "<image>"), (TEXTS, "<own-image>")):
        template = plain.replace("{% for message in messages %}", two_roles)
        rendered = render_chat(
            template, messages, {"tools": [tool]}, placeholders=PLACEHOLDERS, continue_final_message=True
        ).text
        assert rendered.count(image) == 2 and rendered.endswith("It is") and "<tools>" in rendered
        results = rendered[rendered.index("<tool_response>") :]
        assert f"<tool_response>\n{image}\n</tool_response>" in results and "\nnothing\n" in results


# ---- where they are ----


def test_media_are_found_with_their_fields() -> None:
    picture = object()
    messages = [
        {"role": "user", "content": "no parts"},
        {
            "role": "user",
            "content": [
                text("see"),
                {"type": "image_url", "image_url": {"url": "data:a", "detail": "high"}},
                {"type": "image_url", "image_url": "data:b"},
                {"type": "video_url", "video_url": {"url": "data:c"}},
                {"type": "image", "image": picture},
                {"type": "image", "url": "d.png"},
                {"type": "image", "path": "e.png"},
                {"type": "image", "base64": "QQ=="},
                {"type": "image_pil", "image_pil": picture},
            ],
        },
    ]
    content = "messages[1].content"
    assert find_media(messages, (IMAGE, VIDEO)) == [
        MediaPart(IMAGE, "data:a", f"{content}[1].image_url.url"),
        MediaPart(IMAGE, "data:b", f"{content}[2].image_url"),
        MediaPart(VIDEO, "data:c", f"{content}[3].video_url.url"),
        MediaPart(IMAGE, picture, f"{content}[4].image"),
        MediaPart(IMAGE, "d.png", f"{content}[5].url"),
        MediaPart(IMAGE, "e.png", f"{content}[6].path"),
        MediaPart(IMAGE, "data:;base64,QQ==", f"{content}[7].base64"),
        MediaPart(IMAGE, picture, f"{content}[8].image_pil"),
    ]
    kinds = [part.get("type") for part in without_data(messages)[1]["content"]]
    assert kinds == ["text", "image", "image", "video", *["image"] * 5]
    assert not any(picture in part.values() for part in without_data(messages)[1]["content"])


@pytest.mark.parametrize("messages", [None, 5, "text", [5], [{"content": 5}], [{"content": ["a"]}], {}])
def test_what_is_no_conversation_is_left_to_its_check(messages: Any) -> None:
    assert find_media(messages, (IMAGE,)) == []
    without_data(messages)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("data:image/png;base64,aGk=", b"hi"),
        ("DATA:IMAGE/PNG;BASE64,aGk=", b"hi"),
        ("data:;base64,aGk=", b"hi"),
        ("data:application/octet-stream;base64,aGk=", b"hi"),
        ("data:image/png;charset=utf-8;base64,aGk=", b"hi"),
    ],
)
def test_data_urls_are_decoded(url: str, expected: bytes) -> None:
    part = MediaPart(IMAGE, url, "here")
    check_data_url(part)
    assert decode_data_url(part) == expected


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,aGk=", "data:image/png;base64", "data:", "data:video/mp4;base64,aGk=", "data:image/png;base64,",
        "data:image/png;base64,aGk", "data:image/png;base64,a-k=", "data:image/png;base64,ä",
        "data:image/png;base64,aG k=",
    ],
)  # fmt: skip
def test_other_data_urls_are_refused(url: str) -> None:
    part = MediaPart(IMAGE, url, "here")

    def read() -> bytes:
        check_data_url(part)
        return decode_data_url(part)

    with pytest.raises(RequestError) as caught:
        read()
    assert caught.value.field == "here"


def test_placeholders_are_those_of_the_family() -> None:
    vision = VisionConfig(8, 8, 1, 1, 8)
    names = {1: "<|image_pad|>", 2: "<|video_pad|>", 3: "<image>"}

    def texts(family: str, *token_ids: int | None) -> dict[str, str]:
        return placeholder_texts(MediaConfig(family, vision, *token_ids), names.get)  # type: ignore[arg-type]

    assert placeholder_texts(None, names.get) == {}
    assert texts("qwen2_5_vl", 1, 2) == {
        IMAGE: "<|vision_start|><|image_pad|><|vision_end|>",
        VIDEO: "<|vision_start|><|video_pad|><|vision_end|>",
    }
    assert texts("idefics3", 3) == {IMAGE: "<image>", VIDEO: "<video>"}
    assert texts("gemma3", 3) == {IMAGE: "<start_of_image>"}
