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
#define MAX_JOINT_ROWS 4

/* An entry of a block table: which pool, and which block of it. Pool 0 is our own. */
#define MAX_POOLS 8
#define POOL_SHIFT 24
#define POOL_MASK ((1 << POOL_SHIFT) - 1)

enum { DTYPE_FLOAT = 0, DTYPE_BF16 = 1 };

typedef struct {
    char *pool; /* start of the layer's K half in block 0 */
    long block_stride, kv_stride, head_stride; /* bytes; the same in every pool */
    long num_blocks, num_kv_heads, block_size, head_dim;
    int dtype;
    int num_more;                          /* further pools, which are only read */
    const char *more_pools[MAX_POOLS - 1]; /* each like `pool` */
    long more_blocks[MAX_POOLS - 1];       /* 0 = no pool here */
} kv_layer;

INLINE const char *block_of(const kv_layer *kv, int32_t entry) {
    if (entry <= POOL_MASK) return kv->pool + entry * kv->block_stride;
    return kv->more_pools[(entry >> POOL_SHIFT) - 1] + (entry & POOL_MASK) * kv->block_stride;
}

INLINE int is_block(const kv_layer *kv, int32_t entry) {
    if (entry <= POOL_MASK) return entry >= 0 && entry < kv->num_blocks;
    int more = (entry >> POOL_SHIFT) - 1;
    return more < kv->num_more && (entry & POOL_MASK) < kv->more_blocks[more];
}

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

/* Scores of `rows` rows against the keys of one block; -inf past `valid`. */
INLINE void score_block(const int nv, const int rows, const float *q, const float *keys,
                        long valid, float (*scores)[MAX_BLOCK_SIZE], vf *best) {
    for (long first = 0; first < valid; first += VL) {
        vf partial[MAX_JOINT_ROWS][VL];
        UNROLL for (int j = 0; j < VL; j++) {
            const float *key = keys + (first + j) * nv * VL;
            UNROLL for (int r = 0; r < rows; r++) {
                vf dot = vf_load(q + r * nv * VL) * vf_load(key);
                UNROLL for (int d = 1; d < nv; d++)
                    dot += vf_load(q + (r * nv + d) * VL) * vf_load(key + d * VL);
                partial[r][j] = dot;
            }
        }
        /* Keys past `valid` are whatever the memory held: replaced, not multiplied away. */
        vi counts = lane_index() < (int32_t)(valid - first);
        UNROLL for (int r = 0; r < rows; r++) {
            vf s = vf_select(counts, vf_fold(partial[r]), vf_set(-INFINITY));
            best[r] = vf_max(best[r], s);
            vf_store(scores[r] + first, s);
        }
    }
}

/* Turn scores into weights under the new maximum; return by how much older sums shrink. */
INLINE float weigh_block(row_tile *tile, int row, float *scores, long valid, vf best) {
    float old_max = tile->max[row], new_max = vf_max_lane(best);
    new_max = new_max > old_max ? new_max : old_max;
    float shrink = new_max == old_max ? 1.0f : vf_exp(vf_set(old_max - new_max))[0];
    vf total = {0};
    for (long first = 0; first < valid; first += VL) {
        vf p = vf_exp(vf_load(scores + first) - new_max);
        total += p;
        vf_store(scores + first, p);
    }
    tile->max[row] = new_max;
    tile->sum[row] = tile->sum[row] * shrink + vf_sum(total);
    return shrink;
}

/* `rows` neighbouring rows against one block of which each sees `valid` keys. They share loads
 * and hide each other's latencies, and do not mix. `nv` (vectors per head) and `rows` are
 * constants where it matters. */
INLINE void attend_rows(const int nv, const int rows, row_tile *tile, int row, const float *keys,
                        const float *values, long valid) {
    float weights[MAX_JOINT_ROWS][MAX_BLOCK_SIZE] __attribute__((aligned(64)));
    float *acc = tile->acc + (long)row * nv * VL;
    vf best[MAX_JOINT_ROWS], out[MAX_JOINT_ROWS][MAX_HEAD_DIM / VL] = {{{0}}};
    UNROLL for (int r = 0; r < rows; r++) best[r] = vf_set(-INFINITY);
    score_block(nv, rows, tile->q + (long)row * nv * VL, keys, valid, weights, best);
    UNROLL for (int r = 0; r < rows; r++) {
        float shrink = weigh_block(tile, row + r, weights[r], valid, best[r]);
        UNROLL for (int d = 0; d < nv; d++) out[r][d] = vf_load(acc + (r * nv + d) * VL) * shrink;
    }
    for (long j = 0; j < valid; j++) {
        const float *value = values + j * nv * VL;
        UNROLL for (int d = 0; d < nv; d++) {
            vf v = vf_load(value + d * VL);
            UNROLL for (int r = 0; r < rows; r++) out[r][d] += vf_set(weights[r][j]) * v;
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int d = 0; d < nv; d++) vf_store(acc + (r * nv + d) * VL, out[r][d]);
}

INLINE long keys_seen(const row_tile *tile, int row, long base, long block_size) {
    long valid = tile->visible[row] - base;
    return valid < block_size ? valid : block_size;
}

INLINE void attend_tile_block(const int nv, row_tile *tile, const float *keys,
                              const float *values, long base, long block_size) {
    for (int row = 0; row < tile->num_rows;) {
        long valid = keys_seen(tile, row, base, block_size);
        int joint = 1;
        while (joint < MAX_JOINT_ROWS && row + joint < tile->num_rows &&
               keys_seen(tile, row + joint, base, block_size) == valid)
            joint++;
        if (valid > 0) switch (joint) {
                case 4: attend_rows(nv, 4, tile, row, keys, values, valid); break;
                case 3: attend_rows(nv, 3, tile, row, keys, values, valid); break;
                case 2: attend_rows(nv, 2, tile, row, keys, values, valid); break;
                default: attend_rows(nv, 1, tile, row, keys, values, valid);
            }
        row += joint;
    }
}

/* Head sizes other than 64 and 128: one row at a time, `nv` unknown to the compiler. */
static void attend_tile_block_odd(const int nv, row_tile *tile, const float *keys,
                                  const float *values, long base, long block_size) {
    for (int row = 0; row < tile->num_rows; row++) {
        long valid = keys_seen(tile, row, base, block_size);
        if (valid > 0) attend_rows(nv, 1, tile, row, keys, values, valid);
    }
}

static void attend_tile_block_any(int nv, row_tile *tile, const float *keys, const float *values,
                                  long base, long block_size) {
    switch (nv) {
        case 64 / VL: attend_tile_block(64 / VL, tile, keys, values, base, block_size); break;
        case 128 / VL: attend_tile_block(128 / VL, tile, keys, values, base, block_size); break;
        default: attend_tile_block_odd(nv, tile, keys, values, base, block_size);
    }
}

/* Pull the next block towards L2 while this one is worked on: block ids are in no order that a
 * hardware prefetcher could guess. */
INLINE void prefetch_half(const char *from, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
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
    long half_bytes = bs * kv->head_dim * (kv->dtype == DTYPE_BF16 ? 2 : 4);
    int whole = kv->head_dim == width && bs % VL == 0;
    for (long base = 0; base < end; base += bs) {
        const char *keys = block_of(kv, block_table[base / bs]) + kv_head * kv->head_stride;
        const char *values = keys + kv->kv_stride;
        if (base + bs < end) {
            const char *next = block_of(kv, block_table[base / bs + 1]) + kv_head * kv->head_stride;
            prefetch_half(next, half_bytes);
            prefetch_half(next + kv->kv_stride, half_bytes);
        }
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
