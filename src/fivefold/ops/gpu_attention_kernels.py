"""Causal attention on a GPU in Triton: one kernel forward, three backward. `gpu_attention.py` launches them.

The algorithm is that of FlashAttention-2 (arXiv:2307.08691). A query tile walks the keys that it sees with a running
maximum and sum, and no score leaves the chip. Backward recomputes the weights from the log-sum-exp: one kernel has a
query tile and walks its keys (dq), two have a key tile and walk its queries (dk, and dv). No two programs write to the
same place, so that results do not depend on their order.

Visibility is an interval. A query sees the keys from `earliest` to `latest`: from the start of its document or its
window, whichever is later, to itself or the last key. Both ends grow with the query. So the fully visible tiles of the
other side are contiguous, between partly visible ones, and only the latter compare positions. A tile may hold several
short documents.

Loops over tiles begin at 0: Triton (3.8) prefetches (`num_stages`) only in those.

Legend: X queries and Y keys of a tile, E the head size D rounded up to a power of two. `q_by`: strides of q by row,
head and token; the last is part of the program. The elements of a head are contiguous.
"""

# Calls in a kernel are inlined. A `constexpr`, and an argument that is None, is part of the program.
import triton
import triton.language as tl

# Documents and ranks choose these: a program for ones, and one for multiples of 16, would be compiled in mid-run.
kernel = triton.jit(do_not_specialize=["queries", "keys", "documents", "halvings", "offset", "window"])
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1e30)  # the maximum of no scores; finite, because -inf - -inf is NaN


