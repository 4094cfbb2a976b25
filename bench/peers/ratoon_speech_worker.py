"""Ratoon hearing, through its LLM class; the encoder's time is taken around the model's own method.

It has one call more, `num_encoder_runs()`: of clips, since the start.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from peers.protocol import Calls, TokenIds, serve
from peers.ratoon_states import timed
from peers.speech import SAMPLE_RATE, Cuts, SpeechEngine


def load(args: argparse.Namespace) -> Calls:
    from ratoon import LLM

    llm = LLM(args.model, device="cpu", dtype="float32", num_threads=args.threads, kv_memory="2GiB", **args.settings)
    return RatoonSpeech(llm).calls()


class RatoonSpeech(SpeechEngine):
    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = llm

    def calls(self) -> Calls:
        return {**super().calls(), "num_encoder_runs": lambda: self._llm.stats().num_encoder_runs}

    def take_clips(self, recording: str, cuts: Cuts) -> dict[str, float]:
        self._llm.reset_prefix_cache()  # where it would find clips that it has heard
        return super().take_clips(recording, cuts)

    def extract(self) -> Any:
        from ratoon.models.log_mel import log_mel

        num_mel_bins = self._llm.source.config.encoder.num_mel_bins
        return [{"features": log_mel(clip, num_mel_bins)} for clip in self.clips]

    def samples(self) -> Any:
        return [{"audio": clip, "sampling_rate": SAMPLE_RATE} for clip in self.clips]

    def generate(self, heard: Any, prompt: list[int], num_tokens: int, held_back: int | None = None) -> TokenIds:
        from ratoon import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            min_tokens=0 if held_back is None else num_tokens,
            detokenize=False,
        )
        pairs = [{"encoder_prompt": one, "decoder_prompt": prompt} for one in heard]
        outputs = self._llm.generate(pairs, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def encode(self) -> dict[str, float]:
        """What cross-attention reads is made of the states at once ("cross"), and kept in their place."""
        model = self._llm.engine.client.core.executor._worker.runner.model
        with ExitStack() as stack:
            encoding = stack.enter_context(timed(model, "encode"))
            storing = stack.enter_context(timed(model, "store_cross"))
            self.encoded = self.run_encoder()
        return {"encoder": sum(encoding), "cross": sum(storing)}

    def run_encoder(self) -> Any:
        """The features again: what came of them is found by their content."""
        self.generate(self.features, [self._llm.source.config.decoder_start_token_id], 1)
        return self.features


if __name__ == "__main__":
    serve(load, ("ratoon", "torch"))
