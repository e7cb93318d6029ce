// One level of the kernel library, compiled with -DLEVEL=<name> (see common.h): the two forward passes, each written
// once over the kernels, the decoder for any number of sequences and tokens, and the vision encoder.
#include "common.h"
#include "amx.c"
#include "elementwise.c"
#include "gemm.c"
#include "gemv.c"
#include "attention.c"

typedef struct {
    const float *weight, *bias;  // RMSNorm has no bias
    float eps;
} norm_args;

// A linear layer's operand: x, normalized if norm is given
static operand make_operand(const matrix *w, const activations *x, const norm_args *norm, int threads) {
    operand out = new_operand(x->n_tokens, w->depth, operand_type(w->dtype, x->n_tokens));
    const long depth = w->depth, width = width_of(x);
    const int splits = width == 1 && w->dtype == BFLOAT16 && !HAS_BF16_DOT;  // see split_token
    if (out.type == FLOAT32 && !norm && !splits) {
        release(out.data);
        out.data = (char *)x->data, out.panel_bytes = x->n_features * PANEL * 4, out.borrowed = 1;
        return out;
    }
    #pragma omp parallel for num_threads(threads) if (x->n_tokens > PANEL)
    for (long p = 0; p < panels_of(x); p++) {
        float *y = panel_of(x, p), *scratch = NULL;
        if (norm) {
            if (out.type != FLOAT32) scratch = allocate(depth * width * 4);
            y = scratch ? scratch : (float *)(out.data + p * out.panel_bytes);
            normalize(panel_of(x, p), norm->weight, norm->bias, norm->eps, depth, width, y);
        }
        if (width > 1) pack_panel(y, &out, p);
        else if (splits) split_token(y, depth, (float *)out.data);
        else if (out.type == BFLOAT16) round_token(y, depth, (uint16_t *)out.data);
        else if (out.type == INT8) quantize_token(y, w->dtype == INT8, &out);
        release(scratch);
    }
    return out;
}

// Layers of one input, their features below each other in out.y
static void layer(const matrix *w, int n_weights, const activations *x, const norm_args *norm, result out,
                  int threads) {
    operand h = make_operand(w, x, norm, threads);
    int together = n_weights;
    for (int k = 0; k < n_weights; k++) if (w[k].dtype != w->dtype) together = 1;
    for (int k = 0; k < n_weights; out.first += w[k].n_rows, k += together) {
        if (k && w[k].dtype != w[k - 1].dtype) {
            free_operand(&h);
            h = make_operand(w + k, x, norm, threads);
        }
        if (x->n_tokens == 1) gemv(w + k, together, &h, out, threads);
        else gemm(w + k, together, &h, out, threads);
    }
    free_operand(&h);
}

// --- the decoder: LLaMA (Touvron et al. 2023), as models/language_model.py ---

typedef struct {
    matrix qkv[3], out, gate_up[2], down;
    const float *norm1, *norm2;
} decoder_block;

typedef struct {
    const decoder_block *blocks;
    const matrix *head;
    const float *norm;
    long n_blocks, hidden_dim, inter_dim, n_heads, n_kv_heads, head_dim;
    float eps;
} decoder;

// New tokens of n_sequences sequences, n_new of each, and the cache of keys and values (n_blocks, 2, sequences,
// n_kv_heads, capacity, head_dim) that they are appended to
typedef struct {
    long slot;  // where a sequence is in the cache
    long past;  // tokens that it has there
    long last;  // the new token whose logits are computed
} sequence;

typedef struct {
    const void *x;  // embeddings (n_sequences * n_new, hidden_dim)
    long x_dtype;
    long n_sequences, n_new;
    const sequence *sequences;
    const float *angles;  // cosines, then sines of each token's position (n_sequences * n_new, head_dim)
    void *cache;
    long cache_dtype, capacity;
    long block_stride, part_stride, sequence_stride;  // of the cache, in values
    float *logits;  // (n_sequences, vocabulary)
    int threads;
} decoder_step;

// Rotate queries and keys, and append keys and values to the cache
static void rotate_and_append(const decoder *d, const decoder_step *s, long block, activations *qkv,
                              const activations *angles) {
    const long D = d->head_dim, n = qkv->n_tokens, width = width_of(qkv), size = s->cache_dtype == BFLOAT16 ? 2 : 4;
    #pragma omp parallel for num_threads(s->threads) if (n > PANEL)
    for (long p = 0; p < panels_of(qkv); p++) {
        float *panel = panel_of(qkv, p);
        rotate(panel, panel_of(angles, p), d->n_heads + d->n_kv_heads, D, width);
        for (long m = p * PANEL, stop; m < min_long(n, (p + 1) * PANEL); m = stop) {  // tokens of one sequence
            const long b = m / s->n_new, slot = s->sequences[b].slot, token = s->sequences[b].past + m % s->n_new;
            stop = min_long(min_long(n, (p + 1) * PANEL), (b + 1) * s->n_new);
            for (long head = 0; head < 2 * d->n_kv_heads; head++) {  // of keys, then of values
                const long part = head / d->n_kv_heads, h = head % d->n_kv_heads;
                const long to = block * s->block_stride + part * s->part_stride + slot * s->sequence_stride +
                                (h * s->capacity + token) * D;
                transpose(panel + (d->n_heads + head) * D * width + m % width, FLOAT32, width, D, stop - m,
                          (char *)s->cache + to * size, s->cache_dtype, D);
            }
        }
    }
}

