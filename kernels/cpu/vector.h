/* Vectors as wide as the machine's registers, with a fixed order for every sum.
 *
 * Results are deterministic for one build: nothing here depends on the number of rows, on the
 * thread or on where a pointer is aligned. Two machines with other vector widths may differ. */
#ifndef ISTHMUS_VECTOR_H
#define ISTHMUS_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VL 16
#define LANES(F) \
    F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), \
        F(14), F(15)
#elif defined(__AVX__)
#define VL 8
#define LANES(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)
#else
#define VL 4
#define LANES(F) F(0), F(1), F(2), F(3)
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

#ifdef __clang__
#define SHUFFLE(a, b, F) __builtin_shufflevector(a, b, LANES(F))
#else
#define SHUFFLE(a, b, F) __builtin_shuffle(a, b, (vi){LANES(F)})
#endif

INLINE vf vf_load(const float *p) { return *(const vf_mem *)p; }
INLINE void vf_store(float *p, vf v) { *(vf_mem *)p = v; }
INLINE vf vf_set(float x) { return x - (vf){0}; }
INLINE vf vf_select(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}
INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }

#define LANE_INDEX(p) (p)
INLINE vi lane_index(void) { return (vi){LANES(LANE_INDEX)}; }

#define TURN8(p) (((p) + 8) % VL)
#define TURN4(p) (((p) + 4) % VL)
#define TURN2(p) (((p) + 2) % VL)
#define TURN1(p) (((p) + 1) % VL)

/* Sum of all lanes, always by the same tree. */
INLINE float vf_sum(vf v) {
#if VL > 8
    v += SHUFFLE(v, v, TURN8);
#endif
#if VL > 4
    v += SHUFFLE(v, v, TURN4);
#endif
    v += SHUFFLE(v, v, TURN2);
    v += SHUFFLE(v, v, TURN1);
    return v[0];
}

INLINE float vf_max_lane(vf v) {
#if VL > 8
    v = vf_max(v, SHUFFLE(v, v, TURN8));
#endif
#if VL > 4
    v = vf_max(v, SHUFFLE(v, v, TURN4));
#endif
    v = vf_max(v, SHUFFLE(v, v, TURN2));
    v = vf_max(v, SHUFFLE(v, v, TURN1));
    return v[0];
}

/* Fold VL vectors into one whose lane i is the sum of the lanes of v[i].
 * A stage adds the halves of each segment of S lanes and sets the results of two vectors side by
 * side, so that after log2(VL) stages lanes stand in the order of the vectors. */
#define FOLD_LO(p, S) ((((p) % (S)) / ((S) / 2) ? VL : 0) + (p) / (S) * (S) + (p) % ((S) / 2))
#define FOLD_HI(p, S) (FOLD_LO(p, S) + (S) / 2)
#define LO16(p) FOLD_LO(p, 16)
#define HI16(p) FOLD_HI(p, 16)
#define LO8(p) FOLD_LO(p, 8)
#define HI8(p) FOLD_HI(p, 8)
#define LO4(p) FOLD_LO(p, 4)
#define HI4(p) FOLD_HI(p, 4)
#define LO2(p) FOLD_LO(p, 2)
#define HI2(p) FOLD_HI(p, 2)
#define FOLD_STAGE(S, COUNT) \
    UNROLL for (int i = 0; i < (COUNT); i++) v[i] = SHUFFLE(v[i], v[i + (COUNT)], LO##S) + \
                                                    SHUFFLE(v[i], v[i + (COUNT)], HI##S)

INLINE vf vf_fold(vf v[VL]) {
#if VL > 8
    FOLD_STAGE(16, VL / 2);
    FOLD_STAGE(8, VL / 4);
#elif VL > 4
    FOLD_STAGE(8, VL / 2);
#endif
    FOLD_STAGE(4, 2);
    FOLD_STAGE(2, 1);
    return v[0];
}

/* exp by 2^n * p(r), |r| <= ln(2)/2; exactly 0 below the smallest normal result, inf above all. */
INLINE vf vf_exp(vf x) {
    const vf magic = vf_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vi tiny = x < vf_set(-87.3f);
    x = vf_select(tiny, vf_set(-87.3f), x);
    vi huge = x > vf_set(88.72f);
    x = vf_select(huge, vf_set(88.72f), x);
    vf t = x * vf_set(1.44269504f) + magic;
    vf n = t - magic;
    vf r = x - n * vf_set(0.693359375f);
    r = r - n * vf_set(-2.12194440e-4f);
    vf p = vf_set(1.98412698e-4f);
    p = p * r + vf_set(1.38888889e-3f);
    p = p * r + vf_set(8.33333333e-3f);
    p = p * r + vf_set(4.16666667e-2f);
    p = p * r + vf_set(1.66666667e-1f);
    p = p * r + vf_set(0.5f);
    p = p * r + vf_set(1.0f);
    p = p * r + vf_set(1.0f);
    /* 2^n in two factors: n = 128 occurs just below the clamp and has no single-float power. */
    vi e = (vi)t - (vi)magic;
    vi half = e >> 1;
    vf scaled = p * (vf)((half + 127) << 23) * (vf)((e - half + 127) << 23);
    return vf_select(tiny, vf_set(0.0f), vf_select(huge, vf_set(INFINITY), scaled));
}

INLINE float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

/* Round to nearest even; a NaN stays a (quiet) NaN. */
INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vf vf_load_bf16(const uint16_t *p) {
    vu wide = __builtin_convertvector(*(const vh_mem *)p, vu);
    return (vf)(wide << 16);
}

#endif
