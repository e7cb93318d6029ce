// Norms, rotary embeddings, SwiGLU and quantization: one pass over activations in panels, a vector of tokens at a time.
// With a single token (width 1) the features of that token are one row.

// y = RMSNorm (bias NULL; Zhang and Sennrich 2019) or, of several tokens, LayerNorm of a panel x (depth, width)
static void normalize(const float *x, const float *weight, const float *bias, float eps, long depth, long width,
                      float *y) {
    if (width == 1) {
        vec squares = {0};
        long c = 0;
        for (; c + LANES <= depth; c += LANES) squares += load(x + c) * load(x + c);
        float sum = sum_lanes(squares);
        for (; c < depth; c++) sum += x[c] * x[c];
        const float inverse = 1 / sqrtf(sum / depth + eps);
        for (c = 0; c < depth; c++) y[c] = x[c] * inverse * weight[c];
        return;
    }
    for (long i = 0; i < PANEL; i += LANES) {
        vec mean = {0}, square = {0};
        for (long c = 0; c < depth && bias; c++) mean += load(x + c * PANEL + i);
        mean /= (float)depth;
        for (long c = 0; c < depth; c++) {  // around the mean: a difference of squares would lose digits
            const vec centered = load(x + c * PANEL + i) - mean;
            square += centered * centered;
        }
        vec inverse = square / (float)depth + eps;
        for (int j = 0; j < LANES; j++) inverse[j] = 1 / sqrtf(inverse[j]);
        for (long c = 0; c < depth; c++) {
            const vec value = (load(x + c * PANEL + i) - mean) * inverse * weight[c];
            store(y + c * PANEL + i, bias ? value + bias[c] : value);
        }
    }
}

// Rotate features i and i + D / 2 of each of n_heads in place (Su et al. 2021); D / 2 cosines, then as many sines
static void rotate(float *x, const float *angles, long n_heads, long D, long width) {
    const long half = D / 2 * width;
    const float *cos = angles, *sin = angles + half;
    for (long h = 0; h < n_heads; h++, x += 2 * half)
        for (long i = 0; i < half; i++) {
            float first = x[i], second = x[i + half];
            x[i] = first * cos[i] - second * sin[i];
            x[i + half] = second * cos[i] + first * sin[i];
        }
}

