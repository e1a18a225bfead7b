/* KV blocks: names, digests, and many copies out of a pool, without torch and OpenMP.
 *
 * Called with the interpreter's lock released, so a pull costs one lock hand-over, not one a block. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "sha256.h"
#include "xxh3.h"

#define EXPORT __attribute__((visibility("default")))

/* From here on a copy goes around the caches: it would push out what the model needs, and every
 * line of the target would be read before it is overwritten. Shorter ones are wanted soon. */
#define STREAM_MIN_BYTES (4L << 20)
#define LINE 64
#define MAX_HEADS 256 /* also in kv_blocks.py */
#define NAME 16 /* bytes; also there, as the next */
#define MAX_NAMED 256 /* bytes of what is hashed for one */
#define MAX_THREADS 16 /* of one copy */
#define MAX_HELPING 64 /* of all copies at once */
#define SPINS 2000 /* some 50 us */
#define AHEAD (64 * LINE) /* a prefetch beyond the pool is no fault */
#define TOGETHER 10 /* pieces, and what is copied of each in its turn: measured, with little between */
#define TURN (2 * LINE)

/* Where the blocks of a pool lie, or a part of each: pieces of one length, by strides. A block of a
 * block-major pool is one piece, of a layer-major one K and V of each layer. */
typedef struct {
    const uint8_t *base;
    int64_t block_stride, piece_stride, num_pieces, piece_bytes;
} pool_pieces;

#if defined(__AVX__)
static void stream_line(uint8_t *to, const uint8_t *from) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
#else
    __m256i low = _mm256_loadu_si256((const __m256i *)from);
    __m256i high = _mm256_loadu_si256((const __m256i *)(from + LINE / 2));
    _mm256_stream_si256((__m256i *)to, low);
    _mm256_stream_si256((__m256i *)(to + LINE / 2), high);
#endif
}
#endif

static void stream_piece(uint8_t *to, const uint8_t *from, int64_t bytes) {
#if defined(__AVX__)
    for (int64_t at = 0; at < bytes; at += LINE) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_T0);
        stream_line(to + at, from + at);
    }
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

/* A piece of few KiB ends before the processor reads it ahead, and each begins on a page it has to
 * look up: with some of them in turns, one is waited for while another comes. */
static void stream_together(uint8_t *to, const pool_pieces *from, const uint8_t *piece,
                            int64_t count) {
    int64_t bytes = from->piece_bytes;
#if defined(__AVX__)
    for (int64_t at = 0; at < bytes; at += TURN) {
        int64_t end = at + TURN < bytes ? at + TURN : bytes;
        for (int64_t i = 0; i < count; i++)
            for (int64_t line = at; line < end; line += LINE)
                stream_line(to + i * bytes + line, piece + i * from->piece_stride + line);
    }
#else
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * bytes, piece + i * from->piece_stride, (size_t)bytes);
#endif
}

/* Put the pieces of one block side by side. */
static void copy_block(uint8_t *to, const pool_pieces *from, int64_t row, int streams) {
    const uint8_t *piece = from->base + row * from->block_stride;
    int64_t bytes = from->piece_bytes, left = from->num_pieces;
    int is_streamed = streams && ((uintptr_t)to | (uintptr_t)bytes) % LINE == 0;
    while (left > 0) {
        int64_t taken = !is_streamed ? 1 : left < TOGETHER ? left : TOGETHER;
        if (!is_streamed)
            memcpy(to, piece, (size_t)bytes);
        else if (taken == 1)
            stream_piece(to, piece, bytes);
        else
            stream_together(to, from, piece, taken);
        to += taken * bytes;
        piece += taken * from->piece_stride;
        left -= taken;
    }
}

static uint64_t gen_of(const uint64_t *gens, long row, memory_order order) {
    return atomic_load_explicit((const _Atomic uint64_t *)&gens[row], order);
}

/* How digests lie over a block `[layers][2][heads][run_bytes]`: one for each head and group of
 * layers [bounds[g], bounds[g + 1]), a head's groups side by side. */
typedef struct {
    int64_t num_heads, run_bytes, num_groups;
    const int64_t *bounds; /* [num_groups + 1] */
} digest_plan;

