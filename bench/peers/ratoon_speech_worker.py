"""Ratoon hearing, through its LLM class.

It has one call more, `num_encoder_runs()`: of clips, since the start.
"""

from __future__ import annotations

import argparse
from typing import Any

from peers.protocol import Calls, TokenIds, serve
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

    def take_clips(self, recording: str, cuts: Cuts) -> None:
        self._llm.reset_prefix_cache()  # where it would find clips that it has heard
        super().take_clips(recording, cuts)

    def extract(self) -> Any:
        from ratoon.models.log_mel import log_mel

        num_mel_bins = self._llm.source.config.encoder.num_mel_bins
        return [{"features": log_mel(clip, num_mel_bins)} for clip in self.clips]

    def samples(self) -> Any:
        return [{"audio": clip, "sampling_rate": SAMPLE_RATE} for clip in self.clips]

    def generate(self, heard: Any, prompt: list[int], num_tokens: int) -> TokenIds:
        from ratoon import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, detokenize=False)
        pairs = [{"encoder_prompt": one, "decoder_prompt": prompt} for one in heard]
        outputs = self._llm.generate(pairs, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(load, ("ratoon", "torch"))
