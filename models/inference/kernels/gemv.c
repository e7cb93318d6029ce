// gemv: a weight, row-major as it is stored, times one token. Rows are read one after the other: memory is fastest so.

// The dot product of a row with the token, in float32; the row's scale is applied
#if LEVEL == NAIVE
static float dot_row(const matrix *w, long row, const operand *x) {
    float sum = 0;
    const char *data = w->data;
    const long depth = w->dtype == INT8 ? w->stride : w->depth;
    for (long i = 0; i < depth; i++) {
        const long at = row * w->stride + i;
        if (w->dtype < INT8) sum += get(data, w->dtype, at) * get(x->data, x->type, i);
        const float value = w->dtype < INT8 ? 0 : ((int8_t *)x->data)[i] * x->scale[i / INT4_GROUP];
        if (w->dtype == INT8) sum += (((const uint8_t *)data)[at] - 128) * w->scale[row] * value;
        if (w->dtype == INT4) {
            const uint8_t byte = ((const uint8_t *)data)[row * w->stride / 2 + i / 64 * 32 + i % 32];
            const uint32_t group = w->groups[at / INT4_GROUP];
            const int q = i % 64 < 32 ? byte & 15 : byte >> 4;
            sum += (q * from_bf16((uint16_t)group) + from_bf16((uint16_t)(group >> 16))) * value;
        }
    }
    return sum;
}
#else
// A core's own prefetcher stops at the end of a page. On an Intel Xeon a token takes 1.2 to 1.5 times as long without
// a prefetch of each cache line; on AMD's Zen 4 it takes a tenth to a third longer with it, and a line of the next page
// for each row is enough.
#define PREFETCH_BYTES 8192
#if IS_ARM
enum { is_intel = 0 };
#else
static int is_intel;

__attribute__((constructor)) static void read_vendor(void) {
    unsigned eax, ebx, ecx, edx;
    is_intel = __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_INTEL_ebx;
}
#endif

INLINE void prefetch_line(const void *at) {
    if (is_intel) __builtin_prefetch((const char *)at + PREFETCH_BYTES);
}

// Into the first or, for int8's short rows, the second level of the cache
INLINE void prefetch_page(const char *row, long dtype) {
    if (is_intel) return;
    if (dtype < INT8) __builtin_prefetch(row + 4096, 0, 3);
    else if (dtype == INT8) __builtin_prefetch(row + 8192, 0, 2);
}

// 32 bytes at a time at every level: on Zen 4, loads of 64 bytes take longer.
INLINE float dot_float(const float *w, const float *x, long depth) {
    row_vec sum[32 / ROW_LANES] = {0};
    long i = 0;
    for (; i + 32 <= depth; i += 32) {
        prefetch_line(w + i);
        prefetch_line(w + i + 16);
        for (long j = 0; j < 32 / ROW_LANES; j++)
            sum[j] += load_row(w + i + ROW_LANES * j, FLOAT32) * load_row(x + i + ROW_LANES * j, FLOAT32);
    }
    for (long j = 4; j < 32 / ROW_LANES; j++) sum[j - 4] += sum[j];
    float y = sum_row((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < depth; i++) y += w[i] * x[i];
    return y;
}

#if HAS_BF16_DOT
#if IS_ARM
#define BF16_LANES 8  // values of a load
INLINE row_vec add_bf16(row_vec sum, const uint16_t *w, const uint16_t *x) {
    return vbfdotq_f32(sum, (bfloat16x8_t)vld1q_u16(w), (bfloat16x8_t)vld1q_u16(x));
}

INLINE row_vec add_last_bf16(row_vec sum, const uint16_t *w, const uint16_t *x, long n) {
    uint16_t weights[8] = {0};
    memcpy(weights, w, n * 2);
    return add_bf16(sum, weights, x);
}
#else
#define BF16_LANES 16
INLINE row_vec add_bf16(row_vec sum, const uint16_t *w, const uint16_t *x) {
    const __m256i weights = _mm256_loadu_si256((const __m256i *)w), token = _mm256_loadu_si256((const __m256i *)x);
    return _mm256_dpbf16_ps(sum, (__m256bh)weights, (__m256bh)token);
}

INLINE row_vec add_last_bf16(row_vec sum, const uint16_t *w, const uint16_t *x, long n) {
    const __m256i weights = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), w);
    return _mm256_dpbf16_ps(sum, (__m256bh)weights, (__m256bh)_mm256_loadu_si256((const __m256i *)x));
}
#endif