EXPORT void isthmus_block_digests(const digest_plan *plan, const uint8_t *block, uint64_t *out) {
    int64_t heads = plan->num_heads, run = plan->run_bytes;
    xxh3_state states[MAX_HEADS];
    /* In the order of memory, which the processor reads ahead; heads take turns. */
    for (int64_t g = 0; g < plan->num_groups; g++) {
        int64_t from = 2 * plan->bounds[g], to = 2 * plan->bounds[g + 1];
        for (int64_t head = 0; head < heads; head++)
            xxh3_begin(&states[head], (uint64_t)((to - from) * run));
        const uint8_t *piece = block + from * heads * run;
        for (int64_t i = 0; i < (to - from) * heads; i++, piece += run)
            xxh3_take(&states[i % heads], piece, (uint64_t)(run / STRIPE));
        for (int64_t head = 0; head < heads; head++)
            out[head * plan->num_groups + g] = xxh3_end(&states[head]);
    }
}

/* What threads share of one copy. All pointers but this one are good only while `finished` is less
 * than `count`: who has taken no block may come when the caller has long returned. */
typedef struct {
    const pool_pieces *from;
    const uint64_t *gens;
    uint8_t *to;
    int64_t count;
    const int64_t *from_rows, *to_rows;
    const uint64_t *wanted;
    uint8_t *good;
    const digest_plan *plan; /* or none: nothing is digested */
    uint64_t *digests;
    int streams;
    _Atomic int64_t next;     /* not taken by any thread yet */
    _Atomic int64_t finished; /* copied and judged */
    _Atomic int users;        /* threads that may still look at this; the last one frees it */
    pthread_mutex_t lock;
    pthread_cond_t all_finished;
} pull_job;

/* The acquire load keeps the copy behind it, the fence keeps the second load behind the copy, on
 * every architecture; a writer makes the generation odd before it touches the block. */
static void pull_block(pull_job *job, int64_t i) {
    int64_t row = job->from_rows[i], block_bytes = job->from->num_pieces * job->from->piece_bytes;
    uint64_t before = gen_of(job->gens, row, memory_order_acquire);
    job->good[i] = before == job->wanted[i] && before % 2 == 0;
    if (!job->good[i]) return;
    uint8_t *to = job->to + job->to_rows[i] * block_bytes;
    copy_block(to, job->from, row, job->streams);
    atomic_thread_fence(memory_order_acquire);
    job->good[i] = gen_of(job->gens, row, memory_order_relaxed) == before;
    if (job->plan && job->good[i])
        isthmus_block_digests(job->plan, to, job->digests + i * job->plan->num_heads * job->plan->num_groups);
}

/* Block by block, so that a thread that gets no core holds up one block and not its share. */
static void pull_until_taken(pull_job *job) {
    int64_t mine = 0;
    for (;; mine++) {
        int64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (i >= job->count) break;
        pull_block(job, i);
    }
    if (!mine) return;
#if defined(__x86_64__)
    _mm_sfence(); /* streamed stores are not ordered with what tells the reader */
#endif
    if (atomic_fetch_add_explicit(&job->finished, mine, memory_order_acq_rel) + mine < job->count)
        return;
    pthread_mutex_lock(&job->lock);
    pthread_cond_signal(&job->all_finished);
    pthread_mutex_unlock(&job->lock);
}

static void leave(pull_job *job) {
    if (atomic_fetch_sub_explicit(&job->users, 1, memory_order_acq_rel) > 1) return;
    pthread_cond_destroy(&job->all_finished);
    pthread_mutex_destroy(&job->lock);
    free(job);
}

static _Atomic int num_helping; /* of all copies: where no core is free, late ones do not pile up */

static void *help(void *argument) {
    pull_until_taken(argument);
    leave(argument);
    atomic_fetch_sub_explicit(&num_helping, 1, memory_order_relaxed);
    return NULL;
}

static int is_finished(pull_job *job) {
    return atomic_load_explicit(&job->finished, memory_order_acquire) == job->count;
}

/* Wait for the blocks that others have taken: one each, which mostly takes less than falling asleep
 * and waking up. */
