/* Paged attention: rows attend to their context block by block, in order, with online softmax.
 *
 * A row is one query head of one token. What it computes depends on its own query, its position
 * and the blocks of its sequence: the split of keys is the pool's block, the order is ascending,
 * and every sum has a fixed tree. Tiles of rows only share loads. So a prefill row and a decode
 * row at the same position are equal bit for bit. */
#ifndef ISTHMUS_ATTENTION_H
#define ISTHMUS_ATTENTION_H

#include "vector.h"

#define MAX_HEAD_DIM 256
#define MAX_BLOCK_SIZE 128
#define TILE_ROWS 32

enum { DTYPE_FLOAT = 0, DTYPE_BF16 = 1 };

typedef struct {
    char *pool; /* start of the layer's K half in block 0 */
    long block_stride, kv_stride, head_stride; /* bytes */
    long num_blocks, num_kv_heads, block_size, head_dim;
    int dtype;
} kv_layer;

typedef struct {
    int num_rows;
    long visible[TILE_ROWS]; /* keys the row may see: its position + 1; ascending */
    float max[TILE_ROWS], sum[TILE_ROWS];
    float q[TILE_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64))); /* scaled, zero padded */
    float acc[TILE_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
} row_tile;

typedef struct {
    float keys[MAX_BLOCK_SIZE * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float values[MAX_BLOCK_SIZE * MAX_HEAD_DIM] __attribute__((aligned(64)));
} block_copy;

/* One row against one block: `valid` of its keys count. Vectors per head `nv` is a constant. */
INLINE void attend_block(const int nv, row_tile *tile, int row, const float *keys,
                         const float *values, long valid) {
    const float *q = tile->q + (long)row * nv * VL;
    float *acc = tile->acc + (long)row * nv * VL;
    float weights[MAX_BLOCK_SIZE] __attribute__((aligned(64)));
    vf best = vf_set(-INFINITY);
    for (long first = 0; first < valid; first += VL) {
        vf partial[VL];
        UNROLL for (int j = 0; j < VL; j++) {
            const float *key = keys + (first + j) * nv * VL;
            vf dot = vf_load(q) * vf_load(key);
            UNROLL for (int d = 1; d < nv; d++) dot += vf_load(q + d * VL) * vf_load(key + d * VL);
            partial[j] = dot;
        }
        vf scores = vf_fold(partial);
        /* Keys past `valid` are whatever the memory held: replaced, not multiplied away. */
        scores = vf_select(lane_index() < (int32_t)(valid - first), scores, vf_set(-INFINITY));
        best = vf_max(best, scores);
        vf_store(weights + first, scores);
    }
    float old_max = tile->max[row], new_max = vf_max_lane(best);
    new_max = new_max > old_max ? new_max : old_max;
    float shrink = new_max == old_max ? 1.0f : vf_exp(vf_set(old_max - new_max))[0];
    vf total = {0};
    for (long first = 0; first < valid; first += VL) {
        vf p = vf_exp(vf_load(weights + first) - new_max);
        total += p;
        vf_store(weights + first, p);
    }
    tile->max[row] = new_max;
    tile->sum[row] = tile->sum[row] * shrink + vf_sum(total);
    vf out[MAX_HEAD_DIM / VL] = {{0}};
    UNROLL for (int d = 0; d < nv; d++) out[d] = vf_load(acc + d * VL) * shrink;
    for (long j = 0; j < valid; j++) {
        const float *value = values + j * nv * VL;
        vf p = vf_set(weights[j]);
        UNROLL for (int d = 0; d < nv; d++) out[d] += p * vf_load(value + d * VL);
    }
    UNROLL for (int d = 0; d < nv; d++) vf_store(acc + d * VL, out[d]);
}

INLINE void attend_tile_block(const int nv, row_tile *tile, const float *keys,
                              const float *values, long base, long block_size) {
    for (int row = 0; row < tile->num_rows; row++) {
        long valid = tile->visible[row] - base;
        if (valid <= 0) continue;
        attend_block(nv, tile, row, keys, values, valid < block_size ? valid : block_size);
    }
}

static void attend_tile_block_any(int nv, row_tile *tile, const float *keys, const float *values,
                                  long base, long block_size) {
    switch (nv) { /* head sizes 64 and 128 on the vector width in use, and whatever else */
        case 64 / VL: attend_tile_block(64 / VL, tile, keys, values, base, block_size); break;
        case 128 / VL: attend_tile_block(128 / VL, tile, keys, values, base, block_size); break;
        default: attend_tile_block(nv, tile, keys, values, base, block_size);
    }
}

/* Widen to float and pad heads to whole vectors and keys to whole groups, all padding zero. */
static void copy_half(const kv_layer *kv, const char *from, float *to, long count, long width) {
    long keys = (count + VL - 1) / VL * VL;
    for (long j = 0; j < keys; j++)
        for (long d = 0; d < width; d++) {
            float x = 0.0f;
            if (j < count && d < kv->head_dim)
                x = kv->dtype == DTYPE_BF16
                        ? bf16_to_float(((const uint16_t *)from)[j * kv->head_dim + d])
                        : ((const float *)from)[j * kv->head_dim + d];
            to[j * width + d] = x;
        }
}

/* bf16 heads of whole vectors: the common case of copy_half. */
static void widen_half(const uint16_t *from, float *to, long count) {
    for (long i = 0; i < count; i += VL) vf_store(to + i, vf_load_bf16(from + i));
}

static void attend_tile(const kv_layer *kv, row_tile *tile, const int32_t *block_table,
                        long kv_head, block_copy *copy) {
    long bs = kv->block_size, nv = (kv->head_dim + VL - 1) / VL, width = nv * VL;
    long end = tile->visible[tile->num_rows - 1];
    int whole = kv->head_dim == width && bs % VL == 0;
    for (long base = 0; base < end; base += bs) {
        const char *keys = kv->pool + block_table[base / bs] * kv->block_stride +
                           kv_head * kv->head_stride;
        const char *values = keys + kv->kv_stride;
        if (whole && kv->dtype == DTYPE_FLOAT) {
            attend_tile_block_any(nv, tile, (const float *)keys, (const float *)values, base, bs);
            continue;
        }
        long count = end - base < bs ? end - base : bs;
        if (whole) {
            long padded = (count + VL - 1) / VL * VL * width;
            widen_half((const uint16_t *)keys, copy->keys, padded);
            widen_half((const uint16_t *)values, copy->values, padded);
        } else {
            copy_half(kv, keys, copy->keys, count, width);
            copy_half(kv, values, copy->values, count, width);
        }
        attend_tile_block_any(nv, tile, copy->keys, copy->values, base, bs);
    }
}

INLINE float read_element(const char *base, long index, int dtype) {
    return dtype == DTYPE_BF16 ? bf16_to_float(((const uint16_t *)base)[index])
                               : ((const float *)base)[index];
}

INLINE void write_element(char *base, long index, int dtype, float x) {
    if (dtype == DTYPE_BF16)
        ((uint16_t *)base)[index] = float_to_bf16(x);
    else
        ((float *)base)[index] = x;
}

static void start_row(row_tile *tile, const char *q, int dtype, long head_dim, float scale,
                      long visible) {
    long width = (head_dim + VL - 1) / VL * VL;
    int row = tile->num_rows++;
    float *to = tile->q + row * width;
    for (long d = 0; d < head_dim; d++) to[d] = read_element(q, d, dtype) * scale;
    for (long d = head_dim; d < width; d++) to[d] = 0.0f;
    memset(tile->acc + row * width, 0, width * sizeof(float));
    tile->visible[row] = visible;
    tile->max[row] = -INFINITY;
    tile->sum[row] = 0.0f;
}

static void finish_row(const row_tile *tile, int row, char *out, int dtype, long head_dim) {
    long width = (head_dim + VL - 1) / VL * VL;
    const float *acc = tile->acc + row * width;
    for (long d = 0; d < head_dim; d++) write_element(out, d, dtype, acc[d] / tile->sum[row]);
}

#endif
