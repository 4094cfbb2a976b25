"""Images on the CPU: encoder and prefill against transformers, what a second request over an image costs, and what
requests without one cost.

    .venv/bin/python bench/images.py
    .venv/bin/python bench/images.py --parts encoder --vision-layers 32 --rounds 3

encoder: from one new picture to the first token, with default settings, with quantization "none" (which rounds no
product of the encoder to 16 bits where the processor has AMX), and with weights in 8 bits. preparation: what is done
with pixels before the model sees them, in as many threads as there are: resized, cut into patches, hashed. repeat: a
question about a picture that was seen, against a question behind a text of the same length that was seen. shared: many
questions about one new picture at once. text: requests without a picture to a model that reads pictures, against its
decoder as a model of text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from harness import OURS, Program, Ratio, Times, count, format_times, in_turn, say
from peers.images import Question
from peers.process import EngineFailedError, EngineProcess
from random_image_models import SMALL, TINY, TOKENS, make_image_model, make_text_model, shape_of_3b
from workloads import PromptSource

SEED = 0
PEER, BITS, DEFAULT = "transformers", "int8", "auto"
PATCH, SQUARE = 14, 28  # pixels on a side of a patch, and of what one token of the prompt stands for

ENCODER = {
    DEFAULT: "Ratoon, default settings",
    OURS: "Ratoon, quantization none",
    BITS: f"Ratoon, weights in {BITS}",
    PEER: "transformers, float32",
}
ENCODER_RATIOS = {
    "default": Ratio("transformers against Ratoon with default settings", PEER, DEFAULT, "at least 1.3"),
    "floats": Ratio("transformers against Ratoon with quantization none", PEER, OURS, "at least 1.3"),
    "bits": Ratio(f"transformers against Ratoon in {BITS}", PEER, BITS, "at least 1.3"),
}
PREPARATION = {
    "one": "one new picture",
    "many": "{requests} new pictures",
    "same": "one new picture, {requests} times",
}
PREPARATION_RATIOS = {
    "many": Ratio("all against one", "many", "one"),
    "same": Ratio("the same one against one", "same", "one"),
}
REPEAT = {
    "first": "a new picture and a question",
    "second": "the same picture and another question",
    "text_first": "a new text of the same length and a question",
    "text_second": "the same text and another question",
}
REPEAT_RATIOS = {
    "saved": Ratio("the first against the second", "first", "second"),
    "text": Ratio("the second against that behind a text", "second", "text_second", "about 1"),
}
SHARED = {"one": "one question about a new picture", "all": "{requests} questions about a new picture, at once"}
SHARED_RATIOS = {"all": Ratio("all against one", "all", "one")}
TEXT = {"text": "a model of text", "media": "a model that reads pictures, with the same decoder"}
TEXT_RATIOS = {"cost": Ratio("throughput of the second, against the first", "text", "media", "at least 0.98")}


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, sides of pictures in pixels."""

    side: int = 1024  # of the picture that the encoder is measured with
    seen_side: int = 32 * PATCH  # of one with 1,024 patches
    question: int = 16
    requests: int = 32  # over one picture
    text_requests: int = 8
    text_input: int = 128
    text_output: int = 64


QUICK = Sizes(side=100, seen_side=4 * PATCH, question=4, requests=5, text_requests=2, text_input=20, text_output=4)


