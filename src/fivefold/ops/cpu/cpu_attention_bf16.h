/* The blocks of `cpu_attention.c` for bfloat16 on a CPU with AMX, which multiplies 32 x 32 by 32 x 32 elements in 64
   cycles, sixteen times as fast as float. Products are summed in float. Weights and gradients of scores are rounded to
   bfloat16 before they are multiplied, as FlashAttention does on GPUs.

   A product takes rows of `a`, elements side by side, and panels of `b`: 16 columns, in which each 32 bits hold two
   elements of a column, one below the other. So [K][N] is kept as panels [N / 16][K / 2][16][2].
   `depth` is D, padded with zeros to a multiple of 32 (`width` of the structures), as are all numbers of rows.
   Legend: see `cpu_attention.c`. */

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PANEL = 16, STEP = 32 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Tiles;

/* Whether the system lets this process use tiles: it is to be asked once (arch_prctl, ARCH_REQ_XCOMP_PERM). */
static int has_tiles(void) {
    static int answer; /* 0: not asked */
    if (!answer) answer = syscall(SYS_arch_prctl, 0x1023, 18) ? -1 : 1;
    return answer > 0;
}

/* Instructions of tiles do not tell the compiler what memory they read and write: all is in its place before them. */
INLINE void settle(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

/* All tiles of this thread have 16 rows of 64 bytes from here on; `before` is for `give_tiles_back`. */
static void take_tiles(Tiles *before) {
    Tiles all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.rows[i] = 16, all.row_bytes[i] = 64;
    settle(before), settle(&all);
    _tile_storeconfig(before);
    _tile_loadconfig(&all);
    settle(before);
}

static void give_tiles_back(const Tiles *before) {
    settle(before);
    _tile_loadconfig(before);
}

/* out [32][columns] = or += a [32][depth] times b [columns / 16][depth / 2][16][2], `panel` pairs from one panel to the
   next. */
static void product(float *out, int64_t width, int is_added, const uint16_t *a, int64_t a_width, const uint32_t *b,
                    int64_t panel, int64_t depth, int64_t columns) {
    float *below = out + 16 * width;
    settle(out);
    for (int64_t n = 0; n < columns; n += STEP, b += 2 * panel) {
        if (is_added) {
            _tile_loadd(0, out + n, width * 4);
            _tile_loadd(1, out + n + PANEL, width * 4);
            _tile_loadd(2, below + n, width * 4);
            _tile_loadd(3, below + n + PANEL, width * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < depth; k += STEP) {
            _tile_loadd(4, a + k, a_width * 2);
            _tile_loadd(6, b + k / 2 * PANEL, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + panel + k / 2 * PANEL, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + 16 * a_width + k, a_width * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out + n, width * 4);
        _tile_stored(1, out + n + PANEL, width * 4);
        _tile_stored(2, below + n, width * 4);
        _tile_stored(3, below + n + PANEL, width * 4);
    }
    settle(out);
}

/* Rows of 16 times 32 bits become columns. */
INLINE void transpose(__m512i x[16]) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) { /* pairs of rows: 2 x 2 */
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* 4 x 4 in each 128 bits: x[i + c] has the columns c of each */
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(x[c], x[c + 4], 0x88), low_odd = _mm512_shuffle_i32x4(x[c], x[c + 4], 0xdd);
        __m512i high = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0x88);
        __m512i high_odd = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0xdd);
        y[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        y[c + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        y[c + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
        y[c + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
    memcpy(x, y, sizeof y);
}

/* Two vectors of rows, 16 columns each, as pairs. */
INLINE __m512i pairs(__m256i upper, __m256i lower) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(upper), _mm512_slli_epi32(_mm512_cvtepu16_epi32(lower), 16));
}
INLINE __m256i load_16(const uint16_t *at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE __m256i rounded(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }

/* `count` rows from token `first` as [rows][depth]; zeros after D and after the last row. */
static void copy_rows(uint16_t *to, const Shape *s, const Tensor *t, Document d, int64_t h, int64_t first,
                      int64_t count, int64_t rows, int64_t depth) {
    __mmask32 last = 0xffffffffu >> (depth - s->size);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < depth; c += 32, to += 32) {
            const uint16_t *from = (const uint16_t *)t->data + at(t, d, h, first + i) + c;
            __mmask32 taken = i >= count ? 0 : c + 32 < depth ? 0xffffffffu : last;
            _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(taken, from));
        }
}

/* rows [N][depth], of which columns are to be summed over: panels of N. N is a multiple of 16. */
static void panels_of_rows(uint32_t *to, const uint16_t *rows, int64_t count, int64_t depth) {
    __m512i x[16];
    for (int64_t n = 0; n < count; n += PANEL, rows += PANEL * depth)
        for (int64_t d = 0; d < depth; d += STEP, to += 16 * PANEL) {
            for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(rows + i * depth + d);
            transpose(x);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * PANEL, x[i]);
        }
}

