// gemm: a weight, row-major as it is stored, times panels of tokens. gemv.c multiplies one token.

// The type of operand that a weight is multiplied by
INLINE long operand_type(long dtype, long n_tokens) {
    if (dtype == INT8 || (dtype == INT4 && n_tokens == 1)) return INT8;
    return dtype == FLOAT32 || !HAS_BF16_DOT ? FLOAT32 : BFLOAT16;
}

INLINE long units_of(long depth, long type) {
    if (type == FLOAT32) return depth;
    return round_up((depth + values_per_unit(type) - 1) / values_per_unit(type), UNIT_MULTIPLE);
}

static operand new_operand(long n_tokens, long depth, long type) {
    operand x = {.n_tokens = n_tokens, .depth = depth, .type = type};
    if (n_tokens == 1) {
        long groups = (depth + QUANT_GROUP - 1) / QUANT_GROUP;
        x.data = allocate(groups * QUANT_GROUP * (type == INT8 ? 1 : 4));
        if (type == INT8) x.scale = allocate(groups * 8), x.group_sum = allocate(groups * 8);
        return x;
    }
    const long n = n_panels(n_tokens) * PANEL;
    x.units = units_of(type == INT8 ? round_up(depth, QUANT_GROUP) : depth, type), x.panel_bytes = x.units * PANEL * 4;
    x.data = allocate(n * x.units * 4);
    if (type == INT8 || type == INT16) x.scale = allocate(n * 4), x.sum = allocate(n * 4);
    return x;
}

static void free_operand(operand *x) {
    if (!x->borrowed) release(x->data);
    release(x->scale), release(x->sum), release(x->group_sum);
}

// --- one block of weight rows times one panel; `add` (AMX tiles only) keeps what sums held ---

// What is fetched into the cache meanwhile: step bytes for each unit, or nothing if step is 0. The core's own prefetcher
// does not follow a block's many rows.
typedef struct {
    const char *data;
    long step;
} fetch;

#if LEVEL == NAIVE
static void multiply(long type, long rows, const char *left, long stride, const char *panel, long units, void *sums,
                     long vectors, int add, fetch next) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < vectors * LANES; i++) {
            float sum = 0;
            int32_t exact = 0;
            for (long u = 0; u < units; u++) {
                const char *a = left + r * stride + u * 4, *b = panel + (u * PANEL + i) * 4;
                if (type == FLOAT32) sum += *(const float *)a * *(const float *)b;
                for (int j = 0; j < 2 && type == BFLOAT16; j++)
                    sum += from_bf16(((const uint16_t *)a)[j]) * from_bf16(((const uint16_t *)b)[j]);
                for (int j = 0; j < 4 && type == INT8; j++) exact += ((const uint8_t *)a)[j] * ((const int8_t *)b)[j];
            }
            if (type == INT8) ((int32_t *)sums)[r * PANEL + i] = exact;
            else ((float *)sums)[r * PANEL + i] = sum;
        }
}
#else
// A unit of a row, for all tokens. ARM multiplies by a lane.
INLINE ivec load_unit(const void *at) {
#if IS_ARM
    return (ivec)(uint64x2_t){*(const uint32_t *)at};
#else
    return (ivec){0} + *(const int32_t *)at;
#endif
}

// Sums of one unit
INLINE ivec dot(long type, ivec sum, ivec left, ivec right) {
#if IS_ARM
    const int32x2_t unit = vget_low_s32(left);
    if (type == FLOAT32) return (ivec)vfmaq_lane_f32((vec)sum, (vec)right, (float32x2_t)unit, 0);
#if LEVEL == NEON_DOTPROD
    return vdotq_lane_s32(sum, (int8x16_t)right, (int8x8_t)unit, 0);
#endif
#else
    if (type == FLOAT32) return (ivec)((vec)sum + (vec)left * (vec)right);
#if LEVEL == AVX2
    return sum + (ivec)_mm256_madd_epi16((__m256i)left, (__m256i)right);
#elif LEVEL == AVX2_VNNI
    if (type == INT16) return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)left, (__m256i)right);
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)left, (__m256i)right);
#else
    if (type == INT16) return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
    if (type == INT8) return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
#if HAS_BF16_DOT
    return (ivec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#endif
#endif
#endif
    return sum;
}

