/* XXH3 with 64 bits, for inputs that lie in several pieces: see the published specification of
 * xxHash. The tests hold it against the xxhash package. Lengths here are whole stripes, and more
 * than 240 bytes: shorter inputs have other rules, and whoever calls this leaves them out. */
#ifndef ISTHMUS_XXH3_H
#define ISTHMUS_XXH3_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define STRIPE 64
#define LANES 8
#define STRIPES_A_ROUND 16
#define XXH3_MIN_BYTES 241

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u

/* The default secret, as little-endian words; the seed is always 0. */
static const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de,
    0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c,
    0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b,
    0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
#define SECRET_BYTES ((const uint8_t *)SECRET)
#define SCRAMBLE_KEY (SECRET_BYTES + sizeof SECRET - STRIPE)
#define LAST_KEY (SECRET_BYTES + sizeof SECRET - STRIPE - 7)
#define MERGE_KEY (SECRET_BYTES + 11)

typedef struct {
    uint64_t lanes[LANES];
    uint64_t total;         /* stripes of the whole input */
    uint64_t done;          /* stripes taken so far */
} xxh3_state;

static void xxh3_begin(xxh3_state *s, uint64_t total_bytes) {
    static const uint64_t start[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(s->lanes, start, sizeof start);
    s->total = total_bytes / STRIPE;
    s->done = 0;
}

/* Vectors of 4 or 8 lanes; a lane's neighbour gets the data, the lane itself the product. */
#if defined(__AVX512F__)
#define WIDTH 8
typedef __m512i lanes_t;
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define ADD _mm512_add_epi64
#define XOR _mm512_xor_si512
#define MUL32 _mm512_mul_epu32
#define HIGH(v) _mm512_srli_epi64(v, 32)
#define SHIFT_UP(v) _mm512_slli_epi64(v, 32)
#define SHIFT_47(v) _mm512_srli_epi64(v, 47)
#define NEIGHBOUR(v) _mm512_shuffle_epi32(v, _MM_PERM_BADC)
#define SET32(x) _mm512_set1_epi64(x)
#elif defined(__AVX2__)
#define WIDTH 4
typedef __m256i lanes_t;
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define ADD _mm256_add_epi64
#define XOR _mm256_xor_si256
#define MUL32 _mm256_mul_epu32
#define HIGH(v) _mm256_srli_epi64(v, 32)
#define SHIFT_UP(v) _mm256_slli_epi64(v, 32)
#define SHIFT_47(v) _mm256_srli_epi64(v, 47)
#define NEIGHBOUR(v) _mm256_shuffle_epi32(v, 0x4E)
#define SET32(x) _mm256_set1_epi64x(x)
#endif

#ifdef WIDTH
#define NUM_VECTORS (LANES / WIDTH)

static inline void take_stripe(lanes_t *acc, const uint8_t *in, const uint8_t *key) {
    for (int i = 0; i < NUM_VECTORS; i++) {
        lanes_t data = LOAD(in + i * WIDTH * 8);
        lanes_t mixed = XOR(data, LOAD(key + i * WIDTH * 8));
        acc[i] = ADD(ADD(acc[i], NEIGHBOUR(data)), MUL32(mixed, HIGH(mixed)));
    }
}

static inline void scramble(lanes_t *acc) {
    lanes_t prime = SET32(P32_1);
    for (int i = 0; i < NUM_VECTORS; i++) {
        lanes_t v = XOR(XOR(acc[i], SHIFT_47(acc[i])), LOAD(SCRAMBLE_KEY + i * WIDTH * 8));
        acc[i] = ADD(MUL32(v, prime), SHIFT_UP(MUL32(HIGH(v), prime)));
    }
}

static inline void load_lanes(lanes_t *acc, const xxh3_state *s) {
    for (int i = 0; i < NUM_VECTORS; i++) acc[i] = LOAD(s->lanes + i * WIDTH);
}
static inline void store_lanes(xxh3_state *s, const lanes_t *acc) {
    for (int i = 0; i < NUM_VECTORS; i++) STORE(s->lanes + i * WIDTH, acc[i]);
}
#else
#define NUM_VECTORS LANES
typedef uint64_t lanes_t;

static inline uint64_t word_at(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

static inline void take_stripe(lanes_t *acc, const uint8_t *in, const uint8_t *key) {
    for (int i = 0; i < LANES; i++) {
        uint64_t data = word_at(in + 8 * i), mixed = data ^ word_at(key + 8 * i);
        acc[i ^ 1] += data;
        acc[i] += (mixed & 0xFFFFFFFFu) * (mixed >> 32);
    }
}

static inline void scramble(lanes_t *acc) {
    for (int i = 0; i < LANES; i++)
        acc[i] = (acc[i] ^ (acc[i] >> 47) ^ word_at(SCRAMBLE_KEY + 8 * i)) * P32_1;
}

static inline void load_lanes(lanes_t *acc, const xxh3_state *s) {
    memcpy(acc, s->lanes, sizeof s->lanes);
}
static inline void store_lanes(xxh3_state *s, const lanes_t *acc) {
    memcpy(s->lanes, acc, sizeof s->lanes);
}
#endif

/* Take the next piece, whole stripes; the last stripe of all has a key of its own. */
static void xxh3_take(xxh3_state *s, const uint8_t *in, uint64_t num_stripes) {
    lanes_t acc[NUM_VECTORS];
    load_lanes(acc, s);
    for (uint64_t n = 0; n < num_stripes; n++, in += STRIPE) {
        uint64_t at = s->done + n;
        if (at + 1 == s->total) {
            take_stripe(acc, in, LAST_KEY);
            continue;
        }
        take_stripe(acc, in, SECRET_BYTES + at % STRIPES_A_ROUND * 8);
        if (at % STRIPES_A_ROUND == STRIPES_A_ROUND - 1) scramble(acc);
    }
    s->done += num_stripes;
    store_lanes(s, acc);
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t xxh3_end(const xxh3_state *s) {
    uint64_t hash = s->total * STRIPE * P64_1;
    for (int i = 0; i < LANES; i += 2) {
        uint64_t keys[2];
        memcpy(keys, MERGE_KEY + 8 * i, sizeof keys);
        hash += fold(s->lanes[i] ^ keys[0], s->lanes[i + 1] ^ keys[1]);
    }
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9u;
    return hash ^ (hash >> 32);
}

#endif
