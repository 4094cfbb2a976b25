"""The Triton kernels of state-space layers: the convolution, and two forms of the scan over states.

The convolution runs first, for all tokens, into scratch memory. Then a program goes through one request with some
columns of one head: token after token, or in chunks that are products of matrices. It also writes the pages of the
request: the states, and the last inputs of the convolution, which no program of its kind reads. Pages of the null block
are not written. Imported on a CUDA device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x): the logarithm of 1 + u is 2 · artanh(u / (2 + u)), a series of odd powers of at most a third. The
    GPU's own logarithm would lose the digits of small results."""
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    square = z * z
    p = 2.0 / 15.0 + square * (2.0 / 17.0)
    p = 2.0 / 11.0 + square * (2.0 / 13.0 + square * p)
    p = 2.0 / 7.0 + square * (2.0 / 9.0 + square * p)
    p = 2.0 / 3.0 + square * (2.0 / 5.0 + square * p)
    return tl.where(x != x, x, tl.maximum(x, 0.0) + (2.0 + square * p) * z)


@triton.jit
def _find_request(starts_ptr, num_requests, token):
    """The last request that begins at this token or before it: others that begin there are empty. Where each request
    has one token, the first guess is right."""
    low, high = num_requests * 0, num_requests
    guess = tl.minimum(token, num_requests - 1)
    if (tl.load(starts_ptr + guess) <= token) & (tl.load(starts_ptr + guess + 1) > token):
        low, high = guess, guess + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load_page(table_ptr, request, stride_table, before, BLOCK_SIZE: tl.constexpr):
    """The page that a request of `before` computed tokens goes on from; without any, a page that is not to be read."""
    place = table_ptr + request.to(tl.int64) * stride_table + tl.maximum(before - 1, 0) // BLOCK_SIZE
    return tl.load(place).to(tl.int64)


