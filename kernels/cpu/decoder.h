/* A whole step of a dense pre-norm decoder: the single ops one after another, without a return to
 * Python between them. The same functions in the same order give the same bits as op by op. */
#ifndef ISTHMUS_DECODER_H
#define ISTHMUS_DECODER_H

typedef struct {
    const float *panels, *bias; /* packed by isthmus_pack_panels; bias may be NULL */
} packed_linear;

typedef struct {
    const float *input_norm, *q_norm, *k_norm, *mlp_norm; /* q_norm and k_norm may be NULL */
    packed_linear qkv, attn_out, gate_up, down;
} decoder_layer;

typedef struct {
    const decoder_layer *layers;
    const float *final_norm, *rope_table; /* [hidden]; [max_pos, rotary_dim] */
    long num_layers, hidden, intermediate, num_heads, max_pos, rotary_dim;
    float eps, scale;
} decoder_model;

typedef struct {
    const int64_t *positions, *slots, *logit_rows;
    long num_logits;
    kv_layer kv; /* layer 0; the following ones are layer_stride bytes further */
    long layer_stride;
    batch_view batch;
} decoder_step;

/* Scratch of a step, one allocation; sizes in floats per token. */
typedef struct {
    float *memory, *normed, *projected, *qkv, *attended, *gate_up, *gated;
} decoder_scratch;

static int reserve_scratch(decoder_scratch *s, const decoder_model *model, long num_tokens,
                           long q_size, long qkv_size) {
    long per_token = 2 * model->hidden + qkv_size + q_size + 3 * model->intermediate;
    s->memory = malloc(num_tokens * per_token * sizeof(float));
    if (!s->memory) return NO_MEMORY;
    s->normed = s->memory;
    s->projected = s->normed + num_tokens * model->hidden;
    s->qkv = s->projected + num_tokens * model->hidden;
    s->attended = s->qkv + num_tokens * qkv_size;
    s->gate_up = s->attended + num_tokens * q_size;
    s->gated = s->gate_up + num_tokens * 2 * model->intermediate;
    return OK;
}

static int apply_linear(packed_linear w, const float *x, long size_in, float *out, long size_out,
                        long num_rows) {
    return isthmus_linear(x, size_in, w.panels, w.bias, out, num_rows, size_in, size_out);
}

/* Norm each head of each token inside the fused projection, in place. */
static void norm_heads(float *first, long token_stride, long num_heads, long head_dim,
                       const float *weight, float eps, long num_tokens) {
#pragma omp parallel for num_threads(num_threads()) \
    if (num_tokens * num_heads * head_dim > PARALLEL_ROWWISE)
    for (long t = 0; t < num_tokens; t++)
        for (long h = 0; h < num_heads; h++) {
            float *head = first + t * token_stride + h * head_dim;
            norm_row(head, weight, eps, head, head_dim);
        }
}

/* Project, rotate and store this step's keys and values. */
static int project_and_store(const decoder_model *model, const decoder_layer *layer,
                             const decoder_step *step, const kv_layer *kv, decoder_scratch *s) {
    long tokens = step->batch.num_tokens, d = kv->head_dim;
    long q_size = model->num_heads * d, kv_size = kv->num_kv_heads * d;
    long qkv_size = q_size + 2 * kv_size, bytes = sizeof(float);
    int error = apply_linear(layer->qkv, s->normed, model->hidden, s->qkv, qkv_size, tokens);
    if (error) return error;
    if (layer->q_norm) {
        norm_heads(s->qkv, qkv_size, model->num_heads, d, layer->q_norm, model->eps, tokens);
        norm_heads(s->qkv + q_size, qkv_size, kv->num_kv_heads, d, layer->k_norm, model->eps,
                   tokens);
    }
    heads q = {s->qkv, qkv_size, d, model->num_heads};
    heads k = {s->qkv + q_size, qkv_size, d, kv->num_kv_heads};
    error = isthmus_rope(q, k, step->positions, model->rope_table, model->max_pos,
                         model->rotary_dim, tokens);
    if (error) return error;
    rows_view keys = {(char *)(s->qkv + q_size), qkv_size * bytes, d * bytes, DTYPE_FLOAT};
    rows_view values = {(char *)(s->qkv + q_size + kv_size), qkv_size * bytes, d * bytes,
                        DTYPE_FLOAT};
    return isthmus_write_kv(kv, keys, values, step->slots, tokens);
}

