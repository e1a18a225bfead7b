/* Entry points of the CPU library: checks that need the data, threads, and the loops over rows.
 *
 * Every function returns 0 or an error number (see ERRORS in launchers.py); bad arguments are
 * found before anything is written. Threads take whole rows, panels or tiles, so their number never changes a result. */
#include <stdlib.h>

#include "attention.h"
#include "gemm.h"
#include "rowwise.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return 1; }
#endif

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, NO_MEMORY = 1, BAD_SLOT = 2, BAD_SEQUENCE = 3, BAD_BLOCK = 4, BAD_POSITION = 5, BAD_ROW = 6 };

/* Work below this many operations is not worth waking a thread for. */
#define PARALLEL_ROWWISE 65536
#define PARALLEL_FLOPS 262144

static int thread_limit = 0;

static int num_threads(void) { return thread_limit > 0 ? thread_limit : omp_get_max_threads(); }

EXPORT void isthmus_set_num_threads(int n) { thread_limit = n; }
EXPORT int isthmus_get_num_threads(void) { return num_threads(); }
EXPORT const char *isthmus_compiled_for(void) {
#if VL == 16
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif VL == 8
    return "AVX";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "128-bit vectors";
#endif
}
EXPORT long isthmus_panel_width(void) { return PANEL; }

/* ---- linear ---- */

