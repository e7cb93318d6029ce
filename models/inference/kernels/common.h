// What every kernel file shares: levels, data layout (drawn in README.md) and small vector helpers.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Levels of instructions. This source is compiled into one library for each, with -DLEVEL=<name>; those of ARM with
// -march, too, as not all compilers know its features in a pragma.
#define NAIVE 0  // plain loops: what the tests compare the others with
#define AVX2 1
#define AVX2_VNNI 2  // AVX2 with int8 dot products
#define VNNI 3   // AVX-512 with int8 dot products
#define BF16_DOT 4  // AVX-512 with bfloat16 dot products, too
#define AMX 5
#define NEON 6  // every 64-bit ARM
#define NEON_DOTPROD 7  // with int8 dot products
#define NEON_I8MM 8  // with matrix products of int8 and of bfloat16, too

#define IS_ARM (LEVEL >= NEON)
#define HAS_AVX512 (LEVEL >= VNNI && LEVEL <= AMX)
#define HAS_32_REGISTERS (HAS_AVX512 || IS_ARM)
#define HAS_BF16_DOT (LEVEL == NAIVE || LEVEL == BF16_DOT || LEVEL == AMX || LEVEL == NEON_I8MM)
#define HAS_INT16_DOT (LEVEL >= AVX2_VNNI && LEVEL < AMX)  // that attention uses
#define HAS_MATRIX_PRODUCT (LEVEL == NEON_I8MM)  // two rows of 8 bytes times those of two tokens
#define INT8_IN_FLOAT32 (LEVEL == NEON)  // its products of int16 would be no faster

#if LEVEL == AVX2
#pragma GCC target("avx2,fma,f16c")
#elif LEVEL == AVX2_VNNI
#pragma GCC target("avx2,fma,f16c,avxvnni")
#elif LEVEL == VNNI
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#elif LEVEL == BF16_DOT || LEVEL == AMX
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,prefer-vector-width=512")
#endif
#if LEVEL == AMX && !defined(EMULATE_AMX)
#pragma GCC target("amx-tile,amx-bf16,amx-int8")
#endif
#if IS_ARM
#include <arm_neon.h>
#elif LEVEL > NAIVE
#include <cpuid.h>
#include <immintrin.h>
#endif

#define LANES (HAS_AVX512 ? 16 : IS_ARM ? 4 : 8)  // float32 values of a vector
#define PANEL (2 * LANES)                         // tokens of a panel
#define ROW_LANES (IS_ARM ? 4 : 8)                // float32 values of a row that are read, or transposed, together
#define BLOCK_ROWS (LEVEL == AMX ? 32 : HAS_32_REGISTERS ? 12 : LEVEL > NAIVE ? 6 : 4)  // weight rows of one multiply
#define UNIT_MULTIPLE (LEVEL == AMX ? 16 : HAS_MATRIX_PRODUCT ? 2 : 1)  // a depth in units is padded to it
#define INT8_PER_UNIT (LEVEL == AVX2 ? 2 : INT8_IN_FLOAT32 ? 1 : 4)  // AVX2 multiplies int8 as int16
#define CONVERTS_INT8 (LEVEL == NEON_DOTPROD)  // weights of a block, to signed bytes
// What stored int8 weights are above their value when they are multiplied
#define INT8_OFFSET (LEVEL == AVX2 || LEVEL == NEON || LEVEL == NEON_DOTPROD ? 0 : 128)
#define QUANT_GROUP 64  // values of one token that share a scale when a single token is multiplied by int8 or int4;
                        // and that int8 mixes by a Hadamard matrix