class Images(Program):
    """The engines of a part end with it."""

    doc = __doc__
    parts = ("encoder", "preparation", "repeat", "shared", "text")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--vision-layers", 8, "of the encoder, of which every eighth attends to the whole picture")
        parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")

    def prepare(self) -> None:
        args = self.args
        self.sizes = QUICK if args.quick else Sizes()
        self.shape = TINY if args.quick else shape_of_3b(args.vision_layers)
        self.pair = TINY if args.quick else SMALL
        if set(args.parts) != {"text"}:
            self.model = make_image_model(self.shape)
        if "text" in args.parts:
            self.text_models = {"text": make_text_model(self.pair), "media": make_image_model(self.pair)}
        self.source = PromptSource(SEED, self.shape.text["vocab_size"])
        self.num_pictures = 0

    def measure(self) -> None:
        for part in self.args.parts:
            with ExitStack() as stack:
                self.found[part] = getattr(self, f"_measure_{part}")(stack)

    def _start(self, stack: ExitStack, name: str, settings: dict[str, Any] | None = None) -> EngineProcess:
        log = "_".join([name, "images", *(settings or {}).values()])
        more: dict[str, Any] = {"worker": f"{name}_images_worker", "settings": settings}
        engine = self.add_engine(stack, name, self.model, log=log, **more)
        engine.start_with("take", asked=[self._question(self._new_picture(), self.sizes.seen_side)])
        engine.call("answer", num_tokens=1)
        return engine

    def _new_picture(self) -> int:
        self.num_pictures += 1
        return self.num_pictures

    def _question(self, picture: int, side: int) -> Question:
        after = [TOKENS["vision_end_token_id"], *self.source.prompt(self.sizes.question)]
        return {"picture": picture, "side": side, "before": [TOKENS["vision_start_token_id"]], "after": after}

    def _rounds(self, part: str) -> Iterator[int]:
        """The numbers of rounds. The first, -1, warms up and is not counted."""
        for index in range(-1, self.args.rounds):
            say(f"{part}, round {index + 1}/{self.args.rounds}")
            yield index

    # ---- encoder ----

    def _measure_encoder(self, stack: ExitStack) -> dict[str, Any]:
        settings = {DEFAULT: DEFAULT, OURS: "none", BITS: BITS}
        engines = {name: self._start(stack, OURS, {"quantization": value}) for name, value in settings.items()}
        if self.args.peer:
            engines[PEER] = self._start(stack, PEER)
        times, same = Times({name: ENCODER[name] for name in engines}, ENCODER_RATIOS), 0
        for index in self._rounds("encoder"):
            asked = self._question(self._new_picture(), self.sizes.side)
            results = {}
            for name in in_turn(engines, index):
                engines[name].call("take", asked=[asked])
                results[name] = engines[name].call("answer", num_tokens=1)
            if index >= 0:
                times.record({name: result.seconds for name, result in results.items()})
                same += PEER in results and results[DEFAULT].value == results[PEER].value
        return {**times.summary(), "same": same}

    # ---- what comes before the model ----

    def _measure_preparation(self, stack: ExitStack) -> dict[str, Any]:
        engine, requests = self._start(stack, OURS, {"quantization": "none"}), self.sizes.requests
        times = Times(PREPARATION, PREPARATION_RATIOS)
        for index in self._rounds("preparation"):
            pictures = {
                "one": [self._new_picture()],
                "many": [self._new_picture() for _ in range(requests)],
                "same": [self._new_picture()] * requests,
            }
            found = {}
            for way, numbers in pictures.items():
                engine.call("take", asked=[self._question(number, self.sizes.side) for number in numbers])
                found[way] = engine.call("prepare").seconds
            if index >= 0:
                times.record(found)
        return times.summary()

    # ---- one picture, several requests ----

    def _measure_repeat(self, stack: ExitStack) -> dict[str, Any]:
        engine = self._start(stack, OURS, {"quantization": "none"})
        num_rows = (self.sizes.seen_side // SQUARE) ** 2
        times = Times(REPEAT, REPEAT_RATIOS)
        for index in self._rounds("repeat"):
            picture, text, found = self._new_picture(), self.source.prompt(num_rows + 2), {}
            for way, runs in (("first", 1), ("second", 0)):
                asked = [self._question(picture, self.sizes.seen_side)]
                found[way] = self._answer(engine, asked, runs)
            for way in ("text_first", "text_second"):
                prompt = [*text, *self.source.prompt(self.sizes.question)]
                found[way] = engine.call("generate", prompts=[prompt], num_tokens=1).seconds
            if index >= 0:
                times.record(found)
        return times.summary()

    def _measure_shared(self, stack: ExitStack) -> dict[str, Any]:
        engine = self._start(stack, OURS, {"quantization": "none"})
        times = Times(SHARED, SHARED_RATIOS)
        for index in self._rounds("shared"):
            found = {}
            for way, requests in (("one", 1), ("all", self.sizes.requests)):
                picture = self._new_picture()
                asked = [self._question(picture, self.sizes.seen_side) for _ in range(requests)]
                found[way] = self._answer(engine, asked, 1)
            if index >= 0:
                times.record(found)
        return times.summary()

    def _answer(self, engine: EngineProcess, asked: list[Question], expected_runs: int) -> float:
        """Seconds to the first token of all. The encoder must run for exactly so many pictures."""
        engine.call("take", asked=asked)
        before = engine.call("num_encoder_runs").value
        seconds = engine.call("answer", num_tokens=1).seconds
        runs = engine.call("num_encoder_runs").value - before
        if runs != expected_runs:
            raise EngineFailedError(f"the encoder ran for {runs} pictures, not for {expected_runs}")
        return seconds

    # ---- text alone ----

    def _measure_text(self, stack: ExitStack) -> dict[str, Any]:
        sizes, source = self.sizes, PromptSource(SEED, self.pair.text["vocab_size"])
        engines = {}
        for name, folder in self.text_models.items():
            engines[name] = self.add_engine(stack, OURS, folder, log=f"ratoon_{name}")
            engines[name].start(source.prompt(sizes.text_input))
        times = Times(TEXT, TEXT_RATIOS)
        for index in self._rounds("text"):
            prompts = [source.prompt(sizes.text_input) for _ in range(sizes.text_requests)]
            found = {name: engines[name].generate(prompts, sizes.text_output) for name in in_turn(engines, index)}
            if found["text"].token_ids != found["media"].token_ids:
                raise EngineFailedError("the model that reads pictures answers otherwise than its decoder alone")
            if index >= 0:
                times.record({name: generation.seconds for name, generation in found.items()})
        return times.summary()

    # ---- report ----

    def title(self) -> str:
        return f"{self.shape.name} with random weights, {self.args.threads} threads, {self.args.rounds} rounds"

    def report(self) -> Iterator[str]:
        sizes = self.sizes
        patches = f"{(sizes.seen_side // PATCH) ** 2:,} patches"
        for part, result in self.found.items():
            if part == "encoder":
                title = f"One picture of {sizes.side:,} × {sizes.side:,} pixels and {sizes.question} tokens, TTFT"
                yield format_times(title, ENCODER, ENCODER_RATIOS, result)
                if self.args.peer:
                    yield f"First tokens identical with default settings: {result['same']} of {self.args.rounds}"
            elif part == "preparation":
                labels = {way: label.format(requests=sizes.requests) for way, label in PREPARATION.items()}
                title = f"Preparation of pictures of {sizes.side:,} × {sizes.side:,} pixels"
                yield format_times(title, labels, PREPARATION_RATIOS, result)
                rates = {way: sizes.requests / result["seconds"][way]["median"] for way in ("many", "same")}
                yield f"Pictures a second: {rates['many']:.0f}, and {rates['same']:.0f} of the same one"
            elif part == "repeat":
                title = f"A picture of {patches} and {sizes.question} tokens, TTFT; the encoder runs once, then never"
                yield format_times(title, REPEAT, REPEAT_RATIOS, result)
            elif part == "shared":
                labels = {way: label.format(requests=sizes.requests) for way, label in SHARED.items()}
                title = f"A picture of {patches}, first tokens of all; the encoder runs once"
                yield format_times(title, labels, SHARED_RATIOS, result)
            else:
                lengths = f"{sizes.text_input} tokens in, {sizes.text_output} out"
                title = f"{self.pair.name}: {sizes.text_requests} requests without a picture, {lengths}"
                yield format_times(title, TEXT, TEXT_RATIOS, result)


if __name__ == "__main__":
    sys.exit(Images().run())
