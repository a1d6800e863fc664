"""Kernels of attention with sinks: the forward, and the gradients of the queries, of the keys and of the sinks.

With ``c = scale log2(e)``, ``s_ij = c q_i . k_j`` over the keys that query i sees, and ``z`` the sink in base 2:

    lse_i = ln(2) log2(2^z + sum_j 2^s_ij)          P_ij = 2^s_ij / 2^(log2(e) lse_i)         o_i = sum_j P_ij v_j
    delta_i = d_o_i . o_i - d_lse_i                 dS_ij = P_ij (d_o_i . v_j - delta_i)
    dq_i = scale sum_j dS_ij k_j    dk_j = scale sum_i dS_ij q_i    dv_j = sum_i P_ij d_o_i
    d_sink = -sum_i P_i,sink delta_i

Rows of a block of queries are tokens times PACK heads that share a key head, so that few tokens fill a block. A block
knows from the lengths which keys all of its rows see: those are taken without a mask, and those that no row sees not at
all. Widths are padded to BD, a power of two. DOT is the dtype of the products' operands; every product accumulates in
fp32, and no sum depends on the order in which programs run.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunks import locate, sequence_span
from chunkwise_triton.common.tiles import load_live, load_tile, row_pointer, store_tile

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-3.0e38)
"""Where a running maximum starts: finite, so that a row that has seen no key yet gives no NaN."""


@triton.jit
def clamp(x, least, most):
    """``x`` within bounds."""
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def query_program(HQ: tl.constexpr, HK: tl.constexpr, PACK: tl.constexpr):
    """Slot, key head and first query head of a program that works on a block of queries.

    Heads that share keys run side by side, and long rows of a causal triangle first.
    """
    parts: tl.constexpr = HQ // HK // PACK
    slots = tl.num_programs(0) // (HK * parts)
    part = tl.program_id(0) % parts
    slot = slots - 1 - tl.program_id(0) // parts % slots
    key_head = tl.program_id(0) // parts // slots
    return slot, key_head, (key_head * parts + part) * PACK


@triton.jit
def keys_seen(position, count, keys, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """The keys that any of ``count`` queries sees, the first at ``position``, and those that all of them see."""
    low = 0
    all_low = 0
    high = keys
    all_high = keys
    if CAUSAL:
        high = clamp(position + count, 0, keys)
        all_high = clamp(position + 1, 0, keys)
    if WINDOWED:
        low = clamp(position - window + 1, 0, high)
        all_low = clamp(position + count - window, low, high)
    return low, all_low, all_high, high


@triton.jit
def queries_seeing(position, count, queries, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """The queries that see any of ``count`` keys, the first of them seen from query ``position`` on, and those that
    see all of them."""
    low = 0
    all_low = 0
    high = queries
    all_high = queries
    if CAUSAL:
        low = clamp(position, 0, queries)
        all_low = clamp(position + count - 1, low, queries)
    if WINDOWED:
        high = clamp(position + count - 1 + window, low, queries)
        all_high = clamp(position + window, low, high)
    return low, all_low, all_high, high


@triton.jit
def stretches(low, all_low, all_high, high, BLOCK: tl.constexpr):
    """Where the blocks of a loop that need no mask begin and end; those before and behind them need one."""
    begin = low + (all_low - low + BLOCK - 1) // BLOCK * BLOCK
    end = begin + tl.maximum(all_high - begin, 0) // BLOCK * BLOCK
    return begin, end


@triton.jit
def seen(position, key, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether a query at a position sees a key."""
    mask = key >= 0
    if CAUSAL:
        mask &= key <= position
    if WINDOWED:
        mask &= key > position - window
    return mask


@triton.jit
def row_index(n, first, head, T, HQ: tl.constexpr, RAGGED: tl.constexpr):
    """Place of row ``first`` (of all B * T) of a head in ``[B, HQ, T]``."""
    if RAGGED:
        return head.to(tl.int64) * T + first
    return (n.to(tl.int64) * (HQ - 1) + head) * T + first