static void attend_all(const decoder *d, const decoder_step *s, long block, const activations *qkv, activations *y) {
    const long D = d->head_dim, size = s->cache_dtype == BFLOAT16 ? 2 : 4;
    // Heads of a token that share keys are computed together, unless that leaves threads without work.
    const int is_shared = s->n_new == 1 && s->n_sequences * d->n_kv_heads >= s->threads;
    const long together = is_shared ? d->n_heads / d->n_kv_heads : 1, units = d->n_heads / together;
    #pragma omp parallel for num_threads(s->threads) schedule(dynamic)
    for (long unit = 0; unit < s->n_sequences * units; unit++) {
        const long b = unit / units, n_keys = s->sequences[b].past + s->n_new;
        char *key = (char *)s->cache + (block * s->block_stride + s->sequences[b].slot * s->sequence_stride) * size;
        const attention_args args = {
            .q = qkv, .y = y, .first_token = b * s->n_new, .key = {key, s->cache_dtype, s->capacity * D},
            .value = {key + s->part_stride * size, s->cache_dtype, s->capacity * D},
            .n_heads = d->n_heads, .n_kv_heads = d->n_kv_heads, .head_dim = D, .n_new = s->n_new, .n_keys = n_keys,
            .causal = 1,
        };
        if (s->n_new > 1) attend(&args, unit % units);
        else attend_one(&args, unit % units * together, together);
    }
}

// Only the token of each sequence whose logits are computed
static void keep_last(const decoder_step *s, activations *x) {
    activations kept = new_activations(s->n_sequences, x->n_features);
    memset(kept.data, 0, panels_of(&kept) * width_of(&kept) * x->n_features * 4);
    for (long b = 0; b < s->n_sequences; b++)
        for (long c = 0; c < x->n_features; c++) {
            const long to = kept.n_tokens == 1 ? c : panel_at(c, b, x->n_features);
            kept.data[to] = x->data[panel_at(c, b * s->n_new + s->sequences[b].last, x->n_features)];
        }
    release(x->data);
    *x = kept;
}

void decoder_forward(const decoder *d, const decoder_step *s) {
    const long D = d->head_dim, n = s->n_sequences * s->n_new;
    const int threads = s->threads;
    activations x = new_activations(n, d->hidden_dim), qkv = new_activations(n, (d->n_heads + 2 * d->n_kv_heads) * D);
    activations y = new_activations(n, d->n_heads * D), angles = new_activations(n, D);
    read_rows(s->x, s->x_dtype, &x, threads);
    read_rows(s->angles, FLOAT32, &angles, threads);
    memset(y.data, 0, panels_of(&y) * width_of(&y) * y.n_features * 4);  // tokens behind the last one stay finite
    for (long k = 0; k < d->n_blocks; k++) {
        const decoder_block *block = &d->blocks[k];
        const norm_args norm1 = {block->norm1, NULL, d->eps}, norm2 = {block->norm2, NULL, d->eps};
        layer(block->qkv, 3, &x, &norm1, (result){&qkv}, threads);
        rotate_and_append(d, s, k, &qkv, &angles);
        attend_all(d, s, k, &qkv, &y);
        if (k == d->n_blocks - 1 && s->n_new > 1) keep_last(s, &x), keep_last(s, &y);
        layer(&block->out, 1, &y, NULL, (result){&x, .add = 1}, threads);
        activations gate_up = new_activations(x.n_tokens, 2 * d->inter_dim);
        layer(block->gate_up, 2, &x, &norm2, (result){&gate_up}, threads);
        swiglu(&gate_up, threads);
        layer(&block->down, 1, &gate_up, NULL, (result){&x, .add = 1}, threads);
        release(gate_up.data);
    }
    activations logits = new_activations(x.n_tokens, d->head->n_rows);
    layer(d->head, 1, &x, &(norm_args){d->norm, NULL, d->eps}, (result){&logits}, threads);
    write_rows(&logits, s->logits, threads);
    release(logits.data), release(x.data), release(qkv.data), release(y.data), release(angles.data);
}

// --- the vision encoder: SigLIP (Zhai et al. 2023), as models/vision_transformer.py ---

typedef struct {
    matrix qkv, out, fc1, fc2;
    const float *ln1, *ln1_bias, *ln2, *ln2_bias;
} vision_block;

typedef struct {
    const vision_block *blocks;
    const matrix *patch;
    const float *position;  // (n_patches, hidden_dim)
    const float *norm, *norm_bias;
    long n_blocks, hidden_dim, inter_dim, n_heads, n_patches, dtype;
    float eps;
} vision_encoder;

