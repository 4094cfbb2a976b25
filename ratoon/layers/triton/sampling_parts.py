"""Parts of the kernels that choose tokens: scaled logits, probabilities, orders of floats, and the draw of a token."""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
LARGEST_INT = tl.constexpr(2**31 - 1)
# Of the rounding to multiples of 2^-52, as in exact_probabilities
_ROUNDING = tl.constexpr(2.0**-29)
_LOG2_E = tl.constexpr(1.4426950216293335)  # rounded to float32
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-8)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp_of(x):
    """The exponential, within two units of the last place. (tl.exp loses digits where x is large: it rounds x ·
    log2(e).)"""
    x = tl.maximum(x, -200.0)  # 0; the product below would make NaN of -inf
    whole = x * _LOG2_E
    rest = tl.fma(x, _LOG2_E, -whole) + x * _LOG2_E_REST
    return tl.exp2(whole) * tl.fma(rest, _LN_2, 1.0)


@triton.jit
def divide(x, divisor):
    """Rounded correctly, as a CPU divides, in half the time of tl.math.div_rn: one step of Newton's method corrects the
    product with the reciprocal. Infinite quotients need no correction, which would make NaN of them."""
    reciprocal = tl.math.div_rn(1.0, divisor)
    quotient = x * reciprocal
    corrected = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    return tl.where(tl.abs(quotient) < INF, corrected, quotient)


@triton.jit
def load_divisor(temperature, row):
    value = tl.load(temperature + row)
    return tl.where(value == 0, 1.0, value)


@triton.jit
def load_scaled(logits, columns, num_columns, divisor):
    """Logits over temperature; -inf past the end, inf for NaN."""
    return divide(load_logits(logits, columns, num_columns), divisor)


@triton.jit
def load_logits(logits, columns, num_columns):
    x = tl.load(logits + columns, mask=columns < num_columns, other=-INF).to(tl.float32)
    return tl.where(x == x, x, INF)


@triton.jit
def is_finite(x):
    return (x > -INF) & (x < INF)


@triton.jit
def load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS: tl.constexpr):
    """The largest logit of each chunk and of all, and what each chunk adds to the sum of exponentials, the largest
    logit of all subtracted [CHUNKS] float64. These weights are not numbers where the row is bad."""
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    tops = tl.load(maxima + row * num_chunks + chunks, mask=exists, other=-INF)
    of_chunks = tl.load(sums + row * num_chunks + chunks, mask=exists, other=0.0)
    peak = tl.max(tops, 0)
    weights = of_chunks.to(tl.float64) * tl.exp((tops - peak).to(tl.float64) / divisor.to(tl.float64))
    return tops, peak, weights


@triton.jit
def probabilities_of(x, peak, total):
    """The probabilities that exact_probabilities has: multiples of 2^-52."""
    return (divide(exp_of(x - peak), total) + _ROUNDING) - _ROUNDING


@triton.jit
def bits_of(x):
    """The bits of floats. Those of floats that are not negative are in the order of the floats."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def ordered_key(x):
    """Floats as int32 in the same order."""
    bits = bits_of(x + 0.0)  # -0 equals 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def count_true(condition):
    return tl.sum(condition.to(tl.int32), 0)


@triton.jit
def least_of(bits, low):
    """The least that is not below `low`."""
    return tl.min(tl.where(bits >= low, bits, LARGEST_INT), 0)


@triton.jit
def first_above(weights, places, target):
    """The first place whose cumulative weight is above the target, or the last that weighs something. -1: none."""
    cumulative = tl.cumsum(weights, 0)
    weighs = weights > 0
    last = tl.max(tl.where(weighs, places, -1), 0)
    return tl.minimum(tl.min(tl.where(weighs & (cumulative > target), places, LARGEST_INT), 0), last)


@triton.jit
def least_of_mass(bits, masses, low, high, limit):
    """The largest bits v, of the entries', for which those with bits ≥ v have at least this mass together. Those with
    bits ≥ low have it, and none has bits ≥ high. The search ends when what is between the two is less than twice the
    least possible mass: a single entry."""
    mass_low, mass_high = tl.sum(tl.where(bits >= low, masses, 0.0), 0), tl.full([], 0.0, tl.float64)
    while (low + 1 < high) & (mass_low - mass_high >= 2.0 * low.to(tl.float32, bitcast=True)):
        middle = middle_of(low, high)
        mass = tl.sum(tl.where(bits >= middle, masses, 0.0), 0)
        mass_low = tl.where(mass >= limit, mass, mass_low)
        mass_high = tl.where(mass >= limit, mass_high, mass)
        low = tl.where(mass >= limit, middle, low)
        high = tl.where(mass >= limit, high, middle)
    return least_of(bits, low)


@triton.jit
def find_largest(logits, num_columns, tops, peak, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The token of the largest logit: first its chunk, then its place there."""
    chunk = tl.min(tl.where(tops == peak, tl.arange(0, CHUNKS), CHUNKS - 1), 0)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits, columns, num_columns)
    return tl.min(tl.where(x == peak, columns, num_columns), 0)


@triton.jit
def draw_token(
    logits, num_columns, divisor, uniform, weights, peak, total, least,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A token by the weights of the chunks, and then by those of its tokens."""
    chunks = tl.arange(0, CHUNKS)
    target = uniform * tl.sum(weights, 0)
    chunk = tl.maximum(first_above(weights, chunks, target), 0)
    own = tl.sum(tl.where(chunks == chunk, weights, 0.0), 0)
    before = tl.sum(tl.where(chunks < chunk, weights, 0.0), 0)
    share = (target - before) / own  # of the chunk's weight, before the token
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_scaled(logits, columns, num_columns, divisor)
    if FILTERED:
        inside = probabilities_of(x, peak, total)
        inside = tl.where(bits_of(inside) >= least, inside, 0.0)
    else:
        inside = exp_of(x - tl.max(x, 0))
    inside = inside.to(tl.float64)
    return first_above(inside, columns, share * tl.sum(inside, 0))


@triton.jit
def store_token(token_ids, bad, row, token, is_bad, num_columns):
    token = tl.where(is_bad, 0, tl.minimum(tl.maximum(token, 0), num_columns - 1))
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(bad + row, is_bad)


@triton.jit
def choose_unfiltered(
    logits, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad, row,
    DRAWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The token of a row without filters. `logits` are the row's own."""
    if DRAWS:
        divisor = load_divisor(temperature, row)
        tops, peak, weights = load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
        is_bad = (is_finite(peak) & (tl.sum(weights, 0) < INF)) == 0
    else:
        chunks = tl.arange(0, CHUNKS)
        tops = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=-INF)
        peak = tl.max(tops, 0)
        is_bad = is_finite(peak) == 0
    token = 0
    if is_bad == 0:
        if DRAWS:
            if tl.load(temperature + row) != 0:
                uniform = tl.load(uniforms + row)
                token = draw_token(logits, num_columns, divisor, uniform, weights, peak, 1.0, 0, False, CHUNK, CHUNKS)
            else:
                token = find_largest(logits, num_columns, tops, peak, CHUNK, CHUNKS)
        else:
            token = find_largest(logits, num_columns, tops, peak, CHUNK, CHUNKS)
    store_token(token_ids, bad, row, token, is_bad, num_columns)
