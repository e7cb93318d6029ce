// Scaled dot-product attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023). Scores, softmax and
// sums are float32.

// The keys or values of one sequence: of head h and token t at data + h * head_stride + t * depth, in values of dtype
typedef struct {
    char *data;
    long dtype, head_stride;
} head_rows;

// What all heads of one sequence share
typedef struct {
    const float *q;   // panels (n_features, PANEL) with queries from feature 0 on
    float *y;         // panels (n_heads * head_dim, PANEL)
    long n_features, first_token;  // of q and y: the sequence's tokens are first_token to first_token + n_new - 1
    head_rows key, value;
    long n_heads, n_kv_heads, head_dim;
    long n_new, n_keys;  // causal: the last query sees all keys, the one before it all but one, and so on
    int causal;
    const uint8_t *mask;  // (n_keys, n_new), 1 where a query may attend; or NULL
} attention_args;

INLINE const void *row_of(const head_rows *x, long head, long token, long depth) {
    return x->data + (head * x->head_stride + token * depth) * (x->dtype == BFLOAT16 ? 2 : 4);
}

INLINE int is_visible(const attention_args *a, long key, long query) {
    if (a->mask) return a->mask[key * a->n_new + query];
    return !a->causal || key <= a->n_keys - a->n_new + query;
}

#if LEVEL == NAIVE
static void attend(const attention_args *a, long h) {
    const long D = a->head_dim, kv = h / (a->n_heads / a->n_kv_heads);
    float *weights = allocate(a->n_keys * 4);
    for (long t = 0; t < a->n_new; t++) {
        const long m = a->first_token + t;
        float largest = -INFINITY, total = 0;
        for (long s = 0; s < a->n_keys; s++) {
            weights[s] = 0;
            for (long d = 0; d < D; d++)
                weights[s] += a->q[panel_at(h * D + d, m, a->n_features)] *
                              get(row_of(&a->key, kv, s, D), a->key.dtype, d) / sqrtf(D);
            if (is_visible(a, s, t)) largest = fmaxf(largest, weights[s]);
        }
        for (long s = 0; s < a->n_keys; s++)
            total += weights[s] = is_visible(a, s, t) ? expf(weights[s] - largest) : 0;
        for (long d = 0; d < D; d++) {
            float sum = 0;
            for (long s = 0; s < a->n_keys; s++)
                sum += weights[s] / total * get(row_of(&a->value, kv, s, D), a->value.dtype, d);
            a->y[panel_at(h * D + d, m, a->n_heads * D)] = sum;
        }
    }
    free(weights);
}
#else
// Values (n_keys, D) of a head, transposed to rows (D, stride) of float32 or bfloat16, with zeros behind the last key
static void transpose_values(const attention_args *a, long kv, long type, char *out, long stride) {
    const long D = a->head_dim;
    for (long start = 0; start < stride; start += 16)
        for (long d = 0; d < D; d++)
            for (long s = start; s < min_long(start + 16, stride); s++)
                put(out, type, d * stride + s,
                    s < a->n_keys ? get(row_of(&a->value, kv, s, D), a->value.dtype, d) : 0);
}

// scores (n_keys, PANEL) of `n` queries from t on become e^(score - largest); their sums are `total`
static void softmax_panel(const attention_args *a, long t, long n, long n_keys, float *scores, float *total) {
    const long always = a->mask ? 0 : a->causal ? min_long(n_keys, a->n_keys - a->n_new + t + 1) : n_keys;
    for (long s = always; s < n_keys; s++)
        for (long i = 0; i < n; i++)
            if (!is_visible(a, s, t + i)) scores[s * PANEL + i] = -INFINITY;
    for (long i = 0; i < PANEL; i += LANES) {
        vec largest = splat(-1e30f), sum = {0};
        for (long s = 0; s < n_keys; s++) largest = max_vec(largest, load(scores + s * PANEL + i));
        for (long s = 0; s < n_keys; s++) {
            vec weight = exp_vec(load(scores + s * PANEL + i) - largest);
            sum += weight;
            store(scores + s * PANEL + i, weight);
        }
        store(total + i, sum);
    }
}

