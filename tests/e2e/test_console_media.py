"""Recordings and pictures in the console: dropped or chosen, they go to a model that reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import real_models
from tests.e2e.consoles import Console, drop, module_of
from tests.e2e.servers import ROOT, Server, serving
from tests.e2e.test_images import NUM_TOKENS, OPTIONS, Reader, example, picture, png

SPEECH = ROOT / "tests/data/audio/jfk.wav"
WORDS = "ask what you can do for your country"
CONTEXT = "A speech of John F. Kennedy."


@pytest.fixture(scope="module")
def server(chromium: Any) -> Iterator[Server]:
    model = real_models.whisper_tiny()
    with serving(model, "--load-format", "auto", "--served-model-name", "whisper-tiny") as started:
        yield started


@pytest.fixture
def console(chromium: Any, server: Server) -> Iterator[Console]:
    opened = Console(chromium, server.url).open()
    opened.page.wait_for_selector(".welcome >> text=writes down what is said")
    yield opened
    opened.close()


def test_a_dropped_recording_becomes_text_with_segments(console: Console, tmp_path: Path):
    page = console.page
    assert page.locator(".composer input[type=file]").get_attribute("accept") == "audio/*,video/*"
    assert page.locator("#composer").get_attribute("placeholder").startswith("Drop a recording")
    page.fill("#composer", CONTEXT)
    assert page.locator(".composer button[type=submit]").is_disabled()
    drop(console, 'jfk\'s "own".wav', "audio/wav", SPEECH.read_bytes())
    page.wait_for_selector(".segments li")
    console.idle()
    sent = f"Object.values(({module_of('store.js')}).state.tree.messages).find((x) => x.sent).sent"
    fields = {"model": "whisper-tiny", "prompt": CONTEXT, "response_format": "verbose_json", "stream": "true"}
    assert console.run("request.js", sent)["body"] == fields
    assert WORDS in console.answers()[0]
    segments = page.locator(".segments li")
    times = segments.first.locator("button").inner_text()
    assert times.startswith("0:00.0 – 0:"), times
    assert WORDS in " ".join(page.locator(".segments li span").all_inner_texts())
    assert "english, 11.0 s" in page.inner_text(".segments summary")
    assert page.inner_text("[role=status]").startswith("The recording is transcribed")
    assert console.rows()[0] == 'recording: jfk\'s "own".wav'
    # The recording itself can be heard: the page plays it from memory, from the time of a segment.
    assert page.locator("audio").get_attribute("src").startswith("blob:")
    console.wait_for("document.querySelector('audio').readyState > 0")
    page.evaluate("document.querySelector('audio').currentTime = 5")
    segments.first.locator("button").click()
    console.wait_for("document.querySelector('audio').currentTime < 5")
    # What was sent, as programs.
    (tmp_path / 'jfk\'s "own".wav').symlink_to(SPEECH)
    command = console.run("request.js", f"m.asCurl({sent}, document.baseURI, false)")
    assert WORDS in run(["sh", "-c", command.replace("curl -N", "curl -sN")], tmp_path)
    (tmp_path / "program.py").write_text(console.run("request.js", f"m.asPython({sent}, document.baseURI, false)"))
    assert WORDS in run([sys.executable, "program.py"], tmp_path)


def run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


@pytest.mark.full
def test_a_chosen_recording_is_transcribed_again_and_exported_without_its_sound(console: Console, tmp_path: Path):
    page = console.page
    page.set_input_files(".composer input[type=file]", SPEECH)
    page.wait_for_selector(".segments li")
    console.idle()
    first = console.answers()
    page.click(".message.assistant >> text=Retry")
    page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    assert console.answers() == first, "greedy: the same is heard again"
    assert page.locator(".message.user >> text=Edit").count() == 0
    page.click("summary:has-text('Menu')")
    with page.expect_download() as download:
        page.click("text=Export as JSON")
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    assert json.loads(path.read_text())["messages"][0]["recording"] == "jfk.wav"
    page.reload()
    page.set_input_files("[aria-label='File to import']", path)
    page.wait_for_selector(".segments li")
    assert console.answers() == first
    assert page.locator("audio").count() == 0
    assert page.locator(".segments li button").first.is_disabled()
    page.click(".message.assistant >> text=Retry")
    page.wait_for_selector(".toast.shown >> text=drop it again")


def test_what_is_no_recording_gets_the_servers_error(console: Console):
    drop(console, "noise.wav", "audio/wav", b"RIFF is not enough")
    console.page.wait_for_selector(".message.assistant .error")
    assert "file" in console.page.inner_text(".message.assistant .error")
    drop(console, "notes.txt", "text/plain", b"text")
    console.page.wait_for_selector(".toast.shown >> text=neither an image nor a recording")


def test_a_dropped_picture_is_read_by_a_model_that_reads_pictures(chromium: Any, tmp_path: Path):
    reader, shown = Reader(tmp_path / "reader"), picture(1)
    with serving(reader.folder, *OPTIONS, "--served-model-name", "reader") as server:
        console = Console(chromium, server.url).open()
        page = console.page
        page.wait_for_selector("#composer[placeholder='Message, or drop an image']")
        assert page.locator(".composer input[type=file]").get_attribute("accept") == "image/*"
        drop(console, "drawing.png", "image/png", png(shown))
        page.wait_for_selector(".attachment img[alt='drawing.png']")
        console.set(temperature=0, max_tokens=NUM_TOKENS)
        console.ask(example.QUESTIONS[0])
        assert page.locator(".message.user img[alt='drawing.png']").count() == 1
        assert console.answers()[0].strip() == reader.answer(example.QUESTIONS[0], shown).strip()
        # The next message is a continuation, which inherits the rows of the picture and does not send it again.
        with page.expect_request("**/v1/chat/completions") as asked:
            console.ask(example.QUESTIONS[1])
        assert [message["content"] for message in asked.value.post_data_json["messages"]] == [example.QUESTIONS[1]]
        inherited, computed = (int(chip.split()[0]) for chip in console.chips())
        assert inherited > computed
        console.close()
