// Vectors of 16 float32, read from and written to float32 or, if half, bfloat16.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// The first n of a vector's 16 lanes
static inline __mmask16 lane_mask(long n) { return n < 16 ? (1 << n) - 1 : 0xffff; }

static inline __m512 load_vector(const void *x, int half, long i, __mmask16 mask) {
    if (!half) return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void store_vector(void *x, int half, long i, __mmask16 mask, __m512 value) {
    if (!half) {
        _mm512_mask_storeu_ps((float *)x + i, mask, value);
        return;
    }
#ifdef __AVX512BF16__
    _mm256_mask_storeu_epi16((uint16_t *)x + i, mask, (__m256i)_mm512_cvtneps_pbh(value));
#else
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));  // to the nearest, ties to even
    _mm512_mask_cvtepi32_storeu_epi16((uint16_t *)x + i, mask, _mm512_srli_epi32(bits, 16));
#endif
}

// 2^x with a relative error of 8e-8, or 8e-5 if that is enough, by a polynomial of what lies behind the point
static inline __m512 exp2_vector(__m512 x, int coarse) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), part = x - whole, y;
    if (coarse) {
        y = part * 5.508868e-2f + 2.426041e-1f;
        y = y * part + 6.932762e-1f;
        y = y * part + 9.999289e-1f;
    } else {
        y = part * 1.326697e-3f + 9.675460e-3f;
        y = y * part + 5.5507426e-2f;
        y = y * part + 2.4022122e-1f;
        y = y * part + 6.9314695e-1f;
        y = y * part + 1.0000001f;
    }
    return _mm512_scalef_ps(y, whole);
}

// 1 / (1 + e^-x); the reciprocal of infinity, as -ffast-math computes it, is not a number
static inline __m512 sigmoid_vector(__m512 x) {
    return 1 / (1 + exp2_vector(_mm512_min_ps(x * -1.44269504f, _mm512_set1_ps(126)), 0));
}