@kernel
def forward(
    q, k, v, out, lse, bounds, q_by, k_by, v_by, out_by, lse_by, heads, shares, queries, keys, documents, halvings,
    offset, window, scale, cap,
    D: tl.constexpr, E: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile of queries of one head; 0 and -inf where a query sees no key."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * X  # the longest first
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    k += _place(k_by, row, head // shares)
    v += _place(v_by, row, head // shares)
    q_XE = _load(q + _place(q_by, row, head), q_by[2], first, queries, D, E, X, True)
    earliest_X, latest_X = _sees(first, queries, keys, bounds, documents, halvings, offset, window, X)
    begin, left, whole, end = _tiles(earliest_X, latest_X, Y)
    out_XE = tl.zeros([X, E], tl.float32)
    total_X, largest_X = tl.zeros([X], tl.float32), tl.full([X], LEAST, tl.float32)
    for PARTLY in tl.static_range(2):
        for each in range(_count(left, whole, end, PARTLY)):
            out_XE, total_X, largest_X = _attend(
                out_XE, total_X, largest_X, q_XE, k, v, k_by[2], v_by[2], begin + _tile(each, left,
                whole, PARTLY) * Y, keys, earliest_X, latest_X, scale, cap, D, E, Y, PARTLY,
            )  # fmt: skip
    seen_X = total_X > 0
    total_X = tl.where(seen_X, total_X, 1.0)
    _store(out + _place(out_by, row, head), out_by[2], first, queries, out_XE / total_X[:, None], D, E, X)
    lse_X = tl.where(seen_X, (largest_X + tl.log2(total_X)) / LOG2_E, float("-inf"))
    _store_each(lse + _place(lse_by, row, head), lse_by[2], first, queries, lse_X, X)


@triton.jit
def _attend(
    out_XE, total_X, largest_X, q_XE, k, v, k_by, v_by, first, keys, earliest_X, latest_X, scale, cap,
    D: tl.constexpr, E: tl.constexpr, Y: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the running results of `forward`."""
    k_YE = _load(k, k_by, first, keys, D, E, Y, PARTLY)
    score_XY = _scores(tl.dot(q_XE, tl.trans(k_YE), input_precision="ieee"), scale, cap)
    if PARTLY:
        key_Y = first + tl.arange(0, Y)
        seen_XY = (key_Y[None, :] >= earliest_X[:, None]) & (key_Y[None, :] <= latest_X[:, None])
        score_XY = tl.where(seen_XY, score_XY, float("-inf"))
    more_X = tl.maximum(largest_X, tl.max(score_XY, 1))
    weight_XY, kept_X = tl.exp2(score_XY - more_X[:, None]), tl.exp2(largest_X - more_X)
    v_YE = _load(v, v_by, first, keys, D, E, Y, PARTLY)
    out_XE = tl.dot(weight_XY.to(v_YE.dtype), v_YE, out_XE * kept_X[:, None], input_precision="ieee")
    return out_XE, total_X * kept_X + tl.sum(weight_XY, 1), more_X


@kernel
def backward_of_queries(
    grad, q, k, v, out, lse, given, dq, bounds, grad_by, q_by, k_by, v_by, out_by, lse_by, given_by, dq_by, heads,
    shares, queries, keys, documents, halvings, offset, window, scale, cap,
    D: tl.constexpr, E: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries of one head. Writes sum(dO * O) of each query to `given`, for `backward_of_keys`."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * X
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    k += _place(k_by, row, head // shares)
    v += _place(v_by, row, head // shares)
    grad_XE = _load(grad + _place(grad_by, row, head), grad_by[2], first, queries, D, E, X, True)
    out_XE = _load(out + _place(out_by, row, head), out_by[2], first, queries, D, E, X, True)
    given_X = tl.sum(grad_XE.to(tl.float32) * out_XE.to(tl.float32), 1)
    _store_each(given + _place(given_by, row, head), given_by[2], first, queries, given_X, X)
    q_XE = _load(q + _place(q_by, row, head), q_by[2], first, queries, D, E, X, True)
    lse_X = _load_each(lse + _place(lse_by, row, head), lse_by[2], first, queries, X) * LOG2_E
    earliest_X, latest_X = _sees(first, queries, keys, bounds, documents, halvings, offset, window, X)
    begin, left, whole, end = _tiles(earliest_X, latest_X, Y)
    dq_XE = tl.zeros([X, E], tl.float32)
    for PARTLY in tl.static_range(2):
        for each in range(_count(left, whole, end, PARTLY)):
            dq_XE = _add_dq(
                dq_XE, grad_XE, q_XE, k, v, k_by[2], v_by[2], given_X, lse_X, begin + _tile(each,
                left, whole, PARTLY) * Y, keys, earliest_X, latest_X, scale, cap, D, E, Y, PARTLY,
            )  # fmt: skip
    _store(dq + _place(dq_by, row, head), dq_by[2], first, queries, dq_XE * scale, D, E, X)


@triton.jit
def _add_dq(
    dq_XE, grad_XE, q_XE, k, v, k_by, v_by, given_X, lse_X, first, keys, earliest_X, latest_X, scale, cap,
    D: tl.constexpr, E: tl.constexpr, Y: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to dq / scale."""
    k_YE, v_YE = _load(k, k_by, first, keys, D, E, Y, PARTLY), _load(v, v_by, first, keys, D, E, Y, PARTLY)
    score_XY = _scores(tl.dot(q_XE, tl.trans(k_YE), input_precision="ieee"), scale, cap)
    weight_XY = tl.exp2(score_XY - lse_X[:, None])
    if PARTLY:
        key_Y = first + tl.arange(0, Y)
        seen_XY = (key_Y[None, :] >= earliest_X[:, None]) & (key_Y[None, :] <= latest_X[:, None])
        weight_XY = tl.where(seen_XY, weight_XY, 0.0)
    dweight_XY = tl.dot(grad_XE, tl.trans(v_YE), input_precision="ieee")
    dscore_XY = weight_XY * (dweight_XY - given_X[:, None]) * _slope(score_XY, cap)
    return tl.dot(dscore_XY.to(k_YE.dtype), k_YE, dq_XE, input_precision="ieee")


@kernel
def backward_of_keys(
    grad, q, k, v, lse, given, dk, bounds, grad_by, q_by, k_by, v_by, lse_by, given_by, dk_by, heads, shares, queries,
    keys, documents, halvings, offset, window, scale, cap,
    D: tl.constexpr, E: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """dk of a tile of keys, summed over the `shares` query heads that share them. `heads`: of keys."""
    first = tl.program_id(0) * Y
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    k_YE = _load(k + _place(k_by, row, head), k_by[2], first, keys, D, E, Y, True)
    v_YE = _load(v + _place(v_by, row, head), v_by[2], first, keys, D, E, Y, True)
    earliest_Y, latest_Y = _seen_by(first, queries, keys, bounds, documents, halvings, offset, window, Y)
    begin, left, whole, end = _tiles(earliest_Y, latest_Y, X)
    dk_YE = tl.zeros([Y, E], tl.float32)
    for one in range(head * shares, head * shares + shares):
        grad_1, q_1 = grad + _place(grad_by, row, one), q + _place(q_by, row, one)
        lse_1, given_1 = lse + _place(lse_by, row, one), given + _place(given_by, row, one)
        for PARTLY in tl.static_range(2):
            for each in range(_count(left, whole, end, PARTLY)):
                dk_YE = _add_dk(
                    dk_YE, grad_1, q_1, k_YE, v_YE, lse_1, given_1, grad_by[2], q_by[2],
                    lse_by[2], given_by[2], begin + _tile(each, left, whole, PARTLY) * X, queries,
                    earliest_Y, latest_Y, scale, cap, D, E, X, PARTLY,
                )  # fmt: skip
    _store(dk + _place(dk_by, row, head), dk_by[2], first, keys, dk_YE * scale, D, E, Y)


@triton.jit
def _add_dk(
    dk_YE, grad, q, k_YE, v_YE, lse, given, grad_by, q_by, lse_by, given_by, first, queries, earliest_Y, latest_Y,
    scale, cap, D: tl.constexpr, E: tl.constexpr, X: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries to dk / scale. Scores are transposed, as the product needs them."""
    q_XE = _load(q, q_by, first, queries, D, E, X, PARTLY)
    score_YX, weight_YX = _weights(k_YE, q_XE, lse, lse_by, first, queries, earliest_Y, latest_Y, scale, cap, X, PARTLY)
    grad_XE = _load(grad, grad_by, first, queries, D, E, X, PARTLY)
    dweight_YX = tl.dot(v_YE, tl.trans(grad_XE), input_precision="ieee")
    given_X = _load_each(given, given_by, first, queries, X)
    dscore_YX = weight_YX * (dweight_YX - given_X[None, :]) * _slope(score_YX, cap)
    return tl.dot(dscore_YX.to(q_XE.dtype), q_XE, dk_YE, input_precision="ieee")


@kernel
def backward_of_values(
    grad, q, k, lse, dv, bounds, grad_by, q_by, k_by, lse_by, dv_by, heads, shares, queries, keys, documents, halvings,
    offset, window, scale, cap,
    D: tl.constexpr, E: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """dv, like `backward_of_keys` for dk. One kernel for both would need more registers than a thread has, for heads of
    256 on Hopper."""
    first = tl.program_id(0) * Y
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    k_YE = _load(k + _place(k_by, row, head), k_by[2], first, keys, D, E, Y, True)
    earliest_Y, latest_Y = _seen_by(first, queries, keys, bounds, documents, halvings, offset, window, Y)
    begin, left, whole, end = _tiles(earliest_Y, latest_Y, X)
    dv_YE = tl.zeros([Y, E], tl.float32)
    for one in range(head * shares, head * shares + shares):
        grad_1, q_1 = grad + _place(grad_by, row, one), q + _place(q_by, row, one)
        lse_1 = lse + _place(lse_by, row, one)
        for PARTLY in tl.static_range(2):
            for each in range(_count(left, whole, end, PARTLY)):
                dv_YE = _add_dv(
                    dv_YE, grad_1, q_1, k_YE, lse_1, grad_by[2], q_by[2], lse_by[2], begin +
                    _tile(each, left, whole, PARTLY) * X, queries, earliest_Y, latest_Y, scale,
                    cap, D, E, X, PARTLY,
                )  # fmt: skip
    _store(dv + _place(dv_by, row, head), dv_by[2], first, keys, dv_YE, D, E, Y)


@triton.jit
def _add_dv(
    dv_YE, grad, q, k_YE, lse, grad_by, q_by, lse_by, first, queries, earliest_Y, latest_Y, scale, cap,
    D: tl.constexpr, E: tl.constexpr, X: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries to dv."""
    q_XE = _load(q, q_by, first, queries, D, E, X, PARTLY)
    _, weight_YX = _weights(k_YE, q_XE, lse, lse_by, first, queries, earliest_Y, latest_Y, scale, cap, X, PARTLY)
    grad_XE = _load(grad, grad_by, first, queries, D, E, X, PARTLY)
    return tl.dot(weight_YX.to(grad_XE.dtype), grad_XE, dv_YE, input_precision="ieee")


@triton.jit
def _weights(
    k_YE, q_XE, lse, lse_by, first, queries, earliest_Y, latest_Y, scale, cap,
    X: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """Scores and weights of a tile, transposed."""
    lse_X = _load_each(lse, lse_by, first, queries, X) * LOG2_E
    score_YX = _scores(tl.dot(k_YE, tl.trans(q_XE), input_precision="ieee"), scale, cap)
    weight_YX = tl.exp2(score_YX - lse_X[None, :])
    if PARTLY:
        query_X = first + tl.arange(0, X)
        seen_YX = (query_X[None, :] >= earliest_Y[:, None]) & (query_X[None, :] <= latest_Y[:, None])
        weight_YX = tl.where(seen_YX, weight_YX, 0.0)
    return score_YX, weight_YX


# ---- scores ----------------------------------------------------------------------------------------------------------


@triton.jit
def _scores(product, scale, cap):
    """Scores times log2(e), from the products of queries and keys. tanh(x) is 1 - 2 / (1 + exp(2 x)), which is exact
    to 1e-7 and has no overflow: the exponential of a large x is infinite, and the quotient 0."""
    if cap is None:
        return product * (scale * LOG2_E)
    else:
        return (1.0 - 2.0 / (1.0 + tl.exp2(product * (scale * (2.0 * LOG2_E) / cap)))) * (cap * LOG2_E)


@triton.jit
def _slope(score, cap):
    """Derivative of the cap, 1 - tanh^2, at a `score` from `_scores`."""
    if cap is None:
        return 1.0
    else:
        tanh = score * (1.0 / (cap * LOG2_E))
        return 1.0 - tanh * tanh


# ---- visibility ------------------------------------------------------------------------------------------------------


@triton.jit
def _sees(first, queries, keys, bounds, documents, halvings, offset, window, X: tl.constexpr):
    """First and last key that each query of a tile sees. Positions past the last query repeat it."""
    query_X = tl.minimum(first + tl.arange(0, X), queries - 1)
    earliest_X = tl.maximum(query_X + offset - window + 1, 0)
    if bounds is not None:
        begin_X, _ = _document(query_X, bounds, documents, halvings)
        earliest_X = tl.maximum(earliest_X, begin_X)
    return earliest_X, tl.minimum(query_X + offset, keys - 1)


@triton.jit
def _seen_by(first, queries, keys, bounds, documents, halvings, offset, window, Y: tl.constexpr):
    """First and last query that sees each key of a tile. Positions past the last key repeat it."""
    key_Y = tl.minimum(first + tl.arange(0, Y), keys - 1)
    latest_Y = tl.minimum(key_Y - offset + window, queries) - 1
    if bounds is not None:
        _, end_Y = _document(key_Y, bounds, documents, halvings)
        latest_Y = tl.minimum(latest_Y, end_Y - 1)
    return tl.maximum(key_Y - offset, 0), latest_Y


@triton.jit
def _document(token, bounds, documents, halvings):
    """Begin and end of the documents of these tokens. Searches the last bound that is not after a token by halves of
    `documents` <= 2 ** `halvings`."""
    at = tl.zeros_like(token)
    for half in range(halvings):
        further = at + (1 << (halvings - 1 - half))
        is_before = tl.load(bounds + tl.minimum(further, documents)) <= token
        at = tl.where((further < documents) & is_before, further, at)
    return tl.load(bounds + at), tl.load(bounds + at + 1)


@triton.jit
def _tiles(earliest, latest, SIZE: tl.constexpr):
    """Position of the first tile of the other side; number of the first and the last + 1 that are fully visible, and of
    the last + 1. The ranges are empty if nothing is visible."""
    begin = tl.min(earliest)
    end = tl.maximum(tl.cdiv(tl.max(latest) + 1 - begin, SIZE), 0)
    left = tl.minimum(tl.cdiv(tl.max(earliest) - begin, SIZE), end)
    whole = tl.maximum((tl.min(latest) + 1 - begin) // SIZE, left)
    return begin, left, whole, end


@triton.jit
def _count(left, whole, end, PARTLY: tl.constexpr):
    """Number of partly visible tiles (`PARTLY`), or of fully visible ones."""
    return left + end - whole if PARTLY else whole - left


@triton.jit
def _tile(each, left, whole, PARTLY: tl.constexpr):
    """Number of the `each`th of these tiles."""
    return tl.where(each < left, each, each - left + whole) if PARTLY else left + each


# ---- memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def _place(by, row, head):
    """Offset of the first token of a row's head from the first element of its tensor."""
    return tl.cast(row, tl.int64) * by[0] + tl.cast(head, tl.int64) * by[1]


@triton.jit
def _load(at, by, first, tokens, D: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PARTLY: tl.constexpr):
    """[SIZE, E]: the tokens from `first` on, with zeros past D. `PARTLY`: with zeros past the last token, too."""
    token, element = tl.arange(0, SIZE)[:, None], tl.arange(0, E)[None, :]
    at += tl.cast(first, tl.int64) * by
    if PARTLY:
        is_there = first + token < tokens
        if D < E:
            is_there = is_there & (element < D)
        return tl.load(at + token * by + element, mask=is_there, other=0.0)
    elif D < E:
        return tl.load(at + token * by + element, mask=element < D, other=0.0)
    else:
        return tl.load(at + token * by + element)


@triton.jit
def _store(at, by, first, tokens, values, D: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr):
    """The twin of `_load`."""
    token, element = tl.arange(0, SIZE)[:, None], tl.arange(0, E)[None, :]
    is_there = first + token < tokens
    if D < E:
        is_there = is_there & (element < D)
    tl.store(at + tl.cast(first, tl.int64) * by + token * by + element, values.to(at.dtype.element_ty), mask=is_there)


@triton.jit
def _load_each(at, by, first, tokens, SIZE: tl.constexpr):
    """[SIZE]: one number per token from `first` on."""
    token = first + tl.arange(0, SIZE)
    return tl.load(at + token.to(tl.int64) * by, mask=token < tokens, other=0.0)


@triton.jit
def _store_each(at, by, first, tokens, values, SIZE: tl.constexpr):
    """The twin of `_load_each`."""
    token = first + tl.arange(0, SIZE)
    tl.store(at + token.to(tl.int64) * by, values, mask=token < tokens)
