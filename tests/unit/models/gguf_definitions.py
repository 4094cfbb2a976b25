"""GGUF's quantised blocks by their definition in ggml, number by number: what a block of bytes stands for.

Written for reading, not for speed, and from the definition of the blocks alone. The values of a grid (the IQ1, IQ2 and
IQ3 types choose among fixed vectors) are a table without a rule, which is taken from the `gguf` package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import gguf.quants
import numpy as np

Numbers = Iterator[float]
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def half(block: bytes, place: int) -> float:
    (number,) = struct.unpack_from("<e", block, place)
    return float(number)


def word(block: bytes, place: int, size: int = 2) -> int:
    return int.from_bytes(block[place : place + size], "little")


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibbles(packed: bytes) -> Iterator[int]:
    """The low halves of all bytes, then the high ones."""
    yield from (byte & 15 for byte in packed)
    yield from (byte >> 4 for byte in packed)


def q4_0(block: bytes) -> Numbers:
    return (half(block, 0) * (code - 8) for code in nibbles(block[2:]))


def q4_1(block: bytes) -> Numbers:
    return (half(block, 0) * code + half(block, 2) for code in nibbles(block[4:]))


def q5_0(block: bytes) -> Numbers:
    high = word(block, 2, 4)
    return (half(block, 0) * ((code | (high >> i & 1) << 4) - 16) for i, code in enumerate(nibbles(block[6:])))


def q5_1(block: bytes) -> Numbers:
    high, scale, least = word(block, 4, 4), half(block, 0), half(block, 2)
    return (scale * (code | (high >> i & 1) << 4) + least for i, code in enumerate(nibbles(block[8:])))


def q8_0(block: bytes) -> Numbers:
    return (half(block, 0) * signed(byte) for byte in block[2:])


def q2_k(block: bytes) -> Numbers:
    """16 bytes of scales and minima, 64 of codes, two halves. Group g of 16 numbers has scale g."""
    scales, codes, whole, least = block[:16], block[16:80], half(block, 80), half(block, 82)
    for i in range(256):
        scale = scales[i // 16]
        code = codes[i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3
        yield whole * (scale & 15) * code - least * (scale >> 4)


def q3_k(block: bytes) -> Numbers:
    """32 bytes of third bits, 64 of codes, 12 of scales with 6 bits, a half."""
    high, codes, packed, whole = block[:32], block[32:96], block[96:108], half(block, 108)
    for i in range(256):
        group = i // 16
        low = packed[group] & 15 if group < 8 else packed[group - 8] >> 4
        scale = (low | (packed[8 + group % 4] >> group // 4 * 2 & 3) << 4) - 32
        code = codes[i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3
        yield whole * scale * (code - (0 if high[i % 32] >> i // 32 & 1 else 4))


def scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    """Of Q4_K and Q5_K: 6 bits each, of eight groups in 12 bytes."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    high = packed[group + 4]
    return (high & 15) | packed[group - 4] >> 6 << 4, high >> 4 | packed[group] >> 6 << 4