#if HAS_MATRIX_PRODUCT
// A product is of two rows and two tokens: two units of the first row, then of the second, times those of the tokens.
INLINE void multiply_pairs(const long type, const long rows, const long vectors, const char *left, long stride,
                           const char *panel, long units, void *sums) {
    ivec exact[6][4] = {0};  // for INT8; the compiler copies sums of both types at each product
    vec sum[6][4] = {0};
    for (long u = 0; u < units; u += 2, panel += 2 * PANEL * 4) {
        ivec tokens[4];
        for (long t = 0; t < 2 * vectors; t++) tokens[t] = load_int(panel + t * 16);
        #pragma GCC unroll 6
        for (long r = 0; r < rows; r += 2) {
            const char *row = left + r * stride + u * 4;
            const ivec both = (ivec)vcombine_u8(vld1_u8((const void *)row), vld1_u8((const void *)(row + stride)));
            #pragma GCC unroll 4
            for (long t = 0; t < 2 * vectors; t++) {
                ivec *integers = &exact[r / 2][t];
                vec *floats = &sum[r / 2][t];
                if (type == INT8) *integers = vusmmlaq_s32(*integers, (uint8x16_t)both, (int8x16_t)tokens[t]);
                else *floats = vbfmmlaq_f32(*floats, (bfloat16x8_t)both, (bfloat16x8_t)tokens[t]);
            }
        }
    }
    #pragma GCC unroll 12
    for (long r = 0; r < rows; r++)
        for (long v = 0; v < vectors; v++) {
            const int64x2_t *pairs = type == INT8 ? (int64x2_t *)exact[r / 2] : (int64x2_t *)sum[r / 2];
            const int64x2_t a = pairs[2 * v], b = pairs[2 * v + 1];
            store_int((float *)sums + r * PANEL + v * LANES, (ivec)(r % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b)));
        }
}
#endif

INLINE void multiply_rows(const long type, const long rows, const long vectors, const char *left, long stride,
                          const char *panel, long units, void *sums, fetch next) {
#if HAS_MATRIX_PRODUCT
    if (type != FLOAT32) return multiply_pairs(type, rows, vectors, left, stride, panel, units, sums);
#endif
    ivec sum[12][2] = {0};
    for (long u = 0; u < units; u++) {
        if (next.step) __builtin_prefetch(next.data + u * next.step, 0, 2);
        ivec first = load_int(panel + u * PANEL * 4), second = load_int(panel + u * PANEL * 4 + 4 * LANES);
        #pragma GCC unroll 12
        for (long r = 0; r < rows; r++) {
            ivec unit = load_unit(left + r * stride + u * 4);
            sum[r][0] = dot(type, sum[r][0], unit, first);
            if (vectors == 2) sum[r][1] = dot(type, sum[r][1], unit, second);
        }
    }
    #pragma GCC unroll 12
    for (long r = 0; r < rows; r++)
        for (long v = 0; v < vectors; v++) store_int((float *)sums + r * PANEL + v * LANES, sum[r][v]);
}

#if LEVEL == AMX
static void multiply(long type, long rows, const char *left, long stride, const char *panel, long units, void *sums,
                     long vectors, int add, fetch next) {
    if (type == INT8) return multiply_tiles(INT8, left, stride, panel, units, sums, vectors, add);
    if (type == BFLOAT16) return multiply_tiles(BFLOAT16, left, stride, panel, units, sums, vectors, add);
    next.step = (next.step + 3) / 4;
    for (long r = 0; r < rows; r += 8, next.data += units * next.step) {  // float32 has no tiles
        float *part = (float *)sums + r * PANEL;
        if (vectors == 1) multiply_rows(FLOAT32, 8, 1, left + r * stride, stride, panel, units, part, next);
        else multiply_rows(FLOAT32, 8, 2, left + r * stride, stride, panel, units, part, next);
    }
}
#else
#define SMALL_ROWS 4  // of a last block
INLINE void multiply_type(const long type, long rows, const char *left, long stride, const char *panel, long units,
                          void *sums, long vectors, fetch next) {
    if (rows <= SMALL_ROWS && vectors == 1) multiply_rows(type, SMALL_ROWS, 1, left, stride, panel, units, sums, next);
    else if (rows <= SMALL_ROWS) multiply_rows(type, SMALL_ROWS, 2, left, stride, panel, units, sums, next);
    else if (vectors == 1) multiply_rows(type, BLOCK_ROWS, 1, left, stride, panel, units, sums, next);
    else multiply_rows(type, BLOCK_ROWS, 2, left, stride, panel, units, sums, next);
}

