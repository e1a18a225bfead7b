/* out = x @ W^T + bias, bitwise the same for a row whatever rows stand beside it.
 *
 * Every output element is one chain acc = fma(x[k], w[k], acc), k ascending. Register blocks,
 * K slices (the accumulator is parked in `out`, which loses no bits) and threads only change
 * which chains run side by side, never the order within one.
 *
 * W is packed as [num_panels][K][PANEL]: one panel streams PANEL outputs' weights in order. */
#ifndef ISTHMUS_GEMM_H
#define ISTHMUS_GEMM_H

#include "vector.h"

#define PANEL 32
#define PANEL_VECTORS (PANEL / VL)
#if VL == 16
#define MAX_ROWS 12 /* 24 accumulators of 32 registers */
#elif defined(__aarch64__)
#define MAX_ROWS 3
#elif VL == 8
#define MAX_ROWS 3 /* 12 accumulators of 16 registers */
#else
#define MAX_ROWS 1
#endif
#define K_SLICE 512 /* a slice of a panel is 64 KiB: it stays in L2 while row blocks pass */

/* Multiply `rows` packed rows ([k][rows]) by one slice of a panel ([k][PANEL]). */
INLINE void block_multiply(const int rows, const float *x, const float *w, long num_k,
                           float *out, long out_stride, int resume) {
    vf acc[MAX_ROWS][PANEL_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < PANEL_VECTORS; c++)
            acc[r][c] = resume ? vf_load(out + r * out_stride + c * VL) : (vf){0};
    for (long k = 0; k < num_k; k++) {
        UNROLL for (int c = 0; c < PANEL_VECTORS; c++) {
            vf weight = vf_load(w + k * PANEL + c * VL);
            UNROLL for (int r = 0; r < rows; r++)
                acc[r][c] += vf_set(x[k * rows + r]) * weight;
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < PANEL_VECTORS; c++)
            vf_store(out + r * out_stride + c * VL, acc[r][c]);
}

static void block_multiply_any(int rows, const float *x, const float *w, long num_k, float *out,
                               long out_stride, int resume) {
    switch (rows) {
#define CASE(R) case R: block_multiply(R, x, w, num_k, out, out_stride, resume); break;
        CASE(1)
#if MAX_ROWS > 1
        CASE(2) CASE(3)
#endif
#if MAX_ROWS > 3
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* A last panel narrower than PANEL goes through a full-width buffer; its padding weights are 0. */
static void block_multiply_edge(int rows, const float *x, const float *w, long num_k, float *out,
                                long out_stride, int resume, int columns) {
    float wide[MAX_ROWS * PANEL];
    if (resume)
        for (int r = 0; r < rows; r++) {
            memset(wide + r * PANEL, 0, PANEL * sizeof(float));
            memcpy(wide + r * PANEL, out + r * out_stride, columns * sizeof(float));
        }
    block_multiply_any(rows, x, w, num_k, wide, PANEL, resume);
    for (int r = 0; r < rows; r++)
        memcpy(out + r * out_stride, wide + r * PANEL, columns * sizeof(float));
}

typedef struct {
    const float *panels, *bias;
    float *out;
    long in_features, out_features, num_rows, num_blocks;
} gemm_job;

/* Row blocks are balanced (25 rows = 9 + 8 + 8), so that no block starves the registers. */
INLINE long block_start(const gemm_job *job, long block) {
    return block * job->num_rows / job->num_blocks;
}

static void pack_rows(const gemm_job *job, const float *x, long x_stride, float *packed,
                      long block) {
    long start = block_start(job, block), rows = block_start(job, block + 1) - start;
    float *to = packed + start * job->in_features;
    for (long r = 0; r < rows; r++) {
        const float *from = x + (start + r) * x_stride;
        for (long k = 0; k < job->in_features; k++) to[k * rows + r] = from[k];
    }
}

static void multiply_panel(const gemm_job *job, const float *packed, long panel) {
    long num_k = job->in_features, column = panel * PANEL;
    long columns = job->out_features - column < PANEL ? job->out_features - column : PANEL;
    const float *w = job->panels + panel * PANEL * num_k;
    /* One row block streams the panel once, whole; several share it slice by slice. */
    long slices = job->num_blocks == 1 ? 1 : (num_k + K_SLICE - 1) / K_SLICE;
    for (long s = 0; s < slices; s++) {
        long first = s * num_k / slices, count = (s + 1) * num_k / slices - first;
        for (long b = 0; b < job->num_blocks; b++) {
            long start = block_start(job, b), rows = block_start(job, b + 1) - start;
            const float *x = packed + start * num_k + first * rows;
            float *out = job->out + start * job->out_features + column;
            if (columns == PANEL)
                block_multiply_any(rows, x, w + first * PANEL, count, out, job->out_features,
                                   s > 0);
            else
                block_multiply_edge(rows, x, w + first * PANEL, count, out, job->out_features,
                                    s > 0, columns);
        }
    }
    if (job->bias)
        for (long r = 0; r < job->num_rows; r++)
            for (long c = 0; c < columns; c++)
                job->out[r * job->out_features + column + c] += job->bias[column + c];
}

static void pack_panel(const float *weight, long weight_stride, long in_features,
                       long out_features, float *panels, long panel) {
    float *to = panels + panel * PANEL * in_features;
    for (long c = 0; c < PANEL; c++) {
        long row = panel * PANEL + c;
        const float *from = weight + row * weight_stride;
        for (long k = 0; k < in_features; k++)
            to[k * PANEL + c] = row < out_features ? from[k] : 0.0f;
    }
}

#endif
