/* SHA-256 of short messages (FIPS 180-4) by the processor's own instructions. Without them OpenSSL's
 * code is faster than what a compiler makes of plain C, so then there is nothing here. */
#ifndef ISTHMUS_SHA256_H
#define ISTHMUS_SHA256_H

#if defined(__SHA__) && defined(__SSSE3__)
#define HAS_SHA256 1

#include <immintrin.h>
#include <stdint.h>

#define SHA256_CHUNK 64

static const uint32_t SHA256_ROUND[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
static const uint32_t SHA256_START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* The instructions want the state as (a b e f) and (c d g h), the first in the highest lane. */
static void sha256_chunks(const uint8_t *chunk, int64_t count, uint32_t state[8]) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef = _mm_set_epi32((int)state[0], (int)state[1], (int)state[4], (int)state[5]);
    __m128i cdgh = _mm_set_epi32((int)state[2], (int)state[3], (int)state[6], (int)state[7]);
    for (; count > 0; count--, chunk += SHA256_CHUNK) {
        __m128i words[4], abef_before = abef, cdgh_before = cdgh;
        for (int i = 0; i < 4; i++)
            words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)chunk + i), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i *four = &words[i & 3], last = words[(i + 3) & 3];
            __m128i sum = _mm_add_epi32(*four, _mm_load_si128((const __m128i *)SHA256_ROUND + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (i < 12) {
                __m128i next = _mm_sha256msg1_epu32(*four, words[(i + 1) & 3]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(last, words[(i + 2) & 3], 4));
                *four = _mm_sha256msg2_epu32(next, last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    uint32_t low[4], high[4];
    _mm_storeu_si128((__m128i *)low, abef);
    _mm_storeu_si128((__m128i *)high, cdgh);
    state[0] = low[3], state[1] = low[2], state[4] = low[1], state[5] = low[0];
    state[2] = high[3], state[3] = high[2], state[6] = high[1], state[7] = high[0];
}

#endif
#endif
