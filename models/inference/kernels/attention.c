// Scaled dot-product attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023). Scores, softmax and
// sums are float32.

// The keys or values of one sequence: of head h and token t at data + h * head_stride + t * depth, in values of dtype
typedef struct {
    char *data;
    long dtype, head_stride;
} head_rows;

// What all heads of one sequence share
typedef struct {
    const activations *q;  // queries from feature 0 on
    activations *y;
    long first_token;      // of the sequence in q and y
    head_rows key, value;
    const float *key_scale;  // of each key, if keys are in int16
    long value_feature;    // instead of value: where the first head's values are in q
    long n_heads, n_kv_heads, head_dim;
    long n_new, n_keys;
    int causal;            // the last query sees all keys, the one before it all but one, and so on
} attention_args;

INLINE const void *row_of(const head_rows *x, long head, long token, long depth) {
    return x->data + (head * x->head_stride + token * depth) * (x->dtype == BFLOAT16 ? 2 : 4);
}

INLINE int is_visible(const attention_args *a, long key, long query) {
    return !a->causal || key <= a->n_keys - a->n_new + query;
}

#if LEVEL == NAIVE
static float value_of(const attention_args *a, long kv, long key, long d) {
    const long D = a->head_dim;
    if (!a->value_feature) return get(row_of(&a->value, kv, key, D), a->value.dtype, d);
    return a->q->data[panel_at(a->value_feature + kv * D + d, a->first_token + key, a->q->n_features)];
}

static void attend(const attention_args *a, long h) {
    const long D = a->head_dim, kv = h / (a->n_heads / a->n_kv_heads);
    float *weights = allocate(a->n_keys * 4);
    for (long t = 0; t < a->n_new; t++) {
        const long m = a->first_token + t;
        float largest = -INFINITY, total = 0;
        for (long s = 0; s < a->n_keys; s++) {
            weights[s] = 0;
            for (long d = 0; d < D; d++)
                weights[s] += a->q->data[panel_at(h * D + d, m, a->q->n_features)] *
                              get(row_of(&a->key, kv, s, D), a->key.dtype, d) / sqrtf(D);
            if (is_visible(a, s, t)) largest = fmaxf(largest, weights[s]);
        }
        for (long s = 0; s < a->n_keys; s++)
            total += weights[s] = is_visible(a, s, t) ? expf(weights[s] - largest) : 0;
        for (long d = 0; d < D; d++) {
            float sum = 0;
            for (long s = 0; s < a->n_keys; s++)
                sum += weights[s] / total * value_of(a, kv, s, d);
            a->y->data[panel_at(h * D + d, m, a->y->n_features)] = sum;
        }
    }
    release(weights);
}
#else
// Values (n_keys, D) of a head, transposed to rows (D, stride) of float32 or bfloat16, with zeros behind the last key
static void transpose_values(const attention_args *a, long kv, long type, char *out, long stride) {
    const long D = a->head_dim, size = type == BFLOAT16 ? 2 : 4;
    if (!a->value_feature) transpose(row_of(&a->value, kv, 0, D), a->value.dtype, D, a->n_keys, D, out, type, stride);
    for (long s = 0; a->value_feature && s < a->n_keys; s += PANEL) {  // in panels they are transposed already
        float panel[D * PANEL];
        read_tokens(a->q, a->value_feature + kv * D, D, a->first_token + s, min_long(PANEL, a->n_keys - s), panel);
        for (long d = 0; d < D; d++)
            for (long i = 0; i < PANEL && s + i < stride; i += LANES) {
                if (type == BFLOAT16) store_bf16((uint16_t *)out + d * stride + s + i, load(panel + d * PANEL + i));
                else store((float *)out + d * stride + s + i, load(panel + d * PANEL + i));
            }
    }
    for (long d = 0; d < D; d++) memset(out + (d * stride + a->n_keys) * size, 0, (stride - a->n_keys) * size);
}

// Softmax's weights in int16 have a sum of at most INT16_WEIGHTS, and values are at most INT16_VALUE, so that a sum of
// products has 31 bits. A rounded weight is off by at most 0.5 / INT16_WEIGHTS of all, or 0.5 / 32,767 of the largest.
#define INT16_WEIGHTS 1e6f
#define INT16_VALUE 2047

// Hide later keys among s to s + rows - 1, whose scores (rows, PANEL) with n queries from t on are fresh, and update
// the largest score of each query
INLINE void largest_scores(const attention_args *a, long t, long n, long s, long rows, float *scores, float *largest) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < n && !is_visible(a, s + r, t); i++)
            if (!is_visible(a, s + r, t + i)) scores[r * PANEL + i] = -INFINITY;
    for (long i = 0; i < PANEL; i += LANES) {
        vec most = load(largest + i);
        for (long r = 0; r < rows; r++) most = max_vec(most, load(scores + r * PANEL + i));
        store(largest + i, most);
    }
}

