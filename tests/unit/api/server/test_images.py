"""Images in requests: the routes for conversations hand them to the engine, or name the part that is wrong."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from ratoon.core.config import ModelConfig
from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.models.tokenizer import Tokenizer
from tests.unit.api.server.harness import MAX_MODEL_LEN, MODEL, TEMPLATE, Client, byte_backend, say, scripted
from tests.unit.engine.fakes import model_config
from tests.unit.engine.fakes_async import on_event_loop
from tests.unit.media.test_media_files import video as mp4

AROUND, GLOBAL, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
AROUND_ID, GLOBAL_ID, IMAGE_ID = 258, 259, 260
SIDE, NUM_ROWS = 16, 4
TEXT_OF_IMAGE = f"{AROUND}{GLOBAL}{IMAGE * NUM_ROWS}{AROUND}"  # in the place of the placeholder
PARTS_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def media_config(**changes: Any) -> ModelConfig:
    vision = VisionConfig(
        hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, patch_size=4, image_size=SIDE, merge_size=2
    )
    media = MediaConfig(
        family="idefics3",
        vision=vision,
        image_token_id=IMAGE_ID,
        num_rows=NUM_ROWS,
        processor={"do_image_splitting": False, "size": {"longest_edge": SIDE}},
    )
    return model_config(max_position=MAX_MODEL_LEN, vocab_size=300, media=media, **changes)


def media_tokenizer(template: str) -> Tokenizer:
    backend = byte_backend()
    backend.add_special_tokens([AROUND, GLOBAL, IMAGE])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {"default": template})


def seeing(template: str = PARTS_TEMPLATE, text: str = "Hi", **settings: Any) -> Any:
    """A server whose model reads images."""
    config = media_config()
    return scripted(say(text), template=template, config=config, tokenizer=media_tokenizer(template), **settings)


def png(colour: str = "red", side: int = SIDE) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(colour: str = "red") -> str:
    return f"data:image/png;base64,{png(colour)}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(url: str, **further: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **further}}


async def ask(client: Client, *parts: dict[str, Any], **fields: Any) -> Any:
    messages = [{"role": "user", "content": list(parts)}]
    return await client.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


def prompt_of(client: Client) -> str:
    tokenizer: Tokenizer = client.context.llm.get_tokenizer()
    return tokenizer.decode(client.engine.core.added[-1].prompt_token_ids, skip_special_tokens=False)


def colours_of(client: Client) -> list[tuple[int, ...]]:
    """The first pixel of each image of the last request."""
    colours = []
    for feature in client.engine.core.added[-1].mm_features or ():
        pixels = bytes(feature.data.features.data)
        plane = len(pixels) // 3
        colours.append((pixels[0], pixels[plane], pixels[2 * plane]))
    return colours


RED, LIME, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def video_url(num_frames: int = 9, rate: int = 3) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(mp4(num_frames, rate, (SIDE, SIDE))).decode()}"


SECONDS = "You are provided the following series of three frames from a 0:00:03 [H:MM:SS] video.\n" + "".join(
    f"\nFrame from 00:0{second}:{TEXT_OF_IMAGE}" for second in (0, 1, 2)
)


# ---- /v1/chat/completions ----


@pytest.mark.parametrize("template", [PARTS_TEMPLATE, TEMPLATE], ids=["of parts", "of text"])
@on_event_loop
async def test_a_video_of_a_chat_is_a_frame_of_each_second_with_its_time(template: str):
    """Neither template knows videos, and the tokenizer has no token for them."""
    async with seeing(template) as client:
        part = {"type": "video_url", "video_url": {"url": video_url()}}
        answer = await ask(client, part, text("What?"))
        assert answer.status == 200, answer.body
        assert prompt_of(client) == f"<user>{SECONDS}\n\nWhat?\n<assistant>"
        assert len(client.engine.core.added[-1].mm_features) == 3
        answer = await ask(client, part, text("What?"), mm_processor_kwargs={"num_frames": 1})
        assert answer.status == 200 and "series of one frames from a 0:00:03" in prompt_of(client)
        answer = await ask(client, text("What?"), part, part)
        assert (answer.status, answer.error["param"]) == (400, "messages[0].content[2].video_url.url")
        assert "more than the 1 of the kind video" in answer.error["message"]
        answer = await ask(client, part, text("What?"), mm_processor_kwargs={"fps": 0})
        assert (answer.status, answer.error["param"]) == (400, "mm_processor_kwargs")


@on_event_loop
async def test_a_video_of_a_completion_takes_the_place_of_its_word():
    async with seeing() as client:
        answer = await complete(client, "a<video>\nb", multi_modal_data={"video": [video_url()]})
        assert answer.status == 200, answer.body
        assert prompt_of(client) == f"a{SECONDS}\n\n\nb"
        answer = await complete(client, "a<video><video>", multi_modal_data={"video": [video_url()]})
        assert answer.status == 400 and "has 2 placeholders of the kind video" in answer.error["message"]
        answer = await complete(client, "a<video>b")
        assert answer.status == 200 and prompt_of(client) == "a<video>b"


@on_event_loop
async def test_images_of_a_chat_reach_the_engine_in_their_order():
    async with seeing() as client:
        answer = await ask(
            client, image(data_url("red"), detail="low"), text("and"), image(data_url("lime")), text("?")
        )
        assert answer.status == 200, answer.body
        assert prompt_of(client) == f"<user>{TEXT_OF_IMAGE}and{TEXT_OF_IMAGE}?\n<assistant>"
        assert colours_of(client) == [RED, LIME]
    assert answer.json()["usage"]["prompt_tokens"] == 2 * 7 + len("<user>and?\n<assistant>")


@on_event_loop
async def test_a_template_that_reads_text_gets_the_models_placeholder():
    async with seeing(TEMPLATE) as client:
        answer = await ask(client, text("Look:"), image(data_url()), text("What?"), text("Where?"))
        assert answer.status == 200, answer.body
        assert prompt_of(client) == f"<user>Look:{TEXT_OF_IMAGE}What?\nWhere?\n<assistant>"


@on_event_loop
async def test_a_chat_without_images_costs_nothing_more():
    async with seeing() as client:
        assert (await ask(client, text("a"), text("b"))).status == 200
        assert prompt_of(client) == "<user>a\nb\n<assistant>"
        assert not client.engine.core.added[-1].mm_features


VIDEO_URL = ".video_url.url"


def place(rest: str = "") -> str:
    return f"messages[0].content[1]{rest}"


@pytest.mark.parametrize(
    ("part", "param", "problem"),
    [
        (image("data:image/png;base64,%%%"), place(".image_url.url"), "no valid base64"),
        (image("data:image/png;base64,"), place(".image_url.url"), "no data"),
        (image("data:image/png,abc"), place(".image_url.url"), "not in base64"),
        (image("data:text/html;base64,aaaa"), place(".image_url.url"), "type 'text/html'"),
        (image("data:image/png;base64,aGVsbG8="), place(".image_url.url"), ""),  # no picture
        (image("https://example.com/a.png"), place(".image_url.url"), "no address is fetched"),
        (image("file:///etc/passwd"), place(".image_url.url"), "data URL"),
        (image("/etc/passwd"), place(".image_url.url"), "data URL"),
        (image(""), place(".image_url.url"), "empty"),
        ({"type": "image_url"}, place(".image_url"), "missing"),
        ({"type": "image_url", "image_url": {}}, place(".image_url.url"), "missing"),
        ({"type": "image_url", "image_url": {"url": 5}}, place(".image_url.url"), "not text"),
        (image("data:,", detail=5), place(".image_url.detail"), "not text"),
        ({"type": "image", "image": "/etc/passwd"}, place(), "one of image_url, video_url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aaaa"}}, place(VIDEO_URL), "as a video"),
        ({"type": "video_url", "video_url": {"url": "data:image/png;base64,aaaa"}}, place(VIDEO_URL), "video/"),
        ({"type": "input_audio"}, place(), "text, image, video parts"),
    ],
)
@on_event_loop
async def test_a_part_that_is_wrong_is_named(part: dict[str, Any], param: str, problem: str):
    async with seeing() as client:
        answer = await ask(client, text("What?"), part)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param
        assert problem in answer.error["message"]
        assert not client.engine.core.added


@on_event_loop
async def test_a_model_that_reads_text_says_so():
    async with scripted(say("x")) as client:
        answer = await ask(client, text("What?"), image(data_url()))
        assert answer.status == 400
        assert answer.error["param"] == place()
        assert "this model reads text only" in answer.error["message"]


@on_event_loop
async def test_more_images_than_allowed_are_refused_before_any_is_fetched():
    async with seeing(media_hosts=("images.test",)) as client:
        answer = await ask(client, *[image("https://images.test/a.png")] * 9)
        assert answer.status == 400
        assert answer.error["param"] == "messages[0].content[8].image_url.url"
        assert "8" in answer.error["message"]


@on_event_loop
async def test_options_of_preprocessing_are_passed_on():
    async with seeing() as client:
        answer = await ask(client, image(data_url()), mm_processor_kwargs={"do_image_splitting": False})
        assert answer.status == 200, answer.body
        answer = await ask(client, image(data_url()), mm_processor_kwargs={"whatever": 1})
        assert answer.status == 400
        assert answer.error["param"].startswith("mm_processor_kwargs")
        for option in ({"num_frames": 10**30}, {"size": {"longest_edge": 10**30}}):
            answer = await ask(client, image(data_url()), mm_processor_kwargs=option)
            assert (answer.status, answer.error["param"]) == (400, "mm_processor_kwargs")
            assert next(iter(option)) in answer.error["message"]


@on_event_loop
async def test_new_messages_of_a_continuation_have_images():
    async with seeing() as client:
        first = (await ask(client, image(data_url("red")), text("What?"))).json()
        answer = await ask(client, image(data_url("lime")), text("And?"), continuation_of=first["id"])
        assert answer.status == 200, answer.body
        request = client.engine.core.added[-1]
        assert request.continuation_of is not None
        expected = f"<user>{TEXT_OF_IMAGE}What?\n<assistant>Hi\n<user>{TEXT_OF_IMAGE}And?\n<assistant>"
        assert prompt_of(client) == expected
        assert colours_of(client) == [RED, LIME]
        second = answer.json()
        answer = await ask(client, text("More?"), continuation_of=second["id"])
        assert answer.status == 200, answer.body
        assert colours_of(client) == [RED, LIME]


@on_event_loop
async def test_images_of_a_continuation_that_are_wrong_are_named_in_the_body():
    async with seeing() as client:
        first = (await ask(client, *[image(data_url())] * 5)).json()
        answer = await ask(client, *[image(data_url())] * 4, continuation_of=first["id"])
        assert answer.status == 400
        assert answer.error["param"] == "messages[0].content[3].image_url.url"
        assert "5 of them are in the text that is continued" in answer.error["message"]
        answer = await ask(client, image("data:image/png;base64,aGVsbG8="), continuation_of=first["id"])
        assert answer.status == 400
        assert answer.error["param"] == "messages[0].content[0].image_url.url"
        answer = await ask(client, text("<image>"), continuation_of=first["id"])
        assert answer.status == 400
        assert answer.error["param"] == "messages", answer.error
        options = {"mm_processor_kwargs": {"whatever": 1}}
        answer = await ask(client, image(data_url()), continuation_of=first["id"], **options)
        assert (answer.status, answer.error["param"]) == (400, "mm_processor_kwargs.whatever")


# ---- /v1/completions ----


async def complete(client: Client, prompt: Any = None, **fields: Any) -> Any:
    given = {} if prompt is None else {"prompt": prompt}
    return await client.post("/v1/completions", {"model": MODEL, **given, **fields})


@on_event_loop
async def test_completions_have_images_beside_a_prompt_and_beside_a_suffix():
    async with seeing() as client:
        answer = await complete(client, "a<image>b", multi_modal_data={"image": data_url("red")})
        assert answer.status == 200, answer.body
        assert colours_of(client) == [RED]
        first = answer.json()["id"]
        images = {"image": [data_url("lime"), data_url("blue")]}
        suffix = {"continuation_of": first, "continuation_suffix": "c<image>d<image>"}
        answer = await complete(client, multi_modal_data=images, **suffix)
        assert answer.status == 200, answer.body
        assert client.engine.core.added[-1].continuation_of is not None
        assert colours_of(client) == [RED, LIME, BLUE]
        assert prompt_of(client) == f"a{TEXT_OF_IMAGE}bHi<|end|>c{TEXT_OF_IMAGE}d{TEXT_OF_IMAGE}"
        token_ids = client.context.llm.get_tokenizer().encode("c<image>", False)
        suffix = {"continuation_of": first, "continuation_suffix": token_ids}
        answer = await complete(client, multi_modal_data={"image": [data_url("blue")]}, **suffix)
        assert answer.status == 200, answer.body
        assert colours_of(client) == [RED, BLUE]


@on_event_loop
async def test_images_of_completions_that_are_wrong_are_named():
    async with seeing() as client:
        first = (await complete(client, "a<image>", multi_modal_data={"image": data_url()})).json()["id"]

        async def refusal(prompt: Any = None, **fields: Any) -> tuple[str, str]:
            answer = await complete(client, prompt, **fields)
            assert answer.status == 400, answer.body
            return answer.error["param"], answer.error["message"]

        later = {"continuation_of": first, "continuation_suffix": "<image>"}
        for fields in ({"prompt": "<image>"}, later):
            field, _ = await refusal(**fields, multi_modal_data={"image": "file:///etc/passwd"})
            assert field == "multi_modal_data.image[0]"
            field, _ = await refusal(**fields, multi_modal_data={"image": ["data:image/png;base64,aGVsbG8="]})
            assert field == "multi_modal_data.image[0]"
            assert (await refusal(**fields, multi_modal_data={"sound": "a"}))[0] == "multi_modal_data.sound"
            assert (await refusal(**fields, multi_modal_data={"video": "a"}))[0] == "multi_modal_data.video[0]"
            field, problem = await refusal(**fields)
            assert (field, "0 are given" in problem) == (list(fields)[-1], True)
        eight = {"image": [data_url()] * 8}
        field, problem = await refusal(**(later | {"continuation_suffix": "<image>" * 8}), multi_modal_data=eight)
        assert field == "multi_modal_data.image[7]" and "1 of them" in problem
        field, _ = await refusal(["<image>", "<image>"], multi_modal_data={"image": data_url()})
        assert field == "multi_modal_data.image[0]"
        field, problem = await refusal("whole", **later, multi_modal_data={"image": data_url()})
        assert field == "multi_modal_data" and "leave the prompt out" in problem


@on_event_loop
async def test_an_image_of_a_tools_result_is_read():
    call = {"id": "1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [image(data_url("blue"))]},
    ]
    template = PARTS_TEMPLATE.replace("<{{ message.role }}>", "<{{ message.role }}>{{ message.tool_calls and '!' }}")
    async with seeing(template) as client:
        answer = await client.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
        assert answer.status == 200, answer.body
        assert colours_of(client) == [BLUE]
        assert f"<tool>{TEXT_OF_IMAGE}" in prompt_of(client)


@on_event_loop
async def test_tokenize_has_one_placeholder_for_an_image():
    async with seeing() as client:
        messages = [{"role": "user", "content": [image(data_url()), text("?")]}]
        answer = await client.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
        assert answer.json()["tokens"].count(IMAGE_ID) == 1


# ---- /v1/messages ----


def block(colour: str = "red", **further: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": png(colour)}
    return {"type": "image", "source": {**source, **further}}


async def message(client: Client, *blocks: dict[str, Any], **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": list(blocks)}]}
    return await client.post("/v1/messages", body | fields)


CUT = {"mm_processor_kwargs": {"do_image_splitting": True, "size": {"longest_edge": 2 * SIDE}}}  # four tiles, and all


@on_event_loop
async def test_options_of_preprocessing_are_passed_on_beside_blocks():
    async with seeing() as client:
        answer = await message(client, block(), **CUT)
        assert answer.status == 200, answer.body
        assert len(client.engine.core.added[-1].mm_features) == 5
        body = {"model": MODEL, "messages": [{"role": "user", "content": [block()]}], **CUT}
        counted = (await client.post("/v1/messages/count_tokens", body)).json()["input_tokens"]
        assert counted == len(client.engine.core.added[-1].prompt_token_ids)
        answer = await message(client, block(), mm_processor_kwargs={"whatever": 1})
        assert answer.status == 400 and "mm_processor_kwargs.whatever" in answer.json()["error"]["message"]


@on_event_loop
async def test_blocks_with_images_reach_the_engine_in_their_order():
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block("blue"), text("seen")]}
    async with seeing() as client:
        answer = await message(client, text("One"), block("red"), text("two"), block("lime"))
        assert answer.status == 200, answer.body
        assert prompt_of(client) == f"<user>One{TEXT_OF_IMAGE}two{TEXT_OF_IMAGE}\n<assistant>"
        assert colours_of(client) == [RED, LIME]
        answer = await message(client, block("red"), result)  # the template gets the result first
        assert answer.status == 200, answer.body
        assert colours_of(client) == [BLUE, RED]


@on_event_loop
async def test_tokens_of_images_are_counted():
    body = {"model": MODEL, "messages": [{"role": "user", "content": [block(), text("?")]}]}
    async with seeing() as client:
        answer = await client.post("/v1/messages/count_tokens", body)
        assert answer.json()["input_tokens"] == len("<user>?\n<assistant>") + 7
        body["messages"][0]["content"][0] = block(data="aGVsbG8=")
        answer = await client.post("/v1/messages/count_tokens", body)
        assert answer.json()["error"]["message"].startswith("messages[0].content[0].source.data: ")


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"type": "image"}, "messages[0].content[1].source"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages[0].content[1].source.type"),
        ({"type": "image", "source": {"type": "url"}}, "messages[0].content[1].source.url"),
        ({"type": "image", "source": {"type": "url", "url": "https://a.test/"}}, "messages[0].content[1].source.url"),
        (block(data="%"), "messages[0].content[1].source.data"),
        (block(media_type="application/pdf"), "messages[0].content[1].source.data"),
        (block(data="aGVsbG8="), "messages[0].content[1].source.data"),
        ({"type": "document"}, "messages[0].content[1]"),
    ],
)
@on_event_loop
async def test_a_block_that_is_wrong_is_named(wrong: dict[str, Any], place: str):
    async with seeing() as client:
        answer = await message(client, text("What?"), wrong)
        assert answer.status == 400, answer.body
        assert answer.json()["error"]["message"].startswith(f"{place}: ")


@on_event_loop
async def test_a_model_that_reads_text_refuses_a_block():
    async with scripted(say("x")) as client:
        answer = await message(client, block())
        assert answer.json()["error"]["message"] == "messages[0].content[0]: is an image; this model reads text only"


# ---- /v1/responses ----


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def respond(client: Client, given: Any, status: int = 200, **fields: Any) -> Any:
    answer = await client.post("/v1/responses", {"model": MODEL, "input": given, **fields})
    assert answer.status == status, answer.body
    return answer.json()


def words(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


@on_event_loop
async def test_a_stored_image_is_in_the_prompt_of_the_next_turn():
    async with seeing() as client:
        first = await respond(client, said(input_image(data_url("red")), words("What?")))
        assert colours_of(client) == [RED]
        second = await respond(client, said(words("Why?")), previous_response_id=first["id"])
        assert client.engine.core.added[-1].continuation_of is not None  # nothing is computed twice
        await respond(client, said(input_image(data_url("lime")), words("And?")), previous_response_id=second["id"])
        expected = f"<user>{TEXT_OF_IMAGE}What?\n<assistant>Hi\n<user>Why?\n<assistant>Hi\n<user>{TEXT_OF_IMAGE}And?\n"
        assert prompt_of(client) == f"{expected}<assistant>"
        assert colours_of(client) == [RED, LIME]
        assert client.engine.core.added[-1].continuation_of is not None
        stored = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"][0]["content"]
        assert stored[0] == {"type": "input_image", "image_url": data_url("red"), "detail": "auto"}


@on_event_loop
async def test_options_of_preprocessing_are_passed_on_beside_an_input():
    async with seeing() as client:
        first = await respond(client, said(input_image(data_url())), **CUT)
        assert len(client.engine.core.added[-1].mm_features) == 5
        await respond(client, said(input_image(data_url("lime"))), previous_response_id=first["id"], **CUT)
        request = client.engine.core.added[-1]
        assert request.continuation_of is not None and len(request.mm_features) == 10
        answer = await respond(client, said(input_image(data_url())), 400, mm_processor_kwargs={"whatever": 1})
        assert answer["error"]["param"] == "mm_processor_kwargs.whatever"


@on_event_loop
async def test_a_shortened_conversation_begins_afresh():
    """Its text may be that of the previous one, with another image."""
    async with seeing() as client:
        first = await respond(client, said(input_image(data_url("red")), words("What?")))
        long = said(words("xyz " * 90))
        second = await respond(client, long, previous_response_id=first["id"])
        more = [*said(words("zyx " * 90)), *said(input_image(data_url("lime")), words("What?"))]
        await respond(client, more, previous_response_id=second["id"], truncation="auto", max_output_tokens=4)
        assert colours_of(client) == [LIME], "the first turn is left out"
        assert client.engine.core.added[-1].continuation_of is None


@on_event_loop
async def test_a_function_may_return_an_image():
    items = [
        {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [input_image(data_url("blue"))]},
    ]
    async with seeing() as client:
        await respond(client, [*said(words("Look.")), *items])
        assert colours_of(client) == [BLUE]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"type": "input_image"}, "input[0].content[1].image_url"),
        ({"type": "input_image", "file_id": "f"}, "input[0].content[1].file_id"),
        (input_image("https://a.test/b.png"), "input[0].content[1].image_url"),
        (input_image("data:image/png;base64,%"), "input[0].content[1].image_url"),
        (input_image("data:image/png;base64,aGVsbG8="), "input[0].content[1].image_url"),
        ({"type": "input_file"}, "input[0].content[1]"),
    ],
)
@on_event_loop
async def test_an_input_that_is_wrong_is_named(wrong: dict[str, Any], param: str):
    async with seeing() as client:
        answer = await respond(client, said(words("What?"), wrong, input_image(data_url())), 400)
        assert answer["error"]["param"] == param


@on_event_loop
async def test_a_model_that_reads_text_refuses_an_input():
    async with scripted(say("x")) as client:
        answer = await respond(client, said(input_image(data_url())), 400)
        assert answer["error"]["param"] == "input[0].content[0]"
        assert "this model reads text only" in answer["error"]["message"]
