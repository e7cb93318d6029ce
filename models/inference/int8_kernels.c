// What `models.inference.int8_ops` computes between int8 products, each in one pass over the rows: see there.
// x of `half` inputs and outputs is bfloat16, else float32. A code is 128 + round(x / scale).
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SMALLEST 1e-36f  // of a row's largest magnitude
#define PARALLEL_ROWS _Pragma("omp parallel for num_threads(threads)") for (long r = 0; r < rows; r++)
#define PARALLEL_MAX _Pragma("omp parallel for num_threads(threads) reduction(max : largest)") \
    for (long r = 0; r < rows; r++)

static inline float from_half(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

static inline uint16_t to_half(float x) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline const float *load(const void *x, int half, long at, float *buffer, long n) {
    if (!half) return (const float *)x + at;
    for (long i = 0; i < n; i++) buffer[i] = from_half(((const uint16_t *)x)[at + i]);
    return buffer;
}

static inline float max_abs(const float *x, long n, float largest) {
    for (long i = 0; i < n; i++) largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

static inline void round_row(const float *x, float inverse, uint8_t *codes, long n) {
    for (long i = 0; i < n; i++) codes[i] = (uint8_t)((int)rintf(x[i] * inverse) + 128);
}

static inline float quantize_row(const float *x, float smallest, uint8_t *codes, long n) {
    float largest = max_abs(x, n, smallest);
    round_row(x, 127 / largest, codes, n);
    return largest / 127;
}

void quantize_rows(const void *x, int half, float smallest, uint8_t *codes, float *scale, long rows, long n,
                   int threads) {
    PARALLEL_ROWS {
        float buffer[n];
        scale[r] = quantize_row(load(x, half, r * n, buffer, n), fmaxf(smallest, SMALLEST), codes + r * n, n);
    }
}

float quantize_tensor(const void *x, int half, uint8_t *codes, long rows, long n, int threads) {
    float largest = SMALLEST;
    PARALLEL_MAX {
        float buffer[n];
        largest = max_abs(load(x, half, r * n, buffer, n), n, largest);
    }
    PARALLEL_ROWS {
        float buffer[n];
        round_row(load(x, half, r * n, buffer, n), 127 / largest, codes + r * n, n);
    }
    return largest / 127;
}

void add_rms_norm(const float *x, const float *y, const float *y_scale, const float *weight, float eps, float *sum,
                  uint8_t *codes, float *scale, long rows, long n, int threads) {
    PARALLEL_ROWS {
        const float *row = x + r * n;
        float weighted[n], square = 0;
        if (y) {
            for (long i = 0; i < n; i++) sum[r * n + i] = row[i] + y[r * n + i] * y_scale[r];
            row = sum + r * n;
        }
        for (long i = 0; i < n; i++) square += row[i] * row[i], weighted[i] = row[i] * weight[i];
        scale[r] = quantize_row(weighted, SMALLEST, codes + r * n, n) / sqrtf(square / n + eps);
    }
}

float add_layer_norm(float *x, const float *y, const float *weight, const float *bias, float eps, float *normalized,
                     uint8_t *codes, long rows, long n, int threads) {
    float largest = SMALLEST;
    PARALLEL_MAX {
        float *row = x + r * n, *out = normalized + r * n, mean = 0, variance = 0;
        if (y) for (long i = 0; i < n; i++) row[i] += y[r * n + i];
        for (long i = 0; i < n; i++) mean += row[i];
        mean /= n;
        for (long i = 0; i < n; i++) variance += (row[i] - mean) * (row[i] - mean);
        float inverse = 1 / sqrtf(variance / n + eps);
        for (long i = 0; i < n; i++) out[i] = (row[i] - mean) * inverse * weight[i] + bias[i];
        largest = max_abs(out, n, largest);
    }
    PARALLEL_ROWS round_row(normalized + r * n, 127 / largest, codes + r * n, n);
    return largest / 127;
}

void add_rows(float *x, const float *y, const float *y_scale, const float *bias, long rows, long n, int threads) {
    PARALLEL_ROWS for (long i = 0; i < n; i++) x[r * n + i] += y[r * n + i] * y_scale[r] + (bias ? bias[i] : 0);
}

void swiglu(const float *gate_up, const float *in_scale, uint8_t *codes, float *scale, long rows, long n,
            int threads) {
    PARALLEL_ROWS {
        const float *gate = gate_up + r * 2 * n, *up = gate + n;
        float hidden[n], s = in_scale[r];
        for (long i = 0; i < n; i++)
            hidden[i] = gate[i] * s / (1 + expf(fminf(-gate[i] * s, 80))) * up[i];  // larger ones would overflow
        scale[r] = quantize_row(hidden, SMALLEST, codes + r * n, n) * s;
    }
}

// row r of heads (rows, n_q + 2 * n_kv, dim) has row r % n_angles of cos and sin (n_angles, dim)
void rope(const float *heads, const float *scale, const float *cos, const float *sin, void *q, void *k, void *v,
          int half, long rows, long n_angles, long n_q, long n_kv, long dim, int threads) {
    PARALLEL_ROWS {
        const float *c = cos + r % n_angles * dim, *s = sin + r % n_angles * dim;
        for (long h = 0; h < n_q + 2 * n_kv; h++) {
            const float *x = heads + (r * (n_q + 2 * n_kv) + h) * dim;
            float y[dim];
            for (long i = 0; i < dim; i++) y[i] = x[i] * scale[r];
            for (long i = 0, m = dim / 2; i < m && h < n_q + n_kv; i++) {
                float first = y[i], second = y[i + m];
                y[i] = first * c[i] - second * s[i];
                y[i + m] = second * c[i + m] + first * s[i + m];
            }
            void *out = h < n_q ? q : h < n_q + n_kv ? k : v;
            long at = (h < n_q ? r * n_q + h : r * n_kv + (h - n_q) % n_kv) * dim;
            if (half) for (long i = 0; i < dim; i++) ((uint16_t *)out)[at + i] = to_half(y[i]);
            else memcpy((float *)out + at, y, dim * sizeof *y);
        }
    }
}