// scores (n_keys, PANEL) become units of `weights`, e^(score - largest); their sums are `total`
static void softmax_panel(long n_keys, const float *largest, float *scores, operand *weights, float *total) {
    for (long i = 0; i < PANEL; i += LANES) {
        const vec most = load(largest + i);
        vec sum = {0};
        for (long s = 0; s < n_keys; s += 2) {
            float *pair = scores + s * PANEL + i;
            const vec low = exp_vec(load(pair) - most);
            const vec high = s + 1 < n_keys ? exp_vec(load(pair + PANEL) - most) : (vec){0};
            sum += low, sum += high;
            if (weights->type == BFLOAT16) store_int(weights->data + (s / 2 * PANEL + i) * 4, pack_bf16(low, high));
            else store(pair, low), store(pair + PANEL, high);
        }
        for (long u = (n_keys + 1) / 2; weights->type == BFLOAT16 && u < weights->units; u++)
            store_int(weights->data + (u * PANEL + i) * 4, (ivec){0});
        const vec scale = weights->type == INT16 ? min_vec(splat(32767), INT16_WEIGHTS / sum) : splat(1);
        for (long u = 0; weights->type == INT16 && u < weights->units; u++) {
            const float *pair = scores + 2 * u * PANEL + i;
            const ivec rounded = round_to_int(load(pair) * scale) | round_to_int(load(pair + PANEL) * scale) << 16;
            store_int(weights->data + (u * PANEL + i) * 4, rounded);
        }
        store(total + i, sum * scale);
    }
    pair_units(weights->data, weights->type, weights->units);
}

// Integer sums (rows, PANEL) to float32, times a scale of each row and, if given, of each token
INLINE void scale_rows(float *sums, long rows, const float *row_scale, const float *token_scale) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < PANEL; i += LANES) {
            vec value = __builtin_convertvector(load_int(sums + r * PANEL + i), vec) * row_scale[r];
            store(sums + r * PANEL + i, token_scale ? value * load(token_scale + i) : value);
        }
}

// One head's attention: panels of queries meet all of their keys at once, whose scores stay in the core's cache.
static void attend(const attention_args *a, long h) {
    const long D = a->head_dim, kv = h / (a->n_heads / a->n_kv_heads), n_keys = a->n_keys;
    const long type = a->key.dtype == INT16 ? INT16 : operand_type(a->key.dtype, PANEL);
    const long padded_keys = round_up(n_keys, 64) + 32;  // rows a power of two apart would share places in the cache
    char *values = allocate(D * padded_keys * 4);
    char *buffer = allocate(BLOCK_ROWS * (round_up(max_long(D, n_keys), 64) * 4 + 64));
    float *scores = allocate((padded_keys + BLOCK_ROWS) * PANEL * 4), *queries = allocate(D * PANEL * 4);
    operand q = new_operand(PANEL, D, type), weights = new_operand(PANEL, n_keys, type);
    if (type == FLOAT32) release(weights.data), weights.data = (char *)scores;
    float total[PANEL] ALIGNED, largest[PANEL] ALIGNED, sums[BLOCK_ROWS * PANEL] ALIGNED, value_scale[D];
    transpose_values(a, kv, type == INT16 ? FLOAT32 : type, values, padded_keys);
    for (long d = 0; d < D && type == INT16; d++) {
        float *row = (float *)values + d * padded_keys;
        value_scale[d] = quantize_row(row, padded_keys, INT16_VALUE, (uint16_t *)row);
    }
    matrix key = {.data = row_of(&a->key, kv, 0, D), .depth = D, .stride = D, .dtype = a->key.dtype};
    matrix value = {.data = values, .n_rows = D, .stride = padded_keys * (type == INT16 ? 2 : 1), .dtype = type};
    const float scale = 1 / sqrtf(D);
    amx_state state = begin_multiply();
    for (long t = 0; t < a->n_new; t += PANEL) {
        const long n = min_long(PANEL, a->n_new - t), m = a->first_token + t, vectors = n > LANES ? 2 : 1;
        read_tokens(a->q, h * D, D, m, n, queries);
        for (long i = 0; i < D * PANEL; i += LANES) store(queries + i, load(queries + i) * scale);
        pack_panel(queries, &q, 0);
        key.n_rows = a->causal ? n_keys - a->n_new + t + n : n_keys;
        for (long i = 0; i < PANEL; i += LANES) store(largest + i, splat(-1e30f));
        for (long s = 0; s < key.n_rows; s += BLOCK_ROWS) {
            long stride;
            const char *left = left_rows(&key, s, type, q.units, buffer, &stride);
            const long rows = min_long(BLOCK_ROWS, key.n_rows - s);
            multiply(type, rows, left, stride, q.data, q.units, scores + s * PANEL, vectors, 0, (fetch){0});
            if (type == INT16) scale_rows(scores + s * PANEL, rows, a->key_scale + s, q.scale);
            largest_scores(a, t, n, s, rows, scores + s * PANEL, largest);
        }
        weights.units = units_of(key.n_rows, type);
        value.depth = weights.units * values_per_unit(type);  // its rows are longer than the keys that are seen
        softmax_panel(key.n_rows, largest, scores, &weights, total);
        for (long d = 0; d < D; d += BLOCK_ROWS) {
            long stride, rows = min_long(BLOCK_ROWS, D - d);
            const char *left = left_rows(&value, d, type, weights.units, buffer, &stride);
            multiply(type, rows, left, stride, weights.data, weights.units, sums, vectors, 0, (fetch){0});
            if (type == INT16) scale_rows(sums, rows, value_scale + d, NULL);
            for (long r = 0; r < rows; r++)
                for (long i = 0; i < PANEL; i += LANES)
                    store(sums + r * PANEL + i, load(sums + r * PANEL + i) / load(total + i));
            write_tokens(a->y, h * D + d, rows, m, n, sums);
        }
    }
    end_multiply(&state);
    if (type == FLOAT32) weights.data = NULL;
    free_operand(&q), free_operand(&weights), release(values), release(buffer), release(scores), release(queries);
}
#endif

