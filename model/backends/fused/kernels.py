"""Triton kernels of a pass over M nodes; the README of this folder has the rules by which rows keep their bits.

Activations are [M, K] in half precision, weights [N, K] as of `nn.Linear`. A product is weight tile times nodes, so
that the weight is the tall operand. Its result is partial sums [S, M, N] in float32, which the next kernel adds in
order. Keys and values of a layer are [B, heads, rows, D] with any strides.

`DEPENDENT`: whether a kernel is launched before the one in front of it has ended, and waits for it itself.
"""

import triton
import triton.language as tl

# fmt: off

CAN_DEPEND = hasattr(tl.extra.cuda, "gdc_wait")


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _let_next_begin(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit(do_not_specialize=["N", "LAST"])
def places_kernel(
    STARTS, BASES, DEPTHS, SEES, POSITIONS, ENDS, ROWS, TAIL_ROWS, N, LAST, DEEPEST: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Find each node's position, the end of its committed part, the row that it writes, and the rows of its tail.

    A program is a node: node i of the N of sequence b, which has BASES[b] committed rows and writes from row
    STARTS[b] on. SEES [B, N, N] are bytes.
    """
    m = tl.program_id(0)
    b = m // N
    _wait(DEPENDENT)
    base = tl.load(BASES + b).to(tl.int32)
    start = tl.load(STARTS + b).to(tl.int32)
    position = base + tl.load(DEPTHS + m).to(tl.int32)
    end = tl.maximum(position - DEEPEST, 0) // 16 * 16
    tl.store(POSITIONS + m, position)
    tl.store(ENDS + m, end)
    tl.store(ROWS + m, tl.minimum(start + m % N, LAST))
    at = tl.arange(0, T)
    row = tl.where(end + at < base, end + at, -1)
    tl.store(TAIL_ROWS + m * T + at, row, mask=(end + at < base) | (end + at > position))
    other = tl.arange(0, BN)
    sees = tl.load(SEES + m * N + other, mask=other < N, other=0)
    place = base + tl.load(DEPTHS + b * N + other, mask=other < N, other=0).to(tl.int32) - end
    row = tl.minimum(start + other, LAST)
    tl.store(TAIL_ROWS + m * T + place, row, mask=(sees != 0) & (place >= 0) & (place < T))


@triton.jit
def _normed(x, GAIN, at, ok, count, epsilon, HAS_GAIN: tl.constexpr, FROM_ONE: tl.constexpr):
    """Return the root mean square norm of float32 numbers [BK], times its gain, in float32."""
    x = x / tl.sqrt(tl.sum(x * x, 0) / count + epsilon)
    if HAS_GAIN:
        gain = tl.load(GAIN + at, mask=ok, other=0.0).to(tl.float32)
        x = x * (gain + 1.0) if FROM_ONE else x * gain
    return x


@triton.jit
def residual_kernel(
    X, PARTS, BIAS, AFTER, BEFORE, H, part_stride, K, after_epsilon, before_epsilon,
    S: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_AFTER: tl.constexpr, HAS_BEFORE: tl.constexpr,
    AFTER_GAIN: tl.constexpr, BEFORE_GAIN: tl.constexpr, FROM_ONE: tl.constexpr, BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add a branch to the residual stream X [M, K], and norm the sum for the next branch into H.

    The branch is the sum of S parts, with a bias and a norm of its own if it has them; S is 0 before the first one.
    """
    dtype: tl.constexpr = X.dtype.element_ty
    m = tl.program_id(0)
    at = tl.arange(0, BK)
    ok = at < K
    _let_next_begin(DEPENDENT)
    _wait(DEPENDENT)
    x = tl.load(X + m * K + at, mask=ok, other=0.0)
    if S > 0:
        branch = tl.load(PARTS + m * K + at, mask=ok, other=0.0)
        for s in tl.static_range(1, S):
            branch += tl.load(PARTS + s * part_stride + m * K + at, mask=ok, other=0.0)
        if HAS_BIAS:
            branch += tl.load(BIAS + at, mask=ok, other=0.0).to(tl.float32)
        branch = branch.to(dtype).to(tl.float32)
        if HAS_AFTER:
            branch = _normed(branch, AFTER, at, ok, K, after_epsilon, AFTER_GAIN, FROM_ONE)
            branch = branch.to(dtype).to(tl.float32)
        x = (x.to(tl.float32) + branch).to(dtype)
        tl.store(X + m * K + at, x, mask=ok)
    if HAS_BEFORE:
        normed = _normed(x.to(tl.float32), BEFORE, at, ok, K, before_epsilon, BEFORE_GAIN, FROM_ONE)
        x = normed.to(dtype)
    tl.store(H + m * K + at, x, mask=ok)


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    W, X, OUT, N, K, KS, M, part_stride, BN: tl.constexpr, BK: tl.constexpr, NT1: tl.constexpr,
    NT2: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Multiply: OUT[part, m, n] = the sum over the part's KS columns of W[n, k] X[m, k].

    Grid: (tiles of BN outputs, parts, tiles of NT1 + NT2 nodes). X has rows for whole tiles of nodes.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    first = tl.program_id(2) * (NT1 + NT2)
    k = tl.arange(0, BK)
    begin = part * KS
    end = tl.minimum(begin + KS, K)
    ok = n < N
    _wait(DEPENDENT)
    w_at = W + n.to(tl.int64)[:, None] * K + (begin + k)[None, :]
    m1 = first + tl.arange(0, NT1)
    x1_at = X + m1[:, None] * K + (begin + k)[None, :]
    sum1 = tl.zeros([BN, NT1], dtype=tl.float32)
    if NT2 > 0:
        m2 = first + NT1 + tl.arange(0, NT2)
        x2_at = X + m2[:, None] * K + (begin + k)[None, :]
        sum2 = tl.zeros([BN, NT2], dtype=tl.float32)
    for at in range(begin, end, BK):
        if EVEN:
            w = tl.load(w_at)
            x1 = tl.load(x1_at)
        else:
            left = (at + k < end)[None, :]
            w = tl.load(w_at, mask=left & ok[:, None], other=0.0)
            x1 = tl.load(x1_at, mask=left, other=0.0)
        sum1 = tl.dot(w, tl.trans(x1), sum1)
        if NT2 > 0:
            x2 = tl.load(x2_at) if EVEN else tl.load(x2_at, mask=left, other=0.0)
            sum2 = tl.dot(w, tl.trans(x2), sum2)
            x2_at += BK
        w_at += BK
        x1_at += BK
    _let_next_begin(DEPENDENT)
    out = OUT + part * part_stride
    kind: tl.constexpr = OUT.dtype.element_ty
    tl.store(
        out + m1.to(tl.int64)[None, :] * N + n[:, None],
        sum1.to(kind),
        mask=(m1 < M)[None, :] & ok[:, None],
    )
    if NT2 > 0:
        tl.store(
            out + m2.to(tl.int64)[None, :] * N + n[:, None],
            sum2.to(kind),
            mask=(m2 < M)[None, :] & ok[:, None],
        )


@triton.jit
def _gated(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):
    gate = gate.to(dtype).to(tl.float32)
    if GELU:  # by tanh
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = 0.5 * gate * (1.0 + _tanh(inner))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return (gate.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["M"])
def gated_kernel(
    W, X, BIAS, OUT, N, K, M, BN: tl.constexpr, BK: tl.constexpr, NT1: tl.constexpr,
    NT2: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Multiply with the gate's rows W[:N] and the rows behind them, W[N:]: OUT = act(gate) * up, [M, N]."""
    dtype: tl.constexpr = OUT.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * (NT1 + NT2)
    k = tl.arange(0, BK)
    ok = n < N
    _wait(DEPENDENT)
    gate_at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    up_at = W + (N + n).to(tl.int64)[:, None] * K + k[None, :]
    m1 = first + tl.arange(0, NT1)
    x1_at = X + m1[:, None] * K + k[None, :]
    gate1 = tl.zeros([BN, NT1], dtype=tl.float32)
    up1 = tl.zeros([BN, NT1], dtype=tl.float32)
    if NT2 > 0:
        m2 = first + NT1 + tl.arange(0, NT2)
        x2_at = X + m2[:, None] * K + k[None, :]
        gate2 = tl.zeros([BN, NT2], dtype=tl.float32)
        up2 = tl.zeros([BN, NT2], dtype=tl.float32)
    for at in range(0, K, BK):
        if EVEN:
            gate = tl.load(gate_at)
            up = tl.load(up_at)
            x1 = tl.load(x1_at)
        else:
            left = (at + k < K)[None, :]
            gate = tl.load(gate_at, mask=left & ok[:, None], other=0.0)
            up = tl.load(up_at, mask=left & ok[:, None], other=0.0)
            x1 = tl.load(x1_at, mask=left, other=0.0)
        gate1 = tl.dot(gate, tl.trans(x1), gate1)
        up1 = tl.dot(up, tl.trans(x1), up1)
        if NT2 > 0:
            x2 = tl.load(x2_at) if EVEN else tl.load(x2_at, mask=left, other=0.0)
            gate2 = tl.dot(gate, tl.trans(x2), gate2)
            up2 = tl.dot(up, tl.trans(x2), up2)
            x2_at += BK
        gate_at += BK
        up_at += BK
        x1_at += BK
    _let_next_begin(DEPENDENT)
    if HAS_BIAS:
        gate_bias = tl.load(BIAS + n, mask=ok, other=0.0).to(tl.float32)[:, None]
        up_bias = tl.load(BIAS + N + n, mask=ok, other=0.0).to(tl.float32)[:, None]
        gate1 += gate_bias
        up1 += up_bias
        if NT2 > 0:
            gate2 += gate_bias
            up2 += up_bias
    tl.store(
        OUT + m1[None, :] * N + n[:, None],
        _gated(gate1, up1, dtype, GELU),
        mask=(m1 < M)[None, :] & ok[:, None],
    )
    if NT2 > 0:
        tl.store(
            OUT + m2[None, :] * N + n[:, None],
            _gated(gate2, up2, dtype, GELU),
            mask=(m2 < M)[None, :] & ok[:, None],
        )


@triton.jit
def _head_rows(PARTS, BIAS, at, ok, part_stride, S: tl.constexpr, HAS_BIAS: tl.constexpr, W):
    """Return sums of parts, plus their bias: `at` are places in a part, of which column at % W has the bias."""
    sums = tl.load(PARTS + at, mask=ok, other=0.0)
    for s in tl.static_range(1, S):
        sums += tl.load(PARTS + s * part_stride + at, mask=ok, other=0.0)
    if HAS_BIAS:
        sums += tl.load(BIAS + at % W, mask=ok, other=0.0).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["N", "b_stride", "part_stride"])
def rotate_kernel(
    PARTS, BIAS, Q_GAIN, K_GAIN, COS, SIN, POSITIONS, ROWS, Q, KEYS, VALUES, N, part_stride,
    b_stride, row_stride, head_stride, q_epsilon, k_epsilon, H: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, HB: tl.constexpr, S: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, FROM_ONE: tl.constexpr, INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rotate the first R of D numbers of queries and keys, and write Q [M, H, D] and the rows of the cache.

    Grid: (nodes, blocks of HB heads: of queries, then keys, then values). NORM: 0 none, 1 a norm of each head, 2 of
    all heads of a node together, which must be one block. COS, SIN: [positions, R / 2], float32.
    """
    dtype: tl.constexpr = Q.dtype.element_ty
    W: tl.constexpr = (H + 2 * KV) * D
    QB: tl.constexpr = (H + HB - 1) // HB
    KB: tl.constexpr = (KV + HB - 1) // HB
    m = tl.program_id(0)
    block = tl.program_id(1)
    of_q = block < QB
    of_k = (block >= QB) & (block < QB + KB)
    first = tl.where(of_q, block, tl.where(of_k, block - QB, block - QB - KB)) * HB
    count = tl.where(of_q, H, KV)
    before = tl.where(of_q, 0, tl.where(of_k, H, H + KV))
    head = (first + tl.arange(0, HB))[:, None]
    i = tl.arange(0, BD)[None, :]
    ok = (head < count) & (i < D)
    for_q = ok & (head * 0 + block < QB)
    for_v = ok & (head * 0 + block >= QB + KB)
    for_k = ok & (head * 0 + block >= QB) & (head * 0 + block < QB + KB)
    if INTERLEAVED:
        partner = i ^ 1
        pair = i // 2
        is_first = i % 2 == 0
    else:
        partner = tl.where(i < R // 2, i + R // 2, i - R // 2)
        pair = i % (R // 2)
        is_first = i < R // 2
    turns = i < R
    partner = tl.where(turns, partner, i)
    _let_next_begin(DEPENDENT)
    _wait(DEPENDENT)
    column = m * W + before * D + head * D
    a = _head_rows(PARTS, BIAS, column + i, ok, part_stride, S, HAS_BIAS, W).to(dtype)
    row = tl.load(ROWS + m)
    if block < QB + KB:
        o = _head_rows(PARTS, BIAS, column + partner, ok, part_stride, S, HAS_BIAS, W).to(dtype)
        a = a.to(tl.float32)
        o = o.to(tl.float32)
        if NORM > 0:
            epsilon = tl.where(of_q, q_epsilon, k_epsilon)
            if NORM == 1:
                mean = tl.sum(a * a, 1)[:, None] / D
                gain_at = i
                partner_at = partner
            else:
                mean = tl.sum(tl.sum(a * a, 1), 0) / (count * D)
                gain_at = head * D + i
                partner_at = head * D + partner
            root = tl.sqrt(mean + epsilon)
            gain = tl.load(Q_GAIN + gain_at, mask=for_q, other=0.0).to(tl.float32)
            gain += tl.load(K_GAIN + gain_at, mask=for_k, other=0.0).to(tl.float32)
            other = tl.load(Q_GAIN + partner_at, mask=for_q, other=0.0).to(tl.float32)
            other += tl.load(K_GAIN + partner_at, mask=for_k, other=0.0).to(tl.float32)
            if FROM_ONE:
                gain += 1.0
                other += 1.0
            a = (a / root * gain).to(dtype).to(tl.float32)
            o = (o / root * other).to(dtype).to(tl.float32)
        position = tl.load(POSITIONS + m)
        cos = tl.load(COS + position * (R // 2) + pair, mask=turns, other=1.0)
        sin = tl.load(SIN + position * (R // 2) + pair, mask=turns, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        a = tl.fma(a, tl.broadcast_to(cos, [HB, BD]), o * sin).to(dtype)
    in_cache = (m // N).to(tl.int64) * b_stride + row.to(tl.int64) * row_stride + head * head_stride
    tl.store(Q + (m * H + head) * D + i, a, mask=for_q)
    tl.store(KEYS + in_cache + i, a, mask=for_k)
    tl.store(VALUES + in_cache + i, a, mask=for_v)


@triton.jit(do_not_specialize=["M", "N", "b_stride"])
def committed_kernel(
    Q, KEYS, VALUES, SUMS, LARGEST, TOTALS, POSITIONS, ENDS, M, N, b_stride, row_stride,
    head_stride, scale, window, softcap, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr, NT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Attend to committed rows: of each node's positions before its end, SPLIT positions a program.

    Grid: (splits, key heads, sequences * tiles of NT rows), a row being a node and a head of the group.
    """
    G: tl.constexpr = H // KV
    split = tl.program_id(0)
    kv = tl.program_id(1)
    tiles = (N * G + NT - 1) // NT
    b = tl.program_id(2) // tiles
    row = tl.program_id(2) % tiles * NT + tl.arange(0, NT)
    valid = row // G < N
    m = b * N + row // G
    head = kv * G + row % G
    d = tl.arange(0, BD)
    t = tl.arange(0, BT)
    base = b.to(tl.int64) * b_stride + kv * head_stride
    _wait(DEPENDENT)
    end = tl.load(ENDS + m, mask=valid, other=0)
    begin = split * SPLIT
    last = tl.minimum(tl.max(end, 0), begin + SPLIT)
    seen = tl.zeros([NT], dtype=tl.int32)
    if HAS_WINDOW:
        position = tl.load(POSITIONS + m, mask=valid, other=0)
        seen = tl.maximum(position - window + 1, 0)
        begin = tl.maximum(begin, tl.min(tl.where(valid, seen, 2147483647), 0) // BT * BT)
    if begin < last:
        q = tl.load(
            Q + (m * H + head)[:, None] * D + d[None, :],
            mask=valid[:, None] & (d < D)[None, :],
            other=0.0,
        )
        q = tl.trans(q)
        largest = tl.full([NT], -1.0e30, dtype=tl.float32)
        total = tl.zeros([NT], dtype=tl.float32)
        sums = tl.zeros([BD, NT], dtype=tl.float32)
        for at in range(begin, last, BT):
            rows = at + t
            there = (rows < last)[:, None] & (d < D)[None, :]
            place = base + rows.to(tl.int64)[:, None] * row_stride + d[None, :]
            keys = tl.load(KEYS + place, mask=there, other=0.0)
            values = tl.load(VALUES + place, mask=there, other=0.0)
            score = tl.dot(keys, q) * scale
            if HAS_SOFTCAP:
                score = softcap * _tanh(score / softcap)
            ok = (rows[:, None] < end[None, :]) & (rows[:, None] >= seen[None, :])
            score = tl.where(ok, score, -1.0e30)
            now = tl.maximum(largest, tl.max(score, 0))
            share = tl.exp(largest - now)
            weight = tl.where(ok, tl.exp(score - now[None, :]), 0.0)
            total = tl.fma(total, share, tl.sum(weight, 0))
            weight = weight.to(VALUES.dtype.element_ty)
            sums = tl.dot(tl.trans(values), weight, sums * share[None, :])
            largest = now
        out = (split * M + m) * H + head
        place = SUMS + out.to(tl.int64)[None, :] * D + d[:, None]
        tl.store(place, sums, mask=valid[None, :] & (d < D)[:, None])
        tl.store(LARGEST + out, largest, mask=valid)
        tl.store(TOTALS + out, total, mask=valid)
    _let_next_begin(DEPENDENT)


@triton.jit(do_not_specialize=["M", "N", "b_stride"])
def tail_kernel(
    Q, KEYS, VALUES, SUMS, LARGEST, TOTALS, POSITIONS, ENDS, TAIL_ROWS, OUT, M, N, b_stride,
    row_stride, head_stride, scale, window, softcap, H: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, T: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Join a row's splits, AT_ONCE of which are loaded together, then attend to its last positions, row by row.

    Grid: (nodes, heads).
    """
    m = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    t = tl.arange(0, T)
    base = (m // N).to(tl.int64) * b_stride + head // (H // KV) * head_stride
    _let_next_begin(DEPENDENT)
    _wait(DEPENDENT)
    rows = tl.load(TAIL_ROWS + m * T + t)
    end = tl.load(ENDS + m)
    q = tl.load(Q + (m * H + head) * D + d, mask=d < D, other=0.0).to(tl.float32)
    ok = rows >= 0
    seen = 0
    if HAS_WINDOW:
        seen = tl.maximum(tl.load(POSITIONS + m) - window + 1, 0)
        ok = ok & (end + t >= seen)
    place = base + (tl.maximum(rows, 0)[:, None] * row_stride + d[None, :])
    there = ok[:, None] & (d < D)[None, :]
    keys = tl.load(KEYS + place, mask=there, other=0.0)
    values = tl.load(VALUES + place, mask=there, other=0.0)
    largest = -1.0e30
    total = 0.0
    sums = tl.zeros([BD], dtype=tl.float32)
    # A window that begins behind them sees no split, and then none may have been written.
    splits = tl.where(seen < end, (end + SPLIT - 1) // SPLIT, 0)
    for first in range(seen // SPLIT, splits, AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            has = first + more < splits
            at = ((first + more) * M + m) * H + head
            other = tl.load(LARGEST + at, mask=has, other=-1.0e30)
            count = tl.load(TOTALS + at, mask=has, other=0.0)
            of_part = (d * 0 + first + more < splits) & (d < D)
            part = tl.load(SUMS + at.to(tl.int64) * D + d, mask=of_part, other=0.0)
            now = tl.maximum(largest, other)
            share = tl.exp(largest - now)
            theirs = tl.exp(other - now)
            sums = sums * share + part * theirs
            total = total * share + count * theirs
            largest = now
    score = tl.sum(keys.to(tl.float32) * q[None, :], 1) * scale
    if HAS_SOFTCAP:
        score = softcap * _tanh(score / softcap)
    score = tl.where(ok, score, -1.0e30)
    now = tl.maximum(largest, tl.max(score, 0))
    share = tl.exp(largest - now)
    weight = tl.where(ok, tl.exp(score - now), 0.0)
    total = total * share + tl.sum(weight, 0)
    weight = weight.to(VALUES.dtype.element_ty).to(tl.float32)
    sums = sums * share + tl.sum(values.to(tl.float32) * weight[:, None], 0)
    tl.store(OUT + (m * H + head) * D + d, (sums / total).to(OUT.dtype.element_ty), mask=d < D)
