"""Images from the client to the answer: a server and commands with small models that read pictures, which transformers
made, answer as transformers does; and a model that was trained on drawn pictures reads one that this test draws."""

from __future__ import annotations

import base64
import importlib.util
import io
import random
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anthropic
import openai
import pytest
import torch
from PIL import Image, ImageDraw

from ratoon.api.commands.chat_answerers import RemoteAnswerer
from ratoon.cli import main
from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import write_tiny_model

ROOT = Path(__file__).parents[2]
OPTIONS = ("--load-format", "auto")
NUM_TOKENS = 8
LETTERS = {"structured_outputs": {"regex": "[a-z]{12}"}}
TRAINED_STEPS = 400  # enough for colours


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_picture_reader", ROOT / "examples/train_picture_reader.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load_example()


class Reader:
    """A model of random weights in transformers, and its folder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(7)
        self.folder = folder
        self.tokenizer = example.make_tokenizer()
        self.model = example.make_model(self.tokenizer).eval()
        example.save(self.model, self.tokenizer, folder)

    def answer(self, question: str, picture: Image.Image) -> str:
        """What transformers generates, without a choice by chance."""
        ids = torch.tensor([example.prompt_of(self.tokenizer, question)])
        pixels = example.pixels_of(picture)[None, None]
        with torch.no_grad():
            found = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, max_new_tokens=NUM_TOKENS
            )
        text: str = self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def server(reader: Reader) -> Iterator[Server]:
    with serving(reader.folder, *OPTIONS, "--served-model-name", "reader") as running:
        yield running


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.api, api_key="-", max_retries=0)


def picture(number: int) -> Image.Image:
    return example.draw_any(random.Random(number))[0]


def png(one: Image.Image) -> bytes:
    file = io.BytesIO()
    one.save(file, "PNG")
    return file.getvalue()


def base64_of(one: Image.Image) -> str:
    return base64.b64encode(png(one)).decode()


def data_url(one: Image.Image) -> str:
    return f"data:image/png;base64,{base64_of(one)}"


def content(url: str, question: str) -> list[Any]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


def chat(server: Server, url: str, question: str = example.QUESTIONS[0]) -> Any:
    messages: Any = [{"role": "user", "content": content(url, question)}]
    return client_of(server).chat.completions.create(
        model="reader", messages=messages, temperature=0, max_tokens=NUM_TOKENS
    )


# ---- a server ----


@pytest.mark.slow
@pytest.mark.full
def test_an_engine_of_its_own_encodes_pictures_for_a_server(reader: Reader) -> None:
    options = (*OPTIONS, "--served-model-name", "reader", "--encode", "1", "--replicas", "1")
    with serving(reader.folder, *options) as running:
        for number in (1, 2, 1):
            found = chat(running, data_url(picture(number)))
            assert found.choices[0].message.content == reader.answer(example.QUESTIONS[0], picture(number))


@pytest.mark.parametrize("number", range(3))
def test_three_protocols_answer_as_transformers_does(reader: Reader, server: Server, number: int) -> None:
    shown, question = picture(number), example.QUESTIONS[number % 2]
    expected = reader.answer(question, shown)
    assert chat(server, data_url(shown), question).choices[0].message.content == expected
    parts: Any = [{"type": "input_image", "image_url": data_url(shown)}, {"type": "input_text", "text": question}]
    response = client_of(server).responses.create(
        model="reader", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=NUM_TOKENS
    )
    assert response.output_text == expected
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(shown)}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    answer = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0).messages.create(
        model="reader",
        messages=[{"role": "user", "content": blocks}],
        max_tokens=NUM_TOKENS,
        extra_body={"temperature": 0},
    )
    assert "".join(block.text for block in answer.content if block.type == "text") == expected


def test_an_image_that_was_seen_is_in_the_cache(server: Server) -> None:
    shown = data_url(picture(10))
    assert chat(server, shown).usage.prompt_tokens_details.cached_tokens == 0
    again = chat(server, shown).usage
    assert again.prompt_tokens_details.cached_tokens >= again.prompt_tokens // 2
    other = chat(server, data_url(picture(11))).usage
    assert other.prompt_tokens_details.cached_tokens < again.prompt_tokens // 2  # the same tokens, another image


def test_the_next_turn_of_a_stored_response_sees_the_image(server: Server) -> None:
    client = client_of(server)
    parts: Any = [{"type": "input_image", "image_url": data_url(picture(5))}, {"type": "input_text", "text": "A?"}]
    first_turn: Any = {"role": "user", "content": parts}
    options: Any = {"model": "reader", "temperature": 0, "max_output_tokens": 4}
    first = client.responses.create(input=[first_turn], **options)
    second = client.responses.create(input="B?", previous_response_id=first.id, **options)
    said: Any = [first_turn, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "B?"}]
    whole = client.responses.create(input=said, **options)
    assert second.output_text == whole.output_text
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_a_later_turn_brings_an_image_without_the_conversation(server: Server) -> None:
    client = client_of(server)
    turns: Any = [{"role": "user", "content": content(data_url(picture(number)), "A?")} for number in (6, 7)]
    # Letters, because bytes of a part of a character would be other tokens in a text that is sent again
    options: Any = {"model": "reader", "temperature": 0, "extra_body": LETTERS}
    first = client.chat.completions.create(messages=turns[:1], **options)
    later = {**options, "extra_body": {**LETTERS, "continuation_of": first.id}}
    second = client.chat.completions.create(messages=turns[1:], **later)
    said = [turns[0], {"role": "assistant", "content": first.choices[0].message.content}, turns[1]]
    whole = client.chat.completions.create(messages=said, **options)
    assert second.choices[0].message.content == whole.choices[0].message.content
    other = {"role": "user", "content": content(data_url(picture(8)), "A?")}
    third: Any = client.chat.completions.create(messages=[other], **later)
    assert third.choices[0].message.content != second.choices[0].message.content, "it depends on the picture"
    assert third.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def refusal(server: Server, url: str) -> dict[str, Any]:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, url)
    error: Any = caught.value.body
    return dict(error)


def test_what_is_no_picture_is_a_400_and_the_server_goes_on(server: Server) -> None:
    field = "messages[0].content[0].image_url.url"
    whole = png(picture(3))
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    for data in (b"hello", whole[: len(whole) // 2], b"\x89PNG\r\n\x1a\n", bomb.getvalue()):
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        assert refusal(server, url)["param"] == field
    assert refusal(server, "file:///etc/passwd")["param"] == field
    assert chat(server, data_url(picture(3))).choices[0].message.content is not None


def test_an_address_of_this_machine_is_never_connected_to(reader: Reader) -> None:
    """Although the operator allows the host."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[Any] = []
        threading.Thread(target=lambda: connections.append(listener.accept()), daemon=True).start()
        port = listener.getsockname()[1]
        allowed = ("--allow-media-host", f"127.0.0.1:{port}", "--allow-media-host", f"localhost:{port}")
        with serving(reader.folder, *OPTIONS, "--served-model-name", "reader", *allowed) as running:
            for host in ("127.0.0.1", "localhost"):
                assert "not public" in refusal(running, f"http://{host}:{port}/a.png")["message"]
            assert "not allowed" in refusal(running, "http://example.com/a.png")["message"]
        assert not connections