static int attend_step(const decoder_model *model, const decoder_step *step, const kv_layer *kv,
                       decoder_scratch *s) {
    long d = kv->head_dim, q_size = model->num_heads * d, bytes = sizeof(float);
    long qkv_size = q_size + 2 * kv->num_kv_heads * d;
    rows_view q = {(char *)s->qkv, qkv_size * bytes, d * bytes, DTYPE_FLOAT};
    rows_view out = {(char *)s->attended, q_size * bytes, d * bytes, DTYPE_FLOAT};
    return isthmus_paged_attention(kv, &step->batch, q, out, model->scale);
}

/* From attention output to the next layer's normed input; `residual` is updated. */
static int finish_layer(const decoder_model *model, const decoder_layer *layer,
                        const float *next_norm, float *residual, float *normed, long q_size,
                        long num_rows, decoder_scratch *s) {
    long hidden = model->hidden, inter = model->intermediate;
    int error = apply_linear(layer->attn_out, s->attended, q_size, s->projected, hidden, num_rows);
    if (error) return error;
    isthmus_add_rms_norm(s->projected, hidden, residual, hidden, layer->mlp_norm, model->eps,
                         s->normed, residual, num_rows, hidden);
    error = apply_linear(layer->gate_up, s->normed, hidden, s->gate_up, 2 * inter, num_rows);
    if (error) return error;
    isthmus_silu_mul(s->gate_up, 2 * inter, s->gated, num_rows, inter);
    error = apply_linear(layer->down, s->gated, inter, s->projected, hidden, num_rows);
    if (error) return error;
    return isthmus_add_rms_norm(s->projected, hidden, residual, hidden, next_norm, model->eps,
                                normed, residual, num_rows, hidden);
}

/* Beyond the last layer's keys and values only rows whose logits are wanted matter. */
static void keep_logit_rows(const decoder_step *step, float *rows, long size, float *scratch) {
    for (long i = 0; i < step->num_logits; i++)
        memcpy(scratch + i * size, rows + step->logit_rows[i] * size, size * sizeof(float));
    memcpy(rows, scratch, step->num_logits * size * sizeof(float));
}

static int run_layers(const decoder_model *model, const decoder_step *step, float *residual,
                      float *out, decoder_scratch *s) {
    long rows = step->batch.num_tokens, q_size = model->num_heads * step->kv.head_dim;
    isthmus_rms_norm(residual, model->hidden, model->layers[0].input_norm, model->eps, s->normed,
                     rows, model->hidden);
    for (long i = 0; i < model->num_layers; i++) {
        const decoder_layer *layer = model->layers + i;
        int is_last = i + 1 == model->num_layers;
        kv_layer kv = step->kv;
        kv.pool += i * step->layer_stride;
        for (int p = 0; p < kv.num_more; p++)
            if (kv.more_pools[p]) kv.more_pools[p] += i * step->layer_stride;
        int error = project_and_store(model, layer, step, &kv, s);
        if (error) return error;
        if (is_last && step->num_logits == 0) return OK;
        error = attend_step(model, step, &kv, s);
        if (error) return error;
        if (is_last) {
            keep_logit_rows(step, s->attended, q_size, s->qkv);
            keep_logit_rows(step, residual, model->hidden, s->projected);
            rows = step->num_logits;
        }
        const float *next_norm = is_last ? model->final_norm : layer[1].input_norm;
        error = finish_layer(model, layer, next_norm, residual, is_last ? out : s->normed, q_size,
                             rows, s);
        if (error) return error;
    }
    return OK;
}

#endif
