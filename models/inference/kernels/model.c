// The two forward passes, each written once over the kernels: the decoder for any number of sequences and tokens, and
// the vision encoder.

// --- the decoder: LLaMA (Touvron et al. 2023), as models/language_model.py ---

typedef struct {
    matrix qkv[3], out, gate_up[2], down;
    const float *norm1, *norm2;
} decoder_block;

typedef struct {
    const decoder_block *blocks;
    const matrix *head;
    const float *norm;
    const float *cos, *sin;  // (positions, head_dim / 2)
    long n_blocks, hidden_dim, inter_dim, n_heads, n_kv_heads, head_dim;
    float eps;
} decoder;

// New tokens of n_sequences sequences, n_new of each, and the cache of keys and values (n_blocks, 2, sequences,
// n_kv_heads, capacity, head_dim) that they are appended to
typedef struct {
    const void *x;  // embeddings (n_sequences * n_new, hidden_dim)
    long x_dtype;
    long n_sequences, n_new;
    const int64_t *past;       // (n_sequences) tokens that each sequence has in the cache
    const int64_t *positions;  // (n_sequences * n_new)
    const uint8_t *mask;       // (n_sequences, past + n_new, n_new), 1 where a query may attend; NULL: causal
    const int64_t *last;       // (n_sequences) the new token of each whose logits are computed; NULL: none
    void *cache;
    long cache_dtype, capacity;
    long block_stride, part_stride, sequence_stride;  // of the cache, in values
    float *logits;  // (n_sequences, vocabulary)
    int threads;
} decoder_step;

// out: an operand of the normalized x, which is panels or a single token
static void norm_operand(const float *x, const float *weight, const float *bias, float eps, operand *out, int threads) {
    const long depth = out->depth;
    if (out->n_tokens == 1) {
        float *y = out->type == FLOAT32 ? (float *)out->data : allocate(depth * 4);
        normalize(x, weight, bias, eps, depth, 1, y);
        if (out->type == INT8) quantize_token(y, out), release(y);
        return;
    }
    #pragma omp parallel for num_threads(threads) if (out->n_tokens > PANEL)
    for (long p = 0; p < n_panels(out->n_tokens); p++) {
        float *y = out->type == FLOAT32 ? (float *)out->data + p * depth * PANEL : allocate(depth * PANEL * 4);
        normalize(x + p * depth * PANEL, weight, bias, eps, depth, PANEL, y);
        pack_panel(y, out, p);
        if (out->type != FLOAT32) release(y);
    }
}

// out: an operand of x as it is
static void pack_operand(float *x, operand *out, int threads) {
    if (out->type == FLOAT32) {
        release(out->data);
        out->data = (char *)x, out->borrowed = 1;
        return;
    }
    if (out->n_tokens == 1) return quantize_token(x, out);
    #pragma omp parallel for num_threads(threads) if (out->n_tokens > PANEL)
    for (long p = 0; p < n_panels(out->n_tokens); p++) pack_panel(x + p * out->depth * PANEL, out, p);
}

// The features of token `from` of panels become those of token `to` of other panels
static void copy_token(const float *x, long from, float *y, long to, long n_features) {
    for (long c = 0; c < n_features; c++) y[panel_at(c, to, n_features)] = x[panel_at(c, from, n_features)];
}