static void multiply(long type, long rows, const char *left, long stride, const char *panel, long units, void *sums,
                     long vectors, int add, fetch next) {
    if (type == FLOAT32 || (INT8_IN_FLOAT32 && type == INT8))
        multiply_type(FLOAT32, rows, left, stride, panel, units, sums, vectors, next);
    else if (type == INT8) multiply_type(INT8, rows, left, stride, panel, units, sums, vectors, next);
    else if (type == BFLOAT16 && HAS_BF16_DOT) multiply_type(BFLOAT16, rows, left, stride, panel, units, sums, vectors, next);
    else if (HAS_INT16_DOT) multiply_type(INT16, rows, left, stride, panel, units, sums, vectors, next);
}
#endif
#endif

INLINE long value_bytes(const matrix *w) {
    return w->dtype == FLOAT32 ? 4 : w->dtype == BFLOAT16 || w->dtype == INT16 ? 2 : 1;
}

// One row of int4 values as float32 or bfloat16, whole groups: up to INT4_GROUP - 1 values more than the depth
INLINE void convert_int4(const uint8_t *from, const uint32_t *groups, long depth, const long type, char *to) {
    for (long i = 0; i < depth; i += INT4_GROUP, groups++) {
        const vec scale = splat(from_bf16((uint16_t)*groups)), least = splat(from_bf16((uint16_t)(*groups >> 16)));
        const uint8_t *nibbles = from + i / (2 * INT4_GROUP) * INT4_GROUP;
        for (int j = 0; j < INT4_GROUP; j += LANES) {
            const ivec q = (load_uint8(nibbles + j) >> (i / INT4_GROUP % 2 * 4)) & 15;
            const vec value = __builtin_convertvector(q, vec) * scale + least;
            if (type == BFLOAT16) store_bf16((uint16_t *)to + i + j, value);
            else store((float *)to + i + j, value);
        }
    }
}

#if INT8_IN_FLOAT32
typedef float converted_int8;
#elif CONVERTS_INT8
typedef int8_t converted_int8;
#else
typedef int16_t converted_int8;
#endif

// One row of w in the form that `type` multiplies, with zeros up to `padded` values
static void convert_row(const matrix *w, long row, long type, long padded, char *to) {
    const long depth = w->dtype == INT8 ? w->stride : w->depth;
    const long bytes = 4 / values_per_unit(type);  // of a converted value
    const char *from = (const char *)w->data + row * w->stride * value_bytes(w) / (w->dtype == INT4 ? 2 : 1);
    long i = 0;
    const uint32_t *groups = w->groups + row * (w->stride / INT4_GROUP);
    if (w->dtype == INT4 && type == BFLOAT16) convert_int4((const uint8_t *)from, groups, depth, BFLOAT16, to);
    else if (w->dtype == INT4) convert_int4((const uint8_t *)from, groups, depth, FLOAT32, to);
    else if (bytes == value_bytes(w) && !(CONVERTS_INT8 && w->dtype == INT8)) memcpy(to, from, depth * bytes);
    else if (w->dtype == INT8) for (; i < depth; i++) ((converted_int8 *)to)[i] = ((const uint8_t *)from)[i] - 128;
    else {
        for (; i + LANES <= depth; i += LANES) store((float *)to + i, load_bf16((const uint16_t *)from + i));
        for (; i < depth; i++) ((float *)to)[i] = from_bf16(((const uint16_t *)from)[i]);
    }
    memset(to + depth * bytes, 0, (padded - depth) * bytes);
}

// BLOCK_ROWS rows of w from `row` on as units of `type`: where they are if they fit, else in buffer, where missing rows
// are zero. Returns the first row, and the bytes from a row to the next in *stride.
static const char *left_rows(const matrix *w, long row, long type, long units, char *buffer, long *stride) {
    const long rows = min_long(BLOCK_ROWS, w->n_rows - row), row_bytes = w->stride * value_bytes(w);
    const int same = w->dtype == type && 4 / values_per_unit(type) == value_bytes(w) && !(CONVERTS_INT8 && type == INT8);
    const int whole = w->dtype == INT8 ? units * 4 <= row_bytes : units * 4 == w->depth * value_bytes(w);
    if (same && whole && rows == BLOCK_ROWS) {
        *stride = row_bytes;
        return (const char *)w->data + row * row_bytes;
    }
    *stride = units * 4 + 64;  // rows a power of two apart would share places in the cache
    for (long r = 0; r < rows; r++) convert_row(w, row + r, type, units * values_per_unit(type), buffer + r * *stride);
    memset(buffer + rows * *stride, 0, (BLOCK_ROWS - rows) * *stride);
    return buffer;
}

// --- all rows times all panels ---

// What becomes of a matmul's result: features of y from `first` on, or units of an operand in bfloat16
typedef struct {
    activations *y;
    operand *packed;
    long first;
    int add, gelu;  // add to what y holds; apply GELU to the sum, of several tokens
} result;

