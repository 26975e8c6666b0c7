/* Causal attention on a CPU, forward and backward, without a matrix of all scores (FlashAttention 2, Dao 2023).

   Inputs are float or bfloat16. Everything between is float, but where the CPU multiplies bfloat16: see
   `cpu_attention_bf16.h`. Vectors are those of the machine the compiler runs on.

   Legend: N documents of L queries and S keys; H query heads, G key/value heads (H / G of them share one), D head size.
   Query i stands at position `offset` + i among the keys, and sees the keys j <= that position, of these the last
   `window`. Weights are dropped as by `dropout.py`: where the product of two hashes is below `drop_below`. BQ queries
   meet BK keys at a time, whose scores stay in the first two caches.
   A product is summed in registers: MQ rows x 2 vectors of scores, or of an output MQ rows x 1 or 2, MQ / 2 rows x 4. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, MQ = 8 };
#elif defined(__AVX2__)
enum { LANES = 8, MQ = 4 };
#else
enum { LANES = 4, MQ = 4 };
#endif
enum { BQ = 64, BK = 128, TILE = 2 * LANES };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* A tensor [N, heads, length, D] whose last dimension is contiguous; strides in elements. */
typedef struct {
    void *data;
    int64_t row, head, token;
} Tensor;

typedef struct {
    const int32_t *bounds; /* [N + 1]: documents of unlike lengths, one after the other in a row; or NULL: L and S */
    int64_t documents, heads, shared, queries, keys, size; /* N, H, G, L, S, D */
    int64_t offset, window;                                /* window: 0 is none */
    float scale, softcap;                                  /* softcap: 0 is none */
    int32_t is_bf16, threads;
    Tensor query_hashes, key_hashes; /* int32 [N, 1, L] and [N, H, S + TILE]; without data nothing is dropped */
    int32_t drop_below;
    float kept_scale; /* 1 / (1 - p) */
} Shape;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE void store(float *at, vec x) { *(vec *)at = x; }
INLINE vec pick(ints where, vec x, vec y) { return (vec)((where & (ints)x) | (~where & (ints)y)); }
INLINE vec larger(vec x, vec y) { return pick(x > y, x, y); }

/* Four lanes, each the sum or the largest of a quarter: to add up all of them one by one takes longer than a row. */
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t quad_of_ints __attribute__((vector_size(16)));