// One head's attention: panels of queries meet all of their keys at once, whose scores stay in the core's cache.
static void attend(const attention_args *a, long h) {
    const long D = a->head_dim, kv = h / (a->n_heads / a->n_kv_heads), n_keys = a->n_keys;
    const long type = operand_type(a->key.dtype), padded_keys = round_up(n_keys, 64);
    char *values = allocate(D * padded_keys * 4), *buffer = allocate(BLOCK_ROWS * (round_up(max_long(D, n_keys), 64) * 4 + 64));
    float *scores = allocate((padded_keys + BLOCK_ROWS) * PANEL * 4), *queries = allocate(D * PANEL * 4);
    operand q = new_operand(PANEL, D, type), weights = new_operand(PANEL, n_keys, type);
    float total[PANEL] ALIGNED, sums[BLOCK_ROWS * PANEL] ALIGNED;
    transpose_values(a, kv, type, values, padded_keys);
    matrix key = {.data = row_of(&a->key, kv, 0, D), .depth = D, .stride = D, .dtype = a->key.dtype};
    matrix value = {.data = values, .n_rows = D, .stride = padded_keys, .dtype = type};
    const float scale = 1 / sqrtf(D);
    amx_state state = begin_multiply();
    for (long t = 0; t < a->n_new; t += PANEL) {
        const long n = min_long(PANEL, a->n_new - t), m = a->first_token + t, vectors = n > LANES ? 2 : 1;
        for (long d = 0; d < D; d++)
            for (long i = 0; i < PANEL; i++)
                queries[d * PANEL + i] = i < n ? a->q[panel_at(h * D + d, m + i, a->n_features)] * scale : 0;
        pack_panel(queries, &q, 0);
        key.n_rows = a->causal ? n_keys - a->n_new + t + n : n_keys;
        for (long s = 0; s < key.n_rows; s += BLOCK_ROWS) {
            long stride;
            const char *left = left_rows(&key, s, type, q.units, buffer, &stride);
            multiply(type, min_long(BLOCK_ROWS, key.n_rows - s), left, stride, q.data, q.units, scores + s * PANEL, vectors);
        }
        softmax_panel(a, t, n, key.n_rows, scores, total);
        weights.depth = value.depth = key.n_rows, weights.units = units_of(key.n_rows, type);
        pack_panel(scores, &weights, 0);
        for (long d = 0; d < D; d += BLOCK_ROWS) {
            long stride, rows = min_long(BLOCK_ROWS, D - d);
            const char *left = left_rows(&value, d, type, weights.units, buffer, &stride);
            multiply(type, rows, left, stride, weights.data, weights.units, sums, vectors);
            for (long r = 0; r < rows; r++)
                for (long i = 0; i < n; i++)
                    a->y[panel_at(h * D + d + r, m + i, a->n_heads * D)] = sums[r * PANEL + i] / total[i];
        }
    }
    end_multiply(&state);
    free_operand(&q), free_operand(&weights), free(values), free(buffer), free(scores), free(queries);
}
#endif

// Attention of a single query: dot products with the keys, then a weighted sum of the values. `step` is 1 where a token's
// features are one row, PANEL where they are in a panel.
static void attend_one(const attention_args *a, long h, long step) {
    const long D = a->head_dim, kv = h / (a->n_heads / a->n_kv_heads), m = step == 1 ? 0 : a->first_token;
    const float *q = a->q + (step == 1 ? h * D : panel_at(h * D, m, a->n_features));
    float *y = a->y + (step == 1 ? h * D : panel_at(h * D, m, a->n_heads * D));
    float *weights = allocate(a->n_keys * 4), query[D], sum[D], largest = -INFINITY, total = 0;
    for (long d = 0; d < D; d++) query[d] = q[d * step] / sqrtf(D), sum[d] = 0;
    for (long s = 0; s < a->n_keys; s++) {
        const void *row = row_of(&a->key, kv, s, D);
        vec lanes = {0};
        long d = 0;
        for (; d + LANES <= D; d += LANES)
            lanes += load(query + d) * (a->key.dtype == BFLOAT16 ? load_bf16((const uint16_t *)row + d)
                                                                 : load((const float *)row + d));
        weights[s] = sum_lanes(lanes);
        for (; d < D; d++) weights[s] += query[d] * get(row, a->key.dtype, d);
        if (!is_visible(a, s, 0)) weights[s] = -INFINITY;
        largest = fmaxf(largest, weights[s]);
    }
    for (long s = 0; s < a->n_keys; s++) total += weights[s] = expf(weights[s] - largest);
    for (long s = 0; s < a->n_keys; s++) {
        const void *row = row_of(&a->value, kv, s, D);
        long d = 0;
        for (; d + LANES <= D; d += LANES)
            store(sum + d, load(sum + d) + weights[s] * (a->value.dtype == BFLOAT16 ? load_bf16((const uint16_t *)row + d)
                                                                                   : load((const float *)row + d)));
        for (; d < D; d++) sum[d] += weights[s] * get(row, a->value.dtype, d);
    }
    for (long d = 0; d < D; d++) y[d * step] = sum[d] / total;
    free(weights);
}