// Attention of one image's head, whose keys are first copied from panels to rows
static void attend_image(const vision_encoder *e, const activations *qkv, activations *y, long image, long h) {
    const long C = e->hidden_dim, D = C / e->n_heads, T = e->n_patches, type = operand_type(e->dtype, PANEL);
    const long size = type == BFLOAT16 ? 2 : 4;
    // With int8 weights activations are rounded anyway: int16 is finer, and twice as fast as float32
    const int rounds = HAS_INT16_DOT && type == FLOAT32 && e->blocks->qkv.dtype == INT8 && D % LANES == 0;
    float panel[D * PANEL], key_scale[T];
    char *keys = allocate(T * D * size);
    for (long t = 0; t < T; t += PANEL) {
        const long n = min_long(PANEL, T - t);
        read_tokens(qkv, C + h * D, D, image * T + t, n, panel);
        transpose(panel, FLOAT32, PANEL, D, n, keys + t * D * size, type, D);
    }
    for (long t = 0; t < T && rounds; t++)
        key_scale[t] = quantize_row((float *)keys + t * D, D, int16_limit(D), (uint16_t *)keys + t * D);
    const attention_args args = {
        .q = qkv, .y = y, .first_token = image * T, .key = {keys, rounds ? INT16 : type, 0},
        .key_scale = key_scale, .value_feature = 2 * C,
        .n_heads = e->n_heads, .n_kv_heads = e->n_heads, .head_dim = D, .n_new = T, .n_keys = T,
    };
    attend(&args, h);
    release(keys);
}

// Patches (n_images * n_patches, values of a patch) float32 to features (..., hidden_dim) float32
void vision_forward(const vision_encoder *e, const float *patches, long n_images, float *out, int threads) {
    const long C = e->hidden_dim, n = n_images * e->n_patches;
    activations pixels = new_activations(n, e->patch->depth), x = new_activations(n, C), y = new_activations(n, C);
    activations qkv = new_activations(n, 3 * C), hidden = new_activations(n, e->inter_dim);
    operand packed = {0};  // hidden values, if the next layer multiplies them in bfloat16
    read_rows(patches, FLOAT32, &pixels, threads);
    for (long image = 0; image < n_images; image++)
        for (long t = 0; t < e->n_patches; t++)
            for (long c = 0; c < C; c++) x.data[panel_at(c, image * e->n_patches + t, C)] = e->position[t * C + c];
    memset(y.data, 0, panels_of(&y) * PANEL * C * 4);
    layer(e->patch, 1, &pixels, NULL, (result){&x, .add = 1}, threads);
    release(pixels.data);
    for (long k = 0; k < e->n_blocks; k++) {
        const vision_block *block = &e->blocks[k];
        const norm_args ln1 = {block->ln1, block->ln1_bias, e->eps}, ln2 = {block->ln2, block->ln2_bias, e->eps};
        layer(&block->qkv, 1, &x, &ln1, (result){&qkv}, threads);
        #pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (long unit = 0; unit < n_images * e->n_heads; unit++)
            attend_image(e, &qkv, &y, unit / e->n_heads, unit % e->n_heads);
        layer(&block->out, 1, &y, NULL, (result){&x, .add = 1}, threads);
        const int packs = !HAS_MATRIX_PRODUCT && n > 1 && operand_type(block->fc2.dtype, n) == BFLOAT16;
        if (packs && !packed.data) {
            packed = new_operand(n, e->inter_dim, BFLOAT16);
            memset(packed.data, 0, panels_of(&x) * packed.panel_bytes);  // behind the last feature
        }
        layer(&block->fc1, 1, &x, &ln2, (result){&hidden, .packed = packs ? &packed : NULL, .gelu = 1}, threads);
        if (packs) gemm(&block->fc2, 1, &packed, (result){&x, .add = 1}, threads);
        else layer(&block->fc2, 1, &hidden, NULL, (result){&x, .add = 1}, threads);
    }
    #pragma omp parallel for num_threads(threads)
    for (long p = 0; p < panels_of(&x); p++)
        normalize(panel_of(&x, p), e->norm, e->norm_bias, e->eps, C, PANEL, panel_of(&y, p));
    write_rows(&y, out, threads);
    release(x.data), release(qkv.data), release(y.data), release(hidden.data), free_operand(&packed);
}

// --- one layer, for the projector and the tests ---

// y (n, w.n_rows) float32 = x (n, w.depth) float32 times the transpose of w, plus its bias
void linear_rows(const matrix *w, const float *x, long n, float *y, int threads) {
    activations in = new_activations(n, w->depth), out = new_activations(n, w->n_rows);
    read_rows(x, FLOAT32, &in, threads);
    layer(w, 1, &in, NULL, (result){&out}, threads);
    write_rows(&out, y, threads);
    release(in.data), release(out.data);
}