INLINE float sum_of(vec x) {
    quad sum = *(const quad *)&x;
    for (int i = 4; i < LANES; i += 4) sum += *(const quad *)((const float *)&x + i);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

INLINE float max_of(vec x) { /* a NaN is passed over */
    quad max = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    for (int i = 0; i < LANES; i += 4) {
        quad y = *(const quad *)((const float *)&x + i);
        quad_of_ints is_larger = y > max;
        max = (quad)((is_larger & (quad_of_ints)y) | (~is_larger & (quad_of_ints)max));
    }
    float left = max[0] > max[1] ? max[0] : max[1], right = max[2] > max[3] ? max[2] : max[3];
    return left > right ? left : right;
}

/* e^x for x <= 88 within 2 units of the last place; 0 from -87 down, NaN of NaN. x = n ln 2 + r, and a polynomial of r. */
INLINE vec exponential(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec t = x * 1.44269504f + magic;
    vec n = t - magic;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vec result = (vec)((ints)p + (((ints)t - (ints)magic) << 23));
    return (vec)(~(x <= -87.0f) & (ints)result);
}

INLINE vec tangent(vec x) { /* tanh */
    vec small = (vec)((ints)x & 0x7fffffff);
    vec e = exponential(-2.0f * small);
    vec t = (1.0f - e) / (1.0f + e);
    vec square = x * x; /* near 0 the difference above loses digits */
    vec series = small * (1.0f - square * (0.33333333f - square * 0.13333333f));
    t = pick(small < 0.05f, series, t);
    return (vec)((ints)t | ((ints)x & (int32_t)0x80000000));
}

INLINE float from_bf16(uint16_t bits) {
    union { uint32_t bits; float value; } whole = {(uint32_t)bits << 16};
    return whole.value;
}

INLINE uint16_t to_bf16(float x) {
    union { float value; uint32_t bits; } whole = {x};
    if (x != x) return 0x7fc0;
    return (uint16_t)((whole.bits + 0x7fff + ((whole.bits >> 16) & 1)) >> 16);
}

typedef struct {
    int64_t n, first, queries, keys, offset; /* its first token in its row; L; S */
} Document;

INLINE Document document(const Shape *s, int64_t n) {
    if (!s->bounds) return (Document){n, 0, s->queries, s->keys, s->offset};
    int64_t length = s->bounds[n + 1] - s->bounds[n];
    return (Document){0, s->bounds[n], length, length, 0};
}

/* How many queries or keys it has. */
INLINE int64_t tokens(const Shape *s, int64_t n, int is_of_keys) {
    Document d = document(s, n);
    return is_of_keys ? d.keys : d.queries;
}

INLINE int64_t at(const Tensor *t, Document d, int64_t h, int64_t l) {
    return d.n * t->row + h * t->head + (d.first + l) * t->token;
}

/* Hashes by which a head drops: of a query, and of the keys from `key` on. 0 and NULL where nothing is dropped. */
INLINE uint32_t query_hash(const Shape *s, Document d, int64_t l) {
    const Tensor *t = &s->query_hashes;
    return t->data ? ((const uint32_t *)t->data)[at(t, d, 0, l)] : 0;
}
INLINE const uint32_t *key_hashes(const Shape *s, Document d, int64_t h, int64_t key) {
    const Tensor *t = &s->key_hashes;
    return t->data ? (const uint32_t *)t->data + at(t, d, h, key) : NULL;
}

/* x, with zeros where this query and these keys drop. */
INLINE vec drop(const Shape *s, uint32_t query, const uint32_t *keys, vec x) {
    ints dropped = (ints)(*(const bits *)keys * query) < s->drop_below;
    return (vec)(~dropped & (ints)x);
}

/* `count` rows from token `first`, times `scale`, as floats [rows][width]; zeros after D and after the last row. */
static void take_rows(float *to, const Shape *s, const Tensor *t, Document d, int64_t h, int64_t first,
                      int64_t count, int64_t rows, int64_t width, float scale) {
    for (int64_t i = 0; i < rows; i++, to += width) {
        int64_t size = i < count ? s->size : 0;
        if (i < count) {
            int64_t from = at(t, d, h, first + i);
            if (s->is_bf16) {
                const uint16_t *x = (const uint16_t *)t->data + from;
                for (int64_t c = 0; c < size; c++) to[c] = from_bf16(x[c]) * scale;
            } else {
                const float *x = (const float *)t->data + from;
                for (int64_t c = 0; c < size; c++) to[c] = x[c] * scale;
            }
        }
        for (int64_t c = size; c < width; c++) to[c] = 0;
    }
}

static void put_row(const Shape *s, const Tensor *t, Document d, int64_t h, int64_t l, const float *x,
                    float scale) {
    int64_t to = at(t, d, h, l);
    if (s->is_bf16) {
        uint16_t *y = (uint16_t *)t->data + to;
        for (int64_t c = 0; c < s->size; c++) y[c] = to_bf16(x[c] * scale);
    } else {
        float *y = (float *)t->data + to;
        for (int64_t c = 0; c < s->size; c++) y[c] = x[c] * scale;
    }
}

/* [rows][width] as tiles [rows / TILE][D][TILE]: what `multiply` reads one vector of keys after the other. */
static void turn(float *to, const float *from, int64_t rows, int64_t width, int64_t size) {
    for (int64_t tile = 0; tile < rows; tile += TILE)
        for (int64_t d = 0; d < size; d++)
            for (int64_t j = 0; j < TILE; j++) *to++ = from[(tile + j) * width + d];
}

/* scores [MQ][TILE] = a [MQ][D] times one tile [D][TILE] */
INLINE void multiply(float *scores, int64_t row, const float *a, int64_t width, const float *tile, int64_t size) {
    vec sum[MQ][2] = {{{0}}};
    for (int64_t d = 0; d < size; d++, tile += TILE) {
        vec left = load(tile), right = load(tile + LANES);
#pragma GCC unroll 8
        for (int i = 0; i < MQ; i++) {
            vec x = splat(a[i * width + d]);
            sum[i][0] += x * left;
            sum[i][1] += x * right;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MQ; i++) {
        store(scores + i * row, sum[i][0]);
        store(scores + i * row + LANES, sum[i][1]);
    }
}

/* out [ROWS][W vectors] += weights [ROWS][count] times rows [count][W vectors]; weight (i, j) at i * `down` + j * `along` */
#define ACCUMULATE(NAME, ROWS, W)                                                                                      \
    INLINE void NAME(float *out, int64_t width, const float *weights, int64_t down, int64_t along, const float *rows,  \
                     int64_t count) {                                                                                  \
        vec sum[ROWS][W];                                                                                              \
        _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                                         \
            _Pragma("GCC unroll 8") for (int w = 0; w < W; w++) sum[i][w] = load(out + i * width + w * LANES);         \
        for (int64_t j = 0; j < count; j++, rows += width, weights += along) {                                         \
            vec x[W];                                                                                                  \
            _Pragma("GCC unroll 8") for (int w = 0; w < W; w++) x[w] = load(rows + w * LANES);                         \
            _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++) {                                                   \
                vec weight = splat(weights[i * down]);                                                                 \
                _Pragma("GCC unroll 8") for (int w = 0; w < W; w++) sum[i][w] += weight * x[w];                        \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                                         \
            _Pragma("GCC unroll 8") for (int w = 0; w < W; w++) store(out + i * width + w * LANES, sum[i][w]);         \
    }
ACCUMULATE(accumulate_1, MQ, 1)
ACCUMULATE(accumulate_2, MQ, 2)
ACCUMULATE(accumulate_4, MQ / 2, 4)

/* As above for MQ rows and the whole width. */
INLINE void accumulate(float *out, int64_t width, const float *weights, int64_t down, int64_t along, const float *rows,
                       int64_t count) {
    int64_t w = 0;
    for (; w + 4 * LANES <= width; w += 4 * LANES) {
        accumulate_4(out + w, width, weights, down, along, rows + w, count);
        accumulate_4(out + MQ / 2 * width + w, width, weights + MQ / 2 * down, down, along, rows + w, count);
    }
    if (w + 2 * LANES <= width) {
        accumulate_2(out + w, width, weights, down, along, rows + w, count);
        w += 2 * LANES;
    }
    if (w < width) accumulate_1(out + w, width, weights, down, along, rows + w, count);
}

/* The keys [first, last) that the query at `position` sees. */
INLINE int64_t first_key(const Shape *s, int64_t position) {
    return s->window ? most(0, position - s->window + 1) : 0;
}
INLINE int64_t last_key(Document d, int64_t position) { return least(position + 1, d.keys); }

INLINE ints are_seen(int64_t key, int64_t first, int64_t last) {
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return (lane >= (int32_t)most(first - key, 0)) & (lane < (int32_t)most(least(last - key, LANES), 0));
}

/* Part `part` of head `head` of document `n`. */
typedef struct {
    int64_t n, head, part;
} Job;

/* Every part of `step` tokens of every head, the last parts of each document first: they have the most keys. NULL where
   there was no memory. */
static Job *deal(const Shape *s, int64_t heads, int64_t step, int is_of_keys, int64_t *count) {
    int64_t total = 0;
    for (int64_t n = 0; n < s->documents; n++) total += up(tokens(s, n, is_of_keys), step) / step * heads;
    Job *jobs = malloc(sizeof(Job) * most(total, 1)), *next = jobs;
    *count = total;
    for (int64_t n = 0; jobs && n < s->documents; n++)
        for (int64_t part = up(tokens(s, n, is_of_keys), step) / step - 1; part >= 0; part--)
            for (int64_t head = 0; head < heads; head++) *next++ = (Job){n, head, part};
    return jobs;
}

/* Where each document begins in a buffer in which its queries or keys take a multiple of `step` rows; the whole last. */
static int64_t *places(const Shape *s, int64_t step, int is_of_keys) {
    int64_t *found = malloc(sizeof(int64_t) * (s->documents + 1));
    if (found) found[0] = 0;
    for (int64_t n = 0; found && n < s->documents; n++) found[n + 1] = found[n] + up(tokens(s, n, is_of_keys), step);
    return found;
}

typedef struct {
    const Shape *s;
    int64_t width;         /* D, padded to whole vectors */
    const int64_t *places; /* of documents among the keys of a head, each padded to whole tiles */
    void *keys, *values;   /* keys * scale [G][padded S / TILE][D][TILE], and values [G][padded S][width] */
    const Tensor *q, *out, *lse;
} Forward;

/* Scores [span] of a query with the keys from `from` on, of which it sees those in [first, last), become weights:
   e^(score - largest score so far). `out` and `total` are what the keys before them gave, for that largest score.
   `hash` and `hashes` are those of the query and its keys: `total` counts what they drop. */
INLINE void weigh(const Shape *s, float *scores, int64_t from, int64_t span, int64_t first, int64_t last, float scale,
                  uint32_t hash, const uint32_t *hashes, float *largest, float *total, float *out, int64_t width) {
    int is_whole = first <= from && last >= from + span;
    vec top = splat(-INFINITY);
    for (int64_t j = 0; j < span; j += LANES) {
        vec x = load(scores + j) * scale;
        if (s->softcap) x = tangent(x / s->softcap) * s->softcap;
        if (!is_whole) x = pick(are_seen(from + j, first, last), x, splat(-INFINITY));
        store(scores + j, x);
        top = larger(x, top); /* a NaN is passed over, and comes into the sum */
    }
    float before = *largest, now = fmaxf(before, max_of(top));
    if (now == -INFINITY) { /* it sees none of these keys, nor one before them; or their scores are NaN */
        vec lost = {0};
        for (int64_t j = 0; j < span; j += LANES) {
            vec x = load(scores + j);
            lost += (vec)((x != x) & (ints)x);
        }
        *total += sum_of(lost);
        memset(scores, 0, sizeof(float) * span);
        return;
    }
    vec sum = {0};
    for (int64_t j = 0; j < span; j += LANES) {
        vec x = exponential(load(scores + j) - now);
        sum += x;
        store(scores + j, hashes ? drop(s, hash, hashes + j, x) : x);
    }
    if (now > before) {
        float shrink = expf(before - now);
        for (int64_t c = 0; c < width; c += LANES) store(out + c, load(out + c) * shrink);
        *total *= shrink;
        *largest = now;
    }
    *total += sum_of(sum);
}

/* Output and log-sum-exp of query l, of the sums over all keys. */
static void put_result(const Forward *f, Document d, int64_t h, int64_t l, const float *out, float largest,
                       float total) {
    put_row(f->s, f->out, d, h, l, out, f->s->kept_scale / total);
    ((float *)f->lse->data)[at(f->lse, d, h, l)] = largest + logf(total);
}

/* Keys times `scale` in tiles, and values: what forward blocks multiply by. `scratch` has room for BK rows. */
static void pack_keys(const Forward *f, Job job, const Tensor *k, const Tensor *v, float *scratch) {
    const Shape *s = f->s;
    Document d = document(s, job.n);
    int64_t key = job.part * BK, count = least(BK, d.keys - key), rows = up(count, TILE);
    int64_t place = job.head * f->places[s->documents] + f->places[job.n] + key;
    take_rows(scratch, s, k, d, job.head, key, count, rows, f->width, s->scale);
    turn((float *)f->keys + place * s->size, scratch, rows, f->width, s->size);
    take_rows((float *)f->values + place * f->width, s, v, d, job.head, key, count, rows, f->width, 1.0f);
}

/* What BQ queries of one head see. `scratch` has room for 2 * BQ rows and MQ x BK scores. */
static void forward_block(const Forward *f, Job job, float *scratch) {
    const Shape *s = f->s;
    Document d = document(s, job.n);
    int64_t start = job.part * BQ, h = job.head, width = f->width, count = least(BQ, d.queries - start);
    int64_t rows = up(count, MQ), place = h / (s->heads / s->shared) * f->places[s->documents] + f->places[job.n];
    const float *keys = (const float *)f->keys + place * s->size, *values = (const float *)f->values + place * width;
    float *q = scratch, *out = q + BQ * width, *scores = out + BQ * width, largest[BQ], total[BQ];
    take_rows(q, s, f->q, d, h, start, count, rows, width, 1.0f);
    memset(out, 0, sizeof(float) * rows * width);
    for (int64_t i = 0; i < rows; i++) largest[i] = -INFINITY, total[i] = 0;
    int64_t position = d.offset + start, end = last_key(d, position + count - 1);
    for (int64_t key = first_key(s, position) / TILE * TILE; key < end; key += BK) {
        for (int64_t group = 0; group < rows; group += MQ) {
            int64_t here = position + group, final = least(here + MQ, position + count) - 1;
            int64_t from = most(first_key(s, here) / TILE * TILE, key), to = least(last_key(d, final), key + BK);
            if (from >= to) continue;
            int64_t span = up(to - from, TILE);
            for (int64_t j = 0; j < span; j += TILE)
                multiply(scores + j, BK, q + group * width, width, keys + (from + j) * s->size, s->size);
            for (int64_t i = group; i < group + MQ; i++)
                weigh(s, scores + (i - group) * BK, from, span, first_key(s, position + i), last_key(d, position + i),
                      1.0f, query_hash(s, d, least(start + i, d.queries - 1)), key_hashes(s, d, h, from), largest + i,
                      total + i, out + i * width, width);
            accumulate(out + group * width, width, scores, BK, 1, values + from * width, span);
        }
    }
    for (int64_t i = 0; i < count; i++) put_result(f, d, h, start + i, out + i * width, largest[i], total[i]);
}

typedef struct {
    const Shape *s;
    int64_t width;
    const Tensor *grad, *q, *k, *v, *out, *lse, *dk, *dv;
    const int64_t *places;              /* of documents among the queries of a head, each padded to whole groups */
    float *delta;                       /* sum(grad * out) [H][padded L] */
    uint16_t *q_columns, *grad_columns; /* as bfloat16 [H][padded L / BQ][width][BQ] */
} Backward;

/* delta of the queries of a part. `scratch` has room for 2 * BQ rows. */
static void sum_up(const Backward *b, Job job, float *scratch) {
    const Shape *s = b->s;
    Document d = document(s, job.n);
    int64_t start = job.part * BQ, count = least(BQ, d.queries - start), width = b->width;
    float *x = scratch, *y = scratch + BQ * width;
    float *to = b->delta + job.head * b->places[s->documents] + b->places[job.n] + start;
    take_rows(x, s, b->grad, d, job.head, start, count, count, width, 1.0f);
    take_rows(y, s, b->out, d, job.head, start, count, count, width, 1.0f);
    for (int64_t l = 0; l < count; l++, x += width, y += width) {
        vec sum = {0};
        for (int64_t c = 0; c < width; c += LANES) sum += load(x + c) * load(y + c);
        to[l] = sum_of(sum);
    }
}

/* A query, and the keys [first, last) that it sees. */
typedef struct {
    int64_t first, last;
    float lse, delta;
    uint32_t hash;
} Query;

/* Query l of a document whose queries begin at `head` in `delta`; one from `end` on sees nothing. */
INLINE Query query_of(const Backward *b, Document d, int64_t h, int64_t head, int64_t l, int64_t end) {
    if (l >= end) return (Query){0, 0, 0, 0, 0};
    float lse = ((const float *)b->lse->data)[at(b->lse, d, h, l)];
    return (Query){first_key(b->s, d.offset + l), last_key(d, d.offset + l), lse, b->delta[head + l],
                   query_hash(b->s, d, l)};
}

/* Weights of its scores x with the keys from `key` on, of `hashes`; `change`, the gradients of the weights that were
   kept, become those of x. */
INLINE vec weigh_again(const Shape *s, const Query *q, vec x, int64_t key, const uint32_t *hashes, vec *change) {
    vec slope = splat(1.0f);
    if (s->softcap) {
        vec t = tangent(x / s->softcap);
        x = t * s->softcap;
        slope = 1.0f - t * t;
    }
    vec weight = exponential(x - q->lse);
    if (q->first > key || q->last < key + LANES) weight = (vec)(are_seen(key, q->first, q->last) & (ints)weight);
    if (hashes) *change = drop(s, q->hash, hashes, *change * s->kept_scale);
    *change = weight * (*change - q->delta) * slope;
    return hashes ? drop(s, q->hash, hashes, weight) : weight;
}

/* The BK keys of a part with all queries that see them: their dk and dv, and what they add to `dq` [H][padded L][width].
   `scratch` has room for 6 * BK + 2 * BQ rows and 2 * BQ x BK scores. */
static void backward_block(const Backward *b, Job job, float *dq, float *scratch) {
    const Shape *s = b->s;
    Document d = document(s, job.n);
    int64_t key = job.part * BK, g = job.head, count = least(BK, d.keys - key), rows = up(count, TILE);
    int64_t width = b->width, share = s->heads / s->shared;
    float *k = scratch, *dk = k + BK * width, *dv = dk + BK * width, *v = dv + BK * width;
    float *k_tiles = v + BK * width, *v_tiles = k_tiles + BK * width, *q = v_tiles + BK * width;
    float *grad = q + BQ * width, *weights = grad + BQ * width, *dscores = weights + BQ * BK;
    take_rows(k, s, b->k, d, g, key, count, rows, width, s->scale);
    take_rows(v, s, b->v, d, g, key, count, rows, width, 1.0f);
    turn(k_tiles, k, rows, width, s->size);
    turn(v_tiles, v, rows, width, s->size);
    memset(dk, 0, sizeof(float) * rows * width);
    memset(dv, 0, sizeof(float) * rows * width);
    int64_t begin = most(0, key - d.offset), end = d.queries; /* the queries that see one of these keys */
    if (s->window) end = least(end, key + count - 1 + s->window - d.offset);
    for (int64_t h = g * share; h < (g + 1) * share; h++) {
        int64_t place = h * b->places[s->documents] + b->places[job.n];
        const uint32_t *hashes = key_hashes(s, d, h, key);
        for (int64_t start = begin / MQ * MQ; start < end; start += BQ) {
            int64_t some = least(BQ, end - start), height = up(some, MQ);
            take_rows(q, s, b->q, d, h, start, some, height, width, 1.0f);
            take_rows(grad, s, b->grad, d, h, start, some, height, width, 1.0f);
            for (int64_t group = 0; group < height; group += MQ) {
                int64_t here = d.offset + start + group, final = least(here + MQ, d.offset + start + some) - 1;
                int64_t from = most(first_key(s, here) / TILE * TILE, key), to = least(last_key(d, final), key + count);
                int64_t low = (most(from, key) - key) / TILE * TILE, high = to > key + low ? up(to - key, TILE) : low;
                for (int64_t j = low; j < high; j += TILE) {
                    multiply(weights + group * BK + j, BK, q + group * width, width, k_tiles + j * s->size, s->size);
                    multiply(dscores + group * BK + j, BK, grad + group * width, width, v_tiles + j * s->size, s->size);
                }
                for (int64_t i = 0; i < MQ; i++) {
                    float *w = weights + (group + i) * BK, *ds = dscores + (group + i) * BK;
                    int64_t filled = low;
                    if (group + i < some) {
                        const Query of = query_of(b, d, h, place, start + group + i, start + some);
                        for (; filled < high; filled += LANES) {
                            vec change = load(ds + filled);
                            const uint32_t *here = hashes ? hashes + filled : NULL;
                            store(w + filled, weigh_again(s, &of, load(w + filled), key + filled, here, &change));
                            store(ds + filled, change);
                        }
                    }
                    memset(w, 0, sizeof(float) * low);
                    memset(ds, 0, sizeof(float) * low);
                    memset(w + filled, 0, sizeof(float) * (rows - filled));
                    memset(ds + filled, 0, sizeof(float) * (rows - filled));
                }
                if (high > low)
                    accumulate(dq + (place + start + group) * width, width, dscores + group * BK + low, BK, 1,
                               k + low * width, high - low);
            }
            for (int64_t j = 0; j < rows; j += MQ) {
                int64_t skip = least(height, most(0, key + j - d.offset - start) / MQ * MQ); /* these see none of them */
                accumulate(dv + j * width, width, weights + skip * BK + j, 1, BK, grad + skip * width, height - skip);
                accumulate(dk + j * width, width, dscores + skip * BK + j, 1, BK, q + skip * width, height - skip);
            }
        }
    }
    for (int64_t j = 0; j < count; j++) {
        put_row(s, b->dk, d, g, key + j, dk + j * width, s->scale);
        put_row(s, b->dv, d, g, key + j, dv + j * width, s->kept_scale);
    }
}

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#include "cpu_attention_bf16.h"
#else /* nothing multiplies bfloat16 faster: these are never called */
enum { STEP = 32 };
typedef int Tiles;
static int has_tiles(void) { return 0; }
static void take_tiles(Tiles *before) { *before = 0; }
static void give_tiles_back(const Tiles *before) { (void)before; }
static void pack_keys_bf16(const Forward *f, Job job, const Tensor *k, const Tensor *v, uint16_t *scratch) {}
static void forward_block_bf16(const Forward *f, Job job, float *scratch) {}
static void pack_queries_bf16(const Backward *b, Job job, uint16_t *scratch) {}
static void backward_block_bf16(const Backward *b, Job job, float *dq, float *scratch) {}
#endif

/* Memory that begins where a line of the caches does; NULL where there is none. */
static void *memory(int64_t bytes) { return aligned_alloc(64, up(most(bytes, 1), 64)); }

/* out [N,H,L,D] and lse [N,H,L] (float) of q [N,H,L,D] and k, v [N,G,S,D]. 1 where there was no memory. */
int attention_forward(const Shape *s, const Tensor *q, const Tensor *k, const Tensor *v, const Tensor *out,
                      const Tensor *lse) {
    const int in_bf16 = s->is_bf16 && has_tiles();
    int64_t width = up(s->size, in_bf16 ? STEP : LANES), *place = places(s, up(TILE, STEP), 1);
    int64_t padded = place ? place[s->documents] : 0, key_parts, query_parts;
    int64_t room = up(4 * ((2 * BQ + BK) * width + 2 * STEP * BK), 64); /* bytes of a thread */
    void *keys = memory(4 * s->shared * padded * width), *values = memory(4 * s->shared * padded * width);
    char *scratch = memory(room * s->threads);
    Job *of_keys = deal(s, s->shared, BK, 1, &key_parts), *of_queries = deal(s, s->heads, BQ, 0, &query_parts);
    Forward f = {s, width, place, keys, values, q, out, lse};
    const int has_memory = place && keys && values && scratch && of_keys && of_queries;
#pragma omp parallel num_threads(s->threads) if (has_memory)
    if (has_memory) {
        void *own = scratch + room * omp_get_thread_num();
        Tiles before;
        if (in_bf16) take_tiles(&before);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < key_parts; i++) {
            if (in_bf16)
                pack_keys_bf16(&f, of_keys[i], k, v, own);
            else
                pack_keys(&f, of_keys[i], k, v, own);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < query_parts; i++) {
            if (in_bf16)
                forward_block_bf16(&f, of_queries[i], own);
            else
                forward_block(&f, of_queries[i], own);
        }
        if (in_bf16) give_tiles_back(&before);
    }
    free(place), free(keys), free(values), free(scratch), free(of_keys), free(of_queries);
    return !has_memory;
}

/* dq [N,H,L,D], dk and dv [N,G,S,D] of `grad` and `out` [N,H,L,D] and `lse` [N,H,L]. 1 where there was no memory.
   The parts of a head go round `lanes` lanes, each with a dq of its own, so that few heads occupy all threads; the sum
   of the lanes has one order. At most 8 lanes: each takes the memory of q in float. */
int attention_backward(const Shape *s, const Tensor *grad, const Tensor *q, const Tensor *k, const Tensor *v,
                       const Tensor *out, const Tensor *lse, const Tensor *dq, const Tensor *dk, const Tensor *dv) {
    const int in_bf16 = s->is_bf16 && has_tiles();
    int64_t width = up(s->size, in_bf16 ? STEP : LANES), pairs = s->documents * s->shared, parts = 0, query_parts;
    int64_t *place = places(s, in_bf16 ? STEP : MQ, 0), padded = place ? place[s->documents] : 0;
    int64_t room = up(4 * (6 * BK * width + 2 * BQ * width + 2 * BQ * BK), 64); /* bytes of a thread */
    for (int64_t n = 0; n < s->documents; n++) parts = most(parts, up(tokens(s, n, 1), BK) / BK);
    int64_t lanes = 1;
    if (pairs && pairs < 8 * s->threads && pairs != s->threads)
        lanes = most(1, least(parts, least(8, 4 * s->threads / pairs + 1)));
    float *sums = calloc(most(1, lanes * s->heads * padded * width), sizeof(float));
    float *delta = memory(4 * s->heads * padded);
    uint16_t *columns = memory(in_bf16 ? 4 * s->heads * padded * width : 0);
    char *scratch = memory(room * s->threads);
    Job *of_queries = deal(s, s->heads, BQ, 0, &query_parts);
    Backward b = {s, width, grad, q, k, v, out, lse, dk, dv, place, delta, columns};
    const int has_memory = place && sums && delta && columns && scratch && of_queries;
    b.grad_columns = columns + s->heads * padded * width;
#pragma omp parallel num_threads(s->threads) if (has_memory)
    if (has_memory) {
        void *own = scratch + room * omp_get_thread_num();
        Tiles before;
        if (in_bf16) take_tiles(&before);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < query_parts; i++) {
            sum_up(&b, of_queries[i], own);
            if (in_bf16) pack_queries_bf16(&b, of_queries[i], own);
        }
#pragma omp for schedule(dynamic)
        for (int64_t turn = 0; turn < pairs * lanes; turn++) {
            int64_t n = turn / lanes / s->shared, g = turn / lanes % s->shared, lane = turn % lanes;
            float *to = sums + lane * s->heads * padded * width;
            for (int64_t part = lane; part < up(tokens(s, n, 1), BK) / BK; part += lanes) {
                if (in_bf16)
                    backward_block_bf16(&b, (Job){n, g, part}, to, own);
                else
                    backward_block(&b, (Job){n, g, part}, to, own);
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < query_parts; i++) {
            Job job = of_queries[i];
            Document d = document(s, job.n);
            int64_t start = job.part * BQ, end = least(start + BQ, d.queries);
            float *sum = sums + (job.head * padded + place[job.n] + start) * width;
            for (int64_t l = start; l < end; l++, sum += width) {
                for (int64_t lane = 1; lane < lanes; lane++) {
                    const float *more = sum + lane * s->heads * padded * width;
                    for (int64_t c = 0; c < width; c += LANES) store(sum + c, load(sum + c) + load(more + c));
                }
                put_row(s, dq, d, job.head, l, sum, in_bf16 ? s->scale : 1.0f);
            }
        }
        if (in_bf16) give_tiles_back(&before);
    }
    free(place), free(sums), free(delta), free(columns), free(scratch), free(of_queries);
    return !has_memory;
}

/* Both once, of a document of 9 tokens, in both types: 0 where this CPU has the instructions. */
int attention_tried(void) {
    float x[4][9 * 8] = {{0}}, lse[9], dq[9 * 8], dk[9 * 8], dv[9 * 8];
    int32_t hashes[9 + TILE] = {0};
    int failed = 0;
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        Tensor of_hashes = {hashes, 9, 9, 1};
        Shape s = {NULL, 1, 1, 1, 9, 9, 8, 0, 5, 1.0f, 2.0f, is_bf16, 1, of_hashes, of_hashes, -1, 1.0f};
        Tensor t[4], of_lse = {lse, 9, 9, 1}, of_dq = {dq, 72, 72, 8}, of_dk = {dk, 72, 72, 8}, of_dv = {dv, 72, 72, 8};
        for (int i = 0; i < 4; i++) t[i] = (Tensor){x[i], 72, 72, 8};
        failed |= attention_forward(&s, t, t + 1, t + 2, t + 3, &of_lse) ||
                  attention_backward(&s, t + 3, t, t + 1, t + 2, t + 3, &of_lse, &of_dq, &of_dk, &of_dv);
    }
    return failed;
}