/* rows [K][depth], which are to be summed over: panels of columns, `panel` pairs apart. */
static void panels_of_columns(uint32_t *to, int64_t panel, const uint16_t *rows, int64_t count, int64_t depth) {
    for (int64_t c = 0; c < depth; c += PANEL, to += panel)
        for (int64_t k = 0; k < count; k += 2) {
            const uint16_t *x = rows + k * depth + c;
            _mm512_storeu_si512(to + k / 2 * PANEL, pairs(load_16(x), load_16(x + depth)));
        }
}

/* rows [N][depth] as columns [depth][N]. */
static void columns(uint16_t *to, const uint16_t *rows, int64_t count, int64_t depth) {
    __m512i x[16];
    for (int64_t c = 0; c < depth; c += 16)
        for (int64_t n = 0; n < count; n += 32) {
            const uint16_t *from = rows + n * depth + c;
            for (int i = 0; i < 16; i++, from += 2 * depth) x[i] = pairs(load_16(from), load_16(from + depth));
            transpose(x);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (c + i) * count + n, x[i]);
        }
}

/* How many queries a block of `start` has in memory. */
INLINE int64_t block_length(Document d, int64_t start) { return least(BQ, up(d.queries - start, STEP)); }

/* Keys [rows / 16][depth / 2][16] and values [depth / 16][padded S / 2][16] in pairs: what forward blocks multiply by.
   `scratch` has room for BK rows of `depth`. */
static void pack_keys_bf16(const Forward *f, Job job, const Tensor *k, const Tensor *v, uint16_t *scratch) {
    const Shape *s = f->s;
    Document d = document(s, job.n);
    int64_t key = job.part * BK, count = least(BK, d.keys - key), rows = up(count, TILE);
    int64_t padded = f->places[s->documents], place = f->places[job.n] + key;
    copy_rows(scratch, s, k, d, job.head, key, count, rows, f->width);
    panels_of_rows((uint32_t *)f->keys + (job.head * padded + place) * f->width / 2, scratch, rows, f->width);
    copy_rows(scratch, s, v, d, job.head, key, count, rows, f->width);
    panels_of_columns((uint32_t *)f->values + job.head * padded * f->width / 2 + place / 2 * PANEL, padded / 2 * PANEL,
                      scratch, rows, f->width);
}