INLINE vec load_values(const head_rows *x, const void *row, long i) {
    return x->dtype == BFLOAT16 ? load_bf16((const uint16_t *)row + i) : load((const float *)row + i);
}

// The weighted sums of values d to d + n_vectors * LANES of n heads; weights (n, stride), y (n, D)
INLINE void sum_values(const attention_args *a, long kv, const float *weights, long stride, long d, const long n,
                       const long n_vectors, float *y) {
    vec sums[4][4] = {0};
    for (long s = 0; s < a->n_keys; s++) {
        const void *row = row_of(&a->value, kv, s, a->head_dim);
        for (long j = 0; j < n_vectors; j++) {
            const vec value = load_values(&a->value, row, d + j * LANES);
            for (long g = 0; g < n; g++) sums[g][j] += weights[g * stride + s] * value;
        }
    }
    for (long g = 0; g < n; g++)
        for (long j = 0; j < n_vectors; j++) store(y + g * a->head_dim + d + j * LANES, sums[g][j]);
}

// Attention of a single query, of n heads from h on, that share their keys and values and read them once: dot products
// with the keys, then a weighted sum of the values
INLINE void attend_heads(const attention_args *a, long h, const long n) {
    const long D = a->head_dim, kv = h / (a->n_heads / a->n_kv_heads), m = a->first_token;
    const long step = width_of(a->q);  // from a feature of the token to the next
    const long n_keys = a->n_keys, padded = round_up(n_keys, LANES);
    const float *q = panel_of(a->q, m / PANEL) + h * D * step + m % PANEL, scale = 1 / sqrtf(D);
    float *y = panel_of(a->y, m / PANEL) + h * D * step + m % PANEL;
    float *weights = allocate(n * padded * 4), query[n * D];
    for (long i = 0; i < n * D; i++) query[i] = q[i * step] * scale;
    for (long s = 0; s < n_keys; s++) {
        const void *row = row_of(&a->key, kv, s, D);
        vec lanes[4] = {0};
        long d = 0;
        for (; d + LANES <= D; d += LANES) {
            const vec key = load_values(&a->key, row, d);
            for (long g = 0; g < n; g++) lanes[g] += load(query + g * D + d) * key;
        }
        for (long g = 0; g < n; g++) {
            float score = sum_lanes(lanes[g]);
            for (long i = d; i < D; i++) score += query[g * D + i] * get(row, a->key.dtype, i);
            weights[g * padded + s] = score;
        }
    }
    float sum[4];
    for (long g = 0; g < n; g++) {
        float *w = weights + g * padded;
        vec largest = splat(-1e30f), total = {0};
        for (long s = n_keys; s < padded; s++) w[s] = -INFINITY;
        for (long s = 0; s < padded; s += LANES) largest = max_vec(largest, load(w + s));
        largest = splat(max_lanes(largest));
        for (long s = 0; s < padded; s += LANES) {
            const vec weight = exp_vec(load(w + s) - largest);
            total += weight;
            store(w + s, weight);
        }
        sum[g] = 1 / sum_lanes(total);
    }
    long d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) sum_values(a, kv, weights, padded, d, n, 4, query);
    for (; d + LANES <= D; d += LANES) sum_values(a, kv, weights, padded, d, n, 1, query);
    for (; d < D; d++)
        for (long g = 0; g < n; g++) {
            float lane = 0;
            for (long s = 0; s < n_keys; s++)
                lane += weights[g * padded + s] * get(row_of(&a->value, kv, s, D), a->value.dtype, d);
            query[g * D + d] = lane;
        }
    for (long i = 0; i < n * D; i++) y[i * step] = query[i] * sum[i / D];
    release(weights);
}

// A single query, of heads from `first` on that share their keys and values
static void attend_one(const attention_args *a, long first, long n_heads) {
    const long stop = first + n_heads;
    for (long h = first, n; h < stop; h += n) {
        n = min_long(HAS_32_REGISTERS ? 4 : 3, stop - h);  // whose sums stay in registers
        if (n == 1) attend_heads(a, h, 1);
        else if (n == 2) attend_heads(a, h, 2);
        else if (n == 3) attend_heads(a, h, 3);
        else attend_heads(a, h, 4);
    }
}