EXPORT int isthmus_pack_panels(const float *weight, long weight_stride, long in_features,
                               long out_features, float *panels) {
    long num_panels = (out_features + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(num_threads()) schedule(static)
    for (long p = 0; p < num_panels; p++)
        pack_panel(weight, weight_stride, in_features, out_features, panels, p);
    return OK;
}

/* Rows per pass: their packed copy should stay in L2 while all panels go by. */
static long rows_per_pass(long in_features) {
    long rows = 200000 / in_features;
    rows = rows < 96 ? 96 : rows > 240 ? 240 : rows;
    return rows / MAX_ROWS * MAX_ROWS;
}

static void multiply_pass(const gemm_job *job, const float *x, long x_stride, float *scratch) {
    long num_panels = (job->out_features + PANEL - 1) / PANEL;
    long flops = job->num_rows * job->in_features * job->out_features;
#pragma omp parallel num_threads(num_threads()) if (flops > PARALLEL_FLOPS)
    {
        if (scratch) {
#pragma omp for schedule(static)
            for (long b = 0; b < job->num_blocks; b++) pack_rows(job, x, x_stride, scratch, b);
        }
#pragma omp for schedule(dynamic, 2)
        for (long p = 0; p < num_panels; p++) multiply_panel(job, scratch ? scratch : x, p);
    }
}

EXPORT int isthmus_linear(const float *x, long x_stride, const float *panels, const float *bias,
                          float *out, long num_rows, long in_features, long out_features) {
    long pass = rows_per_pass(in_features);
    long held = num_rows < pass ? num_rows : pass;
    float *scratch = NULL;
    if (num_rows > 1) {
        scratch = malloc(held * in_features * sizeof(float));
        if (!scratch) return NO_MEMORY;
    }
    for (long start = 0; start < num_rows; start += pass) {
        long rows = num_rows - start < pass ? num_rows - start : pass;
        gemm_job job = {panels,      bias, out + start * out_features, in_features, out_features,
                        rows,        (rows + MAX_ROWS - 1) / MAX_ROWS};
        multiply_pass(&job, x + start * x_stride, x_stride, scratch);
    }
    free(scratch);
    return OK;
}

/* ---- norm, rotation, activation ---- */

EXPORT int isthmus_rms_norm(const float *x, long x_stride, const float *weight, float eps,
                            float *out, long num_rows, long size) {
#pragma omp parallel for num_threads(num_threads()) if (num_rows * size > PARALLEL_ROWWISE)
    for (long r = 0; r < num_rows; r++)
        norm_row(x + r * x_stride, weight, eps, out + r * size, size);
    return OK;
}

EXPORT int isthmus_add_rms_norm(const float *x, long x_stride, const float *residual,
                                long residual_stride, const float *weight, float eps, float *out,
                                float *total, long num_rows, long size) {
#pragma omp parallel for num_threads(num_threads()) if (num_rows * size > PARALLEL_ROWWISE)
    for (long r = 0; r < num_rows; r++) {
        add_row(x + r * x_stride, residual + r * residual_stride, total + r * size, size);
        norm_row(total + r * size, weight, eps, out + r * size, size);
    }
    return OK;
}

typedef struct {
    float *data;
    long token_stride, head_stride, num_heads;
} heads;

EXPORT int isthmus_rope(heads q, heads k, const int64_t *positions, const float *table,
                        long max_pos, long rotary_dim, long num_tokens) {
    for (long t = 0; t < num_tokens; t++)
        if (positions[t] < 0 || positions[t] >= max_pos) return BAD_POSITION;
    long elements = num_tokens * (q.num_heads + k.num_heads) * rotary_dim;
#pragma omp parallel for num_threads(num_threads()) if (elements > PARALLEL_ROWWISE)
    for (long t = 0; t < num_tokens; t++) {
        const float *turn = table + positions[t] * rotary_dim;
        for (long h = 0; h < q.num_heads; h++)
            rotate_head(q.data + t * q.token_stride + h * q.head_stride, turn, rotary_dim / 2);
        for (long h = 0; h < k.num_heads; h++)
            rotate_head(k.data + t * k.token_stride + h * k.head_stride, turn, rotary_dim / 2);
    }
    return OK;
}

EXPORT int isthmus_silu_mul(const float *gate_up, long stride, float *out, long num_rows,
                            long size) {
#pragma omp parallel for num_threads(num_threads()) if (num_rows * size > PARALLEL_ROWWISE / 4)
    for (long r = 0; r < num_rows; r++)
        silu_mul_row(gate_up + r * stride, gate_up + r * stride + size, out + r * size, size);
    return OK;
}

/* ---- attention ---- */

static void write_half(char *to, int to_dtype, const char *from, int from_dtype, long count) {
    if (to_dtype == from_dtype)
        memcpy(to, from, count * (to_dtype == DTYPE_BF16 ? 2 : 4));
    else
        for (long d = 0; d < count; d++)
            write_element(to, d, to_dtype, read_element(from, d, from_dtype));
}

typedef struct {
    char *data;
    long token_stride, head_stride; /* bytes */
    int dtype;
} rows_view;

EXPORT int isthmus_write_kv(const kv_layer *kv, rows_view k, rows_view v, const int64_t *slots,
                            long num_tokens) {
    long num_slots = kv->num_blocks * kv->block_size;
    long head_bytes = kv->head_dim * (kv->dtype == DTYPE_BF16 ? 2 : 4);
    for (long t = 0; t < num_tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_slots) return BAD_SLOT;
    long elements = num_tokens * kv->num_kv_heads * kv->head_dim;
#pragma omp parallel for num_threads(num_threads()) if (elements > PARALLEL_ROWWISE)
    for (long t = 0; t < num_tokens; t++) {
        char *block = kv->pool + slots[t] / kv->block_size * kv->block_stride +
                      slots[t] % kv->block_size * head_bytes;
        for (long h = 0; h < kv->num_kv_heads; h++) {
            char *to = block + h * kv->head_stride;
            write_half(to, kv->dtype, k.data + t * k.token_stride + h * k.head_stride, k.dtype,
                       kv->head_dim);
            write_half(to + kv->kv_stride, kv->dtype,
                       v.data + t * v.token_stride + h * v.head_stride, v.dtype, kv->head_dim);
        }
    }
    return OK;
}

typedef struct {
    const int32_t *block_tables, *query_starts, *context_lens;
    long num_seqs, max_blocks, num_tokens, num_heads;
} batch_view;

static int check_batch(const batch_view *batch, const kv_layer *kv) {
    if (batch->query_starts[0] != 0 || batch->query_starts[batch->num_seqs] != batch->num_tokens)
        return BAD_SEQUENCE;
    for (long s = 0; s < batch->num_seqs; s++) {
        long queries = (long)batch->query_starts[s + 1] - batch->query_starts[s];
        long context = batch->context_lens[s];
        long blocks = (context + kv->block_size - 1) / kv->block_size;
        if (queries < 0 || queries > context) return BAD_SEQUENCE;
        if (blocks > batch->max_blocks) return BAD_BLOCK;
        for (long b = 0; b < blocks && queries; b++) {
            if (!is_block(kv, batch->block_tables[s * batch->max_blocks + b])) return BAD_BLOCK;
        }
    }
    return OK;
}

/* first_tile[s] = tiles of a KV head before sequence s, with `tile_rows` rows in a tile. */
static long count_tiles(const batch_view *batch, long group, long tile_rows, long *first_tile) {
    long total = 0;
    for (long s = 0; s < batch->num_seqs; s++) {
        long rows = ((long)batch->query_starts[s + 1] - batch->query_starts[s]) * group;
        first_tile[s] = total;
        total += (rows + tile_rows - 1) / tile_rows;
    }
    first_tile[batch->num_seqs] = total;
    return total;
}

static long find_sequence(const long *first_tile, long num_seqs, long tile) {
    long low = 0, high = num_seqs;
    while (high - low > 1) {
        long middle = (low + high) / 2;
        if (first_tile[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void run_tile(const kv_layer *kv, const batch_view *batch, rows_view q, rows_view out,
                     float scale, long seq, long kv_head, long first_row, long tile_rows) {
    row_tile tile;
    block_copy copy;
    long group = batch->num_heads / kv->num_kv_heads, start = batch->query_starts[seq];
    long queries = batch->query_starts[seq + 1] - start;
    long past = batch->context_lens[seq] - queries;
    long rows = queries * group - first_row < tile_rows ? queries * group - first_row : tile_rows;
    tile.num_rows = 0;
    for (long r = first_row; r < first_row + rows; r++) {
        long head = kv_head * group + r % group;
        start_row(&tile, q.data + (start + r / group) * q.token_stride + head * q.head_stride,
                  q.dtype, kv->head_dim, scale, past + r / group + 1);
    }
    attend_tile(kv, &tile, batch->block_tables + seq * batch->max_blocks, kv_head, &copy);
    for (long r = first_row; r < first_row + rows; r++) {
        long head = kv_head * group + r % group;
        finish_row(&tile, r - first_row,
                   out.data + (start + r / group) * out.token_stride + head * out.head_stride,
                   out.dtype, kv->head_dim);
    }
}

EXPORT int isthmus_paged_attention(const kv_layer *kv, const batch_view *batch, rows_view q,
                                   rows_view out, float scale) {
    int error = check_batch(batch, kv);
    if (error || batch->num_tokens == 0) return error;
    long *first_tile = malloc((batch->num_seqs + 1) * sizeof(long));
    if (!first_tile) return NO_MEMORY;
    long group = batch->num_heads / kv->num_kv_heads, threads = num_threads(), work = 0;
    for (long s = 0; s < batch->num_seqs; s++)
        work += ((long)batch->query_starts[s + 1] - batch->query_starts[s]) *
                batch->context_lens[s] * batch->num_heads * kv->head_dim;
    if (work <= PARALLEL_FLOPS) threads = 1;
    long tile_rows = TILE_ROWS, tiles = count_tiles(batch, group, tile_rows, first_tile);
    while (threads > 1 && tile_rows > 1 && tiles * kv->num_kv_heads < 2 * threads) {
        tile_rows /= 2; /* few rows: smaller tiles so that every thread has some */
        tiles = count_tiles(batch, group, tile_rows, first_tile);
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (long item = 0; item < tiles * kv->num_kv_heads; item++) {
        /* Late tiles of a long prompt see the most keys: they go first. */
        long tile = tiles - 1 - item / kv->num_kv_heads;
        long seq = find_sequence(first_tile, batch->num_seqs, tile);
        run_tile(kv, batch, q, out, scale, seq, item % kv->num_kv_heads,
                 (tile - first_tile[seq]) * tile_rows, tile_rows);
    }
    free(first_tile);
    return OK;
}

/* ---- a whole step ---- */

#include "decoder.h"

static int check_step(const decoder_model *model, const decoder_step *step) {
    long num_tokens = step->batch.num_tokens, num_slots = step->kv.num_blocks * step->kv.block_size;
    for (long t = 0; t < num_tokens; t++) {
        if (step->positions[t] < 0 || step->positions[t] >= model->max_pos) return BAD_POSITION;
        if (step->slots[t] < 0 || step->slots[t] >= num_slots) return BAD_SLOT;
    }
    /* At most one row of logits a token: the scratch is sized for that. */
    if (step->num_logits > num_tokens) return BAD_ROW;
    for (long i = 0; i < step->num_logits; i++)
        if (step->logit_rows[i] < 0 || step->logit_rows[i] >= num_tokens) return BAD_ROW;
    return check_batch(&step->batch, &step->kv);
}

/* `residual` [num_tokens, hidden] holds the embeddings and is overwritten; `out` gets the normed
 * rows whose logits are wanted, [num_logits, hidden]. */
EXPORT int isthmus_decoder_step(const decoder_model *model, const decoder_step *step,
                                float *residual, float *out) {
    int error = check_step(model, step);
    if (error || step->batch.num_tokens == 0) return error;
    long q_size = model->num_heads * step->kv.head_dim;
    decoder_scratch scratch;
    error = reserve_scratch(&scratch, model, step->batch.num_tokens, q_size,
                            q_size + 2 * step->kv.num_kv_heads * step->kv.head_dim);
    if (error) return error;
    error = run_layers(model, step, residual, out, &scratch);
    free(scratch.memory);
    return error;
}