// x is padded with zeros, see round_token; no value behind the row is read.
INLINE float dot_bf16(const uint16_t *w, const uint16_t *x, long depth) {
    row_vec sum[4] = {0};
    long i = 0;
    for (; i + 64 <= depth; i += 64) {
        prefetch_line(w + i);
        prefetch_line(w + i + 32);
        for (long j = 0; j < 64 / BF16_LANES; j++)
            sum[j % 4] = add_bf16(sum[j % 4], w + i + j * BF16_LANES, x + i + j * BF16_LANES);
    }
    for (; i < depth; i += BF16_LANES)
        sum[0] = add_last_bf16(sum[0], w + i, x + i, min_long(BF16_LANES, depth - i));
    return sum_row(sum[0] + sum[1] + (sum[2] + sum[3]));
}
#else
// A lane of 4 bytes holds an even and an odd value, and x is split in the same way: see split_token.
#define SPLIT_SUMS (IS_ARM ? 4 : 1)  // pairs of sums: ARM's vectors are short, so that one pair would wait for itself
INLINE void add_split(vec *even, vec *odd, const uint16_t *w, const float *x) {
    const ivec pairs = load_int(w);
    prefetch_line(w);
    *even += (vec)(pairs << 16) * load(x);
    *odd += (vec)(pairs & (int32_t)0xffff0000) * load(x + LANES);
}

INLINE float dot_bf16(const uint16_t *w, const float *x, long depth) {
    vec even[SPLIT_SUMS] = {0}, odd[SPLIT_SUMS] = {0};
    long i = 0;
    for (; i + SPLIT_SUMS * 2 * LANES <= depth; i += SPLIT_SUMS * 2 * LANES)
        for (long j = 0; j < SPLIT_SUMS; j++)
            add_split(&even[j], &odd[j], w + i + j * 2 * LANES, x + i + j * 2 * LANES);
    for (; SPLIT_SUMS > 1 && i + 2 * LANES <= depth; i += 2 * LANES) add_split(&even[0], &odd[0], w + i, x + i);
    for (long j = 1; j < SPLIT_SUMS; j++) even[0] += even[j], odd[0] += odd[j];
    float y = sum_lanes(even[0] + odd[0]);
    for (; i < depth; i++) y += from_bf16(w[i]) * x[i];
    return y;
}
#endif

#if IS_ARM
// Adds products of 16 values, w unsigned at NEON_I8MM, to four sums. |w| and |x| are at most 127: two products fit 16 bits.
INLINE ivec add_products(ivec sum, uint8x16_t w, const void *x) {
    const int8x16_t token = vld1q_s8(x), weights = (int8x16_t)w;
#if LEVEL == NEON_I8MM
    return vusdotq_s32(sum, w, token);
#elif LEVEL == NEON_DOTPROD
    return vdotq_s32(sum, weights, token);
#else
    const int16x8_t pairs = vmull_s8(vget_low_s8(weights), vget_low_s8(token));
    return vpadalq_s16(sum, vmlal_s8(pairs, vget_high_s8(weights), vget_high_s8(token)));
#endif
}
#endif

// Sums of products of QUANT_GROUP values, in all lanes
INLINE ivec dot_group(const uint8_t *w, const int8_t *x) {
#if IS_ARM
    ivec sum = {0};
    for (int i = 0; i < QUANT_GROUP; i += 16)
        sum = add_products(sum, vld1q_u8(w + i) ^ (uint8_t)(128 - INT8_OFFSET), x + i);
    return sum;
#elif LEVEL == AVX2
    ivec sum = {0};
    for (int i = 0; i < QUANT_GROUP; i += 32) {  // |x| * (w with the sign of x): a pair of products fits 16 bits
        __m256i values = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(w + i)), _mm256_set1_epi8(-128));
        __m256i token = _mm256_loadu_si256((const __m256i *)(x + i));
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(token), _mm256_sign_epi8(values, token));
        sum += (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    return sum;
#elif LEVEL == AVX2_VNNI
    ivec sum = {0};
    for (int i = 0; i < QUANT_GROUP; i += 32)
        sum = (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)load_int(w + i), (__m256i)load_int(x + i));
    return sum;
#else
    return (ivec)_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(w), _mm512_loadu_si512(x));
#endif
}

INLINE float dot_int8(const uint8_t *w, const operand *x) {
    vec sum = {0};
    for (long g = 0; g * QUANT_GROUP < x->depth; g++) {
        prefetch_line(w + g * QUANT_GROUP);
        ivec exact = dot_group(w + g * QUANT_GROUP, (const int8_t *)x->data + g * QUANT_GROUP);
        sum += __builtin_convertvector(exact, vec) * x->scale[2 * g];
    }
    return sum_lanes(sum) + x->offset;
}

