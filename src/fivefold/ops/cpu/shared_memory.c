/* Collectives between processes of one machine over memory that they share.

   Each rank of a group has a ring of slots in the segment and two counters: the chunks that it has `posted` to its own
   ring, and the chunks that it has `taken` from the rings of all. Every collective of the group is a number of chunks,
   alike on all ranks, so that chunk number i of the group is in slot i % slots of each ring. A rank posts chunk i once
   all have taken chunk i - slots, and takes it once all have posted it. Nothing else is waited for.

   A collective is issued without waiting. It moves on whenever this process waits for any collective, of whatever
   group: an order of waiting that differs between ranks blocks nobody.

   Who waits spins for a while, and then sleeps in a futex on the `bell` of the rank that it waits for. */

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 128, BLOCK = 1024, OTHERS_NS = 1000000 }; /* how long one sleeps while other groups are under way */
enum { GATHER, SCATTER, REDUCE, BROADCAST, EXCHANGE };
enum { BYTES, F32, F64, BF16, I32, I64 };
enum { SUM = 0, AVG = 1, MIN = 3, MAX = 4 }; /* as c10d numbers them */
enum { DONE, UNDER_WAY, UNLIKE };            /* UNLIKE + r: rank r calls another collective */

typedef struct {
    _Alignas(LINE) _Atomic uint32_t posted;
    _Atomic uint32_t taken, bell, sleepers;
} Rank;

typedef struct {
    uint64_t call; /* what the sender takes this chunk to be part of */
    int64_t chunks, sizes[];  /* of an exchange: chunks that the sender needs, and bytes for each rank */
} Header;

/* One collective of this process. `bytes`: GATHER, REDUCE, BROADCAST: of the input; SCATTER: of the output. EXCHANGE:
   `sent` and `received` [ranks] have the bytes. */
typedef struct Call {
    const char *input;
    char *output;
    int64_t bytes;
    const int64_t *sent, *received;
    int32_t kind, type, how, root;
    volatile int32_t is_done; /* here and below: written in C alone */
    int32_t unlike;           /* 1 + the rank that calls another collective */
    int64_t posted, taken, chunks;
    struct Call *next;
} Call;

typedef struct Channel {
    char *memory;
    int64_t size, chunk, stride, spin;
    int32_t ranks, rank, slots, blocker;
    pthread_mutex_t lock; /* held while calls move on, never while one sleeps */
    Call *posting, *taking, *last; /* the first not all posted, the first not all taken; and the last issued */
    struct Channel *next;
} Channel;

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static Channel *channels;
static _Atomic int32_t calls_under_way;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }
static int64_t parts(int64_t bytes, int64_t chunk) { return most(1, (bytes + chunk - 1) / chunk); }
static Rank *rank_of(const Channel *c, int rank) { return (Rank *)c->memory + rank; }
static int64_t header_size(int32_t ranks) { return up((int64_t)sizeof(Header) + 8 * ranks, LINE); }
static int64_t slot_size(int32_t ranks, int64_t chunk) { return header_size(ranks) + up(chunk, LINE); }

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static Header *header(const Channel *c, int rank, uint32_t chunk) {
    int64_t slot = (int64_t)rank * c->slots + chunk % (uint32_t)c->slots;
    return (Header *)(c->memory + c->ranks * (int64_t)sizeof(Rank) + slot * c->stride);
}

static char *data(const Channel *c, int rank, uint32_t chunk) {
    return (char *)header(c, rank, chunk) + header_size(c->ranks);
}

/* ---- sums: of all ranks in their order, which gives the same bits everywhere */

