/* Ops that treat each row by itself: norm, rotation, activation. */
#ifndef ISTHMUS_ROWWISE_H
#define ISTHMUS_ROWWISE_H

#include "vector.h"

/* Mean of squares over four vector chains and a scalar tail, always in this order. */
static float mean_square(const float *x, long size) {
    vf acc[4] = {{0}, {0}, {0}, {0}};
    long i = 0;
    for (; i + 4 * VL <= size; i += 4 * VL)
        UNROLL for (int c = 0; c < 4; c++) {
            vf v = vf_load(x + i + c * VL);
            acc[c] += v * v;
        }
    for (; i + VL <= size; i += VL) {
        vf v = vf_load(x + i);
        acc[0] += v * v;
    }
    float sum = vf_sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; i < size; i++) sum += x[i] * x[i];
    return sum / (float)size;
}

static void norm_row(const float *x, const float *weight, float eps, float *out, long size) {
    float factor = 1.0f / sqrtf(mean_square(x, size) + eps);
    for (long i = 0; i < size; i++) out[i] = (x[i] * factor) * weight[i];
}

static void add_row(const float *x, const float *y, float *out, long size) {
    for (long i = 0; i < size; i++) out[i] = x[i] + y[i];
}

/* Rotate the pairs (i, i + half) of one head; `turn` is cosines then sines. */
static void rotate_head(float *head, const float *turn, long half) {
    float *low = head, *high = head + half;
    const float *cosine = turn, *sine = turn + half;
    long i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = vf_load(low + i), b = vf_load(high + i);
        vf c = vf_load(cosine + i), s = vf_load(sine + i);
        vf_store(low + i, a * c - b * s);
        vf_store(high + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
    }
}

INLINE vf silu(vf x) { return x / (vf_set(1.0f) + vf_exp(-x)); }

static void silu_mul_row(const float *gate, const float *up, float *out, long size) {
    long i = 0;
    for (; i + VL <= size; i += VL) vf_store(out + i, silu(vf_load(gate + i)) * vf_load(up + i));
    if (i == size) return;
    float buffer[2 * VL] = {0};
    memcpy(buffer, gate + i, (size - i) * sizeof(float));
    memcpy(buffer + VL, up + i, (size - i) * sizeof(float));
    vf_store(buffer, silu(vf_load(buffer)) * vf_load(buffer + VL));
    memcpy(out + i, buffer, (size - i) * sizeof(float));
}

#endif
