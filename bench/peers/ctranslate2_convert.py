"""A Hugging Face folder into CTranslate2's format, in fp32. Runs in CTranslate2's environment, with transformers there.

python -m peers.ctranslate2_convert FOLDER OUTPUT
"""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("output")
    args = parser.parse_args()
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(args.folder).convert(args.output, quantization="float32", force=True)


if __name__ == "__main__":
    main()