#define INT4_GROUP 32   // weights that share a scale and a minimum

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float row_vec __attribute__((vector_size(4 * ROW_LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef struct { vec v; } __attribute__((packed, aligned(1), may_alias)) unaligned_vec;
typedef struct { ivec v; } __attribute__((packed, aligned(1), may_alias)) unaligned_ivec;
typedef struct { uint32_t v; } __attribute__((packed, aligned(1), may_alias)) unaligned_int;
typedef struct { hvec v; } __attribute__((packed, aligned(1), may_alias)) unaligned_hvec;

enum { FLOAT32, BFLOAT16, INT8, INT4, INT16 };  // how a weight, an operand or a cache is stored

// A matrix (n_rows, depth), row-major: a layer's weight, or the keys of an attention head.
typedef struct {
    const void *data;        // INT8: 128 + value of the mixed row in a byte; INT4: 64 values in 32 bytes, two halves of nibbles
    const float *scale;      // INT8: of each row
    const uint32_t *groups;  // INT4: (n_rows, stride / 32), bfloat16 scale below bfloat16 minimum
    const float *bias;       // (n_rows), or NULL
    long n_rows, depth;
    long stride;             // values from a row to the next; of INT8 and INT4 a multiple of 64
    long dtype;
} matrix;

INLINE long values_per_unit(long type) { return type == FLOAT32 ? 1 : type == INT8 ? INT8_PER_UNIT : 2; }

// Activations as the right factor of a matmul: for each panel, (units, PANEL) of 4 bytes. A unit is one float32, two
// bfloat16 or int16 or four int8 (AVX2: two int16) values of one token, successive in depth.
typedef struct {
    char *data;
    float *scale;   // INT8, INT16: of each token (padded to panels); of a single token, of each INT4_GROUP values
    int32_t *sum;   // INT8, INT16: of each token's quantized values
    float *group_sum;  // a single token for INT4: scaled sums of each group of INT4_GROUP
    float offset;   // a single token for INT8: what INT8_OFFSET adds to every row
    long n_tokens, depth, units, type, panel_bytes;
    int borrowed;  // data is the activations themselves
} operand;

// Activations in float32: panels (n_features, PANEL) of tokens, or, of a single token, one row.
typedef struct {
    float *data;
    long n_features, n_tokens;
} activations;

INLINE vec load(const float *x) { return ((const unaligned_vec *)x)->v; }
INLINE void store(float *x, vec y) { ((unaligned_vec *)x)->v = y; }
INLINE vec splat(float x) { return (vec){0} + x; }
INLINE ivec load_int(const void *x) { return ((const unaligned_ivec *)x)->v; }
INLINE void store_int(void *x, ivec y) { ((unaligned_ivec *)x)->v = y; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }
INLINE long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }
#if HAS_AVX512
INLINE vec max_vec(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec min_vec(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE ivec max_int(ivec a, ivec b) { return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE ivec load_uint8(const uint8_t *x) { return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)x)); }
INLINE ivec load_uint16(const uint16_t *x) { return (ivec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)); }
#elif IS_ARM
INLINE vec max_vec(vec a, vec b) { return vmaxq_f32(a, b); }
INLINE vec min_vec(vec a, vec b) { return vminq_f32(a, b); }
INLINE ivec max_int(ivec a, ivec b) { return vmaxq_s32(a, b); }
INLINE ivec load_uint8(const uint8_t *x) {
    const uint8x8_t four = (uint8x8_t)(uint64x1_t){((const unaligned_int *)x)->v};
    return (ivec)vmovl_u16(vget_low_u16(vmovl_u8(four)));
}
INLINE ivec load_uint16(const uint16_t *x) { return (ivec)vmovl_u16(vld1_u16(x)); }
#elif LEVEL > NAIVE
INLINE vec max_vec(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec min_vec(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE ivec max_int(ivec a, ivec b) { return (ivec)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE ivec load_uint8(const uint8_t *x) { return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)x)); }
INLINE ivec load_uint16(const uint16_t *x) { return (ivec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)x)); }
#else
INLINE vec max_vec(vec a, vec b) { return (vec)(((ivec)a & (a > b)) | ((ivec)b & ~(a > b))); }
INLINE vec min_vec(vec a, vec b) { return (vec)(((ivec)a & (a < b)) | ((ivec)b & ~(a < b))); }
INLINE ivec max_int(ivec a, ivec b) { return (a & (a > b)) | (b & ~(a > b)); }
INLINE ivec load_uint8(const uint8_t *x) { return (ivec){x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]}; }
INLINE ivec load_uint16(const uint16_t *x) { return (ivec){x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]}; }
#endif
// Max of `largest` and |x| as integers, so that a NaN, the highest of them, is not lost; max_vec gives b for a NaN
INLINE vec max_abs(vec largest, vec x) { return (vec)max_int((ivec)largest, (ivec)x & 0x7fffffff); }

INLINE float sum_row(row_vec x) {
    typedef float quarter __attribute__((vector_size(16)));
    quarter low, high;
    memcpy(&low, &x, 16);
    if (ROW_LANES == 8) memcpy(&high, (char *)&x + 16, 16), low += high;
    return (low[0] + low[1]) + (low[2] + low[3]);
}