def q4_k(block: bytes) -> Numbers:
    whole, least, codes = half(block, 0), half(block, 2), block[16:]
    for i in range(256):
        scale, minimum = scale_and_minimum(block[4:16], i // 32)
        yield whole * scale * (codes[i // 64 * 32 + i % 32] >> i // 32 % 2 * 4 & 15) - least * minimum


def q5_k(block: bytes) -> Numbers:
    whole, least, high, codes = half(block, 0), half(block, 2), block[16:48], block[48:]
    for i in range(256):
        scale, minimum = scale_and_minimum(block[4:16], i // 32)
        code = codes[i // 64 * 32 + i % 32] >> i // 32 % 2 * 4 & 15 | (high[i % 32] >> i // 32 & 1) << 4
        yield whole * scale * code - least * minimum


def q6_k(block: bytes) -> Numbers:
    """128 bytes of low halves, 64 of high bits, 16 signed scales, a half."""
    for i in range(256):
        part, place = divmod(i, 128)
        low = block[part * 64 + place % 64] >> place // 64 * 4 & 15
        high = block[128 + part * 32 + place % 32] >> place // 32 * 2 & 3
        yield half(block, 208) * signed(block[192 + i // 16]) * ((low | high << 4) - 32)


def iq4_nl(block: bytes) -> Numbers:
    return (half(block, 0) * NON_LINEAR[code] for code in nibbles(block[2:]))


def iq4_xs(block: bytes) -> Numbers:
    for group in range(8):
        low = block[4 + group // 2] >> group % 2 * 4 & 15
        scale = (low | (word(block, 2) >> group * 2 & 3) << 4) - 32
        for code in nibbles(block[8 + group * 16 : 24 + group * 16]):
            yield half(block, 0) * scale * NON_LINEAR[code]


def tq1_0(block: bytes) -> Numbers:
    """Five numbers of -1, 0 and 1 in a byte, as digits of a fraction to the base of 3; four in the last four bytes."""
    for packed, num_digits in ((block[:32], 5), (block[32:48], 5), (block[48:52], 4)):
        for digit in range(num_digits):
            for byte in packed:
                yield half(block, 52) * ((byte * 3**digit % 256) * 3 // 256 - 1)


def tq2_0(block: bytes) -> Numbers:
    for packed in (block[:32], block[32:64]):
        for shift in (0, 2, 4, 6):
            yield from (half(block, 64) * ((byte >> shift & 3) - 1) for byte in packed)


def mxfp4(block: bytes) -> Numbers:
    return (2.0 ** (block[0] - 127) * E2M1[code] for code in nibbles(block[1:]))


def grid_of(name: str) -> list[list[float]]:
    table = getattr(gguf.quants, name)
    table.init_grid()
    rows: list[list[float]] = np.asarray(table.grid).reshape(table.grid_shape).tolist()
    return rows


def signs(seven_bits: int) -> list[int]:
    """The eighth makes the number of negative ones even."""
    bits = seven_bits | seven_bits.bit_count() % 2 << 7
    return [-1 if bits >> i & 1 else 1 for i in range(8)]


def all_signs(byte: int) -> list[int]:
    return [-1 if byte >> i & 1 else 1 for i in range(8)]


def iq2_xxs(block: bytes) -> Numbers:
    grid = grid_of("IQ2_XXS")
    for group in range(8):
        start = 2 + group * 8
        rest = word(block, start + 4, 4)
        scale = half(block, 0) * (0.5 + (rest >> 28)) / 4
        for i in range(4):
            for value, sign in zip(grid[block[start + i]], signs(rest >> 7 * i & 127), strict=True):
                yield scale * value * sign


def iq2_xs(block: bytes) -> Numbers:
    grid = grid_of("IQ2_XS")
    for i in range(32):
        code = word(block, 2 + 2 * i)
        scale = half(block, 0) * (0.5 + (block[66 + i // 4] >> i // 2 % 2 * 4 & 15)) / 4
        for value, sign in zip(grid[code & 511], signs(code >> 9), strict=True):
            yield scale * value * sign


def iq2_s(block: bytes) -> Numbers:
    grid = grid_of("IQ2_S")
    for i in range(32):
        high = block[66 + i // 4] >> i % 4 * 2 & 3
        scale = half(block, 0) * (0.5 + (block[74 + i // 4] >> i // 2 % 2 * 4 & 15)) / 4
        for value, sign in zip(grid[block[2 + i] | high << 8], all_signs(block[34 + i]), strict=True):
            yield scale * value * sign


def iq3_xxs(block: bytes) -> Numbers:
    grid = grid_of("IQ3_XXS")
    for i in range(32):
        rest = word(block, 66 + i // 4 * 4, 4)
        scale = half(block, 0) * (0.5 + (rest >> 28)) / 2
        values = grid[block[2 + 2 * i]] + grid[block[3 + 2 * i]]
        for value, sign in zip(values, signs(rest >> i % 4 * 7 & 127), strict=True):
            yield scale * value * sign


def iq3_s(block: bytes) -> Numbers:
    grid = grid_of("IQ3_S")
    for i in range(32):
        high = block[66 + i // 4] >> i % 4 * 2
        values = grid[block[2 + 2 * i] | (high & 1) << 8] + grid[block[3 + 2 * i] | (high >> 1 & 1) << 8]
        scale = half(block, 0) * (1 + 2 * (block[106 + i // 8] >> i // 4 % 2 * 4 & 15))
        for value, sign in zip(values, all_signs(block[74 + i]), strict=True):
            yield scale * value * sign


def iq1_s(block: bytes) -> Numbers:
    grid = grid_of("IQ1_S")
    for i in range(32):
        high = word(block, 34 + i // 4 * 2)
        scale = half(block, 0) * (2 * (high >> 12 & 7) + 1)
        shift = -0.125 if high >> 15 else 0.125
        yield from (scale * (value + shift) for value in grid[block[2 + i] | (high >> i % 4 * 3 & 7) << 8])


def iq1_m(block: bytes) -> Numbers:
    """The half is spread over the upper bits of four words of scales."""
    grid = grid_of("IQ1_S")
    scales = [word(block, 48 + 2 * i) for i in range(4)]
    whole = half(sum((scales[i] >> 12) << 4 * i for i in range(4)).to_bytes(2, "little"), 0)
    for i in range(32):
        scale = whole * (2 * (scales[i // 8] >> i // 2 % 4 * 3 & 7) + 1)
        high = block[32 + i // 2] >> i % 2 * 4
        shift = -0.125 if high & 8 else 0.125
        yield from (scale * (value + shift) for value in grid[block[i] | (high & 7) << 8])


# How a block is read, and where its halves are, whose bits a test chooses so that they are numbers
DEFINITIONS: dict[str, tuple[Callable[[bytes], Numbers], tuple[int, ...]]] = {
    "Q4_0": (q4_0, (0,)), "Q4_1": (q4_1, (0, 2)), "Q5_0": (q5_0, (0,)), "Q5_1": (q5_1, (0, 2)), "Q8_0": (q8_0, (0,)),
    "Q2_K": (q2_k, (80, 82)), "Q3_K": (q3_k, (108,)), "Q4_K": (q4_k, (0, 2)), "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)), "IQ4_NL": (iq4_nl, (0,)), "IQ4_XS": (iq4_xs, (0,)), "TQ1_0": (tq1_0, (52,)),
    "TQ2_0": (tq2_0, (64,)), "MXFP4": (mxfp4, ()), "IQ2_XXS": (iq2_xxs, (0,)), "IQ2_XS": (iq2_xs, (0,)),
    "IQ2_S": (iq2_s, (0,)), "IQ3_XXS": (iq3_xxs, (0,)), "IQ3_S": (iq3_s, (0,)), "IQ1_S": (iq1_s, (0,)),
    "IQ1_M": (iq1_m, ()),
}  # fmt: skip