INLINE void finish_block(const matrix *w, long row, long rows, const operand *x, long panel, float *sums, long vectors,
                         const result *out) {  // sums becomes scratch memory
    float *y = out->packed ? sums : panel_of(out->y, panel) + (out->first + row) * PANEL;
    for (long r = 0; r < rows; r++)
        for (long v = 0; v < vectors; v++) {
            vec value = load(sums + r * PANEL + v * LANES);
            if (x->type == INT8) {
                ivec exact = (ivec)value - INT8_OFFSET * load_int(x->sum + panel * PANEL + v * LANES);
                if (!INT8_IN_FLOAT32) value = __builtin_convertvector(exact, vec);
                value *= load(x->scale + panel * PANEL + v * LANES);
                value *= w->scale[row + r];
            }
            if (w->bias) value += w->bias[row + r];
            float *at = y + r * PANEL + v * LANES;
            if (out->add) value += load(at);
            store(at, out->gelu ? gelu_vec(value) : value);
        }
    if (!out->packed) return;
    char *units = out->packed->data + panel * out->packed->panel_bytes + (out->first + row) / 2 * PANEL * 4;
    for (long r = 0; r < rows; r += 2)
        for (long i = 0; i < vectors * LANES; i += LANES) {
            const vec high = r + 1 < rows ? load(sums + (r + 1) * PANEL + i) : (vec){0};
            store_int(units + (r / 2 * PANEL + i) * 4, pack_bf16(load(sums + r * PANEL + i), high));
        }
}

#define L2_BYTES ((LEVEL == AMX ? 768 : 512) << 10)  // of panels that stay in a core's cache while all weight rows pass
#define PART_UNITS 128        // of the depth, whose tiles of a block of rows stay in the nearest cache meanwhile
#define FETCHING_PANELS 4     // at most, in whose time the next block of rows is fetched
#define SHARING_PANELS 8      // that a block of rows is multiplied by at least, if it must be converted first

static void gemm(const matrix *weights, int n_weights, const operand *x, result out, int threads) {
    const long panels = n_panels(x->n_tokens);
    const long least = min_long(panels, weights->dtype == x->type ? 1 : SHARING_PANELS);
    const long group = max_long(least, min_long(panels, L2_BYTES / (x->units * PANEL * 4)));
    const long fetching = min_long(group, FETCHING_PANELS);
    const int in_parts = LEVEL == AMX && x->type != FLOAT32 && x->units > PART_UNITS;
    const long part_units = in_parts ? PART_UNITS : x->units;
    #pragma omp parallel num_threads(threads)
    {
        amx_state state = begin_multiply();
        char *buffer = allocate(BLOCK_ROWS * (x->units * 4 + 64) + INT4_GROUP * 4);
        float *sums = allocate((in_parts ? group : 1) * BLOCK_ROWS * PANEL * 4);
        for (long start = 0; start < panels; start += group) {
            result part = out;
            for (int k = 0; k < n_weights; part.first += weights[k++].n_rows) {
                const matrix *w = &weights[k];
                #pragma omp for schedule(dynamic, 2) nowait
                for (long row = 0; row < w->n_rows; row += BLOCK_ROWS) {
                    long stride, rows = min_long(BLOCK_ROWS, w->n_rows - row);
                    const char *left = left_rows(w, row, x->type, x->units, buffer, &stride);
                    const long row_bytes = w->stride * value_bytes(w) / (w->dtype == INT4 ? 2 : 1);
                    const long step = (BLOCK_ROWS * row_bytes - 1) / (x->units * fetching) + 1;
                    const char *ahead = (const char *)w->data + (row + BLOCK_ROWS) * row_bytes;
                    for (long u = 0; u < x->units; u += part_units)
                        for (long p = start; p < min_long(panels, start + group); p++) {
                            const long i = p - start, vectors = x->n_tokens - p * PANEL > LANES ? 2 : 1;
                            const fetch next = {ahead + i * x->units * step, i < fetching ? step : 0};
                            const char *panel = x->data + p * x->panel_bytes + u * PANEL * 4;
                            float *block = sums + (in_parts ? i * BLOCK_ROWS * PANEL : 0);
                            const long units = min_long(part_units, x->units - u);
                            multiply(x->type, rows, left + u * 4, stride, panel, units, block, vectors, u > 0, next);
                            if (u + units == x->units) finish_block(w, row, rows, x, p, block, vectors, &part);
                        }
                }
            }
        }
        release(buffer), release(sums);
        end_multiply(&state);
    }
}