@triton.jit(do_not_specialize=["num_requests"])
def mix_kernel(
    projected_ptr, weight_ptr, bias_ptr, histories_ptr, mixed_ptr, table_ptr, starts_ptr, lens_ptr, num_requests,
    stride_row, stride_history, stride_table, INNER: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The convolution of a token with those before it, and its activation. Grid: tokens, BLOCK_C channels each."""
    token = tl.program_id(0)
    request = _find_request(starts_ptr, num_requests, token)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if (token < start) | (token >= end):
        return
    before = tl.load(lens_ptr + request) - (end - start)
    page = _load_page(table_ptr, request, stride_table, before, BLOCK_SIZE)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = channels < CHANNELS
    mixed = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        mixed = tl.load(bias_ptr + channels, mask=there, other=0.0)
    for tap in tl.static_range(WIDTH):
        row = token - (WIDTH - 1) + tap
        new = tl.load(
            projected_ptr + row.to(tl.int64) * stride_row + INNER + channels, mask=there & (row >= start), other=0.0
        )
        old = tl.load(
            histories_ptr + page * stride_history + (WIDTH - 1 + row - start) * CHANNELS + channels,
            mask=there & (row < start) & (before > 0), other=0.0,
        )  # fmt: skip
        mixed += (new.to(tl.float32) + old) * tl.load(weight_ptr + tap * CHANNELS + channels, mask=there, other=0.0)
    tl.store(mixed_ptr + token.to(tl.int64) * CHANNELS + channels, silu(mixed), mask=there)


@triton.jit
def _keep_channels(
    projected_ptr, histories_ptr, slots_ptr, start, end, before, page, stride_row, stride_history, channels, there,
    INNER: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the last inputs of the convolution to the pages of the blocks that the request's tokens end in. The last
    block comes first: what it takes from the page that the request went on from is overwritten by the first one at
    most. A thread may write where another one reads, so that all read before any writes."""
    places = tl.arange(0, WIDTH_PAD)[:, None]
    mask = (places < WIDTH - 1) & there[None, :]
    last = end
    while last > start:
        target = tl.load(slots_ptr + last - 1).to(tl.int64) // BLOCK_SIZE
        rows = last - (WIDTH - 1) + places
        new = tl.load(
            projected_ptr + rows.to(tl.int64) * stride_row + INNER + channels[None, :], mask=mask & (rows >= start),
            other=0.0,
        )  # fmt: skip
        old = tl.load(
            histories_ptr + page * stride_history + (WIDTH - 1 + rows - start) * CHANNELS + channels[None, :],
            mask=mask & (rows < start) & (before > 0), other=0.0,
        )  # fmt: skip
        tl.debug_barrier()
        tl.store(
            histories_ptr + target * stride_history + places * CHANNELS + channels[None, :], new.to(tl.float32) + old,
            mask=mask & (target != 0),
        )  # fmt: skip
        last -= (before + last - 1 - start) % BLOCK_SIZE + 1


@triton.jit
def _keep_history(
    projected_ptr, histories_ptr, slots_ptr, start, end, before, page, stride_row, stride_history, head, columns,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STATE_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """Writes the histories of a program's own channels. Those of a group are written by its first head's first
    program."""
    inner: tl.constexpr = HEADS * HEAD_DIM
    channels: tl.constexpr = inner + 2 * GROUPS * STATE
    _keep_channels(
        projected_ptr, histories_ptr, slots_ptr, start, end, before, page, stride_row, stride_history,
        head * HEAD_DIM + columns, columns < HEAD_DIM, inner, channels, WIDTH, WIDTH_PAD, BLOCK_SIZE,
    )  # fmt: skip
    if (head % (HEADS // GROUPS) == 0) & (tl.program_id(2) == 0):
        numbers = tl.arange(0, STATE_PAD)
        written = inner + head // (HEADS // GROUPS) * STATE + numbers
        for part in tl.static_range(2):  # what is written, and what is read
            _keep_channels(
                projected_ptr, histories_ptr, slots_ptr, start, end, before, page, stride_row, stride_history,
                written + part * GROUPS * STATE, numbers < STATE, inner, channels, WIDTH, WIDTH_PAD, BLOCK_SIZE,
            )  # fmt: skip


@triton.jit
def _load_steps(
    projected_ptr, rows, there, stride_row, head, step_bias_ptr, least_step, most_step, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The time steps of a head at these rows; 0 where there is none."""
    place = projected_ptr + rows.to(tl.int64) * stride_row + 2 * (HEADS * HEAD_DIM + GROUPS * STATE) + head
    steps = softplus(tl.load(place, mask=there, other=0.0).to(tl.float32) + tl.load(step_bias_ptr + head))
    steps = tl.where(steps < least_step, least_step, steps)
    return tl.where(there, tl.where(steps > most_step, most_step, steps), 0.0)


@triton.jit(do_not_specialize=["most_tokens"])
def step_kernel(
    projected_ptr, mixed_ptr, out_ptr, decay_ptr, skip_ptr, step_bias_ptr, states_ptr, histories_ptr, table_ptr,
    starts_ptr, lens_ptr, slots_ptr, least_step, most_step, most_tokens, stride_row, stride_state, stride_history,
    stride_table, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, STATE_PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """Requests of up to `most_tokens` tokens, token after token. A result does not depend on what else is in the step,
    nor on where the tokens before it were cut. Grid: requests, heads, COLUMNS columns of a head each."""
    request, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if (end <= start) | (end - start > most_tokens):
        return
    inner: tl.constexpr = HEADS * HEAD_DIM
    channels: tl.constexpr = inner + 2 * GROUPS * STATE
    before = tl.load(lens_ptr + request) - (end - start)
    page = _load_page(table_ptr, request, stride_table, before, BLOCK_SIZE)
    columns, numbers = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STATE_PAD)
    in_columns, in_state = columns < HEAD_DIM, numbers < STATE
    places = (head * HEAD_DIM + columns[:, None]) * STATE + numbers[None, :]
    mask = in_columns[:, None] & in_state[None, :]
    state = tl.load(states_ptr + page * stride_state + places, mask=mask & (before > 0), other=0.0)
    tl.debug_barrier()  # the page may be the one that is written
    decay, skip = tl.load(decay_ptr + head), tl.load(skip_ptr + head)
    written = inner + head // (HEADS // GROUPS) * STATE + numbers
    for index in range(end - start):
        token = start + index
        line = mixed_ptr + token.to(tl.int64) * channels
        x = tl.load(line + head * HEAD_DIM + columns, mask=in_columns, other=0.0)
        write = tl.load(line + written, mask=in_state, other=0.0)
        read = tl.load(line + GROUPS * STATE + written, mask=in_state, other=0.0)
        step = _load_steps(
            projected_ptr, token, True, stride_row, head, step_bias_ptr, least_step, most_step, HEADS, HEAD_DIM, STATE,
            GROUPS,
        )  # fmt: skip
        state = state * tl.exp(step * decay) + (x * step)[:, None] * write[None, :]
        y = tl.sum(state * read[None, :], 1) + x * skip
        gate = tl.load(
            projected_ptr + token.to(tl.int64) * stride_row + head * HEAD_DIM + columns, mask=in_columns, other=0.0
        )
        y = (y * silu(gate.to(tl.float32))).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64) * inner + head * HEAD_DIM + columns, y, mask=in_columns)
        if ((before + index + 1) % BLOCK_SIZE == 0) | (token == end - 1):
            target = tl.load(slots_ptr + token).to(tl.int64) // BLOCK_SIZE
            tl.store(states_ptr + target * stride_state + places, state, mask=mask & (target != 0))
    _keep_history(
        projected_ptr, histories_ptr, slots_ptr, start, end, before, page, stride_row, stride_history, head, columns,
        HEADS, HEAD_DIM, STATE, GROUPS, WIDTH, BLOCK_SIZE, STATE_PAD, WIDTH_PAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["most_tokens"])
def chunk_kernel(
    projected_ptr, mixed_ptr, out_ptr, decay_ptr, skip_ptr, step_bias_ptr, states_ptr, histories_ptr, table_ptr,
    starts_ptr, lens_ptr, slots_ptr, least_step, most_step, most_tokens, stride_row, stride_state, stride_history,
    stride_table, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, STATE_PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Requests of more than `most_tokens` tokens, up to CHUNK at a time. Grid: as of step_kernel."""
    request, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if end - start <= most_tokens:
        return
    inner: tl.constexpr = HEADS * HEAD_DIM
    channels: tl.constexpr = inner + 2 * GROUPS * STATE
    before = tl.load(lens_ptr + request) - (end - start)
    page = _load_page(table_ptr, request, stride_table, before, BLOCK_SIZE)
    columns, numbers = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STATE_PAD)
    in_columns, in_state = columns < HEAD_DIM, numbers < STATE
    places = (head * HEAD_DIM + columns[:, None]) * STATE + numbers[None, :]
    mask = in_columns[:, None] & in_state[None, :]
    state = tl.load(states_ptr + page * stride_state + places, mask=mask & (before > 0), other=0.0)
    tl.debug_barrier()  # the page may be the one that is written
    decay, skip = tl.load(decay_ptr + head), tl.load(skip_ptr + head)
    written = inner + head // (HEADS // GROUPS) * STATE + numbers
    offsets = tl.arange(0, CHUNK)
    behind = offsets[:, None] > offsets[None, :]
    token = start
    while token < end:
        position = before + token - start
        last = tl.minimum(tl.minimum(end, token + CHUNK), token + BLOCK_SIZE - position % BLOCK_SIZE)
        rows = token + offsets
        there = rows < last
        lines = mixed_ptr + rows.to(tl.int64)[:, None] * channels
        in_x, in_lines = there[:, None] & in_columns[None, :], there[:, None] & in_state[None, :]
        x = tl.load(lines + head * HEAD_DIM + columns[None, :], mask=in_x, other=0.0)
        write = tl.load(lines + written[None, :], mask=in_lines, other=0.0)
        read = tl.load(lines + GROUPS * STATE + written[None, :], mask=in_lines, other=0.0)
        steps = _load_steps(
            projected_ptr, rows, there, stride_row, head, step_bias_ptr, least_step, most_step, HEADS, HEAD_DIM, STATE,
            GROUPS,
        )  # fmt: skip
        logs = steps * decay
        # How much is left at a row of what an earlier one wrote: the logs between them are added up in that order,
        # because the difference of two long sums would have lost its last digits.
        sums = tl.cumsum(tl.where(behind, logs[:, None], 0.0), 0)
        kept = tl.where(offsets[:, None] >= offsets[None, :], tl.exp(sums), 0.0)
        since = tl.exp(tl.cumsum(logs, 0))  # of the state before the chunk
        scaled = x * steps[:, None]
        scores = tl.dot(read, tl.trans(write), input_precision=PRECISION) * kept
        y = tl.dot(read, tl.trans(state), input_precision=PRECISION) * since[:, None] + x * skip
        y = tl.dot(scores, scaled, y, input_precision=PRECISION)
        gates = projected_ptr + rows.to(tl.int64)[:, None] * stride_row + head * HEAD_DIM + columns[None, :]
        y *= silu(tl.load(gates, mask=in_x, other=0.0).to(tl.float32))
        out = out_ptr + rows.to(tl.int64)[:, None] * inner + head * HEAD_DIM + columns[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=in_x)
        # Rows that are not there let nothing decay, so that the last row of the chunk stands for the last that is.
        left = tl.sum(tl.where(offsets[:, None] == CHUNK - 1, kept, 0.0), 0)
        state *= tl.sum(tl.where(offsets == CHUNK - 1, since, 0.0), 0)
        state = tl.dot(tl.trans(scaled * left[:, None]), write, state, input_precision=PRECISION)
        token = last
        if (token == end) | ((before + token - start) % BLOCK_SIZE == 0):
            target = tl.load(slots_ptr + token - 1).to(tl.int64) // BLOCK_SIZE
            tl.store(states_ptr + target * stride_state + places, state, mask=mask & (target != 0))
    _keep_history(
        projected_ptr, histories_ptr, slots_ptr, start, end, before, page, stride_row, stride_history, head, columns,
        HEADS, HEAD_DIM, STATE, GROUPS, WIDTH, BLOCK_SIZE, STATE_PAD, WIDTH_PAD,
    )  # fmt: skip
