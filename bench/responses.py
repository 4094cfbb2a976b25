"""Turns of an agent's conversation with tools, while other requests fill the KV cache: `/v1/responses`, which continues
roots, against `/v1/chat/completions` with the prefix cache.

    .venv/bin/python bench/responses.py --json responses.json
    .venv/bin/python bench/responses.py --turns 4 --context 2048 --result 200 --load-length 256     # a short run

A turn sends the result of the last call, a text of --result tokens, and is answered with the next call, which the
server enforces. Before each turn, other requests with prompts of their own go through as many tokens as the KV cache
has, --load at a time; then the same without them. Both ways send the same results, and share no blocks (cache_salt).
The figure is the time from sending a turn to its first event, which comes with the first token. The expected ratio at
the last turn, with load, is 5.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import openai
from export_hf import MODEL
from harness import Program, count, markdown, say
from service.server import ServerFailedError, ServerProcess

AIM = 5.0
BLOCK_SIZE = 16
SERVED_NAME = "model"
AGENT_KEY, LOAD_KEY = "sk-agent", "sk-load"
ANSWER_TOKENS = 128
PARAMETERS = {
    "type": "object",
    "properties": {"page": {"enum": ["next", "last"]}},
    "required": ["page"],
    "additionalProperties": False,
}
NAME, DESCRIPTION = "read_page", "Read a page of the manual"
INSTRUCTIONS = "You read a manual page by page, and call a tool for each page."
QUESTION = "Read the manual from its first page on."
WORDS = (
    "rice", "field", "water", "seed", "grain", "root", "shoot", "harvest", "plant", "season", "soil", "rain", "sun",
    "farmer", "stalk", "leaf", "straw",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    seconds: float  # to the first token
    input_tokens: int
    cached_tokens: int
    source: str | None = None  # of what a response inherited


class Responses:
    """The server keeps the conversation."""

    def __init__(self, client: openai.AsyncOpenAI, salt: str) -> None:
        self._client = client
        self._previous: str | None = None
        self._call_id: str | None = None
        self._extra = {"cache_salt": salt}
        self._tools = [{"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}]

    async def turn(self, text: str) -> Turn:
        item = {"role": "user", "content": text}
        if self._call_id is not None:
            item = {"type": "function_call_output", "call_id": self._call_id, "output": text}
        begin = time.perf_counter()
        first = None
        stream = await self._client.responses.create(
            model=SERVED_NAME,
            input=[item],
            instructions=INSTRUCTIONS,
            previous_response_id=self._previous,
            tools=self._tools,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_output_tokens=ANSWER_TOKENS,
            stream=True,
            extra_body=self._extra,
        )
        final: Any = None
        async for event in stream:
            first = first or time.perf_counter() - begin
            if event.type in ("response.completed", "response.incomplete", "response.failed"):
                final = event.response
        if final.status != "completed" or first is None:
            raise ServerFailedError(f"a response is {final.status}: {final.error}")
        self._previous = final.id
        self._call_id = next(found.call_id for found in final.output if found.type == "function_call")
        continuation = final.model_extra.get("continuation")
        source = None if continuation is None else continuation["source"]
        return Turn(first, final.usage.input_tokens, final.usage.input_tokens_details.cached_tokens, source)


class Chat:
    """The client keeps the conversation, and sends all of it."""

    def __init__(self, client: openai.AsyncOpenAI, salt: str) -> None:
        self._client = client
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": INSTRUCTIONS}]
        self._call_id: str | None = None
        self._extra = {"cache_salt": salt}
        function = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
        self._tools = [{"type": "function", "function": function}]

    async def turn(self, text: str) -> Turn:
        message = {"role": "user", "content": text}
        if self._call_id is not None:
            message = {"role": "tool", "tool_call_id": self._call_id, "content": text}
        self._messages.append(message)
        begin = time.perf_counter()
        first, usage = None, None
        call: dict[str, Any] = {}
        stream = await self._client.chat.completions.create(
            model=SERVED_NAME,
            messages=self._messages,
            tools=self._tools,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=self._extra,
        )
        async for chunk in stream:
            first = first or time.perf_counter() - begin
            usage = chunk.usage or usage
            for choice in chunk.choices:
                for piece in choice.delta.tool_calls or ():
                    if piece.id is not None:
                        call = {"id": piece.id, "type": "function", "function": {"name": NAME, "arguments": ""}}
                    call["function"]["arguments"] += piece.function.arguments or ""
        if first is None or usage is None or not call:
            raise ServerFailedError("an answer has no call")
        self._call_id = call["id"]
        self._messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        return Turn(first, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


class Load:
    """Requests that share nothing with any other."""

    def __init__(self, client: openai.AsyncOpenAI, args: argparse.Namespace) -> None:
        self._client = client
        self._args = args
        self._random = random.Random(1)

    async def fill(self) -> None:
        """As many tokens as the KV cache has."""
        length = self._args.load_length
        left = -(-self._args.num_tokens // length)
        gate = asyncio.Semaphore(self._args.load)

        async def send() -> None:
            prompt = [self._random.randrange(20, 250) for _ in range(length)]
            async with gate:
                await self._client.completions.create(model=SERVED_NAME, prompt=prompt, max_tokens=1)

        await asyncio.gather(*(send() for _ in range(left)))


def page(number: int, num_tokens: int) -> str:
    """A text of about so many tokens: each word is one."""
    chosen = random.Random(number)
    return f"Page {number}: " + " ".join(chosen.choice(WORDS) for _ in range(num_tokens))


async def converse(server: ServerProcess, args: argparse.Namespace, with_load: bool) -> dict[str, list[Turn]]:
    base = f"http://{server.host}:{server.port}/v1"
    salt = secrets.token_hex(8)
    async with (
        openai.AsyncOpenAI(base_url=base, api_key=AGENT_KEY, max_retries=0, timeout=600) as agent,
        openai.AsyncOpenAI(base_url=base, api_key=LOAD_KEY, max_retries=0, timeout=600) as other,
    ):
        ways = {name: way(agent, f"{name}-{salt}") for name, way in (("chat", Chat), ("responses", Responses))}
        load = Load(other, args)
        turns: dict[str, list[Turn]] = {name: [] for name in ways}
        for number in range(args.turns):
            text = QUESTION if number == 0 else page(number, args.result)
            for name, way in ways.items():
                if with_load:
                    await load.fill()
                turns[name].append(await way.turn(text))
                seconds = turns[name][-1].seconds
                say(f"{'with' if with_load else 'without'} load, turn {number + 1}: {name} {1000 * seconds:.0f} ms")
    return turns


def ratios(turns: dict[str, list[Turn]]) -> list[float]:
    return [chat.seconds / response.seconds for chat, response in zip(turns["chat"], turns["responses"])]


class ResponsesBenchmark(Program):
    doc = __doc__
    rounds = None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", default=MODEL, help="default: %(default)s")
        parser.add_argument("--load-format", default="auto", metavar="NAME", help="dummy: random weights")
        parser.add_argument("--device", default="cpu", help="default: %(default)s")
        count(parser, "--turns", 10)
        count(parser, "--context", 8192, "tokens; the model's")
        count(parser, "--result", 700, "tokens of a tool's result")
        count(parser, "--load", 4, "other requests at a time")
        count(parser, "--load-length", 1024, "their tokens")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        # Room for both conversations, of which half of the memory may be leased, and for the other requests.
        args.num_tokens = 2 * args.context + args.load * args.load_length

    def measure(self) -> None:
        args = self.args
        options = [args.model, "--served-model-name", SERVED_NAME, "--load-format", args.load_format]
        options += ["--device", args.device, "--threads", str(args.threads), "--max-model-len", str(args.context)]
        options += ["--num-blocks", str(args.num_tokens // BLOCK_SIZE + 1), "--block-size", str(BLOCK_SIZE)]
        options += ["--api-key", AGENT_KEY, "--api-key", LOAD_KEY, "--response-lease", "3600"]
        try:
            with ServerProcess(options) as server:
                asyncio.run(converse(server, argparse.Namespace(**{**vars(args), "turns": 1}), False))  # warm-up
                for title, with_load in (("With load", True), ("Without load", False)):
                    self.found[title] = asyncio.run(converse(server, args, with_load))
        except openai.OpenAIError as error:
            raise ServerFailedError(str(error)) from None

    def title(self) -> str:
        return f"{self.args.model}, {self.args.threads} threads"

    def report(self) -> Iterator[str]:
        args = self.args
        yield f"KV cache of {args.num_tokens} tokens; {args.load} other requests of {args.load_length} tokens at a time"
        for title, turns in self.found.items():
            rows = [["turn", "chat completions", "responses", "inherited from", "ratio"]]
            for number, ratio in enumerate(ratios(turns)):
                both = turns["chat"][number], turns["responses"][number]
                cells = [f"{1000 * one.seconds:.0f} ({one.cached_tokens} of {one.input_tokens})" for one in both]
                rows.append([str(number + 1), *cells, both[1].source or "", f"{ratio:.1f}×"])
            yield f"{title}: time to first token in ms (cached of input tokens)\n\n{markdown(rows)}"
        last = ratios(self.found["With load"])[-1]
        verdict = "reached" if last >= AIM else "missed"
        yield f"Turn {args.turns} with load: {last:.1f}×; the aim of {AIM:g}× is {verdict}."

    def figures(self) -> dict[str, Any]:
        turns = {
            title: {way: [asdict(turn) for turn in turns[way]] for way in turns} | {"ratios": ratios(turns)}
            for title, turns in self.found.items()
        }
        return {"turns": turns}


if __name__ == "__main__":
    sys.exit(ResponsesBenchmark().run())
