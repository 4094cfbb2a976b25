"""A Hugging Face folder into CTranslate2's format. Runs in CTranslate2's environment, with transformers there.

python -m peers.ctranslate2_convert FOLDER OUTPUT float32|int8
"""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("output")
    parser.add_argument("quantization")
    args = parser.parse_args()
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(args.folder).convert(args.output, quantization=args.quantization, force=True)


if __name__ == "__main__":
    main()
