/* KV blocks: digests, and many seqlock copies out of a peer's pool, without torch and OpenMP.
 *
 * Called with the interpreter's lock released, so a pull costs one lock hand-over, not one a block. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xxh3.h"

#define EXPORT __attribute__((visibility("default")))

/* From here on a copy goes around the caches: it would push out what the model needs, and every
 * line of the target would be read before it is overwritten. Shorter ones are wanted soon. */
#define STREAM_MIN_BYTES (4L << 20)
#define LINE 64
#define MAX_HEADS 256 /* also in kv_blocks.py */
#define AHEAD (64 * LINE) /* a prefetch beyond the pool is no fault */

static void stream_lines(uint8_t *to, const uint8_t *from, long bytes) {
#if defined(__AVX512F__)
    for (long at = 0; at < bytes; at += LINE) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(to + at), _mm512_loadu_si512(from + at));
    }
#elif defined(__AVX__)
    for (long at = 0; at < bytes; at += LINE) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_T0);
        __m256i low = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i high = _mm256_loadu_si256((const __m256i *)(from + at + LINE / 2));
        _mm256_stream_si256((__m256i *)(to + at), low);
        _mm256_stream_si256((__m256i *)(to + at + LINE / 2), high);
    }
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

static void copy_block(uint8_t *to, const uint8_t *from, long bytes, int streams) {
    if (streams && ((uintptr_t)to | (uintptr_t)bytes) % LINE == 0)
        stream_lines(to, from, bytes);
    else
        memcpy(to, from, (size_t)bytes);
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

/* Copy `count` blocks; good[i] says that the generation was wanted[i], even, before and after.
 *
 * The acquire load keeps the copy behind it, the fence keeps the second load behind the copy, on
 * every architecture; a writer makes the generation odd before it touches the block. */
EXPORT void isthmus_pull_blocks(const uint8_t *from, const uint64_t *gens, uint8_t *to,
                                long block_bytes, long count, const int64_t *from_rows,
                                const int64_t *to_rows, const uint64_t *wanted, uint8_t *good) {
    int streams = count * block_bytes >= STREAM_MIN_BYTES;
    for (long i = 0; i < count; i++) {
        uint64_t before = gen_of(gens, from_rows[i], memory_order_acquire);
        good[i] = before == wanted[i] && before % 2 == 0;
        if (!good[i]) continue;
        copy_block(to + to_rows[i] * block_bytes, from + from_rows[i] * block_bytes, block_bytes,
                   streams);
        atomic_thread_fence(memory_order_acquire);
        good[i] = gen_of(gens, from_rows[i], memory_order_relaxed) == before;
    }
#if defined(__x86_64__)
    if (streams) _mm_sfence(); /* streamed stores are not ordered with what wakes the reader */
#endif
}
