"""The console in a browser, with the embedded model: what a reader does, and what an attacker would."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratoon.console import FOLDER
from tests.e2e.consoles import Console, module_of
from tests.e2e.servers import Server, serving
from tests.waiting import wait_until

MAX_SCRIPTS = 150_000  # bytes, compressed


@pytest.fixture(scope="module")
def server(chromium: Any) -> Iterator[Server]:
    with serving("smollm2-135m", "--load-format", "auto") as started:
        yield started


@pytest.fixture(scope="module")
def scripts(chromium: Any, server: Server) -> Iterator[Console]:
    """A page for tests that call functions of its scripts, and leave the page itself as it is."""
    opened = Console(chromium, server.url)
    yield opened.open()
    opened.close()


@pytest.fixture
def console(scripts: Console) -> Iterator[Console]:
    """The page as it is for a new visitor. A browser takes seconds to make another one."""
    yield scripts.open_again()
    scripts.check()


def test_scripts_are_small_and_the_libraries_versions_are_written_down():
    scripts = sorted(FOLDER.rglob("*.js"))
    assert sum(len(gzip.compress(path.read_bytes())) for path in scripts) < MAX_SCRIPTS
    page = (FOLDER / "index.html").read_text()
    preloaded = set(re.findall(r'href="console/([^"]+\.js)"', page)) | {"main.js"}
    assert preloaded == {str(path.relative_to(FOLDER)) for path in scripts}, (
        "each script is fetched without waiting for another"
    )
    licences = (FOLDER / "vendor" / "LICENSES.md").read_text()
    for path in (FOLDER / "vendor").glob("*.js"):
        assert re.search(rf"`{re.escape(path.name)}` \|.*\| \d+\.\d+\.\d+ \| (MIT|Apache-2\.0)", licences), path.name


def test_the_page_is_painted_after_two_answers_and_asks_for_all_scripts_at_once(chromium: Any, server: Server):
    """The page and its style sheet are enough for the first paint. No script is answered before all have been asked
    for: were one found by reading another, this would wait forever. Opening the page again asks for none of them."""
    console = Console(chromium, server.url)
    scripts = {f"/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*.js")}
    held: dict[str, Any] = {}
    console.page.route("**/*.js", lambda route: held.__setitem__(route.request.url, route))
    console.page.goto(server.url, wait_until="commit")
    painted = "performance.getEntriesByType('paint').some((entry) => entry.name === 'first-contentful-paint')"
    console.wait_for(painted)
    blocking = "performance.getEntriesByType('resource').filter((one) => one.renderBlockingStatus === 'blocking')"
    (style,) = console.page.evaluate(f"{blocking}.map((one) => one.name)")
    assert style.endswith("/style.css")
    wait_until("all scripts are asked for", lambda: len(held) == len(scripts) or console.page.wait_for_timeout(20))
    assert {url[len(style) - len("/style.css") :] for url in held} == scripts
    assert all(url.startswith(style.removesuffix("style.css")) for url in held)
    for route in held.values():
        route.continue_()
    console.page.wait_for_selector(".bar .model:not(:empty)")
    console.page.unroute("**/*.js")
    console.open()  # with the browser's cache, which is off while requests are held
    console.open()
    from_network = "performance.getEntriesByType('resource').filter((one) => one.transferSize > 0)"
    found = console.page.evaluate(f"{from_network}.map((one) => new URL(one.name).pathname)")
    assert set(found) <= {"/console/config.json", "/v1/models"}, "all files are kept"
    console.close()


def test_a_conversation_streams_and_each_turn_inherits_the_one_before(console: Console):
    console.set(temperature=0, max_tokens=12)
    console.ask("What is the capital of France?")
    with console.page.expect_request("**/v1/chat/completions") as asked:
        console.ask("And of Italy?")
    body = asked.value.post_data_json
    assert [message["content"] for message in body["messages"]] == ["And of Italy?"], "only the new message is sent"
    assert body["continuation_of"].startswith("chatcmpl-")
    inherited, computed = (int(chip.split()[0]) for chip in console.chips())
    assert inherited > computed > 0
    assert len(console.rows()) == 4
    assert console.page.locator("[role=status]").inner_text().strip() == "Answer complete: 12 tokens"


def test_editing_and_retrying_keep_what_was_there(console: Console):
    console.set(temperature=1, seed=1, max_tokens=6)
    console.ask("Name a colour.")
    first = console.answers()[0]
    console.set(seed=7)
    console.page.locator(".message.assistant >> text=Retry").click()
    console.page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    inherited = int(console.chips()[0].split()[0])
    assert inherited > 20, "the prompt is inherited, not computed again"
    console.page.locator("[aria-label='Previous version']").click()
    console.page.wait_for_selector(".versions >> text=1/2")
    assert console.answers() == [first]
    console.page.locator(".message.user >> text=Edit").click()
    console.page.fill(".edit textarea", "Name a city.")
    console.page.press(".edit textarea", "Enter")
    console.page.wait_for_selector(".message.user >> text=Name a city.")
    console.idle()
    assert sorted(row for row in console.rows() if row.startswith("Name")) == ["Name a city.", "Name a colour."]
    assert len(console.rows()) == 5


def test_a_click_on_an_alternative_branches_there(console: Console):
    console.set(temperature=0, max_tokens=10)
    console.ask("Tell me a story about a fox.")
    whole = console.answers()[0]
    console.page.locator(".token[data-token='4']").first.click()
    other = console.page.locator(".card button.alternative:not([disabled])").first
    text = other.locator("code").inner_text()
    assert re.fullmatch(r"[\d.]+ %|< 0.01 %", other.locator(".share").inner_text())
    with console.page.expect_request("**/v1/completions") as asked:
        other.click()
    console.idle()
    body = asked.value.post_data_json
    assert len(body["continuation_suffix"]) == 1
    assert body["continuation_at"] == len(body["prompt"]) - 1, "prompt and four tokens are kept"
    assert console.chips()[1] == "1 computed", "the chosen token; the others are inherited"
    branched = console.answers()[0]
    forced = console.page.locator(".token.forced")
    assert forced.inner_text() == text.replace("␣", " ")
    assert branched != whole
    kept = "".join(console.page.locator(f".token[data-token='{index}']").first.inner_text() for index in range(4))
    assert whole.startswith(kept)
    assert console.page.locator(".outline .badge").inner_text().startswith("@5 ")
    # The conversation goes on from the branch.
    with console.page.expect_request("**/v1/chat/completions") as asked:
        console.ask("Go on.")
    assert asked.value.post_data_json["continuation_of"].startswith("cmpl-")


def test_a_branch_within_a_form_goes_on_in_its_grammar(console: Console):
    console.set(temperature=0, max_tokens=30)
    console.page.click("summary:has-text('Form of the answer')")
    console.page.select_option("label:has-text('It must be') select", "regex")
    console.page.fill("textarea.editor", "I (like|love|hate) (cats|dogs|birds)\\.")
    console.ask("What do you feel?")
    assert re.fullmatch(r"I (like|love|hate) (cats|dogs|birds)\.", console.answers()[0])
    console.page.locator(".token[data-token='2']").first.click()
    with console.page.expect_request("**/v1/completions") as asked:
        console.page.locator(".card >> text=Draw again from here").click()
    console.page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    assert asked.value.post_data_json["structured_outputs"] == {"continue_grammar": True}
    assert re.fullmatch(r"I (like|love|hate) (cats|dogs|birds)\.", console.answers()[0])


def test_beams_are_shown_as_the_tree_that_they_are(console: Console):
    console.page.check("text=Search with beams")
    console.set(n=3, max_tokens=6)
    console.ask("Name a colour.")
    leaves = console.page.locator(".choices button.leaf")
    leaves.first.wait_for()
    scores = [float(re.search(r"score (-[\d.]+)", text)[1]) for text in leaves.all_inner_texts()]
    assert len(scores) == 3
    best = float(re.search(r"score (-[\d.]+)", console.chips()[0])[1])
    assert best == max(scores)
    console.page.wait_for_selector(".choices .token[title$='%']")
    # What answers share stands in the drawing once, so it has fewer tokens than they have together.
    drawn = console.page.locator(".choices .token").count()
    written = sum(
        console.run(
            "store.js",
            "Object.values(m.state.tree.messages).filter((x) => x.role === 'assistant').map((x) => x.tokens.length)",
        )
    )
    assert 0 < drawn < written
    worst = leaves.last
    worst.click()
    console.page.wait_for_selector(".versions")


def test_several_answers_are_shown_as_the_tree_that_they_are_with_scores(console: Console):
    console.set(temperature=1.5, seed=5, n=4, max_tokens=30)
    console.page.click("summary:has-text('Form of the answer')")
    console.page.select_option("label:has-text('It must be') select", "regex")
    console.page.fill("textarea.editor", "I would like to see (a cat|two dogs|many birds|the sea) today\\.")
    console.ask("What would you like?")
    leaves = console.page.locator(".choices button.leaf")
    leaves.first.wait_for()
    assert console.page.locator(".choices .about").inner_text().startswith("4 answers")
    answers = console.run(
        "store.js",
        """Object.values(m.state.tree.messages).filter((x) => x.role === 'assistant')
            .map((x) => ({text: x.text, tokens: x.tokens.length,
                          sum: x.tokens.reduce((all, token) => all + token.logprob, 0)}))""",
    )
    assert len({answer["text"] for answer in answers}) > 1, "they are not all the same"
    shown = {int(text.split()[0]): text for text in leaves.all_inner_texts()}
    assert sorted(shown) == [1, 2, 3, 4]
    for number, text in shown.items():
        assert float(re.search(r"log p (-[\d.]+)", text)[1]) == pytest.approx(answers[number - 1]["sum"], abs=0.0051)
    # What they begin with in common stands in the drawing once, and the way to each leaf is its answer.
    drawn = console.page.locator(".choices .token").count()
    assert 0 < drawn < sum(answer["tokens"] for answer in answers)
    ways = leaves.evaluate_all(
        """all => all.map((leaf) => {
            let text = '';
            for (let item = leaf.closest('li'); item; item = item.parentElement.closest('li'))
                text = (item.querySelector(':scope > .run')?.textContent ?? '') + text;
            return [parseInt(leaf.innerText), text];
        })"""
    )
    for number, text in ways:
        assert text.startswith(answers[number - 1]["text"]), "behind the text there may be the token that ends it"
    other = next(number for number, text in shown.items() if answers[number - 1]["text"] != answers[0]["text"])
    leaves.filter(has_text=re.compile(rf"^\s*{other} ")).click()
    console.page.wait_for_selector(f".versions >> text={other}/4")
    assert console.answers() == [answers[other - 1]["text"]]
    assert leaves.filter(has_text=re.compile(rf"^\s*{other} ")).get_attribute("aria-current") == "true"


def test_two_branches_stand_side_by_side_with_their_differences_marked(console: Console):
    console.page.keyboard.press("Escape")
    console.page.keyboard.press("2")
    console.page.wait_for_selector("section[aria-label=Compare] >> text=There are no two answers yet")
    console.page.click("nav >> text=Conversation")
    console.set(temperature=0, max_tokens=12)
    console.ask("Tell me a story about a fox.")
    whole = console.answers()[0]
    console.page.locator(".token[data-token='4']").first.click()
    console.page.locator(".card button.alternative:not([disabled])").first.click()
    console.page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    branched = console.answers()[0]
    kept = "".join(console.page.locator(f".token[data-token='{index}']").first.inner_text() for index in range(4))
    console.page.click("nav >> text=Compare")
    sides = console.page.locator(".compare article")
    sides.last.wait_for()
    text = [side.locator(".verbatim").inner_text() for side in sides.all()]
    assert text == [whole, branched], "what it branched off is on the left"
    for side, mark, other in ((sides.first, "del", "ins"), (sides.last, "ins", "del")):
        assert side.locator(".verbatim > :first-child").inner_text().startswith(kept), (
            "the shared beginning is not marked"
        )
        assert side.locator(f".verbatim {mark}").count() >= 1
        assert side.locator(f".verbatim {other}").count() == 0
    same = [side.locator(".verbatim span").all_inner_texts() for side in sides.all()]
    assert "".join(same[0]) == "".join(same[1]), "what is not marked is the same on both sides"
    share = int(re.match(r"(\d+) % in common, compared by tokens", console.page.inner_text(".compare .summary"))[1])
    assert 0 < share < 100
    assert "branched after 4 tokens" in sides.last.inner_text()
    # An answer of another question, by a mark and by the list.
    console.page.click("nav >> text=Conversation")
    console.page.wait_for_selector("section[aria-label=Conversation]")
    console.page.keyboard.press("m")
    console.page.click("nav >> text=Compare")
    console.page.wait_for_selector(".compare .summary >> text=100 % in common")  # the marked one beside itself
    console.page.locator("label.picker:has-text('Right') select").select_option(index=0)
    console.page.wait_for_selector(".compare del")
    assert [side.locator(".verbatim").inner_text() for side in sides.all()] == [branched, whole]


DIFFERENCES = [
    ("abcdef", "abcdef", "abcdef"),
    ("abcdef", "abXdef", "abdef"),
    ("abc", "", ""),
    ("kitten", "sitting", "ittn"),
    ("aaaa", "aa", "aa"),
]


def test_the_marked_difference_is_the_smallest(scripts: Console):
    for left, right, common in DIFFERENCES:
        sides = scripts.run("compare.js", "m.difference([...a[0]], [...a[1]])", left, right)
        assert ["".join(run["text"] for run in side) for side in sides] == [left, right]
        for side in sides:
            assert "".join(run["text"] for run in side if run["same"]) == common
    long = scripts.run("compare.js", "m.difference(Array(5000).fill('a'), Array(5000).fill('b'))")
    assert [len(side[0]["text"]) for side in long] == [5000, 5000]


def test_what_each_layer_would_have_said_is_a_picture(console: Console):
    console.set(temperature=0, max_tokens=6)
    console.ask("What is the capital of France?")
    console.page.locator(".token[data-token='3']").first.click()
    console.page.click("text=Look inside")
    rows = console.page.locator(".layers tbody tr")
    rows.first.wait_for()
    assert rows.count() == 31, "the embeddings and thirty layers"
    last = rows.first.locator("td.own")
    assert "right" in last.get_attribute("class"), "greedy: what the last layer says is what was written"
    norms = [float(text) for text in console.page.locator(".layers td.norm").all_inner_texts()]
    assert len(norms) == 31
    assert all(norm > 0 for norm in norms)


def test_everything_can_be_done_with_keys(console: Console):
    press = console.page.keyboard.press
    console.set(temperature=0, max_tokens=5)
    press("Escape")
    press("/")
    console.page.wait_for_selector("#composer:focus")
    console.page.keyboard.type("Name a fruit.")
    press("Enter")
    console.page.wait_for_selector(".message.assistant")
    console.idle()
    press("Escape")
    press("t")
    console.page.wait_for_selector(".answer-text.coloured")
    press("a")
    press("ArrowRight")
    press("ArrowRight")
    console.page.wait_for_selector(".token.touched[data-token='1']")
    press("Enter")
    console.page.wait_for_selector(":focus[class*=alternative]")
    press("Enter")
    console.page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    console.page.focus("[role=tree]")
    here = "[role=treeitem][aria-selected=true]"
    console.page.wait_for_selector(f"{here}[aria-level='2']")
    press("ArrowLeft")
    console.page.wait_for_selector(".versions >> text=1/2")
    press("ArrowUp")
    console.page.wait_for_selector(f"{here}[aria-level='1']")
    press("ArrowDown")
    console.page.wait_for_selector(f"{here}[aria-level='2']")
    press("Home")
    console.page.wait_for_selector(f"{here}[aria-level='1']")
    press("End")
    console.page.wait_for_selector(f"{here}[aria-level='2']")
    press("ArrowRight")
    console.page.wait_for_selector(".versions >> text=2/2")
    press("Delete")
    console.wait_for("document.querySelectorAll('[role=treeitem]').length === 2")
    press("3")
    console.page.wait_for_selector(".engine")
    press("1")
    press("?")
    console.page.wait_for_selector("dialog[aria-label=Keys]")
    press("Escape")
    console.page.wait_for_selector("dialog", state="detached")


# What a screen reader is told: each of these has a name, in every view.
NAMED = {
    "application",
    "button",
    "textbox",
    "combobox",
    "checkbox",
    "link",
    "tree",
    "treeitem",
    "img",
    "image",
    "dialog",
    "navigation",
}


def names_of_controls(console: Console) -> dict[str, list[str]]:
    """The accessible names that the browser computes, by role."""
    session = console.context.new_cdp_session(console.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    found: dict[str, list[str]] = {}
    for node in nodes:
        role = node.get("role", {}).get("value", "")
        if role in NAMED and not node.get("ignored"):
            found.setdefault(role, []).append(node.get("name", {}).get("value", "").strip())
    return found


def test_a_screen_reader_finds_a_name_for_every_control(console: Console):
    console.set(temperature=0, max_tokens=6)
    console.page.click("summary:has-text('Form of the answer')")
    console.page.select_option("label:has-text('It must be') select", "regex")
    console.page.fill("textarea.editor", "[a-z ]{4,20}")
    console.page.click("summary:has-text('Tools')")
    console.page.click("text=Add a tool")
    console.page.select_option("label:has-text('Choice') select", "none")
    console.ask("Name a fruit.")
    console.page.locator(".token[data-token='2']").first.click()
    views = {"talk": names_of_controls(console)}
    console.page.locator(".card button.alternative:not([disabled])").first.click()
    console.page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    views["branch"] = names_of_controls(console)
    console.page.locator(".token[data-token='2']").first.click()
    console.page.click("text=Look inside")
    console.page.wait_for_selector(".layers tbody tr")
    views["lens"] = names_of_controls(console)
    console.page.keyboard.press("Escape")
    for name, selector in (("Compare", ".compare article"), ("Engine", ".blocks canvas")):
        console.page.click(f"nav >> text={name}")
        console.page.wait_for_selector(selector)
        views[name] = names_of_controls(console)
    console.page.click("summary:has-text('Menu')")
    views["menu"] = names_of_controls(console)
    console.page.click("text=API key…")
    console.page.wait_for_selector("dialog")
    views["dialog"] = names_of_controls(console)
    for view, found in views.items():
        assert found.get("button"), view
        unnamed = [role for role, names in found.items() if not all(names)]
        assert not unnamed, f"{view}: {unnamed}"
    assert len(views["branch"]["treeitem"]) == 3 and views["branch"]["treeitem"][0].startswith("You:")
    pictures = views["Engine"]["application"]
    assert any("blocks of 16 tokens" in name for name in pictures), "the field of blocks, in words"
    console.page.keyboard.press("Escape")


def test_an_answer_is_stopped_and_goes_on(console: Console, server: Server):
    console.set(temperature=0, max_tokens=4)
    console.page.fill("textarea[aria-label='System prompt']", "You are a pirate.")
    with console.page.expect_request("**/v1/chat/completions") as asked:
        console.ask("Tell me a long story about the sea.")
    assert asked.value.post_data_json["messages"][0] == {"role": "system", "content": "You are a pirate."}
    assert "You are a pirate." in console.page.inner_text(".message.system")
    short = console.answers()[0]
    console.set(max_tokens=3000)
    console.page.fill("textarea[placeholder=none]", "never written: \u2042")
    console.page.click("text=Go on")
    console.page.wait_for_selector(".versions >> text=2/2")
    console.wait_for(f"document.querySelector('.answer-text').innerText.length > {len(short) + 20}")
    assert console.page.locator(".message.assistant").get_attribute("aria-busy") == "true"
    console.page.keyboard.press("Escape")  # of the field, which has the focus
    console.page.wait_for_selector(".message >> text=Stopped.")
    assert console.answers()[0].startswith(short)
    wait_until("the server has aborted it", lambda: not requests_of(server))


def requests_of(server: Server) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{server.api}/engine/events?count=1") as response:
        lines = response.read().decode().splitlines()
    found = next(line for line in lines if line.startswith("data: "))
    return json.loads(found[6:])["requests"]


def test_a_result_without_a_canned_one_is_asked_for(console: Console):
    console.set(temperature=0, max_tokens=60)
    console.page.click("summary:has-text('Tools')")
    console.page.click("text=Add a tool")
    console.page.fill("label:has-text('Canned result') textarea", "")
    console.page.select_option("label:has-text('Choice') select", "required")
    console.ask("What is the weather in Paris?")
    fields = console.page.locator(".results textarea")
    fields.first.wait_for()
    num_calls = fields.count()
    for field in fields.all():
        field.fill("It snows.")
    with console.page.expect_request("**/v1/chat/completions") as asked:
        console.page.click("text=Give results")
    console.idle()
    body = asked.value.post_data_json
    assert [(one["role"], one["content"]) for one in body["messages"]] == [("tool", "It snows.")] * num_calls
    assert body.get("tool_choice", "auto") == "auto", "else it could never answer"
    assert console.page.locator(".message.tool .said").all_inner_texts() == ["It snows."] * num_calls


def ask_in_thread(server: Server, **fields: object) -> tuple[threading.Thread, dict[str, Any]]:
    """A request that runs for long, and how it ended."""
    ended: dict[str, Any] = {}

    def ask() -> None:
        body = json.dumps({"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, **fields}).encode()
        request = urllib.request.Request(f"{server.api}/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                ended.update(json.load(response))
        except urllib.error.HTTPError as error:
            ended.update(json.load(error))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, ended


def check_walks_by_keys(page: Any) -> None:
    """Walks the pictures of blocks and of steps: what a pointer would show is shown, and told to a screen reader."""
    blocks, steps = page.locator(".blocks"), page.locator(".steps")
    blocks.locator("canvas").press("ArrowRight")
    blocks.locator(".over", has_text="block 0: the null block").wait_for()
    for key, expected in (("ArrowRight", r"block 1: \S"), ("ArrowDown", r"block [1-9]\d+: \S"), ("End", "block 599: ")):
        page.keyboard.press(key)
        blocks.locator("[aria-live=polite]", has_text=re.compile(expected)).wait_for(state="attached")
    page.keyboard.press("Escape")
    blocks.locator(".over", has_text="600 blocks of 16 tokens").wait_for()
    assert blocks.locator("[aria-live=polite]").text_content() == ""
    numbers = re.compile(r"\d+ prompt \+ \d+ decoded tokens of \d+ requests in \d+\.\d ms")
    assert numbers.search(steps.locator("canvas").get_attribute("aria-label"))
    steps.locator("canvas").press("ArrowLeft")  # to the newest
    steps.locator("header", has_text="step: ").wait_for()
    told = steps.locator("[aria-live=polite]").text_content()
    assert numbers.search(told) and told in steps.locator("header").inner_text()


def test_the_map_shows_what_runs_and_aborts_it(console: Console, server: Server):
    console.set(temperature=0, max_tokens=4)
    console.ask("Hello.")
    thread, ended = ask_in_thread(server, request_id="endless")
    console.page.click("nav >> text=Engine")
    row = console.page.locator("tr", has_text="cmpl-endless")
    row.wait_for()
    assert "running" in row.inner_text()
    label = console.page.locator(".blocks canvas").get_attribute("aria-label")
    assert re.search(r"600 blocks of 16 tokens: [1-9]\d* in use, [1-9]\d* leased", label), label
    colours = """() => { const c = document.querySelector('.blocks canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const found = new Set();
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) found.add(d.slice(i, i + 3).join());
        return found.size; }"""
    assert console.page.evaluate(colours) >= 4, "free, in use, leased, the null block"
    console.page.locator(".steps h2", has_text=re.compile(r"Last [1-9]\d* steps")).wait_for()
    check_walks_by_keys(console.page)
    row.locator("text=Abort").click()
    row.wait_for(state="detached")
    thread.join()
    assert ended, "the request has been answered"
    assert "choices" not in ended or ended["choices"][0]["finish_reason"] == "abort"
    leases = console.page.locator("[aria-label=Leases] tbody tr")
    before = leases.count()
    assert before >= 1
    name = leases.first.locator("code").inner_text()
    leases.first.locator("text=Drop").click()
    console.page.locator("[aria-label=Leases] tr", has_text=name).wait_for(state="detached")


def test_forms_of_answers_are_enforced_and_a_wrong_one_gets_the_servers_error_beside_it(console: Console):
    console.page.click("summary:has-text('Form of the answer')")
    console.page.select_option("label:has-text('It must be') select", "json_schema")
    schema = {"type": "object", "properties": {"age": {"not": {}}}, "required": ["age"]}
    console.page.fill("textarea.editor", json.dumps(schema))
    console.page.click("text=Check")
    console.page.wait_for_selector("#format-error:visible")
    assert "'not' at #/properties/age is not supported" in console.page.inner_text("#format-error")
    console.page.fill("textarea.editor", "{")
    console.page.click("text=Check")
    console.page.wait_for_selector("#format-error:visible >> text=is not JSON")
    console.page.fill("textarea.editor", '{"enum": ["red", "green"]}')
    console.page.click("text=Check")
    console.page.wait_for_selector("text=The server accepts it.")
    console.ask("Name a colour.")
    assert console.answers()[0].strip() in ('"red"', '"green"')
    for form, text, possible in (
        ("choice", "blue\nyellow", ("blue", "yellow")),
        ("grammar", 'start: "I like " COLOUR\nCOLOUR: "pink" | "grey"', ("I like pink", "I like grey")),
    ):
        console.page.select_option("label:has-text('It must be') select", form)
        console.page.fill("textarea.editor", text)
        console.ask("Name another one.")
        assert console.answers()[-1].strip() in possible
    console.page.fill("textarea.editor", "start: NOTHING")
    console.page.click("text=Check")
    console.page.wait_for_selector("#format-error:visible >> text=NOTHING")


def test_a_called_tool_gets_its_canned_result(console: Console):
    console.set(temperature=0, max_tokens=60)
    console.page.click("summary:has-text('Tools')")
    console.page.click("text=Add a tool")
    console.page.select_option("label:has-text('Choice') select", "required")
    console.ask("What is the weather in Paris?")
    console.page.wait_for_selector(".message.tool")
    console.idle()
    assert console.page.locator(".call code").first.inner_text().startswith("weather({")
    assert "celsius" in console.page.locator(".message.tool .said").first.inner_text()
    assert console.page.locator(".message.assistant").count() >= 2


def test_a_picture_for_a_model_of_text_gets_the_servers_error(console: Console):
    assert console.page.locator("#composer").get_attribute("placeholder") == "Message"
    assert console.page.locator(".attach").count() == 0, "the server says that the model reads text"
    dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    console.page.evaluate(
        """(data) => { const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const files = new DataTransfer();
        files.items.add(new File([bytes], 'dot.png', {type: 'image/png'}));
        document.querySelector('.composer').dispatchEvent(
            new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true})); }""",
        dot,
    )
    console.page.wait_for_selector(".attachment img[alt='dot.png']")
    console.ask("What is this?")
    assert "image" in console.page.inner_text(".message.assistant .error")


def test_what_was_sent_can_be_sent_again_from_python_and_curl(console: Console, server: Server, tmp_path: Path):
    console.set(temperature=0, max_tokens=4)
    console.ask("It's “new”: a\\b\n'quoted'")
    sent = f"Object.values(({module_of('store.js')}).state.tree.messages).find((x) => x.sent).sent"
    program = console.run("request.js", f"m.asPython({sent}, document.baseURI, false)")
    path = tmp_path / "program.py"
    path.write_text(program)
    printed = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout
    pieces = re.findall(r"'delta': \{'content': (['\"].+?['\"])\}", printed)
    assert pieces
    command = console.run("request.js", f"m.asCurl({sent}, document.baseURI, false)")
    shell = subprocess.run(
        ["sh", "-c", command.replace("curl -N", "printf '%s\\n'")], capture_output=True, text=True, check=True
    )
    assert json.loads(shell.stdout[shell.stdout.index("{") :])["messages"][0]["content"] == "It's “new”: a\\b\n'quoted'"


def test_a_conversation_is_exported_and_imported(console: Console, tmp_path: Path):
    console.set(temperature=0, max_tokens=4)
    console.ask("Name a river.")
    answers, rows = console.answers(), console.rows()
    console.page.click("summary:has-text('Menu')")
    with console.page.expect_download() as download:
        console.page.click("text=Export as JSON")
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    console.page.click("summary:has-text('Menu')")
    console.page.click("text=Clear everything")
    console.page.wait_for_selector(".welcome")
    console.page.set_input_files("[aria-label='File to import']", path)
    console.page.wait_for_selector(".message.assistant")
    assert (console.answers(), console.rows()) == (answers, rows)
    # Its tokens are still there to branch from.
    console.page.locator(".token[data-token='1']").first.click()
    console.page.locator(".card button.alternative:not([disabled])").first.click()
    console.page.wait_for_selector(".versions >> text=2/2")
    console.idle()
    path.write_text(
        json.dumps(
            {"format": "ratoon.conversation", "version": 1, "messages": [{"id": "a", "role": "user", "parent": "a"}]}
        )
    )
    console.page.set_input_files("[aria-label='File to import']", path)
    console.page.wait_for_selector(".toast.shown >> text=are no tree")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_the_width_of_a_phone_nothing_overflows(chromium: Any, server: Server, scheme: str):
    console = Console(chromium, server.url, color_scheme=scheme)
    console.page.set_viewport_size({"width": 360, "height": 740})
    # The settings are hidden at first, and without them an answer may be as long as the context.
    console.page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "max_tokens": 8})),
    )
    console.open()
    console.ask("Hello.")
    for view in ("Conversation", "Compare", "Engine"):
        console.page.click(f"nav >> text={view}")
        console.page.wait_for_selector(f"section[aria-label={view}]")
        assert console.page.evaluate("document.documentElement.scrollWidth") == 360
    console.page.click("nav >> text=Conversation")
    for panel, selector in (("Settings", ".settings"), ("Tree", ".outline"), ("Inside", "aside[aria-label=Inside]")):
        console.page.click(f".tools >> text={panel}")
        box = console.page.locator(selector).bounding_box()
        assert box["x"] >= 0 and box["width"] > 0 and box["x"] + box["width"] <= 360, panel
        assert console.page.evaluate("document.documentElement.scrollWidth") == 360
    background = console.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background))) / 3
    assert (light > 200) if scheme == "light" else (light < 50)
    console.close()


ATTACKS = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg/onload=window.pwned=1>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<a href='javascript:window.pwned=1'>x</a>",
    "[click](javascript:window.pwned=1) [click](JaVaScRiPt:window.pwned=1) [click](\tjavascript:window.pwned=1)",
    "[click](data:text/html,<script>window.pwned=1</script>) [click](vbscript:x) [click](file:///etc/passwd)",
    "[click](//evil.example/x) [click](https://user:password@evil.example/)",
    "![track](https://evil.example/pixel.png) ![x](x 'onerror=alert(1)')",
    '<https://evil.example/?q="onmouseover=window.pwned=1>',
    '[a](https://evil.example/"onmouseover="window.pwned=1)',
    "`<b>x</b>` **<i onclick=window.pwned=1>x</i>**",
    "```html\n<script>window.pwned = 1</script>\n```",
    "| <script>window.pwned=1</script> | b |\n|---|---|\n| <img src=x onerror=window.pwned=1> | y |",
    "{{constructor.constructor('window.pwned=1')()}} ${window.pwned=1}",
    "<style>@import 'https://evil.example/x.css'</style><link rel=stylesheet href=https://evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'><base href=https://evil.example>",
    "<form action=https://evil.example><input name=a></form>",
    "__proto__ [constructor](https://evil.example/constructor)",
    "\u202e\u0000<think><script>window.pwned=1</script></think>",
]
FLOODS = [
    "*" * 20000,
    "[" * 20000,
    "`" * 9999 + " " + "`" * 9998,
    "> " * 5000,
    "- " * 5000,
    "**a " * 5000,
    "|" * 10000 + "\n|-",
    "_a" * 9999,
]


def answer_with(text: str) -> str:
    """The stream of an answer with this text, its tool call, and its tokens."""
    token = {"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": [{"token": text, "logprob": -0.1}]}
    call = {"index": 0, "id": text, "type": "function", "function": {"name": text, "arguments": text}}
    delta = {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}
    chunks = [
        {
            "id": "chatcmpl-x",
            "choices": [{"index": 0, "delta": delta, "logprobs": {"content": [token]}, "token_ids": [1]}],
        },
        {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {}, "finish_reason": text}]},
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_hostile_output_stays_text(console: Console):
    text = "\n\n".join(ATTACKS)
    console.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=answer_with(text)),
    )
    for rendered in (True, False):
        console.ask("Attack.")
        console.page.locator(".reasoning summary").last.click()
        console.page.locator(".token[data-token='0']:visible").first.hover()
        console.page.wait_for_selector(".card")
        for view in ("Compare", "Conversation"):
            console.page.click(f"nav >> text={view}")
        if rendered:
            console.page.click("text=Verbatim")
    assert console.page.evaluate("window.pwned") is None
    assert (
        console.page.locator(
            "#app :is(script, iframe, svg svg, style, link, meta, base, object, embed, [onerror], [onload])"
        ).count()
        == 0
    )
    assert console.page.locator(".message.assistant img, .message.assistant form:not(.results)").count() == 0
    console.page.click("text=Verbatim")
    console.page.wait_for_selector(".answer-text a", state="attached")
    links = console.page.locator(".answer-text a").evaluate_all("all => all.map((a) => [a.href, a.rel, a.target])")
    assert links, "some of them are links of the web"
    assert all(href.startswith("https://evil.example/") and "noopener" in rel for href, rel, _ in links)
    assert all("@" not in href for href, _, _ in links)
    shown = console.page.locator(".answer-text a + .target").all_inner_texts()
    assert any("evil.example" in target for target in shown), "where a link leads can be read"
    # An error is text as well.
    console.page.unroute("**/v1/chat/completions")
    error = {"error": {"message": ATTACKS[1], "param": ATTACKS[0]}}
    console.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    console.ask("Attack.")
    assert ATTACKS[1] in console.page.locator(".message .error").last.inner_text()
    assert console.page.evaluate("window.pwned") is None


def test_no_text_takes_more_than_linear_time_to_render(scripts: Console):
    for text in FLOODS:
        assert scripts.run("markdown.js", "m.parse(a[0]).length", text) >= 0


def test_a_hostile_file_is_refused_or_cleaned(scripts: Console):
    picture = {"url": "https://evil.example/x.png", "name": "x"}
    script = {"url": "data:text/html;base64,AAAA", "name": "x"}
    message = {
        "id": "a",
        "role": "user",
        "parent": None,
        "text": ATTACKS[1],
        "attachments": [picture, script],
        "onclick": "x",
    }
    read = "m.readTree(JSON.parse(a[0])).messages.a"
    found = scripts.run(
        "tree.js", read, json.dumps({"format": "ratoon.conversation", "version": 1, "messages": [message]})
    )
    assert found["attachments"] == []
    assert "onclick" not in found
    for wrong in (
        {**message, "id": "__proto__"},
        {**message, "id": "<b>"},
        {**message, "parent": "b"},
        {**message, "role": "system"},
    ):
        text = json.dumps({"format": "ratoon.conversation", "version": 1, "messages": [wrong]})
        refused = (
            "(() => { try { m.readTree(JSON.parse(a[0])); return ''; } catch (error) { return error.message; } })()"
        )
        assert scripts.run("tree.js", refused, text)
