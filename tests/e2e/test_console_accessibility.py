"""The console for readers with a screen reader, with keys alone, or with a page that is magnified.

What axe-core finds in each view, what Chromium tells assistive technology, and where the focus goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.axe_core import script_or_skip, violations
from tests.e2e.consoles import Console, drop
from tests.e2e.servers import ADMIN_KEY, Server, serving
from tests.waiting import wait_until

QUESTION = "Tell me a story about a fox."
KEY = "key-of-the-reader"


@pytest.fixture(scope="module")
def server(chromium: Any) -> Iterator[Server]:
    options = ("--api-key", KEY, "--admin", "--admin-key", ADMIN_KEY)
    with serving("smollm2-135m", "--load-format", "auto", "--served-model-name", "fox", *options) as started:
        yield started


@pytest.fixture(scope="module")
def shared(chromium: Any, server: Server) -> Iterator[Console]:
    """A page with a conversation that has two versions of an answer. Tests of single views leave it as it is."""
    console = Console(chromium, server.url).open()
    enter_key(console)
    console.set(temperature=0, max_tokens=8)
    console.ask(QUESTION)
    branch(console)
    yield console
    console.close()


@pytest.fixture(scope="module")
def visited(chromium: Any, server: Server) -> Iterator[Console]:
    opened = Console(chromium, server.url)
    yield opened.open()
    opened.close()


@pytest.fixture
def console(visited: Console) -> Iterator[Console]:
    """The page as it is for a new visitor. A browser takes seconds to make another one."""
    opened = visited.open_again()
    enter_key(opened)
    opened.set(temperature=0, max_tokens=8)
    yield opened
    opened.check()


def enter_key(console: Console) -> None:
    console.page.fill("dialog input[name=key]", KEY)
    console.page.press("dialog input[name=key]", "Enter")
    console.page.wait_for_selector(".bar .model >> text=fox")


def branch(console: Console) -> None:
    console.page.locator(".token[data-token='2']").first.click()
    console.page.locator(".card button.alternative:not([disabled])").first.click()
    console.page.wait_for_selector(".versions >> text=2/2")
    console.idle()


# ---- every view, against the rules ----


def show_conversation(console: Console) -> None:
    console.page.click("nav >> text=Conversation")
    console.page.wait_for_selector(".message.assistant")


def show_probabilities(console: Console) -> None:
    show_conversation(console)
    console.page.keyboard.press("Escape")
    console.page.click(".tools >> text=Probabilities")


def show_card(console: Console) -> None:
    show_conversation(console)
    console.page.locator(".token[data-token='2']").first.click()
    console.page.wait_for_selector(".card")


def show_inside(console: Console) -> None:
    show_card(console)
    console.page.click("text=Look inside")
    console.page.wait_for_selector(".layers tbody tr")


def show_settings(console: Console) -> None:
    """Shows the settings of the conversation with a schema that the server refuses, and with a tool."""
    show_conversation(console)
    if console.page.locator(".settings").count() == 0:
        console.page.click(".tools >> text=Settings")
    form = "label:has-text('It must be') select"
    if not console.page.locator(form).is_visible():
        console.page.click("summary:has-text('Form of the answer')")
    console.page.select_option(form, "json_schema")
    console.page.fill("textarea.editor", "{")
    console.page.click("text=Check")
    console.page.wait_for_selector("#format-error:visible")
    console.page.click("summary:has-text('Tools')")
    console.page.click("text=Add a tool")
    console.page.wait_for_selector("fieldset.tool")


def show_edit(console: Console) -> None:
    show_conversation(console)
    console.page.locator(".message.user >> text=Edit").click()
    console.page.wait_for_selector(".edit textarea")


def show_failure(console: Console) -> None:
    show_conversation(console)
    error = {"error": {"message": "no such thing", "param": "n"}}
    console.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    console.ask("Fail.")
    console.page.unroute("**/v1/chat/completions")
    console.page.wait_for_selector(".message .error")


def show_compare(console: Console) -> None:
    console.page.click("nav >> text=Compare")
    console.page.wait_for_selector(".compare del")


def show_engine(console: Console) -> None:
    console.page.click("nav >> text=Engine")
    console.page.wait_for_selector("[aria-label=Leases] tbody tr")
    console.page.wait_for_selector(".blocks canvas")
    console.page.locator("summary:has-text('Admin key')").click()


def show_menu(console: Console) -> None:
    console.page.click("summary:has-text('Menu')")
    console.page.wait_for_selector(".menu .entries")


def show_key_dialog(console: Console) -> None:
    show_menu(console)
    console.page.click("text=API key…")
    console.page.wait_for_selector("dialog")


def show_help(console: Console) -> None:
    console.page.keyboard.press("Escape")
    console.page.keyboard.press("?")
    console.page.wait_for_selector("dialog[aria-label=Keys]")


def show_answers_as_a_tree(console: Console) -> None:
    show_conversation(console)
    console.set(n=2, temperature=2, seed=3)
    console.ask("Name a colour.")
    console.page.wait_for_selector(".choices button.leaf")


def show_markdown(console: Console) -> None:
    show_conversation(console)
    blocks = ["# A title", "> quoted `code`", "- one [link](https://example.org)", "| a | b |\n|---|---|\n| 1 | 2 |"]
    text = "\n\n".join([*blocks, "```c\nint a;\n```\n"])
    chunk = {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": text, "reasoning_content": "Hm."}}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    console.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    console.ask("Write Markdown.")
    console.page.unroute("**/v1/chat/completions")
    console.page.click(".reasoning summary")
    console.page.wait_for_selector("figure.code")


def show_transcript(console: Console) -> None:
    """Shows the text of a recording, as a model of speech writes it down."""
    show_conversation(console)
    events: list[dict[str, Any]] = [
        {"type": "transcript.text.segment", "start": 0.0, "end": 1.5, "text": "One two."},
        {"type": "transcript.text.done", "text": "One two.", "language": "english", "duration": 1.5},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    console.page.route(
        "**/v1/audio/transcriptions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    drop(console, "speech.wav", "audio/wav", b"RIFF")
    console.page.wait_for_selector(".segments li")
    console.idle()
    console.page.unroute("**/v1/audio/transcriptions")


VIEWS: list[Callable[[Console], None]] = [
    show_conversation, show_probabilities, show_card, show_inside, show_settings, show_edit, show_failure, show_compare,
    show_engine, show_menu, show_key_dialog, show_help, show_answers_as_a_tree, show_markdown, show_transcript,
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("show", VIEWS, ids=lambda show: show.__name__.removeprefix("show_"))
def test_no_view_violates_the_accessibility_guidelines_in_light_or_dark(shared: Console, show: Any):
    script_or_skip()
    kept = shared.run("store.js", "JSON.stringify([m.state.tree, m.state.settings])")
    try:
        show(shared)
        for scheme in ("light", "dark"):
            shared.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            assert violations(shared.page, colours_alone=scheme == "dark") == [], scheme
    finally:
        shared.page.keyboard.press("Escape")
        shared.run(
            "store.js",
            """([m.state.tree, m.state.settings] = JSON.parse(a[0]), m.state.panel = "settings",
                Object.assign(m.state, {coloured: false, touched: null, formatError: null}), m.changed())""",
            kept,
        )


def test_a_page_before_its_first_question_violates_nothing(chromium: Any, server: Server):
    script_or_skip()
    for scheme in ("light", "dark"):
        console = Console(chromium, server.url, color_scheme=scheme).open()
        assert violations(console.page) == [], "the dialog that asks for the key"
        enter_key(console)
        assert violations(console.page) == []
        console.close()


# ---- small and magnified windows ----


@pytest.mark.parametrize("width", [320, 360, 650])
def test_in_a_narrow_or_magnified_window_every_view_is_read_without_scrolling_to_the_side(shared: Console, width: int):
    """A window of 1280 pixels has 320 of them at 400 %."""
    page = shared.page
    show_conversation(shared)
    page.set_viewport_size({"width": width, "height": 425})
    try:
        page.wait_for_selector(".settings", state="detached")
        assert page.locator("#composer").is_visible(), "no panel covers the conversation"
        for show in (show_conversation, show_compare, show_engine):
            show(shared)
            wide = page.evaluate(
                """() => [...document.querySelectorAll('main, main section, main section *')].filter((one) => {
                    const scrolls = one.closest('.table, .messages pre, .visually-hidden');
                    return !scrolls && one.getBoundingClientRect().right > innerWidth + 1;
                }).map((one) => one.outerHTML.slice(0, 100))"""
            )
            assert wide == []
        show_conversation(shared)
        for panel in ("Settings", "Tree", "Inside"):
            page.click(f".tools >> text={panel}")
            page.locator("#composer").wait_for(state="hidden")  # keys do not go where nothing is seen
            page.click(f".tools >> text={panel}")
            page.locator("#composer").wait_for()
    finally:
        page.set_viewport_size({"width": 1300, "height": 850})
        show_conversation(shared)
        shared.run("store.js", "(m.state.panel = 'settings', m.state.outline = true, m.changed())")
        page.wait_for_selector(".settings")


# ---- what a screen reader is told ----


def tree_of(console: Console, selector: str = "body") -> str:
    """Returns the accessibility tree in the form of Playwright: a line for each element, with its role and its name."""
    return str(console.page.locator(selector).aria_snapshot())


def test_the_conversation_is_headings_groups_and_a_tree_with_places(shared: Console):
    show_conversation(shared)
    thread = tree_of(shared, ".thread")
    assert re.findall(r'heading "(\w+)" \[level=2\]', thread) == ["You", "fox"]
    assert re.findall(r'article "(\w+)"', thread) == ["You", "fox"]
    assert 'group "Version 2 of 2":' in thread and 'group "Answer":' in thread
    answer = shared.page.locator(".answer-text")
    hint = shared.page.locator(f"#{answer.get_attribute('aria-describedby')}").text_content()
    assert "Left and right arrow" in hint
    items = shared.page.locator("[role=treeitem]")
    places = [
        [item.get_attribute(f"aria-{name}") for name in ("level", "posinset", "setsize", "selected")]
        for item in items.all()
    ]
    assert sorted(places) == [["1", "1", "1", "false"], ["2", "1", "2", "false"], ["2", "2", "2", "true"]]
    page = tree_of(shared)
    for landmark in ("banner:", 'navigation "Views":', "main:", 'complementary "Tree":', 'region "Conversation":'):
        assert f"- {landmark}" in page
    assert page.count("banner") == 1


def test_the_view_compare_names_its_sides_and_its_differences(shared: Console):
    show_compare(shared)
    tree = tree_of(shared, "main")
    assert re.search(r"status: \d+ % in common, compared by tokens", tree)
    left, right = tree.split('article "Right":')
    assert 'article "Left":' in left and 'combobox "Left":' in left and "- deletion:" in left
    assert 'combobox "Right":' in right and "- insertion:" in right


def test_pictures_of_the_engine_and_of_layers_are_told_in_words(shared: Console):
    show_engine(shared)
    tree = tree_of(shared, "main")
    assert re.findall(r'heading "([\w ]+)" \[level=2\]', tree)[0] == "Engine 0"
    assert re.search(r'application "Engine 0, 600 blocks of 16 tokens: \d+ in use, \d+ leased', tree)
    assert 'columnheader "action"' in tree and 'columnheader "colour"' in tree
    show_inside(shared)
    tree = tree_of(shared, ".lens")
    picture = re.search(r"img .The probability of this token through the layers\. (.*?)[\"']:?", tree)[1]
    assert re.fullmatch(r"(layer \d+: [<\d. ]+ %(, )?){5}", picture), picture
    assert picture.startswith("layer 0: ") and "layer 30: " in picture
    told = shared.page.inner_text("[role=status]")
    assert re.search(r": (Layer \d+ of 30 is the first|No layer puts this token first)", told)
    shared.page.keyboard.press("Escape")
    shared.page.wait_for_selector(".lens", state="detached")
    shared.page.wait_for_selector(".answer-text:focus")
    shared.run("store.js", "(m.state.panel = 'settings', m.state.touched = null, m.changed())")


def test_an_answer_is_told_in_sentences_and_its_end_once(console: Console):
    """Pieces of text come token by token; the live region gets whole sentences, and the rest at the end."""
    watched = """() => {
        window.told = [];
        const log = document.querySelector('[role=log]');
        const add = (one) => one.addedNodes.forEach((node) => told.push(node.textContent));
        new MutationObserver((all) => all.forEach(add))
            .observe(log, {childList: true, subtree: true}); }"""
    console.page.evaluate(watched)
    console.set(max_tokens=60)
    console.ask(QUESTION)
    told = console.page.evaluate("told")
    text = console.run("store.js", "m.state.tree.messages[m.state.tree.cursor].text")
    assert " ".join(told).split() == text.split() and 1 <= len(told) < 10
    for piece in told[:-1]:
        assert re.search(r"[.!?…:]\W*$|\n$", piece), piece
    assert console.page.inner_text("[role=status]") == "Answer complete: 60 tokens"
    assert console.page.locator("[role=log]").get_attribute("aria-live") in (None, "polite")


def test_sentences_are_told_some_seconds_apart_and_nothing_twice(shared: Console):
    take = """(() => { const s = new m.Speech(a[1]); const told = [];
        for (const [text, now, done] of a[0]) { s.take(text, now, done); told.push(s.pieces.map((one) => one.text)); }
        return told; })()"""
    texts = ["One", "One. Tw", "One. Two. Th", "One. Two. Three. F", "One. Two. Three. Four", "One. Two. Three. Four"]
    times = [0, 0.1, 1, 2.2, 2.3, 9]
    steps = [(f"Kept. {text}", now, now > 2.2) for text, now in zip(texts, times, strict=True)]
    one, two = ["One."], ["One.", "Two. Three."]
    assert shared.run("speech.js", take, steps, len("Kept. ")) == [[], one, one, two, [*two, "Four"], [*two, "Four"]]
    for text, whole in (
        ("a 3.5 b", ""),
        ('He said "no." Th', 'He said "no." '),
        ("- one\n- tw", "- one\n"),
        ("好。不", "好。"),
    ):
        assert shared.run("speech.js", "a[0].slice(0, m.wholeUntil(a[0], 0))", text) == whole


def test_the_same_message_twice_is_told_twice(shared: Console):
    told = "m.announce('Copied'), m.state.announcement"
    first, second, third = (shared.run("store.js", f"({told})") for _ in range(3))
    assert first != second != third and {first.strip(), second.strip(), third.strip()} == {"Copied"}


def test_a_token_is_told_without_signs_for_spaces(console: Console):
    console.ask(QUESTION)
    console.page.keyboard.press("Escape")
    console.page.keyboard.press("a")
    console.page.keyboard.press("ArrowRight")
    console.page.keyboard.press("ArrowRight")
    console.page.wait_for_selector(".token.touched[data-token='1']")
    token = console.page.inner_text(".token.touched").strip()
    status = console.page.locator("[role=status]")
    wait_until("it is told", lambda: status.inner_text().startswith(f"{token}, "))
    for text, spoken in ((" a", "a"), ("\n", "line break"), ("  ", "space space"), ("", "nothing")):
        assert console.run("tokens.js", "m.spoken(a[0])", text) == spoken


# ---- where the focus goes ----


def focused(console: Console) -> str:
    """Returns the role or tag, and the name, of the element that has the focus."""
    return str(
        console.page.evaluate(
            """() => { const one = document.activeElement;
            const role = one.getAttribute('role') ?? one.tagName.toLowerCase();
            return `${role} ${one.getAttribute('aria-label') || one.innerText || one.id}`.trim(); }"""
        )
    )


def test_the_focus_is_never_lost_when_what_had_it_goes(console: Console):
    page = console.page

    def press(selector: str, expected: str, key: str = "Enter") -> None:
        page.locator(selector).first.focus()
        page.keyboard.press(key)
        wait_until(f"{expected} has the focus, behind {selector}", lambda: focused(console) == expected)

    press(".starts button", "article fox")
    console.idle()
    press(".message.assistant .actions >> text=Retry", "article fox")
    page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    press("[aria-label='Previous version']", "article fox")  # there is none before: the button is off
    press("[aria-label='Next version']", "article fox")
    press(".message.user >> text=Edit", "textarea Edit the message")
    press(".edit >> text=Cancel", "button Edit")
    press(".message.user >> text=Edit", "textarea Edit the message")
    press(".edit textarea", "button Edit", "Escape")
    press(".message.assistant .actions >> text=Delete", "article fox")
    press(".message.assistant .actions >> text=Delete", "article You")
    page.fill("#composer", "Go on.")
    press(".composer .primary", "article fox")
    console.idle()
    wait_until("the answer has the focus", lambda: focused(console) == "article fox")
    page.locator(".token[data-token='1']").first.click()
    press(".card .alternative:enabled", "group Answer")
    console.idle()
    page.keyboard.press("2")
    wait_until("the view has the focus", lambda: focused(console) == "section Compare")
    page.keyboard.press("1")
    wait_until("the answer has the focus again", lambda: focused(console) == "article fox")
    page.click("summary:has-text('Tools')")
    press("#add-tool", "button Add a tool")
    press(".tool button", "summary Tools")


def test_dialogs_and_the_menu_give_the_focus_back(console: Console):
    page = console.page
    menu = page.locator("summary:has-text('Menu')")
    for entry in ("Keys (?)", "API key…"):
        menu.focus()
        page.keyboard.press("Enter")
        page.locator(f".menu .entries >> text={entry}").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog:focus-within")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")
        assert focused(console) == "summary Menu"
    page.keyboard.press("Enter")
    page.wait_for_selector(".menu[open]")
    page.keyboard.press("Tab")
    assert focused(console) == "button New conversation"
    page.keyboard.press("Escape")
    page.wait_for_selector(".menu:not([open])")
    assert focused(console) == "summary Menu"
    page.keyboard.press("Enter")
    page.wait_for_selector(".menu[open]")
    page.locator("#composer").focus()
    page.wait_for_selector(".menu:not([open])")
    page.click(".tools >> text=Tree")
    page.keyboard.press("?")
    page.wait_for_selector("dialog:focus-within")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert focused(console) == "button Tree"


def test_letters_are_no_commands_once_they_are_switched_off(console: Console):
    """A reader who speaks to the page, or presses a key by accident, would otherwise begin conversations."""
    page = console.page
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.locator("dialog input[type=checkbox]").uncheck()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("2")
    page.keyboard.press("?")
    page.click(".tools >> text=Tree")  # what comes behind is drawn behind it
    page.wait_for_selector(".tools [aria-pressed=false] >> text=Tree")
    assert page.locator("dialog").count() == 0 and page.locator(".thread").count() == 1
    assert console.run("store.js", "m.readSettings({keys: false}).keys") is False
