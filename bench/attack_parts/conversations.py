"""The Responses API: stored items, references to them, and streams in the background whose clients are gone."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from attack_parts.clients import (
    HEADERS,
    MEBIBYTE,
    MODEL,
    RESPONSES,
    Server,
    in_parallel,
    judge_health,
    judge_memory,
    post,
    post_all,
    request,
    statuses,
    watching,
)

NUM_RESPONSES = 80
INPUT_BYTES = int(0.9 * MEBIBYTE)  # of the items of a request
ITEM_CHARS = 100
STORE_LIMIT = 256 * MEBIBYTE  # the default of --max-response-bytes
SETTLE_SECONDS = 3.0
NUM_REFERENCES = 40
NUM_BACKGROUND = 128
BACKGROUND_LIMIT_MEBIBYTES = 16  # low, so that it is reached within the time
BACKGROUND_OPTIONS = ("--max-response-bytes", f"{BACKGROUND_LIMIT_MEBIBYTES}MiB")  # of the server
BACKGROUND_SECONDS = 40.0
MOST_GROWTH = 0.5 * MEBIBYTE  # a second, once the limit is reached
OVERHEAD = 1.25  # resident bytes for what the store counts: the C library can't use all memory that is freed
WORKING_BYTES = 128 * MEBIBYTE  # of requests that are being read, beside the store
RUNNING_BYTES = 64 * MEBIBYTE  # of so many requests that run


def respond(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": 1, **fields}


def with_items() -> dict[str, Any]:
    """Far more than the model reads: the server takes the last one for the prompt, and stores them all."""
    user, assistant = ({"role": role, "content": "x" * ITEM_CHARS} for role in ("user", "assistant"))
    items = [user, *[assistant] * (INPUT_BYTES // len(json.dumps(assistant))), user]
    return respond(input=items, truncation="auto")


def store(server: Server) -> list[str]:
    """The ids of the responses that were stored."""
    replies = post_all(server, RESPONSES, [with_items()] * NUM_RESPONSES)
    print(f"answers: {statuses(replies)}")
    return [reply.json()["id"] for reply in replies if reply.status == 200]


def run_responses(server: Server) -> None:
    """Many items."""
    print(f"{NUM_RESPONSES} requests with items of {INPUT_BYTES / MEBIBYTE:.1f} MiB each, at once\n")
    post(server, RESPONSES, respond(input="x"))
    with watching(server) as watched:
        store(server)
        time.sleep(SETTLE_SECONDS)
    print(f"all of them together have {NUM_RESPONSES * INPUT_BYTES / MEBIBYTE:.0f} MiB of JSON")
    judge_memory("the server's memory at the end, beyond what it had", watched.left, OVERHEAD * STORE_LIMIT)
    judge_memory("    at most, meanwhile", watched.peak, OVERHEAD * STORE_LIMIT + WORKING_BYTES)
    judge_health(watched)


def run_references(server: Server) -> None:
    """Small requests that refer to stored items."""
    print(f"{NUM_REFERENCES} requests with an item_reference, at once, beside {NUM_RESPONSES} stored responses\n")
    ids = store(server)
    page = request(server, "GET", f"{RESPONSES}/{ids[-1]}/input_items?order=asc&limit=1").json()
    asked = respond(input=[{"type": "item_reference", "id": page["first_id"]}])
    with watching(server) as watched:
        replies = post_all(server, RESPONSES, [asked] * NUM_REFERENCES)
    print(f"answers in {watched.seconds:.1f} s: {statuses(replies)}")
    judge_health(watched)


def run_background(server: Server) -> None:
    """Streams in the background; each client hangs up after the first event."""
    print(f"{NUM_BACKGROUND} streams in the background whose clients are gone, {BACKGROUND_SECONDS:g} s\n")
    post(server, RESPONSES, respond(input="x"))
    lock, begun = threading.Lock(), [0]

    def begin(number: int) -> None:
        fields = {"background": True, "stream": True, "ignore_eos": True, "max_output_tokens": 1900}
        logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
        connection = http.client.HTTPConnection(server.address, timeout=60)
        body = json.dumps({**respond(input=f"{number}: tell me a story."), **fields, **logprobs})
        connection.request("POST", RESPONSES, body, HEADERS)
        answer = connection.getresponse()
        answer.read(1)
        connection.close()
        with lock:
            begun[0] += answer.status == 200

    with watching(server) as watched:
        in_parallel([lambda number=number: begin(number) for number in range(NUM_BACKGROUND)])  # type: ignore[misc]
        time.sleep(BACKGROUND_SECONDS)
    print(f"begun: {begun[0]}; the limit of the store (--max-response-bytes): {BACKGROUND_LIMIT_MEBIBYTES} MiB")
    judge_memory("growth a second, in the later half", watched.growth, MOST_GROWTH)
    limit = BACKGROUND_LIMIT_MEBIBYTES * MEBIBYTE + RUNNING_BYTES
    judge_memory("the server's memory, beyond what it had", watched.peak, limit)
    judge_health(watched)