@triton.jit
def halves(x):
    """The even and the odd columns of a tile."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def products_of_64(x, y):
    """``x y^T`` for tiles of 128 columns or fewer."""
    if x.shape[1] > 64:
        x_even, x_odd = halves(x)
        y_even, y_odd = halves(y)
        found = tl.dot(x_even, tl.trans(y_even), input_precision="tf32x3")
        found += tl.dot(x_odd, tl.trans(y_odd), input_precision="tf32x3")
    else:
        found = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    return found


@triton.jit
def row_products(x, y):
    """``x y^T`` over the width of heads; of fp32, 64 columns at a time.

    Tensor cores cut off what a sum loses, always towards zero: over 256 columns that is more than fp32 may lose.
    """
    if x.dtype != tl.float32:
        found = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    elif x.shape[1] > 128:
        x_even, x_odd = halves(x)
        y_even, y_odd = halves(y)
        found = products_of_64(x_even, y_even) + products_of_64(x_odd, y_odd)
    else:
        found = products_of_64(x, y)
    return found


@triton.jit
def forward_step(
    q_tile, acc, top, total, k_at, v_at, begin, high, position, c, window,
    HK: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rescale what was summed to a new maximum, and add the keys from ``begin`` on."""
    j = tl.arange(0, BN)
    d = tl.arange(0, BD)
    at = tl.cast(begin, tl.int64) * (HK * D)
    live = j < high - begin
    k_tile = load_tile(k_at + at, j, HK * D, d, D, BD, live, MASKED).to(DOT)  # [BN, BD]
    s = row_products(q_tile, k_tile)
    if MASKED:
        key = begin + j[None, :]
        s = tl.where(seen(position[:, None], key, window, CAUSAL, WINDOWED) & (key < high), s * c, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
    else:
        new = tl.maximum(top, tl.max(s, 1) * c)
        p = tl.exp2(s * c - new[:, None])
    rescale = tl.exp2(top - new)
    total = total * rescale + tl.sum(p.to(total.dtype), 1)
    acc = acc * rescale[:, None]
    v_tile = load_tile(v_at + at, j, HK * D, d, D, BD, live, MASKED).to(DOT)  # [BN, BD]
    acc = tl.dot(p.to(DOT), v_tile, acc, input_precision="tf32x3")
    return acc, new, total


@triton.jit(do_not_specialize=["T", "S", "per_row", "window"])
def forward_kernel(
    q, k, v, sinks, o, lse, scale, window, cu_seqlens_q, cu_seqlens_k, table, T, S, per_row,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PACK: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """o of a block of queries, and their lse where KEEP."""
    slot, key_head, head = query_program(HQ, HK, PACK)
    n, first, count = locate(slot, cu_seqlens_q, table, T, per_row, BM // PACK, RAGGED)
    if count <= 0:
        return
    start, queries = sequence_span(n, cu_seqlens_q, T, RAGGED)
    key_start, keys = sequence_span(n, cu_seqlens_k, S, RAGGED)
    t = tl.arange(0, BM) // PACK
    g = tl.arange(0, BM) % PACK
    row = g.to(tl.int64) * T + t
    d = tl.arange(0, BD)
    begin_position = (first - start).to(tl.int32) + keys - queries
    position = begin_position + t
    low, all_low, all_high, high = keys_seen(begin_position, count, keys, window, CAUSAL, WINDOWED)
    begin, end = stretches(low, all_low, all_high, high, BN)
    q_tile = load_tile(row_pointer(q, first, head, HQ, D), t * HQ + g, D, d, D, BD, t < count, True)  # [BM, BD]
    q_tile = tl.where(scale < 0, -q_tile, q_tile).to(DOT)  # so that the largest product is the largest score
    c = tl.abs(scale) * LOG2E
    k_at = row_pointer(k, key_start, key_head, HK, D)
    v_at = row_pointer(v, key_start, key_head, HK, D)
    acc = tl.zeros((BM, BD), tl.float32)
    top = tl.full((BM,), LEAST, tl.float32)
    # What rounding takes from the sum is in all of a row's outputs alike, and so in delta: fp32 sums in fp64.
    total = tl.zeros((BM,), tl.float64 if q.dtype.element_ty == tl.float32 else tl.float32)
    if WINDOWED:
        for at in tl.range(low, begin, BN):
            acc, top, total = forward_step(
                q_tile, acc, top, total, k_at, v_at, at, high, position, c, window,
                HK, D, BN, BD, DOT, CAUSAL, WINDOWED, True,
            )  # fmt: skip
    for at in tl.range(begin, end, BN):
        acc, top, total = forward_step(
            q_tile, acc, top, total, k_at, v_at, at, high, position, c, window,
            HK, D, BN, BD, DOT, CAUSAL, WINDOWED, False,
        )  # fmt: skip
    for at in tl.range(end, high, BN):
        acc, top, total = forward_step(
            q_tile, acc, top, total, k_at, v_at, at, high, position, c, window,
            HK, D, BN, BD, DOT, CAUSAL, WINDOWED, True,
        )  # fmt: skip
    sink = tl.load(sinks + head + g)
    new = tl.maximum(top, sink * LOG2E)
    kept = tl.exp2(top - new)
    whole = total * kept + tl.exp2(sink * LOG2E - new)
    acc = (acc.to(whole.dtype) * (kept / tl.where(whole > 0.0, whole, 1.0))[:, None]).to(tl.float32)
    store_tile(row_pointer(o, first, head, HQ, D), acc, t * HQ + g, D, d, D, t < count)
    if KEEP:
        # A sink that outweighs the keys is taken as it is: what base 2 and back rounds is more than the keys' share.
        largest = tl.where(sink * LOG2E < top, top * LN2, sink)
        value = tl.where(total > 0.0, largest + tl.log2(whole.to(tl.float32)) * LN2, sink)
        tl.store(lse + row_index(n, first, head, T, HQ, RAGGED) + row, value, mask=t < count)


@triton.jit(do_not_specialize=["T", "per_row"])
def statistics_kernel(
    o, d_o, d_lse, lse, sinks, statistics, sums, cu_seqlens_q, table, T, per_row,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    PACK: tl.constexpr, RAGGED: tl.constexpr, HAS_DO: tl.constexpr, HAS_LSE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The statistics of a block of queries, and where SUM what they give to the sinks' gradients ``[slots, HQ]``."""
    slot, _, head = query_program(HQ, HK, PACK)
    n, first, count = locate(slot, cu_seqlens_q, table, T, per_row, BM // PACK, RAGGED)
    t = tl.arange(0, BM) // PACK
    g = tl.arange(0, BM) % PACK
    row = g.to(tl.int64) * T + t
    d = tl.arange(0, BD)
    live = t < count
    # A row that sees one key has gradients that are what is left of d_o . v_j - delta: fp32 keeps delta in two numbers.
    SUM_IN: tl.constexpr = tl.float64 if o.dtype.element_ty == tl.float32 else tl.float32
    value = tl.zeros((BM,), SUM_IN)
    if HAS_DO:
        o_tile = load_tile(row_pointer(o, first, head, HQ, D), t * HQ + g, D, d, D, BD, live, True)  # [BM, BD]
        d_tile = load_tile(row_pointer(d_o, first, head, HQ, D), t * HQ + g, D, d, D, BD, live, True)  # [BM, BD]
        value += tl.sum(o_tile.to(SUM_IN) * d_tile.to(SUM_IN), 1)
    if HAS_LSE:
        value -= load_live(d_lse + row_index(n, first, head, T, HQ, RAGGED) + row, live, True)
    logs = load_live(lse + row_index(n, first, head, T, HQ, RAGGED) + row, live, True)
    at = statistics + (row_index(n, first, head, T, HQ, RAGGED) + row) * 4
    tl.store(at, logs * LOG2E, mask=live)
    high = value.to(tl.float32)
    tl.store(at + 1, high, mask=live)
    tl.store(at + 2, (value - high).to(tl.float32), mask=live)
    if SUM:
        sink = tl.load(sinks + head + g)
        share = tl.where(live & (sink > float("-inf")), tl.exp2((sink - logs) * LOG2E), 0.0)
        each = tl.sum(tl.reshape(share * high, (BM // PACK, PACK)), 0)
        tl.store(sums + slot.to(tl.int64) * HQ + head + tl.arange(0, PACK), -each)


@triton.jit
def query_step(
    q_tile, d_tile, acc, logs, delta, delta_low, k_at, v_at, begin, high, position, c, window,
    HK: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the keys from ``begin`` on give to the gradient of a block of queries."""
    j = tl.arange(0, BN)
    d = tl.arange(0, BD)
    at = tl.cast(begin, tl.int64) * (HK * D)
    live = j < high - begin
    k_tile = load_tile(k_at + at, j, HK * D, d, D, BD, live, MASKED).to(DOT)  # [BN, BD]
    v_tile = load_tile(v_at + at, j, HK * D, d, D, BD, live, MASKED).to(DOT)  # [BN, BD]
    s = row_products(q_tile, k_tile)
    p = tl.exp2(s * c - logs[:, None])
    if MASKED:
        key = begin + j[None, :]
        p = tl.where(seen(position[:, None], key, window, CAUSAL, WINDOWED) & (key < high), p, 0.0)
    dp = row_products(d_tile, v_tile) - delta[:, None]
    if k_tile.dtype == tl.float32:
        dp -= delta_low[:, None]
    ds = p * dp
    return tl.dot(ds.to(DOT), k_tile, acc, input_precision="tf32x3")


@triton.jit(do_not_specialize=["T", "S", "per_row", "window"])
def query_gradient_kernel(
    q, k, v, d_o, statistics, dq, scale, window, cu_seqlens_q, cu_seqlens_k, table, T, S, per_row,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PACK: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries."""
    slot, key_head, head = query_program(HQ, HK, PACK)
    n, first, count = locate(slot, cu_seqlens_q, table, T, per_row, BM // PACK, RAGGED)
    if count <= 0:
        return
    start, queries = sequence_span(n, cu_seqlens_q, T, RAGGED)
    key_start, keys = sequence_span(n, cu_seqlens_k, S, RAGGED)
    t = tl.arange(0, BM) // PACK
    g = tl.arange(0, BM) % PACK
    row = g.to(tl.int64) * T + t
    d = tl.arange(0, BD)
    live = t < count
    begin_position = (first - start).to(tl.int32) + keys - queries
    position = begin_position + t
    low, all_low, all_high, high = keys_seen(begin_position, count, keys, window, CAUSAL, WINDOWED)
    begin, end = stretches(low, all_low, all_high, high, BN)
    q_tile = load_tile(row_pointer(q, first, head, HQ, D), t * HQ + g, D, d, D, BD, live, True).to(DOT)  # [BM, BD]
    d_tile = load_tile(row_pointer(d_o, first, head, HQ, D), t * HQ + g, D, d, D, BD, live, True).to(DOT)  # [BM, BD]
    at = statistics + (row_index(n, first, head, T, HQ, RAGGED) + row) * 4
    logs = load_live(at, live, True)
    delta = load_live(at + 1, live, True)
    delta_low = load_live(at + 2, live, True)
    c = scale * LOG2E
    k_at = row_pointer(k, key_start, key_head, HK, D)
    v_at = row_pointer(v, key_start, key_head, HK, D)
    acc = tl.zeros((BM, BD), tl.float32)
    if WINDOWED:
        for at in tl.range(low, begin, BN):
            acc = query_step(
                q_tile, d_tile, acc, logs, delta, delta_low, k_at, v_at, at, high, position, c, window,
                HK, D, BN, BD, DOT, CAUSAL, WINDOWED, True,
            )  # fmt: skip
    for at in tl.range(begin, end, BN):
        acc = query_step(
            q_tile, d_tile, acc, logs, delta, delta_low, k_at, v_at, at, high, position, c, window,
            HK, D, BN, BD, DOT, CAUSAL, WINDOWED, False,
        )  # fmt: skip
    for at in tl.range(end, high, BN):
        acc = query_step(
            q_tile, d_tile, acc, logs, delta, delta_low, k_at, v_at, at, high, position, c, window,
            HK, D, BN, BD, DOT, CAUSAL, WINDOWED, True,
        )  # fmt: skip
    store_tile(row_pointer(dq, first, head, HQ, D), acc * scale, t * HQ + g, D, d, D, live)


@triton.jit
def key_step(
    k_tile, v_tile, dk_acc, dv_acc, q_at, d_at, pairs_at, begin, high, shift, key, c, window, T,
    HQ: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PACK: tl.constexpr, DOT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the queries from ``begin`` on give to the gradients of a block of keys and values."""
    t = tl.arange(0, BM) // PACK
    g = tl.arange(0, BM) % PACK
    row = g.to(tl.int64) * T + t
    d = tl.arange(0, BD)
    live = t < high - begin
    at = tl.cast(begin, tl.int64) * (HQ * D)
    q_tile = load_tile(q_at + at, t * HQ + g, D, d, D, BD, live, MASKED).to(DOT)  # [BM, BD]
    d_tile = load_tile(d_at + at, t * HQ + g, D, d, D, BD, live, MASKED).to(DOT)  # [BM, BD]
    e = tl.arange(0, 4)
    pairs = load_tile(pairs_at + tl.cast(begin, tl.int64) * 4, row, 4, e, 4, 4, live, MASKED)  # [BM, 4] fp32
    logs = tl.sum(tl.where(e[None, :] == 0, pairs, 0.0), 1)
    s = row_products(k_tile, q_tile)
    p = tl.exp2(s * c - logs[None, :])  # [BN, BM]
    if MASKED:
        mask = seen((begin + shift + t)[None, :], key[:, None], window, CAUSAL, WINDOWED)
        p = tl.where(mask & live[None, :], p, 0.0)
    if DV:
        dv_acc = tl.dot(p.to(DOT), d_tile, dv_acc, input_precision="tf32x3")
    if DK:
        delta = tl.sum(tl.where(e[None, :] == 1, pairs, 0.0), 1)
        dp = row_products(v_tile, d_tile) - delta[None, :]
        if k_tile.dtype == tl.float32:
            dp -= tl.sum(tl.where(e[None, :] == 2, pairs, 0.0), 1)[None, :]
        ds = p * dp
        dk_acc = tl.dot(ds.to(DOT), q_tile, dk_acc, input_precision="tf32x3")
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["T", "S", "per_row", "window"])
def key_gradient_kernel(
    q, k, v, d_o, statistics, dk, dv, scale, window, cu_seqlens_q, cu_seqlens_k, table, T, S, per_row,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PACK: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dk (DK) and dv (DV) of a block of keys, summed over the query heads that share them."""
    slots = tl.num_programs(0) // HK
    slot = tl.program_id(0) % slots  # of a causal triangle, the keys that most queries see first
    key_head = tl.program_id(0) // slots
    n, first, count = locate(slot, cu_seqlens_k, table, S, per_row, BN, RAGGED)
    if count <= 0:
        return
    start, keys = sequence_span(n, cu_seqlens_k, S, RAGGED)
    query_start, queries = sequence_span(n, cu_seqlens_q, T, RAGGED)
    j = tl.arange(0, BN)
    d = tl.arange(0, BD)
    shift = keys - queries
    begin_key = (first - start).to(tl.int32)
    key = begin_key + j
    low, all_low, all_high, high = queries_seeing(begin_key - shift, count, queries, window, CAUSAL, WINDOWED)
    begin, end = stretches(low, all_low, all_high, high, BM // PACK)
    used = j < count
    if WINDOWED:
        used &= key > shift - window  # keys in front of the first query's window may hold anything
    k_tile = load_tile(row_pointer(k, first, key_head, HK, D), j, HK * D, d, D, BD, used, True).to(DOT)  # [BN, BD]
    v_tile = load_tile(row_pointer(v, first, key_head, HK, D), j, HK * D, d, D, BD, used, True).to(DOT)  # [BN, BD]
    c = scale * LOG2E
    dk_acc = tl.zeros((BN, BD), tl.float32)
    dv_acc = tl.zeros((BN, BD), tl.float32)
    group: tl.constexpr = HQ // HK
    for part in range(0, group, PACK):
        head = key_head * group + part
        q_at = row_pointer(q, query_start, head, HQ, D)
        d_at = row_pointer(d_o, query_start, head, HQ, D)
        pairs_at = statistics + row_index(n, query_start, head, T, HQ, RAGGED) * 4
        if CAUSAL:
            for at in tl.range(low, begin, BM // PACK):
                dk_acc, dv_acc = key_step(
                    k_tile, v_tile, dk_acc, dv_acc, q_at, d_at, pairs_at, at, high, shift, key, c, window, T,
                    HQ, D, BM, BD, PACK, DOT, CAUSAL, WINDOWED, DK, DV, True,
                )  # fmt: skip
        for at in tl.range(begin, end, BM // PACK):
            dk_acc, dv_acc = key_step(
                k_tile, v_tile, dk_acc, dv_acc, q_at, d_at, pairs_at, at, high, shift, key, c, window, T,
                HQ, D, BM, BD, PACK, DOT, CAUSAL, WINDOWED, DK, DV, False,
            )  # fmt: skip
        for at in tl.range(end, high, BM // PACK):
            dk_acc, dv_acc = key_step(
                k_tile, v_tile, dk_acc, dv_acc, q_at, d_at, pairs_at, at, high, shift, key, c, window, T,
                HQ, D, BM, BD, PACK, DOT, CAUSAL, WINDOWED, DK, DV, True,
            )  # fmt: skip
    if DK:
        store_tile(row_pointer(dk, first, key_head, HK, D), dk_acc * scale, j, HK * D, d, D, j < count)
    if DV:
        store_tile(row_pointer(dv, first, key_head, HK, D), dv_acc, j, HK * D, d, D, j < count)
