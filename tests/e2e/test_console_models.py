"""The console of a server with several models, in a browser: they are listed, the chosen one answers, a request that
waits until its model is loaded says so, and the view Engine shows the engines of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.axe_core import violations
from tests.e2e.consoles import Console
from tests.e2e.servers import Server, serving
from tests.e2e.test_several_models import unload
from tests.unit.api.server.harness import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Engines start as processes that import everything: that takes longer than a stream waits before it says so."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        write_tiny_model(folder / name)
    (folder / "two" / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "max_new_tokens": 70}'
    )
    with serving(folder / "one", f"second={folder / 'two'}", has_forks=False) as started:
        yield started


@pytest.fixture
def console(chromium: Any, server: Server) -> Iterator[Console]:
    opened = Console(chromium, server.url)
    yield opened.open()
    opened.close()


def listed(console: Console) -> list[str]:
    return console.page.locator("select.model option").all_inner_texts()


def hints(console: Console) -> list[str | None]:
    return [
        console.page.locator(f"input[name={name}]").get_attribute("placeholder")
        for name in ("temperature", "max_tokens")
    ]


def test_models_are_listed_and_the_chosen_one_is_loaded_and_answers(console: Console, server: Server) -> None:
    page = console.page
    unload(server, "one", "second")
    page.reload()
    console.wait_for("document.querySelector('select.model')?.options.length === 2")
    assert listed(console) == ["one (unloaded)", "second (unloaded)"]
    assert page.locator("select.model").input_value() == "one", "the first, until another is chosen"
    page.select_option("select.model", "second")
    assert hints(console) == [
        "1 (0: the likeliest token), or the model's own",
        "what the context leaves, or the model's own",
    ]
    console.set(temperature=0, max_tokens=4)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.fill("#composer", "Hello")
        page.press("#composer", "Enter")
    assert asked.value.post_data_json["model"] == "second"
    waiting = page.wait_for_selector(".message.assistant .waiting").inner_text()
    assert waiting.startswith("Waiting for second: loading, ")
    console.idle()
    assert page.locator(".waiting").count() == 0
    assert page.locator(".message.assistant .who").all_inner_texts() == ["second"]
    assert page.locator(".message.assistant .error").count() == 0
    console.wait_for("document.querySelector('select.model').options[1].text === 'second'")
    assert listed(console) == ["one (unloaded)", "second"]
    assert hints(console) == ["0.6, the model's own", "70, the model's own"], "its files have been read"


def test_another_model_goes_on_with_the_text_and_branches_stay_with_their_own(console: Console) -> None:
    page = console.page
    page.select_option("select.model", "second")
    console.set(temperature=0, max_tokens=4)
    console.ask("Hello")
    page.select_option("select.model", "one")
    with page.expect_request("**/v1/chat/completions") as asked:
        console.ask("And now?")
    body = asked.value.post_data_json
    assert body["model"] == "one" and "continuation_of" not in body
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"], (
        "it has inherited nothing"
    )
    assert page.locator(".message.assistant .who").all_inner_texts() == ["second", "one"]
    with page.expect_request("**/v1/completions") as asked:
        page.locator(".message.assistant >> text=Go on").first.click()
    console.idle()
    assert asked.value.post_data_json["model"] == "second", "tokens and memory of the answer are its model's"
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator(".message.assistant >> text=Retry").first.click()
    console.idle()
    assert asked.value.post_data_json["model"] == "one", "a new answer is the chosen model's"


def test_the_engines_of_all_loaded_models_are_shown_with_their_models_names(console: Console) -> None:
    page = console.page
    console.set(temperature=0, max_tokens=4)
    for model in ("one", "second"):
        page.select_option("select.model", model)
        console.ask("Hello")
    page.click("nav >> text=Engine")
    page.wait_for_selector(".blocks canvas >> nth=1")
    assert page.locator(".blocks h2").all_inner_texts() == ["Engine 0", "Engine 100"]
    assert page.locator(".blocks .model").all_inner_texts() == ["one", "second"]
    page.wait_for_selector("[aria-label^='Drop ']")
    assert page.locator("[aria-label=Leases] tbody tr").first.locator("td >> nth=5").inner_text() == "device"
    held = page.locator("[aria-label^='Drop ']").count()
    page.locator("[aria-label^='Drop ']").first.click()
    console.wait_for(f"""document.querySelectorAll("[aria-label^='Drop ']").length === {held - 1}""")


def test_lists_of_models_and_of_their_engines_violate_no_accessibility_guideline(console: Console) -> None:
    console.set(temperature=0, max_tokens=4)
    for model in ("one", "second"):
        console.page.select_option("select.model", model)
        console.ask("Hello")
    for view, selector in (("Conversation", ".message.assistant"), ("Engine", ".blocks canvas >> nth=1")):
        console.page.click(f"nav >> text={view}")
        console.page.wait_for_selector(selector)
        for scheme in ("light", "dark"):
            console.page.emulate_media(color_scheme=scheme)
            assert violations(console.page) == []