/* As `forward_block`. `scratch` has room for BQ rows of float and bfloat16, and 32 x BK scores of both. */
static void forward_block_bf16(const Forward *f, Job job, float *scratch) {
    const Shape *s = f->s;
    Document d = document(s, job.n);
    int64_t start = job.part * BQ, h = job.head, depth = f->width, count = least(BQ, d.queries - start);
    int64_t rows = up(count, STEP), padded = f->places[s->documents], g = h / (s->heads / s->shared);
    const uint32_t *keys = (const uint32_t *)f->keys + (g * padded + f->places[job.n]) * depth / 2;
    const uint32_t *values = (const uint32_t *)f->values + g * padded * depth / 2 + f->places[job.n] / 2 * PANEL;
    float *out = scratch, *scores = out + BQ * depth, largest[BQ], total[BQ];
    uint16_t *q = (uint16_t *)(scores + STEP * BK), *weights = q + BQ * depth;
    copy_rows(q, s, f->q, d, h, start, count, rows, depth);
    memset(out, 0, sizeof(float) * rows * depth);
    for (int64_t i = 0; i < rows; i++) largest[i] = -INFINITY, total[i] = 0;
    int64_t position = d.offset + start, end = last_key(d, position + count - 1);
    for (int64_t key = first_key(s, position) / TILE * TILE; key < end; key += BK) {
        for (int64_t group = 0; group < rows; group += STEP) {
            int64_t here = position + group, final = least(here + STEP, position + count) - 1;
            int64_t from = most(first_key(s, here) / TILE * TILE, key), to = least(last_key(d, final), key + BK);
            if (from >= to) continue;
            int64_t span = up(to - from, TILE);
            product(scores, BK, 0, q + group * depth, depth, keys + from * depth / 2, depth / 2 * PANEL, depth,
                    span);
            for (int64_t i = 0; i < STEP; i++) {
                float *row = scores + i * BK;
                uint32_t hash = query_hash(s, d, least(start + group + i, d.queries - 1));
                weigh(s, row, from, span, first_key(s, here + i), last_key(d, here + i), s->scale, hash,
                      key_hashes(s, d, h, from), largest + group + i, total + group + i, out + (group + i) * depth,
                      depth);
                for (int64_t j = 0; j < span; j += PANEL)
                    _mm256_storeu_si256((__m256i *)(weights + i * BK + j), rounded(load(row + j)));
            }
            product(out + group * depth, depth, 1, weights, BK, values + from / 2 * PANEL, padded / 2 * PANEL, span,
                    depth);
        }
    }
    for (int64_t i = 0; i < count; i++) put_result(f, d, h, start + i, out + i * depth, largest[i], total[i]);
}

/* Columns of the queries of a block and of their gradients: what dk and dv are summed from. */
static void pack_queries_bf16(const Backward *b, Job job, uint16_t *scratch) {
    const Shape *s = b->s;
    Document d = document(s, job.n);
    int64_t start = job.part * BQ, count = least(BQ, d.queries - start), length = block_length(d, start);
    int64_t place = (job.head * b->places[s->documents] + b->places[job.n] + start) * b->width;
    copy_rows(scratch, s, b->q, d, job.head, start, count, length, b->width);
    columns(b->q_columns + place, scratch, length, b->width);
    copy_rows(scratch, s, b->grad, d, job.head, start, count, length, b->width);
    columns(b->grad_columns + place, scratch, length, b->width);
}

/* Rows [count][depth] of columns [depth][BK], given out times `scale`. `scratch` has room for 16 rows. */
static void put_columns(const Shape *s, const Tensor *t, Document d, int64_t h, int64_t first, int64_t count,
                        const float *from, int64_t depth, float scale, float *scratch) {
    __m512i x[16];
    for (int64_t l = 0; l < count; l += 16) {
        for (int64_t c = 0; c < depth; c += 16) {
            for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(from + (c + i) * BK + l);
            transpose(x);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(scratch + i * depth + c, x[i]);
        }
        for (int64_t i = 0; i < least(16, count - l); i++)
            put_row(s, t, d, h, first + l + i, scratch + i * depth, scale);
    }
}

/* As `backward_block`, with dq without `scale`. `scratch` has room for 2 * BK rows of float and 5 * BK + 2 * BQ rows of
   bfloat16, 2 * 32 x BK scores of float and 32 + 2 * BQ x BK of bfloat16, all of `depth`. */