static void wait_finished(pull_job *job) {
    for (int i = 0; i < SPINS && !is_finished(job); i++) {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
    if (is_finished(job)) return;
    pthread_mutex_lock(&job->lock);
    while (!is_finished(job)) pthread_cond_wait(&job->all_finished, &job->lock);
    pthread_mutex_unlock(&job->lock);
}

static int start_helper(const pthread_attr_t *detached, pull_job *job) {
    pthread_t thread;
    int is_started = atomic_fetch_add_explicit(&num_helping, 1, memory_order_relaxed) < MAX_HELPING;
    atomic_fetch_add_explicit(&job->users, 1, memory_order_relaxed);
    if (is_started) is_started = !pthread_create(&thread, detached, help, job);
    if (is_started) return 1;
    atomic_fetch_sub_explicit(&job->users, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&num_helping, 1, memory_order_relaxed);
    return 0;
}

/* Start up to `wanted` threads, which handle no signals; fewer where the system gives no more. */
static void start_helpers(int wanted, pull_job *job) {
    sigset_t all, before;
    pthread_attr_t detached;
    sigfillset(&all);
    if (pthread_attr_init(&detached)) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (!pthread_sigmask(SIG_SETMASK, &all, &before)) {
        while (wanted > 0 && start_helper(&detached, job)) wanted--;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&detached);
}

/* Have `num_helpers` other threads share a copy; 0 where the system has no memory for the job. */
static int pull_together(const pull_job *job, int num_helpers) {
    pull_job *shared = malloc(sizeof *shared);
    if (!shared) return 0;
    *shared = *job;
    atomic_init(&shared->users, 1);
    pthread_mutex_init(&shared->lock, NULL);
    pthread_cond_init(&shared->all_finished, NULL);
    start_helpers(num_helpers, shared);
    pull_until_taken(shared);
    wait_finished(shared);
    leave(shared);
    return 1;
}

/* Copy `count` blocks; good[i] says that the generation was wanted[i], even, before and after.
 *
 * With a plan, digests[i] are those of what was written; then the copy goes through the caches, where
 * it is read again. Where a core alone does not fill the memory's bandwidth, `num_threads` share a
 * long copy. They live for one call: starting one takes a fiftieth of what it copies. Nobody waits
 * for one that comes too late to take a block. */
EXPORT void isthmus_pull_blocks(const pool_pieces *from, const uint64_t *gens, uint8_t *to,
                                int64_t count, const int64_t *from_rows, const int64_t *to_rows,
                                const uint64_t *wanted, uint8_t *good, const digest_plan *plan,
                                uint64_t *digests, int64_t num_threads) {
    int is_long = count * from->num_pieces * from->piece_bytes >= STREAM_MIN_BYTES;
    pull_job job = {.from = from, .gens = gens, .to = to, .count = count, .from_rows = from_rows,
                    .to_rows = to_rows, .wanted = wanted, .good = good, .plan = plan,
                    .digests = digests, .streams = is_long && !plan};
    int64_t helpers = (num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1;
    if (helpers >= count) helpers = count - 1;
    if (is_long && helpers > 0 && pull_together(&job, (int)helpers)) return;
    for (int64_t i = 0; i < count; i++) pull_block(&job, i);
#if defined(__x86_64__)
    _mm_sfence(); /* streamed stores are not ordered with what wakes the reader */
#endif
}

/* Put `count` blocks of our own, which nobody writes, side by side. Not around the caches: they are
 * about to be sent. */
EXPORT void isthmus_gather_blocks(const pool_pieces *from, uint8_t *to, int64_t count,
                                  const int64_t *rows) {
    int64_t block_bytes = from->num_pieces * from->piece_bytes;
    for (int64_t i = 0; i < count; i++)
        copy_block(to + i * block_bytes, from, rows[i], 0);
}

#if defined(HAS_SHA256)
/* Names of blocks, each of which follows the one before: the first `NAME` bytes of the SHA-256 of a
 * head that holds the parent's name at `parent_at`, and the block's tokens. The head holds that of
 * the first block's parent; with the tokens it has MAX_NAMED bytes at most. */
EXPORT void isthmus_hash_chain(const uint8_t *head, int64_t head_bytes, int64_t parent_at,
                               const uint8_t *tokens, int64_t block_bytes, int64_t num_blocks,
                               uint8_t *names) {
    uint8_t message[MAX_NAMED + SHA256_CHUNK + 9] = {0};
    int64_t bytes = head_bytes + block_bytes;
    int64_t chunks = (bytes + 9 + SHA256_CHUNK - 1) / SHA256_CHUNK;
    memcpy(message, head, (size_t)head_bytes);
    message[bytes] = 0x80;
    for (int i = 0; i < 8; i++)
        message[chunks * SHA256_CHUNK - 1 - i] = (uint8_t)((uint64_t)bytes * 8 >> 8 * i);
    for (int64_t block = 0; block < num_blocks; block++, names += NAME) {
        uint32_t state[8];
        memcpy(message + head_bytes, tokens + block * block_bytes, (size_t)block_bytes);
        memcpy(state, SHA256_START, sizeof state);
        sha256_chunks(message, chunks, state);
        for (int i = 0; i < NAME; i++)
            names[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
        memcpy(message + parent_at, names, NAME);
    }
}
#endif
