"""Images on the command line and in Python: the option, typed paths, and parts of messages."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ratoon import LLM, RequestError
from ratoon.api.cli import parse_arguments
from ratoon.api.commands.chat import Conversation, Entry, parse_entry
from ratoon.api.commands.chat_answerers import PrintedAnswer
from ratoon.api.commands.complete import make_request
from ratoon.api.image_options import begins_with_image, content_of, read_images, split_paths
from ratoon.cli import main
from tests.unit.api.server.test_images import (
    NUM_ROWS,
    PARTS_TEMPLATE,
    SECONDS,
    TEXT_OF_IMAGE,
    media_config,
    media_tokenizer,
)
from tests.unit.media.test_media_files import video as mp4


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a cat.PNG"
    Image.new("RGB", (16, 16), "red").save(path, "PNG")
    return path


@pytest.fixture
def sees(client: Any, source: Any) -> Any:
    """The scripted model reads images."""
    source.config = media_config()
    source.load_tokenizer = lambda: media_tokenizer(PARTS_TEMPLATE)
    return client


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("{path}", ""),
        ('"{path}"', ""),
        ("'{path}'", ""),
        ("{escaped}", ""),
        ("{uri}", ""),
        ("What is {escaped} about?", "What is about?"),
        ("{escaped} What is it?", "What is it?"),
        ("Compare '{path}' and {uri}.", "Compare and {uri}."),  # the dot belongs to the last word
    ],
)
def test_paths_of_images_are_taken_out_of_a_message(picture: Path, typed: str, text: str) -> None:
    names = {"path": picture, "escaped": str(picture).replace(" ", "\\ "), "uri": picture.as_uri()}
    found = split_paths(typed.format(**names))
    assert found.text == text.format(**names)
    assert found.paths == [picture]


def test_other_paths_stay_text(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for typed in (
        f"{tmp_path}/notes.txt",
        f"{tmp_path}/none.png",
        "a.png  b",
        '"',
        "x" * 5000 + ".png",
        "~nobody9/a.png",
    ):
        assert split_paths(typed) == (typed, [])


def test_a_path_in_front_is_no_command(picture: Path) -> None:
    escaped = str(picture).replace(" ", "\\ ")
    assert begins_with_image(escaped) and begins_with_image(str(picture))
    assert parse_entry(f"{escaped} what?") == Entry(f"{escaped} what?")
    assert parse_entry(f"/image {escaped}").is_command
    assert parse_entry("/help").is_command


def test_content_is_text_unless_there_are_images(picture: Path) -> None:
    assert content_of("hi", []) == "hi"
    (image,) = read_images([str(picture)])
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    assert content_of("hi", [image]) == [part, {"type": "text", "text": "hi"}]
    assert content_of("", [image]) == [part]


class Listener:
    """An answerer that notes the messages."""

    name = "listener"

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    def answer(self, messages: Any, answer: PrintedAnswer, varies: bool = False) -> None:
        self.asked.append(list(messages))
        answer.add("ok")

    def describe_state(self) -> str:
        return ""


def kinds(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return ["text"] if isinstance(content, str) else [part["type"] for part in content]


def test_images_of_a_chat_belong_to_the_next_message(picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listener = Listener()
    conversation = Conversation(listener, None, read_images([str(picture)]))
    for typed in (
        "What?",
        "Why?",
        f"/image {picture}",
        "And this?",
        f"'{picture}'",
        f"'{picture}' Two?",
        "/image nothing.png",
    ):
        conversation.handle(parse_entry(typed))
    users = [message for message in listener.asked[-1] if message["role"] == "user"]
    assert [kinds(message) for message in users] == [
        ["image_url", "text"],
        ["text"],
        ["image_url", "text"],
        ["image_url", "image_url", "text"],
    ]
    printed = capsys.readouterr()
    assert "(with the next message: a cat.PNG)" in printed.out
    assert "nothing.png can't be read" in printed.err


def test_generate_takes_images(sees: Any, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "fake", "What?", "--image", str(picture), "--max-tokens", "1"]) == 0
    tokenizer = media_tokenizer(PARTS_TEMPLATE)
    prompt = tokenizer.decode(sees.added[-1].prompt_token_ids, False)
    assert prompt == f"<user>{TEXT_OF_IMAGE}What?\n<assistant>"
    assert [feature.length for feature in sees.added[-1].mm_features] == [NUM_ROWS]
    assert main(["generate", "fake", "--raw", "A <image>!", "--image", str(picture), "--max-tokens", "1"]) == 0
    assert tokenizer.decode(sees.added[-1].prompt_token_ids, False) == f"A {TEXT_OF_IMAGE}!"


def test_generate_names_the_image_that_is_wrong(sees: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    assert main(["generate", "fake", "What?", "--image", str(broken)]) == 2
    assert f"--image {broken}: " in capsys.readouterr().err
    assert main(["generate", "fake", "What?", "--image", str(tmp_path / "none.png")]) == 2
    assert "none.png can't be read (No such file or directory)" in capsys.readouterr().err


def test_a_video_is_an_option_beside_images(
    sees: Any, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a film.mp4"
    path.write_bytes(mp4(9, 3, (16, 16)))
    assert main(["generate", "fake", "What?", "--video", str(path), "--image", str(picture)]) == 0
    prompt = media_tokenizer(PARTS_TEMPLATE).decode(sees.added[-1].prompt_token_ids, skip_special_tokens=False)
    assert f"{SECONDS}\n\n{TEXT_OF_IMAGE}What?" in prompt, "in the order of the command"
    args = parse_arguments(["complete", "--url", "x", "--chat", "hi", "--video", str(path), "--image", str(picture)])
    args.images = read_images(args.images)
    parts = make_request("m", "hi", args)[1]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["video_url", "image_url", "text"]
    assert parts[0]["video_url"]["url"].startswith("data:video/mp4;base64,")
    capsys.readouterr()
    (tmp_path / "notes.mp4").write_text("no video")
    for wrong, problem in (
        (tmp_path / "notes.mp4", "can't be read as a video"),
        (tmp_path / "none.mp4", "the path of a video"),
    ):
        command = ["generate", "fake", "What?", "--video", str(wrong)]
        assert main(command) == 2 and problem in capsys.readouterr().err


def test_a_model_of_text_takes_no_images(client: Any, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "fake", "What?"], ["chat", "fake"]):
        assert main([*command, "--image", str(picture)]) == 2
        assert "reads text only" in capsys.readouterr().err


def test_complete_sends_images_as_data(picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_arguments(["complete", "--url", "x", "--chat", "hi", "--image", str(picture)])
    args.images = read_images(args.images)
    _, body = make_request("m", "hi", args)
    assert kinds(body["messages"][0]) == ["image_url", "text"]
    assert main(["complete", "hi", "--image", str(picture)]) == 2
    assert "add --chat" in capsys.readouterr().err


# ---- Python ----


def test_a_chat_takes_pictures_in_the_usual_forms(sees: Any, picture: Path) -> None:
    opened = Image.open(picture)
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": opened},
        {"type": "image", "image": str(picture)},
        {"type": "image", "image": picture.read_bytes()},
        {"type": "image", "path": picture},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": picture.as_uri()}},
        {"type": "image_url", "image_url": {"url": str(picture)}},
    ]
    messages = [{"role": "user", "content": [*forms, {"type": "text", "text": "?"}]}]
    with LLM("fake") as llm:
        llm.chat(messages)
    features = sees.added[-1].mm_features
    assert len(features) == len(forms)
    assert len({feature.content_hash for feature in features}) == 1


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.test/b.png"}}, r"image_url.url: is an address"),
        ({"type": "image", "image": "HTTP://a.test/b.png"}, r"image: is an address"),
        ({"type": "image"}, "image: is missing"),
        ({"type": "image", "image": "/none/there.png"}, r"content\[0\].image: "),
        ({"type": "video", "video": b"no video"}, r"content\[0\].video: can't be read as a video"),
    ],
)
def test_what_can_not_be_read_is_named(sees: Any, part: dict[str, Any], problem: str) -> None:
    with LLM("fake") as llm, pytest.raises(RequestError, match=problem) as caught:
        llm.chat([{"role": "user", "content": [part]}])
    assert caught.value.field.startswith("messages[0].content[0]")
