// What `models.inference.eager_ops` computes between products, each in one pass over the rows: see there.
// `half` inputs and outputs are bfloat16, else float32. A code is 128 + round(x / scale).
#include "compiled_ops.h"

#define COLUMNS 64  // of one pass
#define TILE 16
#define AHEAD 2048  // bytes of a weight, read before they are needed
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

static inline float get(const void *x, int half, long i) {
    return half ? from_half(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static inline void put(void *x, int half, long i, float value) {
    if (half) ((uint16_t *)x)[i] = to_half(value);
    else ((float *)x)[i] = value;
}

static inline const float *load(const void *x, int half, long at, float *buffer, long n) {
    if (!half) return (const float *)x + at;
    for (long i = 0; i < n; i++) buffer[i] = get(x, 1, at + i);
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

void swiglu(const void *gate_up, int half, const float *in_scale, uint8_t *codes, float *scale, long rows, long n,
            int threads) {
    PARALLEL_ROWS {
        float hidden[n];
        for (long i = 0; i < n; i += 16) {
            __m512 gate = load_vector(gate_up, half, r * 2 * n + i, lane_mask(n - i)) * in_scale[r];
            __m512 up = load_vector(gate_up, half, r * 2 * n + n + i, lane_mask(n - i));
            store_vector(hidden, 0, i, lane_mask(n - i), gate * sigmoid_vector(gate) * up);
        }
        scale[r] = quantize_row(hidden, SMALLEST, codes + r * n, n) * in_scale[r];
    }
}

// gate = silu(gate) * up
void silu_mul(void *gate, const void *up, int half, long rows, long n, int threads) {
    PARALLEL_ROWS for (long i = 0; i < n; i += 16) {
        __mmask16 mask = lane_mask(n - i);
        __m512 x = load_vector(gate, half, r * n + i, mask);
        store_vector(gate, half, r * n + i, mask, x * sigmoid_vector(x) * load_vector(up, half, r * n + i, mask));
    }
}

// x = gelu(x + bias), by the approximation with tanh: x * (1 + tanh(y)) / 2 is x * sigmoid(2 * y)
void add_gelu(float *x, const float *bias, long rows, long n, int threads) {
    PARALLEL_ROWS for (long i = 0; i < n; i += 16) {
        __mmask16 mask = lane_mask(n - i);
        __m512 y = load_vector(x, 0, r * n + i, mask) + load_vector(bias, 0, i, mask);
        store_vector(x, 0, r * n + i, mask, y * sigmoid_vector(y * (1.5957691f + 0.071354816f * y * y)));
    }
}

void layer_norm(const void *x, const void *weight, const void *bias, int half, float eps, void *out, long rows, long n,
                int threads) {
    PARALLEL_ROWS {
        float row[n];
        __m512 sum = _mm512_setzero_ps(), squares = sum;
        for (long i = 0; i < n; i += 16) {
            __m512 y = load_vector(x, half, r * n + i, lane_mask(n - i));
            store_vector(row, 0, i, lane_mask(n - i), y);
            sum += y;
        }
        float mean = _mm512_reduce_add_ps(sum) / n;
        for (long i = 0; i < n; i += 16) {
            __m512 y = _mm512_maskz_mov_ps(lane_mask(n - i), load_vector(row, 0, i, lane_mask(n - i)) - mean);
            squares += y * y;
        }
        float inverse = 1 / sqrtf(_mm512_reduce_add_ps(squares) / n + eps);
        for (long i = 0; i < n; i += 16) {
            __mmask16 mask = lane_mask(n - i);
            __m512 y = (load_vector(row, 0, i, mask) - mean) * inverse * load_vector(weight, half, i, mask);
            store_vector(out, half, r * n + i, mask, y + load_vector(bias, half, i, mask));
        }
    }
}

static inline void rotate(float *y, const float *cos, const float *sin, long dim) {
    for (long i = 0, m = dim / 2; i < m; i++) {
        float first = y[i], second = y[i + m];
        y[i] = first * cos[i] - second * sin[i];
        y[i + m] = second * cos[i + m] + first * sin[i + m];
    }
}

// row r of heads (rows, n_q + 2 * n_kv, dim) has row r % n_angles of cos and sin (n_angles, dim)
void rope(const float *heads, const float *scale, const float *cos, const float *sin, void *q, void *k, void *v,
          int half, long rows, long n_angles, long n_q, long n_kv, long dim, int threads) {
    PARALLEL_ROWS for (long h = 0; h < n_q + 2 * n_kv; h++) {
        const float *x = heads + (r * (n_q + 2 * n_kv) + h) * dim;
        float y[dim];
        for (long i = 0; i < dim; i++) y[i] = x[i] * scale[r];
        if (h < n_q + n_kv) rotate(y, cos + r % n_angles * dim, sin + r % n_angles * dim, dim);
        void *out = h < n_q ? q : h < n_q + n_kv ? k : v;
        long at = (h < n_q ? r * n_q + h : r * n_kv + (h - n_q) % n_kv) * dim;
        if (half) for (long i = 0; i < dim; i++) put(out, 1, at + i, y[i]);
        else for (long i = 0; i < dim; i++) put(out, 0, at + i, y[i]);
    }
}

static inline void norm_block(const void *x, const void *weight, float eps, void *out, int half, long n, long columns,
                              long start, long width) {
    float scale[COLUMNS] = {0};
    for (long i = 0; i < n; i++)
        for (long t = 0; t < width; t++) {
            float value = get(x, half, i * columns + start + t);
            scale[t] += value * value;
        }
    for (long t = 0; t < width; t++) scale[t] = 1 / sqrtf(scale[t] / n + eps);
    for (long i = 0; i < n; i++) {
        float w = get(weight, half, i);
        for (long t = 0; t < width; t++)
            put(out, half, i * columns + start + t, get(x, half, i * columns + start + t) * scale[t] * w);
    }
}

// x and out (n, columns)
void rms_norm_columns(const void *x, const void *weight, float eps, void *out, int half, long n, long columns,
                      int threads) {
    #pragma omp parallel for num_threads(threads)
    for (long start = 0; start < columns; start += COLUMNS) {
        long width = columns - start < COLUMNS ? columns - start : COLUMNS;
        if (half) norm_block(x, weight, eps, out, 1, n, columns, start, width);
        else norm_block(x, weight, eps, out, 0, n, columns, start, width);
    }
}

static inline void rope_tile(const void *heads, const float *cos, const float *sin, void *q, void *k, void *v, int half,
                             long rows, long n_angles, long n_q, long n_kv, long dim, long h, long start) {
    long width = rows - start < TILE ? rows - start : TILE;
    float tile[TILE][dim];
    for (long i = 0; i < dim; i++)
        for (long t = 0; t < width; t++) tile[t][i] = get(heads, half, (h * dim + i) * rows + start + t);
    void *out = h < n_q ? q : h < n_q + n_kv ? k : v;
    for (long t = 0, r = start; t < width; t++, r++) {
        if (h < n_q + n_kv) rotate(tile[t], cos + r % n_angles * dim, sin + r % n_angles * dim, dim);
        long at = (h < n_q ? r * n_q + h : r * n_kv + (h - n_q) % n_kv) * dim;
        for (long i = 0; i < dim; i++) put(out, half, at + i, tile[t][i]);
    }
}

// heads (n_q + 2 * n_kv, dim, rows), otherwise as `rope`
void rope_columns(const void *heads, const float *cos, const float *sin, void *q, void *k, void *v, int half, long rows,
                  long n_angles, long n_q, long n_kv, long dim, int threads) {
    #pragma omp parallel for num_threads(threads) collapse(2)
    for (long h = 0; h < n_q + 2 * n_kv; h++)
        for (long start = 0; start < rows; start += TILE) {
            if (half) rope_tile(heads, cos, sin, q, k, v, 1, rows, n_angles, n_q, n_kv, dim, h, start);
            else rope_tile(heads, cos, sin, q, k, v, 0, rows, n_angles, n_q, n_kv, dim, h, start);
        }
}

// weight (rows, n) times x (n,)
void int8_gemv(const void *x, int half, const int8_t *weight, const void *scale, void *y, long rows, long n,
               int threads) {
    float buffer[n];
    const float *wide = load(x, half, 0, buffer, n);
    PARALLEL_ROWS {
        const int8_t *row = weight + r * n;
        float sum = 0;
        for (long i = 0; i < n; i += 64) __builtin_prefetch(row + AHEAD + i);
        for (long i = 0; i < n; i++) sum += wide[i] * row[i];
        put(y, half, r, sum * get(scale, half, r));
    }
}