def test_a_model_of_text_says_that_it_reads_text_only(tmp_path: Path) -> None:
    with serving(write_tiny_model(tmp_path), "--served-model-name", "reader") as running:
        error = refusal(running, data_url(picture(0)))
        assert error["param"] == "messages[0].content[0]"
        assert "reads text only" in error["message"]


# ---- commands ----


def test_commands_take_images(reader: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = picture(20)
    path = tmp_path / "shown.png"
    path.write_bytes(png(shown))
    question = example.QUESTIONS[0]
    common = ("--temperature", "0", "--max-tokens", str(NUM_TOKENS), "--device", "cpu")
    assert main(["generate", str(reader.folder), question, "--image", str(path), *common]) == 0
    assert capsys.readouterr().out.strip() == reader.answer(question, shown).strip()


def test_chat_takes_the_path_of_an_image(
    reader: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = picture(21)
    path = tmp_path / "shown.png"
    path.write_bytes(png(shown))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{path} {example.QUESTIONS[1]}\n"))
    options = ("--temperature", "0", "--max-tokens", str(NUM_TOKENS), "--device", "cpu")
    assert main(["chat", str(reader.folder), *options]) == 0
    assert capsys.readouterr().out.strip() == reader.answer(example.QUESTIONS[1], shown).strip()


def test_chat_with_a_server_sends_each_image_once(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.png" for number in (22, 23)]
    for number, path in zip((22, 23), paths):
        path.write_bytes(png(picture(number)))
    lines = "".join(f"{path} {question}\n" for path, question in zip(paths, example.QUESTIONS))
    options = ("--url", server.url, "--temperature", "0", "--regex", "[a-z]{12}")
    printed = []
    for continues in (True, False):  # by continuations, and by the whole conversation
        monkeypatch.setattr(RemoteAnswerer, "_server_continues", constant(continues))
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["chat", *options]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def constant(value: bool) -> Any:
    async def answer(*_: Any) -> bool:
        return value

    return answer


# ---- a model that has learned something ----


@pytest.mark.slow
@pytest.mark.full
def test_a_trained_model_reads_a_picture_that_is_drawn_here(tmp_path: Path) -> None:
    model, tokenizer = example.train(TRAINED_STEPS)
    example.save(model, tokenizer, tmp_path)
    found = []
    with serving(tmp_path, *OPTIONS, "--served-model-name", "reader") as running:
        for colour in example.COLOURS.values():
            drawn = Image.new("RGB", (150, 110), "white")  # in another size and form than those of the training
            ImageDraw.Draw(drawn).rounded_rectangle((20, 10, 130, 100), 20, colour)
            found.append(chat(running, data_url(drawn), example.QUESTIONS[1]).choices[0].message.content.strip())
    assert found == [f"It is {name}." for name in example.COLOURS]