// gate = silu(gate) * up (Shazeer 2020), the first and the second half of the features
static void swiglu(activations *gate_up, int threads) {
    const long n = gate_up->n_features / 2 * width_of(gate_up);
    #pragma omp parallel for num_threads(threads) if (gate_up->n_tokens > PANEL)
    for (long p = 0; p < panels_of(gate_up); p++) {
        float *gate = panel_of(gate_up, p), *up = gate + n;
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(gate + i, silu_vec(load(gate + i)) * load(up + i));
        for (; i < n; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    }
}

// Activations from rows (n_tokens, n_features) of dtype, and back to float32
static void read_rows(const void *rows, long dtype, activations *x, int threads) {
    const long depth = x->n_features, size = dtype == BFLOAT16 ? 2 : 4;
    #pragma omp parallel for num_threads(threads) if (x->n_tokens > PANEL)
    for (long p = 0; p < panels_of(x); p++) {
        const long used = min_long(width_of(x), x->n_tokens - p * PANEL);
        const char *from = (const char *)rows + p * PANEL * depth * size;
        if (used < width_of(x)) memset(panel_of(x, p), 0, depth * PANEL * 4);
        transpose(from, dtype, depth, used, depth, panel_of(x, p), FLOAT32, width_of(x));
    }
}

static void write_rows(const activations *x, float *rows, int threads) {
    const long depth = x->n_features;
    #pragma omp parallel for num_threads(threads) if (x->n_tokens * depth > 4096)
    for (long block = 0; block < (depth + 63) / 64 * panels_of(x); block++) {  // 64 features of one panel
        const long p = block % panels_of(x), start = block / panels_of(x) * 64;
        const long used = min_long(width_of(x), x->n_tokens - p * PANEL);
        transpose(panel_of(x, p) + start * width_of(x), FLOAT32, width_of(x), min_long(64, depth - start), used,
                  rows + p * PANEL * depth + start, FLOAT32, depth);
    }
}

// Features `first` to first + depth - 1 of the tokens m to m + n - 1, n up to PANEL, as one panel; and back
static void read_tokens(const activations *x, long first, long depth, long m, long n, float *panel) {
    if (m % PANEL == 0) {
        memcpy(panel, panel_of(x, m / PANEL) + first * PANEL, depth * PANEL * 4);
        return;
    }
    for (long d = 0; d < depth; d++)
        for (long i = 0; i < PANEL; i++)
            panel[d * PANEL + i] = i < n ? x->data[panel_at(first + d, m + i, x->n_features)] : 0;
}

static void write_tokens(activations *x, long first, long depth, long m, long n, const float *panel) {
    for (long d = 0; d < depth; d++) {
        float *row = panel_of(x, m / PANEL) + (first + d) * PANEL;
        if (m % PANEL == 0) memcpy(row, panel + d * PANEL, n * 4);
        else for (long i = 0; i < n; i++) x->data[panel_at(first + d, m + i, x->n_features)] = panel[d * PANEL + i];
    }
}

// The largest int16 values whose products, `depth` of them, have a sum of 32 bits
INLINE float int16_limit(long depth) { return floorf(sqrtf(2.147e9f / max_long(depth, 2))); }

// A row x of n values, a multiple of LANES, as int16 up to `limit`; returns their scale. to may be x.
static float quantize_row(const float *x, long n, float limit, uint16_t *to) {
    vec largest = splat(1e-30f);
    for (long i = 0; i < n; i += LANES) largest = max_abs(largest, load(x + i));
    const float scale = max_lanes(largest) / limit;
    for (long i = 0; i < n; i += LANES)
        ((unaligned_hvec *)(to + i))->v = __builtin_convertvector(round_to_int(load(x + i) / scale), hvec);
    return scale;
}

// Eight values or vectors times a Hadamard matrix of 8, whose entries are 1 and -1
#define HADAMARD8(x) \
    _Pragma("GCC unroll 3") \
    for (int step = 1; step < 8; step *= 2) \
        _Pragma("GCC unroll 8") \
        for (int i = 0; i < 8; i++) \
            if (!(i & step)) { \
                const __typeof__(x[0]) sum = x[i] + x[i + step]; \
                x[i + step] = x[i] - x[i + step]; \
                x[i] = sum; \
            }

// Activations that int8 rounds are first mixed: each QUANT_GROUP of them times a Hadamard matrix / 8, as its weights
// were (QuaRot, Ashkboos et al. 2024). The product is the same, but one large value is spread over 64 small ones, and
// the steps of the token's scale become finer. With a matrix of 64 = 8 x 8, a group is mixed by rows, then by columns.

// x (depth, LANES) is a vector of tokens with `stride` values from a feature to the next; y (depth rounded up, LANES)
static void mix_panel(const float *x, long depth, long stride, float *y) {
    for (long start = 0; start < depth; start += QUANT_GROUP)
        for (int by_column = 0; by_column < 2; by_column++)
            for (int k = 0; k < 8; k++) {
                const int first = by_column ? k : 8 * k, step = by_column ? 8 : 1;
                vec v[8];
                for (int j = 0; j < 8; j++) {
                    const long c = start + first + j * step;
                    v[j] = by_column ? load(y + c * LANES) : c < depth ? load(x + c * stride) : (vec){0};
                }
                HADAMARD8(v)
                for (int j = 0; j < 8; j++)
                    store(y + (start + first + j * step) * LANES, by_column ? v[j] * 0.125f : v[j]);
            }
}

// One group of a single token, in place
static void mix_group(float *x) {
    typedef float row __attribute__((vector_size(32)));
    row v[8];
    float transposed[QUANT_GROUP];
    for (int by_column = 0; by_column < 2; by_column++) {
        memcpy(v, x, sizeof v);
        HADAMARD8(v)
        for (int j = 0; j < 8 && by_column; j++) v[j] *= 0.125f;
        memcpy(transposed, v, sizeof v);
        transpose(transposed, FLOAT32, 8, 8, 8, x, FLOAT32, 8);
    }
}

#if HAS_MATRIX_PRODUCT
// Two successive units of a token side by side, in place: of eight tokens
INLINE void pair_units(char *units, long type, long n_units) {
    for (long u = 0; type != FLOAT32 && u < n_units; u += 2, units += 2 * PANEL * 4) {
        const ivec a = load_int(units), b = load_int(units + 16), c = load_int(units + 32), d = load_int(units + 48);
        store_int(units, vzip1q_s32(a, c)), store_int(units + 16, vzip2q_s32(a, c));
        store_int(units + 32, vzip1q_s32(b, d)), store_int(units + 48, vzip2q_s32(b, d));
    }
}
#else
INLINE void pair_units(char *units, long type, long n_units) {}
#endif

// Units of an operand from a panel x (depth, PANEL) of float32, which is mixed for int8
static void pack_panel(const float *x, operand *out, long panel) {
    const long depth = out->depth;
    char *units = out->data + panel * out->panel_bytes;
    if (out->type == FLOAT32 && (const char *)x == units) return;
    const long n_values = out->type == INT8 ? round_up(depth, QUANT_GROUP) : depth;
    const long stride = out->type == INT8 ? LANES : PANEL;  // from a feature to the next
    float *mixed = out->type == INT8 ? allocate(n_values * LANES * 4) : NULL;
    for (long i = 0; i < PANEL; i += LANES) {
        const float *lane = x + i;
        char *to = units + i * 4;
        if (out->type == FLOAT32) {
            for (long c = 0; c < depth; c++) store((float *)to + c * PANEL, load(lane + c * PANEL));
            continue;
        }
        if (out->type == BFLOAT16) {
            for (long c = 0; c < depth; c += 2) {
                vec high = c + 1 < depth ? load(lane + (c + 1) * PANEL) : (vec){0};
                store_int(to + c / 2 * PANEL * 4, pack_bf16(load(lane + c * PANEL), high));
            }
            for (long u = (depth + 1) / 2; u < out->units; u++) store_int(to + u * PANEL * 4, (ivec){0});
            continue;
        }
        if (mixed) mix_panel(lane, depth, PANEL, mixed), lane = mixed;
        vec largest = splat(1e-30f);
        for (long c = 0; c < n_values; c++) largest = max_abs(largest, load(lane + c * stride));
        const float limit = out->type == INT8 ? 127 : int16_limit(depth);
        vec inverse = limit / largest;
        ivec sum = {0};
        const int n = values_per_unit(out->type), bits = 32 / n, mask = bits == 8 ? 0xff : 0xffff;
        for (long u = 0; u < out->units; u++) {
            ivec unit = {0};
            for (long j = 0; j < n && u * n + j < n_values; j++) {
                ivec q = round_to_int(load(lane + (u * n + j) * stride) * inverse);
                sum += q;
                unit |= INT8_IN_FLOAT32 ? (ivec)__builtin_convertvector(q, vec) : (q & mask) << (int)(j * bits);
            }
            store_int(to + u * PANEL * 4, unit);
        }
        store(out->scale + panel * PANEL + i, largest / limit);
        store_int(out->sum + panel * PANEL + i, sum);
    }
    pair_units(units, out->type, out->units);
    release(mixed);
}

// Round a single token x (depth) to int8, with a scale for each QUANT_GROUP values, mixed for int8 weights; data is
// padded with zeros
static void quantize_token(const float *x, int is_mixed, operand *out) {
    int8_t *q = (int8_t *)out->data;
    out->offset = 0;
    for (long start = 0; start < out->depth; start += QUANT_GROUP) {
        float values[QUANT_GROUP] ALIGNED = {0};
        memcpy(values, x + start, min_long(QUANT_GROUP, out->depth - start) * 4);
        if (is_mixed) mix_group(values);
        vec largest = splat(1e-30f);
        for (long i = 0; i < QUANT_GROUP; i += LANES) largest = max_abs(largest, load(values + i));
        const float scale = max_lanes(largest) / 127, inverse = 1 / scale;
        for (long half = 0; half < QUANT_GROUP; half += INT4_GROUP) {
            ivec sum = {0};
            for (long i = half; i < half + INT4_GROUP; i += LANES) {
                ivec rounded = round_to_int(load(values + i) * inverse);
                sum += rounded;
                for (int j = 0; j < LANES; j++) q[start + i + j] = (int8_t)rounded[j];
            }
            int32_t total = 0;
            for (int j = 0; j < LANES; j++) total += sum[j];
            const long group = (start + half) / INT4_GROUP;
            out->scale[group] = scale, out->group_sum[group] = scale * total;
            out->offset -= INT8_OFFSET * scale * total;
        }
    }
}

// A weight (n_rows, depth) of float32 or bfloat16 in int8, as `_fit_int8` of models/inference/quantization.py: data is
// (n_rows, depth rounded up to QUANT_GROUP)
void quantize_weight(const void *weight, long dtype, long n_rows, long depth, uint8_t *data, float *scale, int threads) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    const long stride = round_up(depth, QUANT_GROUP);
    #pragma omp parallel for num_threads(threads)
    for (long r = 0; r < n_rows; r++) {
        float *row = allocate(stride * 4);
        for (long i = 0; i < stride; i++) row[i] = i < depth ? get(weight, dtype, r * depth + i) : 0;
        vec largest = splat(127 * 1.17549435e-38f);
        for (long start = 0; start < stride; start += QUANT_GROUP) mix_group(row + start);
        for (long i = 0; i < stride; i += LANES) largest = max_abs(largest, load(row + i));
        scale[r] = max_lanes(largest) / 127;
        for (long i = 0; i < stride; i += LANES) {
            const bytes rounded = __builtin_convertvector(round_to_int(load(row + i) / scale[r]) + 128, bytes);
            memcpy(data + r * stride + i, &rounded, LANES);
        }
        release(row);
    }
}

// The token of dot_bf16: of each 2 * LANES values of x the even ones, then the odd ones. out may be x.
static void split_token(const float *x, long depth, float *out) {
    for (long i = 0; i < depth; i += 2 * LANES) {
        const long n = min_long(2 * LANES, depth - i);
        float values[2 * LANES];
        memcpy(values, x + i, n * 4);
        if (n < 2 * LANES) memcpy(out + i, values, n * 4);  // the rest is multiplied in order
        else for (long j = 0; j < n; j++) out[i + j / 2 + j % 2 * LANES] = values[j];
    }
}

// A token in bfloat16, with zeros up to a multiple of 2 * LANES values
static void round_token(const float *x, long depth, uint16_t *out) {
    for (long i = 0; i < depth; i++) out[i] = to_bf16(x[i]);
    memset(out + depth, 0, (round_up(depth, 2 * LANES) - depth) * 2);
}