INLINE float sum_lanes(vec x) {
#if HAS_AVX512
    return _mm512_reduce_add_ps((__m512)x);
#else
    return sum_row(x);
#endif
}

INLINE float max_lanes(vec x) {
    float largest = x[0];
    for (int i = 1; i < LANES; i++) if (x[i] > largest || isnan(x[i])) largest = x[i];
    return largest;
}

// bfloat16 is the upper half of a float32. Rounding is to the nearest, ties to even.
INLINE ivec round_bits(vec x) { return (ivec)x + 0x7fff + (((ivec)x >> 16) & 1); }
INLINE vec load_bf16(const uint16_t *x) { return (vec)(load_uint16(x) << 16); }
INLINE void store_bf16(uint16_t *x, vec y) {
    ((unaligned_hvec *)x)->v = __builtin_convertvector((round_bits(y) >> 16) & 0xffff, hvec);
}

// Two bfloat16 values in each lane of 4 bytes
INLINE ivec pack_bf16(vec low, vec high) {
#if HAS_AVX512 && HAS_BF16_DOT
    const __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
    return (ivec)a | (ivec)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high)) << 16;
#else
    return ((round_bits(low) >> 16) & 0xffff) | (round_bits(high) & (int32_t)0xffff0000);
#endif
}

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE float get(const void *x, long dtype, long i) {
    return dtype == BFLOAT16 ? from_bf16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

INLINE void put(void *x, long dtype, long i, float y) {
    if (dtype == BFLOAT16) ((uint16_t *)x)[i] = to_bf16(y);
    else ((float *)x)[i] = y;
}

// To the nearest integer, for |x| < 2^22; compiled without -ffast-math, which would cancel the two sums
#define ROUND_FLOAT 12582912.0f  // 1.5 * 2^23
#define ROUND_BITS 0x4b400000
INLINE ivec round_to_int(vec x) { return (ivec)(x + ROUND_FLOAT) - ROUND_BITS; }

// e^x with a relative error of 2e-7, for x up to 88; 0 or up to 1e-38 for x below -87; NaN for NaN
INLINE vec exp_vec(vec x) {
    vec power = max_vec(splat(-127), min_vec(splat(127), x * 1.44269504f)), whole = power + ROUND_FLOAT;
    ivec exponent = (ivec)whole - ROUND_BITS;
    vec part = power - (whole - ROUND_FLOAT), y;
    y = part * 1.326697e-3f + 9.675460e-3f;
    y = y * part + 5.5507426e-2f;
    y = y * part + 2.4022122e-1f;
    y = y * part + 6.9314695e-1f;
    y = y * part + 1.0f;
    return y * (vec)((exponent + 127) << 23);  // 2^-127 is 0 here
}

INLINE vec silu_vec(vec x) { return x / (1.0f + exp_vec(-x)); }
// GELU's tanh approximation, x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)) (Hendrycks and Gimpel 2016)
INLINE vec gelu_vec(vec x) { return x / (1.0f + exp_vec(-1.5957691216f * x * (1.0f + 0.044715f * x * x))); }

// Where feature c of token m is in panels
INLINE long panel_at(long c, long m, long n_features) { return (m / PANEL * n_features + c) * PANEL + m % PANEL; }
INLINE long n_panels(long n_tokens) { return (n_tokens + PANEL - 1) / PANEL; }

#if LEVEL > NAIVE
// ROW_LANES successive values as float32, and back
#if IS_ARM
INLINE vec load_row(const void *x, const long dtype) { return dtype == FLOAT32 ? load(x) : load_bf16(x); }
INLINE void store_row(void *x, const long dtype, vec y) { dtype == FLOAT32 ? store(x, y) : store_bf16(x, y); }
#else
INLINE __m256 load_row(const void *x, const long dtype) {
    if (dtype == FLOAT32) return _mm256_loadu_ps(x);
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(x)), 16);
}