// Rotate queries and keys, and append keys and values to the cache
static void rotate_and_append(const decoder *d, const decoder_step *s, long block, float *qkv, const float *cos,
                              const float *sin) {
    const long D = d->head_dim, n = s->n_sequences * s->n_new, n_q = d->n_heads * D, n_kv = d->n_kv_heads * D;
    const long width = n == 1 ? 1 : PANEL, n_features = n_q + 2 * n_kv;
    #pragma omp parallel for num_threads(s->threads) if (n > PANEL)
    for (long p = 0; p < (n == 1 ? 1 : n_panels(n)); p++) {
        float *panel = qkv + p * n_features * width;
        rotate(panel, cos + p * D / 2 * width, sin + p * D / 2 * width, d->n_heads + d->n_kv_heads, D, width);
        for (long m = p * PANEL, stop; m < min_long(n, (p + 1) * PANEL); m = stop) {  // tokens of one sequence
            const long b = m / s->n_new, token = s->past[b] + m % s->n_new;
            stop = min_long(min_long(n, (p + 1) * PANEL), (b + 1) * s->n_new);
            for (long part = 0; part < 2; part++)
                for (long h = 0; h < d->n_kv_heads; h++) {
                    const float *from = panel + (n_q + part * n_kv + h * D) * width + m % width;
                    const long to = block * s->block_stride + part * s->part_stride + b * s->sequence_stride +
                                    (h * s->capacity + token) * D;
                    transpose(from, FLOAT32, width, D, stop - m, (char *)s->cache + to * (s->cache_dtype == BFLOAT16 ? 2 : 4),
                              s->cache_dtype, D);
                }
        }
    }
}

static void attend_all(const decoder *d, const decoder_step *s, long block, const float *qkv, float *y) {
    const long D = d->head_dim, n = s->n_sequences * s->n_new, size = s->cache_dtype == BFLOAT16 ? 2 : 4;
    #pragma omp parallel for num_threads(s->threads) schedule(dynamic)
    for (long unit = 0; unit < s->n_sequences * d->n_heads; unit++) {
        const long b = unit / d->n_heads, h = unit % d->n_heads, n_keys = s->past[b] + s->n_new;
        char *key = (char *)s->cache + (block * s->block_stride + b * s->sequence_stride) * size;
        const attention_args args = {
            .q = qkv, .y = y, .n_features = (d->n_heads + 2 * d->n_kv_heads) * D, .first_token = b * s->n_new,
            .key = {key, s->cache_dtype, s->capacity * D},
            .value = {key + s->part_stride * size, s->cache_dtype, s->capacity * D},
            .n_heads = d->n_heads, .n_kv_heads = d->n_kv_heads, .head_dim = D, .n_new = s->n_new, .n_keys = n_keys,
            .causal = !s->mask, .mask = s->mask ? s->mask + b * n_keys * s->n_new : NULL,
        };
        if (s->n_new > 1) attend(&args, h);
        else attend_one(&args, h, n == 1 ? 1 : PANEL);
    }
}