// The sum over a row's groups of scale * (q . x) + minimum * sum(x). Two streams are read, which a core's own prefetcher
// follows less well, so each line is fetched on every CPU.
INLINE float dot_int4(const uint8_t *w, const uint32_t *groups, long n_groups, const operand *x) {
    vec sum[2] = {0}, least = {0};
    for (long g = 0; g < n_groups; g += LANES) {
        const long n = min_long(LANES, n_groups - g);
#if IS_ARM
        vec token_scale = {0}, token_sum = {0};
        ivec pairs = {0};
        memcpy(&token_scale, x->scale + g, n * 4);
        memcpy(&token_sum, x->group_sum + g, n * 4);
        memcpy(&pairs, groups + g, n * 4);
#elif !HAS_AVX512
        const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        const vec token_scale = (vec)_mm256_maskload_ps(x->scale + g, mask);
        const vec token_sum = (vec)_mm256_maskload_ps(x->group_sum + g, mask);
        const ivec pairs = (ivec)_mm256_maskload_epi32((const int *)groups + g, mask);
#else
        const __mmask16 mask = (__mmask16)((1u << n) - 1);
        const vec token_scale = (vec)_mm512_maskz_loadu_ps(mask, x->scale + g);
        const vec token_sum = (vec)_mm512_maskz_loadu_ps(mask, x->group_sum + g);
        const ivec pairs = (ivec)_mm512_maskz_loadu_epi32(mask, groups + g);
#endif
        __builtin_prefetch((const char *)(groups + g) + PREFETCH_BYTES / 4);
        const vec scale = (vec)(pairs << 16) * token_scale;
        least += (vec)(pairs & (int32_t)0xffff0000) * token_sum;
        for (long j = 0; j < n; j += 2, w += INT4_GROUP) {  // 64 values: two groups
            __builtin_prefetch(w + PREFETCH_BYTES);
            const char *token = x->data + (g + j) * INT4_GROUP;
#if IS_ARM
            ivec first = {0}, second = {0};
            for (int i = 0; i < INT4_GROUP; i += 16) {
                const uint8x16_t both = vld1q_u8(w + i);
                first = add_products(first, both & 15, token + i);
                second = add_products(second, both >> 4, token + INT4_GROUP + i);
            }
            sum[0] += __builtin_convertvector(first, vec) * scale[j];
            sum[1] += __builtin_convertvector(second, vec) * scale[j + 1];
#else
            const __m256i both = _mm256_loadu_si256((const __m256i *)w), low = _mm256_set1_epi8(15);
            const __m256i first = _mm256_and_si256(both, low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#if !HAS_AVX512
            for (int nibble = 0; nibble < 2; nibble++) {
                const __m256i values = _mm256_loadu_si256((const __m256i *)token + nibble);
                const __m256i q = nibble ? second : first;
#if LEVEL == AVX2
                const __m256i pairs_of_dots = _mm256_maddubs_epi16(q, values);
                const ivec exact = (ivec)_mm256_madd_epi16(pairs_of_dots, _mm256_set1_epi16(1));
#else
                const ivec exact = (ivec)_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), q, values);
#endif
                const __m256 scales = _mm256_permutevar8x32_ps((__m256)scale, _mm256_set1_epi32((int)j + nibble));
                sum[nibble] += __builtin_convertvector(exact, vec) * (vec)scales;
            }
#else  // the first group in the lower half of the lanes, the second in the upper
            const __m512i lanes = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
            const __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
            const __m512i exact = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, _mm512_loadu_si512(token));
            const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)j));
            sum[0] += (vec)_mm512_cvtepi32_ps(exact) * (vec)_mm512_permutexvar_ps(index, (__m512)scale);
#endif
#endif
        }
    }
    return sum_lanes(sum[0] + sum[1] + least);
}

INLINE float dot_row(const matrix *w, long row, const operand *x) {
    const char *data = (const char *)w->data + row * w->stride * value_bytes(w) / (w->dtype == INT4 ? 2 : 1);
    prefetch_page(data, w->dtype);
    if (w->dtype == FLOAT32) return dot_float((const float *)data, (const float *)x->data, w->depth);
    if (w->dtype == BFLOAT16) return dot_bf16((const uint16_t *)data, (const void *)x->data, w->depth);
    if (w->dtype == INT8) return dot_int8((const uint8_t *)data, x) * w->scale[row];
    const long n_groups = w->stride / INT4_GROUP;
    return dot_int4((const uint8_t *)data, w->groups + row * n_groups, n_groups, x);
}
#endif

static void gemv(const matrix *weights, int n_weights, const operand *x, result out, int threads) {
    #pragma omp parallel num_threads(threads)
    for (int k = 0; k < n_weights; k++) {
        const matrix *w = &weights[k];
        long first = out.first;
        for (int before = 0; before < k; before++) first += weights[before].n_rows;
        #pragma omp for schedule(dynamic, 64) nowait
        for (long row = 0; row < w->n_rows; row++) {
            float value = dot_row(w, row, x) + (w->bias ? w->bias[row] : 0), *at = out.y->data + first + row;
            if (out.add) value += *at;
            *at = value;
        }
    }
}