static float from_bf16(uint16_t x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

static uint16_t to_bf16(float x) {
    union { float value; uint32_t bits; } u = {x};
    uint32_t rounded = (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
    return (uint16_t)(x != x ? (u.bits >> 16) | 0x40 : rounded);
}

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default"))) /* the loader picks one */
#else
#define VECTORS
#endif
#define SAME(x) (x)
#define EACH(EXPRESSION)                 \
    for (int64_t i = 0; i < count; i++) { \
        (EXPRESSION);                     \
    }
#define REDUCTION(NAME, TYPE, WIDE, LOAD, STORE)                                                    \
    VECTORS static void NAME(char *out, char *const *in, int ranks, int64_t bytes, int how) {       \
        WIDE sum[BLOCK];                                                                            \
        int64_t all = bytes / (int64_t)sizeof(TYPE);                                                \
        for (int64_t at = 0; at < all; at += BLOCK) {                                               \
            int64_t count = least(BLOCK, all - at);                                                 \
            const TYPE *first = (const TYPE *)in[0] + at;                                           \
            TYPE *result = (TYPE *)out + at;                                                        \
            EACH(sum[i] = LOAD(first[i]))                                                           \
            for (int rank = 1; rank < ranks; rank++) {                                              \
                const TYPE *x = (const TYPE *)in[rank] + at;                                        \
                if (how == MAX) EACH(sum[i] = sum[i] >= LOAD(x[i]) || sum[i] != sum[i] ? sum[i] : LOAD(x[i])) \
                else if (how == MIN) EACH(sum[i] = sum[i] <= LOAD(x[i]) || sum[i] != sum[i] ? sum[i] : LOAD(x[i])) \
                else EACH(sum[i] += LOAD(x[i]))                                                     \
            }                                                                                       \
            if (how == AVG) EACH(sum[i] /= (WIDE)ranks)                                             \
            EACH(result[i] = STORE(sum[i]))                                                         \
        }                                                                                           \
    }
REDUCTION(reduce_f32, float, float, SAME, SAME)
REDUCTION(reduce_f64, double, double, SAME, SAME)
REDUCTION(reduce_bf16, uint16_t, float, from_bf16, to_bf16)
REDUCTION(reduce_i32, uint32_t, int32_t, (int32_t), SAME)
REDUCTION(reduce_i64, uint64_t, int64_t, (int64_t), SAME)

static void reduce(const Call *call, char *out, char *const *in, int ranks, int64_t bytes) {
    switch (call->type) {
        case F32: reduce_f32(out, in, ranks, bytes, call->how); break;
        case F64: reduce_f64(out, in, ranks, bytes, call->how); break;
        case BF16: reduce_bf16(out, in, ranks, bytes, call->how); break;
        case I32: reduce_i32(out, in, ranks, bytes, call->how); break;
        case I64: reduce_i64(out, in, ranks, bytes, call->how); break;
    }
}

/* ---- one chunk */

/* Of a chunk, the bytes of one rank: a scatter and an exchange have a part for each. */
static int64_t part_of(const Channel *c) { return c->chunk / c->ranks / LINE * LINE; }
static int64_t chunk_of(const Channel *c, const Call *call) {
    return call->kind == SCATTER || call->kind == EXCHANGE ? part_of(c) : c->chunk;
}
static int64_t bytes_of(const Channel *c, const Call *call, int64_t chunk, int64_t bytes) {
    int64_t size = chunk_of(c, call);
    return most(0, least(size, bytes - chunk * size));
}

static uint64_t name_of(const Call *call) {
    uint64_t kind = (uint64_t)(call->kind | call->type << 4 | call->how << 8 | call->root << 12);
    return kind | (call->kind == EXCHANGE ? 0 : (uint64_t)call->bytes << 24);
}

static void ring(Rank *rank) {
    atomic_fetch_add(&rank->bell, 1);
    if (atomic_load(&rank->sleepers)) syscall(SYS_futex, &rank->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Whether all, or of a broadcast its root, have got to `wanted`; else who has not. */
static int are_at(Channel *c, uint32_t wanted, int of_posted, int only) {
    for (int rank = 0; rank < c->ranks; rank++) {
        if (only >= 0 && rank != only) continue;
        Rank *other = rank_of(c, rank);
        uint32_t at = atomic_load_explicit(of_posted ? &other->posted : &other->taken, memory_order_acquire);
        if ((int32_t)(at - wanted) < 0) {
            c->blocker = rank;
            return 0;
        }
    }
    return 1;
}

static void write_chunk(Channel *c, const Call *call, uint32_t number) {
    Header *head = header(c, c->rank, number);
    char *to = data(c, c->rank, number);
    head->call = name_of(call);
    if (call->kind == BROADCAST && call->root != c->rank) return;
    int64_t start = call->posted * chunk_of(c, call), sent = 0;
    if (call->kind != SCATTER && call->kind != EXCHANGE) {
        memcpy(to, call->input + start, (size_t)bytes_of(c, call, call->posted, call->bytes));
        return;
    }
    head->chunks = 1;
    for (int rank = 0; rank < c->ranks; rank++) {
        int64_t all = call->kind == SCATTER ? call->bytes : call->sent[rank];
        int64_t bytes = bytes_of(c, call, call->posted, all);
        head->sizes[rank] = all;
        head->chunks = most(head->chunks, parts(all, part_of(c)));
        if (rank != c->rank && bytes) memcpy(to + rank * part_of(c), call->input + sent + start, (size_t)bytes);
        sent += all;
    }
}

static int post(Channel *c) {
    Call *call = c->posting;
    if (!call) return 0;
    /* The chunks of an exchange are known once its first was taken, and until then those that this rank needs. */
    if (call->kind == EXCHANGE && !call->taken && call->posted >= call->chunks) return 0;
    Rank *self = rank_of(c, c->rank);
    uint32_t number = atomic_load_explicit(&self->posted, memory_order_relaxed);
    if (!are_at(c, number + 1 - (uint32_t)c->slots, 0, -1)) return 0;
    write_chunk(c, call, number);
    call->posted++;
    if (call->posted == call->chunks && (call->kind != EXCHANGE || call->taken)) c->posting = call->next;
    atomic_store_explicit(&self->posted, number + 1, memory_order_release);
    ring(self);
    return 1;
}

/* 0, or 1 + the rank whose chunk is part of another collective. */
static int read_chunk(Channel *c, Call *call, uint32_t number) {
    int64_t start = call->taken * chunk_of(c, call), received = 0, sent = 0;
    int64_t bytes = bytes_of(c, call, call->taken, call->bytes);
    char *in[c->ranks];
    for (int rank = 0; rank < c->ranks; rank++) {
        if (call->kind == BROADCAST && rank != call->root) continue;
        const Header *head = header(c, rank, number);
        int is_unlike = head->call != name_of(call);
        is_unlike |= call->kind == EXCHANGE && !is_unlike && head->sizes[c->rank] != call->received[rank];
        if (is_unlike) return 1 + rank;
        in[rank] = data(c, rank, number);
    }
    switch (call->kind) {
        case REDUCE: reduce(call, call->output + start, in, c->ranks, bytes); break;
        case SCATTER:
            for (int rank = 0; rank < c->ranks; rank++) in[rank] += c->rank * part_of(c);
            in[c->rank] = (char *)call->input + c->rank * call->bytes + start;
            reduce(call, call->output + start, in, c->ranks, bytes);
            break;
        case BROADCAST:
            if (c->rank != call->root) memcpy(call->output + start, in[call->root], (size_t)bytes);
            break;
        case GATHER:
            for (int rank = 0; rank < c->ranks; rank++) {
                char *to = call->output + rank * call->bytes + start;
                const char *from = rank == c->rank ? call->input + start : in[rank];
                if (to != from) memmove(to, from, (size_t)bytes);
            }
            break;
        case EXCHANGE:
            for (int rank = 0; rank < c->ranks; rank++) {
                int64_t size = bytes_of(c, call, call->taken, call->received[rank]);
                const char *from = in[rank] + c->rank * part_of(c);
                if (rank == c->rank) from = call->input + sent + start;
                if (rank < c->rank) sent += call->sent[rank];
                if (size) memcpy(call->output + received + start, from, (size_t)size);
                received += call->received[rank];
                call->chunks = most(call->chunks, header(c, rank, number)->chunks);
            }
            break;
    }
    return 0;
}

static int take(Channel *c) {
    Call *call = c->taking;
    if (!call || call->taken == call->posted || call->unlike) return 0;
    Rank *self = rank_of(c, c->rank);
    uint32_t number = atomic_load_explicit(&self->taken, memory_order_relaxed);
    if (!are_at(c, number + 1, 1, call->kind == BROADCAST ? call->root : -1)) return 0;
    if ((call->unlike = read_chunk(c, call, number))) return 0;
    call->taken++;
    if (c->posting == call && call->posted == call->chunks) c->posting = call->next;
    if (call->taken == call->chunks) {
        c->taking = call->next;
        if (!call->next) c->last = NULL;
        atomic_fetch_sub(&calls_under_way, 1);
        atomic_thread_fence(memory_order_release);
        call->is_done = 1;
    }
    atomic_store_explicit(&self->taken, number + 1, memory_order_release);
    ring(self);
    return 1;
}

static int advance(Channel *c) {
    int moved = 0, posted, taken;
    do {
        posted = post(c);
        taken = take(c);
        moved |= posted | taken;
    } while (posted | taken);
    return moved;
}

/* ---- what Python calls */

int64_t segment_size(int32_t ranks, int32_t slots, int64_t chunk) {
    return ranks * ((int64_t)sizeof(Rank) + slots * slot_size(ranks, chunk));
}

/* The segment of an open file, whose bytes were zero; NULL without memory. `spin`: ns before one sleeps. */
Channel *open_channel(int file, int32_t ranks, int32_t rank, int32_t slots, int64_t chunk, int64_t spin) {
    Channel *c = calloc(1, sizeof(Channel));
    if (!c) return NULL;
    c->size = segment_size(ranks, slots, chunk);
    c->memory = mmap(NULL, (size_t)c->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (c->memory == MAP_FAILED) {
        free(c);
        return NULL;
    }
    c->ranks = ranks, c->rank = rank, c->slots = slots;
    c->chunk = chunk, c->stride = slot_size(ranks, chunk), c->spin = spin;
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_lock(&registry);
    c->next = channels;
    channels = c;
    pthread_mutex_unlock(&registry);
    return c;
}

void close_channel(Channel *c) {
    pthread_mutex_lock(&registry);
    Channel **at = &channels;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    pthread_mutex_unlock(&registry);
    for (Call *call = c->taking; call; call = call->next) atomic_fetch_sub(&calls_under_way, 1);
    munmap(c->memory, (size_t)c->size);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* Take a collective up, after those before it. It stays where it is in memory until it is done. */
void issue(Channel *c, Call *call) {
    pthread_mutex_lock(&c->lock);
    call->is_done = call->unlike = 0;
    call->posted = call->taken = 0;
    call->next = NULL;
    call->chunks = parts(call->bytes, chunk_of(c, call));
    if (call->kind == EXCHANGE)
        for (int rank = 0; rank < c->ranks; rank++)
            call->chunks = most(call->chunks, parts(call->sent[rank], part_of(c)));
    if (c->last) c->last->next = call;
    c->last = call;
    if (!c->posting) c->posting = call;
    if (!c->taking) c->taking = call;
    atomic_fetch_add(&calls_under_way, 1);
    advance(c);
    pthread_mutex_unlock(&c->lock);
}

/* Let the collectives of other groups move on, where nobody else is at them. */
static int advance_others(const Channel *c) {
    int moved = 0;
    if (pthread_mutex_trylock(&registry)) return 0;
    for (Channel *other = channels; other; other = other->next) {
        if (other == c || pthread_mutex_trylock(&other->lock)) continue;
        moved |= advance(other);
        pthread_mutex_unlock(&other->lock);
    }
    pthread_mutex_unlock(&registry);
    return moved;
}

static int has_others(Channel *c) {
    int own = 0;
    for (Call *call = c->taking; call; call = call->next) own++;
    return atomic_load(&calls_under_way) > own;
}

/* Until a rank's bell is not at `heard` any more, or so many ns. It does not yield its core while it spins: Linux takes
   a slice for each yield from who is not alone on the core, hundreds of ms in all. */
static void sleep_until(Rank *other, uint32_t heard, int64_t spin, int64_t most_ns) {
    if (spin) {
        int64_t end = now() + spin;
        do {
            for (int i = 0; i < 32; i++) {
                if (atomic_load_explicit(&other->bell, memory_order_acquire) != heard) return;
                relax();
            }
        } while (now() < end);
    }
    struct timespec limit = {most_ns / 1000000000, most_ns % 1000000000};
    atomic_fetch_add(&other->sleepers, 1);
    syscall(SYS_futex, &other->bell, FUTEX_WAIT, heard, &limit, NULL, 0);
    atomic_fetch_sub(&other->sleepers, 1);
}

/* Wait for a collective, for about `limit` ns. */
int wait_for(Channel *c, Call *call, int64_t limit) {
    int64_t end = now() + limit;
    for (int64_t spin = c->spin;;) {
        pthread_mutex_lock(&c->lock);
        int moved = advance(c);
        /* The bell is read before the counters are read again, so that no ring of it is missed. */
        int blocker = c->blocker;
        Rank *other = rank_of(c, blocker);
        uint32_t heard = atomic_load(&other->bell);
        moved |= advance(c);
        int is_done = call->is_done, unlike = c->taking ? c->taking->unlike : 0;
        int is_other = c->blocker != blocker, others = has_others(c);
        pthread_mutex_unlock(&c->lock);
        if (is_done) return DONE;
        if (unlike) return UNLIKE + unlike - 1;
        if (others) moved |= advance_others(c);
        int64_t left = end - now();
        if (left <= 0) return UNDER_WAY;
        if (moved || is_other) continue;
        sleep_until(other, heard, spin, others ? least(left, OTHERS_NS) : left);
    }
}

/* The rank for which a collective that is under way waits. */
int blocker(const Channel *c) { return c->blocker; }