void decoder_forward(const decoder *d, const decoder_step *s) {
    const long C = d->hidden_dim, D = d->head_dim, n_q = d->n_heads * D, n_features = n_q + 2 * d->n_kv_heads * D;
    const int threads = s->threads;
    long n = s->n_sequences * s->n_new;
    const long panels = n == 1 ? 1 : n_panels(n), width = n == 1 ? 1 : PANEL;
    float *x = allocate(panels * C * width * 4), *qkv = allocate(panels * n_features * width * 4);
    float *y = allocate(panels * n_q * width * 4), *gate_up = allocate(panels * 2 * d->inter_dim * width * 4);
    float *cos = allocate(panels * D / 2 * width * 4), *sin = allocate(panels * D / 2 * width * 4);
    if (n == 1) for (long c = 0; c < C; c++) x[c] = get(s->x, s->x_dtype, c);
    else rows_to_panels(s->x, s->x_dtype, n, C, x, threads), memset(y, 0, panels * n_q * width * 4);
    for (long m = 0; m < panels * width; m++)
        for (long i = 0; i < D / 2; i++) {
            const long at = n == 1 ? i : panel_at(i, m, D / 2), from = s->positions[min_long(m, n - 1)] * (D / 2) + i;
            cos[at] = d->cos[from], sin[at] = d->sin[from];
        }

    for (long k = 0; k < d->n_blocks; k++) {
        const decoder_block *block = &d->blocks[k];
        operand h = operand_for(block->qkv, n);
        norm_operand(x, block->norm1, NULL, d->eps, &h, threads);
        linear(block->qkv, 3, &h, (result){qkv, n_features}, threads);
        free_operand(&h);
        rotate_and_append(d, s, k, qkv, cos, sin);
        if (k == d->n_blocks - 1 && !s->last) break;  // the cache is complete
        attend_all(d, s, k, qkv, y);
        if (k == d->n_blocks - 1 && s->n_new > 1) {  // from here on, only the tokens whose logits are computed
            n = s->n_sequences;
            float *kept = allocate(max_long(C, n_q) * n_panels(n) * PANEL * 4), *to[2] = {x, y};
            for (int j = 0; j < 2; j++) {
                const long depth = j ? n_q : C;
                memset(kept, 0, depth * n_panels(n) * PANEL * 4);
                for (long b = 0; b < n; b++) {
                    const long m = b * s->n_new + s->last[b];
                    if (n > 1) copy_token(to[j], m, kept, b, depth);
                    else for (long c = 0; c < depth; c++) kept[c] = to[j][panel_at(c, m, depth)];
                }
                memcpy(to[j], kept, depth * (n == 1 ? 1 : n_panels(n) * PANEL) * 4);
            }
            release(kept);
        }

        h = operand_for(&block->out, n);
        pack_operand(y, &h, threads);
        linear(&block->out, 1, &h, (result){x, C, .add = 1}, threads);
        free_operand(&h);

        h = operand_for(block->gate_up, n);
        norm_operand(x, block->norm2, NULL, d->eps, &h, threads);
        linear(block->gate_up, 2, &h, (result){gate_up, 2 * d->inter_dim}, threads);
        free_operand(&h);
        h = operand_for(&block->down, n);
        const long used = n == 1 ? 1 : PANEL;
        if (n == 1) swiglu(gate_up, gate_up + d->inter_dim, d->inter_dim), pack_operand(gate_up, &h, threads);
        #pragma omp parallel for num_threads(threads) if (n > PANEL)
        for (long p = 0; p < (n == 1 ? 0 : n_panels(n)); p++) {
            float *gate = gate_up + p * 2 * d->inter_dim * used;
            swiglu(gate, gate + d->inter_dim * used, d->inter_dim * used);
            pack_panel(gate, &h, p);
        }
        linear(&block->down, 1, &h, (result){x, C, .add = 1}, threads);
        free_operand(&h);
    }
    if (s->last) {
        const matrix *head = d->head;
        operand h = operand_for(head, n);
        norm_operand(x, d->norm, NULL, d->eps, &h, threads);
        float *logits = n == 1 ? s->logits : allocate(n_panels(n) * head->n_rows * PANEL * 4);
        linear(head, 1, &h, (result){logits, head->n_rows}, threads);
        if (n > 1) panels_to_rows(logits, n, head->n_rows, s->logits, threads), release(logits);
        free_operand(&h);
    }
    release(x), release(qkv), release(y), release(gate_up), release(cos), release(sin);
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

// Attention of one image's head; keys are first copied from panels to rows
static void attend_image(const vision_encoder *e, const float *qkv, float *y, long image, long h) {
    const long C = e->hidden_dim, D = C / e->n_heads, T = e->n_patches, type = operand_type(e->dtype);
    float panel[D * PANEL];
    char *keys = allocate(T * D * 4);
    for (long t = 0; t < T; t += PANEL) {
        const long n = min_long(PANEL, T - t), size = type == BFLOAT16 ? 2 : 4;
        read_tokens(qkv + (C + h * D) * PANEL, 3 * C, D, image * T + t, n, panel);
        transpose(panel, FLOAT32, PANEL, D, n, keys + t * D * size, type, D);
    }
    // the head is the first one of its own rows and, with shifted pointers, of q and y
    const attention_args args = {
        .q = qkv + h * D * PANEL, .y = y + h * D * PANEL, .n_features = 3 * C, .first_token = image * T,
        .key = {keys, type, 0}, .value_panels = qkv + (2 * C + h * D) * PANEL,
        .n_heads = e->n_heads, .n_kv_heads = e->n_heads, .head_dim = D, .n_new = T, .n_keys = T,
    };
    attend(&args, 0);
    release(keys);
}

// Patches (n_images * n_patches, values of a patch) float32 to features of the same shape, (..., hidden_dim) float32
void vision_forward(const vision_encoder *e, const float *patches, long n_images, float *out, int threads) {
    const long C = e->hidden_dim, n = n_images * e->n_patches, panels = n_panels(n);
    float *pixels = allocate(panels * e->patch->depth * PANEL * 4), *x = allocate(panels * C * PANEL * 4);
    float *qkv = allocate(panels * 3 * C * PANEL * 4), *y = allocate(panels * C * PANEL * 4);
    float *hidden = allocate(panels * e->inter_dim * PANEL * 4);
    rows_to_panels(patches, FLOAT32, n, e->patch->depth, pixels, threads);
    for (long m = 0; m < panels * PANEL; m++)
        for (long c = 0; c < C; c++) x[panel_at(c, m, C)] = e->position[m % e->n_patches * C + c];
    memset(y, 0, panels * C * PANEL * 4);
    operand h = operand_for(e->patch, n);
    pack_operand(pixels, &h, threads);
    linear(e->patch, 1, &h, (result){x, C, .add = 1}, threads);
    free_operand(&h), release(pixels);
    for (long k = 0; k < e->n_blocks; k++) {
        const vision_block *block = &e->blocks[k];
        h = operand_for(&block->qkv, n);
        norm_operand(x, block->ln1, block->ln1_bias, e->eps, &h, threads);
        linear(&block->qkv, 1, &h, (result){qkv, 3 * C}, threads);
        free_operand(&h);
        #pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (long unit = 0; unit < n_images * e->n_heads; unit++)
            attend_image(e, qkv, y, unit / e->n_heads, unit % e->n_heads);
        h = operand_for(&block->out, n);
        pack_operand(y, &h, threads);
        linear(&block->out, 1, &h, (result){x, C, .add = 1}, threads);
        free_operand(&h);
        h = operand_for(&block->fc1, n);
        norm_operand(x, block->ln2, block->ln2_bias, e->eps, &h, threads);
        linear(&block->fc1, 1, &h, (result){hidden, e->inter_dim, .gelu = 1}, threads);
        free_operand(&h);
        h = operand_for(&block->fc2, n);
        pack_operand(hidden, &h, threads);
        linear(&block->fc2, 1, &h, (result){x, C, .add = 1}, threads);
        free_operand(&h);
    }
    #pragma omp parallel for num_threads(threads)
    for (long p = 0; p < panels; p++) normalize(x + p * C * PANEL, e->norm, e->norm_bias, e->eps, C, PANEL, y + p * C * PANEL);
    panels_to_rows(y, n, C, out, threads);
    release(x), release(qkv), release(y), release(hidden);
}

// --- one layer, for the projector and the tests ---

// y (n, w.n_rows) float32 = x (n, w.depth), float32 or bfloat16, times the transpose of w, plus its bias
void linear_rows(const matrix *w, const void *x, long x_dtype, long n, float *y, int threads) {
    const long width = n == 1 ? 1 : PANEL, panels = n == 1 ? 1 : n_panels(n);
    float *in = allocate(panels * width * w->depth * 4), *out = n == 1 ? y : allocate(panels * PANEL * w->n_rows * 4);
    if (n == 1) for (long c = 0; c < w->depth; c++) in[c] = get(x, x_dtype, c);
    else rows_to_panels(x, x_dtype, n, w->depth, in, threads);
    operand h = operand_for(w, n);
    pack_operand(in, &h, threads);
    linear(w, 1, &h, (result){out, w->n_rows}, threads);
    if (n > 1) panels_to_rows(out, n, w->n_rows, y, threads), release(out);
    free_operand(&h), release(in);
}