static void backward_block_bf16(const Backward *b, Job job, float *dq, float *scratch) {
    const Shape *s = b->s;
    Document d = document(s, job.n);
    int64_t key = job.part * BK, g = job.head, count = least(BK, d.keys - key), rows = up(count, TILE);
    int64_t depth = b->width, share = s->heads / s->shared;
    float *dk = scratch, *dv = dk + BK * depth, *weights = dv + BK * depth, *dscores = weights + STEP * BK;
    uint32_t *k_panels = (uint32_t *)(dscores + STEP * BK), *v_panels = k_panels + BK * depth / 2;
    uint32_t *k_columns = v_panels + BK * depth / 2, *weight_panels = k_columns + BK * depth / 2;
    uint32_t *dscore_panels = weight_panels + BQ * BK / 2;
    uint16_t *held = (uint16_t *)(dscore_panels + BQ * BK / 2), *q = held + BK * depth, *grad = q + BQ * depth;
    uint16_t *dscore_rows = grad + BQ * depth;
    copy_rows(held, s, b->k, d, g, key, count, rows, depth);
    panels_of_rows(k_panels, held, rows, depth);
    panels_of_columns(k_columns, BK / 2 * PANEL, held, rows, depth);
    copy_rows(held, s, b->v, d, g, key, count, rows, depth);
    panels_of_rows(v_panels, held, rows, depth);
    memset(dk, 0, sizeof(float) * depth * BK);
    memset(dv, 0, sizeof(float) * depth * BK);
    int64_t begin = most(0, key - d.offset), end = d.queries; /* the queries that see one of these keys */
    if (s->window) end = least(end, key + count - 1 + s->window - d.offset);
    for (int64_t h = g * share; h < (g + 1) * share; h++) {
        int64_t head = h * b->places[s->documents] + b->places[job.n];
        const uint32_t *hashes = key_hashes(s, d, h, key);
        for (int64_t start = begin / BQ * BQ; start < end; start += BQ) {
            int64_t some = least(BQ, end - start), length = block_length(d, start), panel = length / 2 * PANEL;
            int64_t position = d.offset + start, bottom = BK, top = 0; /* of these keys, what one of the queries sees */
            copy_rows(q, s, b->q, d, h, start, some, length, depth);
            copy_rows(grad, s, b->grad, d, h, start, some, length, depth);
            for (int64_t group = 0; group < length; group += STEP) {
                int64_t here = position + group, final = least(here + STEP, position + some) - 1;
                int64_t low = most(first_key(s, here) - key, 0) / TILE * TILE;
                int64_t high = up(least(last_key(d, final) - key, count), TILE);
                uint32_t *w_pairs = weight_panels + group / 2 * PANEL, *ds_pairs = dscore_panels + group / 2 * PANEL;
                if (group >= some || high < low) high = low;
                if (high > low) {
                    const uint32_t *right = k_panels + low * depth / 2;
                    product(weights + low, BK, 0, q + group * depth, depth, right, depth / 2 * PANEL, depth,
                            high - low);
                    right = v_panels + low * depth / 2;
                    product(dscores + low, BK, 0, grad + group * depth, depth, right, depth / 2 * PANEL, depth,
                            high - low);
                    bottom = least(bottom, low), top = most(top, high);
                }
                for (int64_t i = 0; i < STEP; i += 2, w_pairs += PANEL, ds_pairs += PANEL) {
                    const Query two[2] = {query_of(b, d, h, head, start + group + i, start + some),
                                          query_of(b, d, h, head, start + group + i + 1, start + some)};
                    for (int64_t j = 0; j < rows; j += PANEL) {
                        __m256i w[2] = {{0}}, ds[2] = {{0}};
                        if (low <= j && j < high) {
                            for (int r = 0; r < 2; r++) {
                                int64_t place = (i + r) * BK + j;
                                vec change = load(dscores + place);
                                const uint32_t *keys = hashes ? hashes + j : NULL;
                                vec x = load(weights + place) * s->scale;
                                vec p = weigh_again(s, two + r, x, key + j, keys, &change);
                                w[r] = rounded(p), ds[r] = rounded(change);
                                _mm256_storeu_si256((__m256i *)(dscore_rows + place), ds[r]);
                            }
                        }
                        _mm512_storeu_si512(w_pairs + j / PANEL * panel, pairs(w[0], w[1]));
                        _mm512_storeu_si512(ds_pairs + j / PANEL * panel, pairs(ds[0], ds[1]));
                    }
                }
                if (high > low)
                    product(dq + (head + start + group) * depth, depth, 1, dscore_rows + low, BK,
                            k_columns + low / 2 * PANEL, BK / 2 * PANEL, high - low, depth);
            }
            const uint16_t *q_columns = b->q_columns + (head + start) * depth;
            const uint16_t *grad_columns = b->grad_columns + (head + start) * depth;
            for (int64_t c = 0; c < depth && top > bottom; c += STEP) {
                int64_t first = bottom / PANEL * panel, many = top - bottom;
                product(dv + c * BK + bottom, BK, 1, grad_columns + c * length, length, weight_panels + first, panel,
                        length, many);
                product(dk + c * BK + bottom, BK, 1, q_columns + c * length, length, dscore_panels + first, panel,
                        length, many);
            }
        }
    }
    put_columns(s, b->dk, d, g, key, count, dk, depth, s->scale, (float *)held);
    put_columns(s, b->dv, d, g, key, count, dv, depth, s->kept_scale, (float *)held);
}