INLINE void store_row(void *x, const long dtype, __m256 y) {
    if (dtype == FLOAT32) return _mm256_storeu_ps(x, y);
    __m256i bits = (__m256i)y, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    _mm_storeu_si128(x, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
#endif

INLINE void transpose_tile(const char *from, const long from_dtype, long from_bytes, char *to, const long to_dtype,
                           long to_bytes) {
#if IS_ARM
    float32x4_t a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = load_row(from + i * from_bytes, from_dtype);
    for (int i = 0; i < 4; i += 2) b[i] = vtrn1q_f32(a[i], a[i + 1]), b[i + 1] = vtrn2q_f32(a[i], a[i + 1]);
    for (int i = 0; i < 2; i++) {
        const float64x2_t low = (float64x2_t)b[i], high = (float64x2_t)b[i + 2];
        store_row(to + i * to_bytes, to_dtype, (vec)vzip1q_f64(low, high));
        store_row(to + (i + 2) * to_bytes, to_dtype, (vec)vzip2q_f64(low, high));
    }
#else
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = load_row(from + i * from_bytes, from_dtype);
    for (int i = 0; i < 8; i += 2)
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        store_row(to + i * to_bytes, to_dtype, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        store_row(to + (i + 4) * to_bytes, to_dtype, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
#endif
}
#endif

// to[column][row] = from[row][column]; strides in values
static void transpose(const void *from, long from_dtype, long from_stride, long n_rows, long n_columns, void *to,
                      long to_dtype, long to_stride) {
    long rows = 0, columns = 0;
#if LEVEL > NAIVE
    rows = n_rows / ROW_LANES * ROW_LANES, columns = n_columns / ROW_LANES * ROW_LANES;
    const long from_size = from_dtype == FLOAT32 ? 4 : 2, to_size = to_dtype == FLOAT32 ? 4 : 2;
    for (long r = 0; r < rows; r += ROW_LANES)
        for (long c = 0; c < columns; c += ROW_LANES) {
            const char *x = (const char *)from + (r * from_stride + c) * from_size;
            char *y = (char *)to + (c * to_stride + r) * to_size;
            transpose_tile(x, from_dtype, from_stride * from_size, y, to_dtype, to_stride * to_size);
        }
#endif
    for (long r = 0; r < n_rows; r++)
        for (long c = r < rows ? columns : 0; c < n_columns; c++)
            put(to, to_dtype, c * to_stride + r, get(from, from_dtype, r * from_stride + c));
}

// Scratch memory, aligned to 64 bytes. Released blocks are kept for the next pass: the operating system clears every
// new page, which takes a tenth of an image's time.
#define KEPT_BLOCKS 64
#ifdef __SANITIZE_ADDRESS__
#define KEPT_BYTES 0l  // it must see every block
#else
#define KEPT_BYTES (256l << 20)
#endif
typedef struct { long n_bytes, unused[7]; } scratch_header;
static scratch_header *kept[KEPT_BLOCKS];
static long kept_bytes;
static char kept_lock;

static void *allocate(long n_bytes) {
    scratch_header *block = NULL;
    int best = -1;
    n_bytes = round_up(n_bytes, 64);
    while (__atomic_test_and_set(&kept_lock, __ATOMIC_ACQUIRE)) {}
    for (int i = 0; i < KEPT_BLOCKS; i++)
        if (kept[i] && kept[i]->n_bytes >= n_bytes && kept[i]->n_bytes <= 2 * n_bytes &&
            (best < 0 || kept[i]->n_bytes < kept[best]->n_bytes)) best = i;
    if (best >= 0) block = kept[best], kept[best] = NULL, kept_bytes -= block->n_bytes;
    __atomic_clear(&kept_lock, __ATOMIC_RELEASE);
    if (!block) block = aligned_alloc(64, sizeof *block + n_bytes), block->n_bytes = n_bytes;
    return block + 1;
}

static void release(void *data) {
    if (!data) return;
    scratch_header *block = (scratch_header *)data - 1;
    while (__atomic_test_and_set(&kept_lock, __ATOMIC_ACQUIRE)) {}
    for (int i = 0; i < KEPT_BLOCKS && block; i++)
        if (!kept[i] && kept_bytes + block->n_bytes <= KEPT_BYTES)
            kept[i] = block, kept_bytes += block->n_bytes, block = NULL;
    __atomic_clear(&kept_lock, __ATOMIC_RELEASE);
    free(block);
}

INLINE long width_of(const activations *x) { return x->n_tokens == 1 ? 1 : PANEL; }
INLINE long panels_of(const activations *x) { return x->n_tokens == 1 ? 1 : n_panels(x->n_tokens); }
INLINE float *panel_of(const activations *x, long panel) { return x->data + panel * x->n_features * width_of(x); }

static activations new_activations(long n_tokens, long n_features) {
    activations x = {.n_features = n_features, .n_tokens = n_tokens};
    x.data = allocate(panels_of(&x) * n_features * width_of(&x) * 4);
    return x;
}
