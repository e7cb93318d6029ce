// Products in vectors (float32) and tiles (bfloat16, AMX), and what is made of them: a weight times the activations of
// few tokens, and scaled dot-product attention (Vaswani et al. 2017), in which a block of queries meets all of its keys
// at once and its scores stay in the processor's cache. Scores, softmax and sums are float32. Right factors lie in
// panels of PANEL columns: (depth, PANEL), in bfloat16 (depth / 2, PANEL, 2).
#include <sys/syscall.h>
#include <unistd.h>

#include "compiled_ops.h"

#define PANEL 32
#define VECTOR_ROWS 12  // of a left factor in float32: 24 sums fit the registers
#define TILE_ROWS 32  // in bfloat16: 4 sums of 16 rows and 16 columns fit the tiles
#define ROWS_AHEAD 8  // of keys and values, fetched before they are needed: rows far apart are not foreseen
#define REQUEST_PERMISSION 0x1023  // of arch_prctl
#define TILE_DATA 18

typedef float vector __attribute__((vector_size(64), aligned(4)));

static inline long padded(long n) { return (n + PANEL - 1) / PANEL * PANEL; }

// out (VECTOR_ROWS, columns) = left (VECTOR_ROWS, depth) times the first 16 or all columns of a panel. In every step
// `step` bytes of `ahead`, a later left factor, are fetched from memory.
static inline __attribute__((always_inline)) void multiply_vectors(
    const float *left, long left_stride, const float *panel, long depth, float *out, long out_stride, const int columns,
    const char *ahead, long step) {
    vector sums[VECTOR_ROWS][2] = {0};
    for (long i = 0; i < depth; i++) {
        vector first = *(const vector *)(panel + i * PANEL), second = *(const vector *)(panel + i * PANEL + 16);
        __builtin_prefetch(ahead + i * step);
        #pragma GCC unroll 12
        for (int r = 0; r < VECTOR_ROWS; r++) {
            sums[r][0] += left[r * left_stride + i] * first;
            if (columns > 16) sums[r][1] += left[r * left_stride + i] * second;
        }
    }
    #pragma GCC unroll 12
    for (int r = 0; r < VECTOR_ROWS; r++) {
        *(vector *)(out + r * out_stride) = sums[r][0];
        if (columns > 16) *(vector *)(out + r * out_stride + 16) = sums[r][1];
    }
}

#ifdef __AMX_BF16__
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row of each tile
    uint8_t rows[16];
} tile_config;

static inline void configure_tiles(tile_config *previous) {  // previous: of other code that multiplies in tiles
    const tile_config config = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_storeconfig(previous);
    _tile_loadconfig(&config);
}

// out (TILE_ROWS, PANEL) = left (TILE_ROWS, depth) times a panel; depth is a multiple of 32
static void multiply_tiles(const uint16_t *left, long left_stride, const uint16_t *panel, long depth, float *out,
                           long out_stride) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long i = 0; i < depth; i += 32) {
        _tile_loadd(4, left + i, left_stride * 2);
        _tile_loadd(5, left + 16 * left_stride + i, left_stride * 2);
        _tile_loadd(6, panel + i * PANEL, PANEL * 4);
        _tile_loadd(7, panel + i * PANEL + 32, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + 16, out_stride * 4);
    _tile_stored(2, out + 16 * out_stride, out_stride * 4);
    _tile_stored(3, out + 16 * out_stride + 16, out_stride * 4);
}

int has_tiles(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }
#else  // nobody asks for bfloat16 where has_tiles is false
typedef char tile_config;
static void configure_tiles(tile_config *previous) {}
#define _tile_loadconfig(config)
static void multiply_tiles(const uint16_t *left, long left_stride, const uint16_t *panel, long depth, float *out,
                           long out_stride) {}

int has_tiles(void) { return 0; }
#endif

// out (rows, n) = left (rows, depth) times panels that are panel_depth deep; see multiply_vectors
static void multiply(const void *left, long left_stride, const void *panels, long panel_depth, long depth, float *out,
                     long out_stride, long n, int half, const char *ahead, long step) {
    for (long j = 0; j < n; j += PANEL, out += PANEL, ahead += depth * step) {
        const float *panel = (const float *)panels + j * panel_depth;
        const uint16_t *half_panel = (const uint16_t *)panels + j * panel_depth;
        if (half) multiply_tiles(left, left_stride, half_panel, padded(depth), out, out_stride);
        else if (n - j > 16) multiply_vectors(left, left_stride, panel, depth, out, out_stride, PANEL, ahead, step);
        else multiply_vectors(left, left_stride, panel, depth, out, out_stride, 16, ahead, step);
    }
}

static inline void prefetch_row(const void *row, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i);
}

// Rows k (n, units) become columns of panels; a unit of 4 bytes is one float32 or two bfloat16.
static void pack_columns(const uint32_t *k, long stride, uint32_t *panels, long n, long units, long padded_units) {
    memset(panels, 0, padded(n) * padded_units * 4);
    for (long key = 0; key < n; key++) {
        prefetch_row(k + (key + ROWS_AHEAD) * stride, units * 4);
        for (long i = 0; i < units; i++)
            panels[(key / PANEL * padded_units + i) * PANEL + key % PANEL] = k[key * stride + i];
    }
}

// Rows v (n, dim) become rows of panels.
static void pack_rows(const void *v, long stride, void *panels, int half, long n, long dim) {
    const long size = half ? 2 : 4;
    memset(panels, 0, padded(n) * padded(dim) * size);
    for (long j = 0; j < dim; j += PANEL) {
        long width = dim - j < PANEL ? dim - j : PANEL;
        for (long key = 0; key < n; key += half ? 2 : 1) {
            uint32_t *out = (uint32_t *)panels + (j * padded(n) + key * PANEL) / (half ? 2 : 1);
            const uint16_t *first = (const uint16_t *)v + key * stride + j, *second = first + stride;
            const char *later = (const char *)v + ((key + ROWS_AHEAD) * stride + j) * size;
            prefetch_row(later, width * size);
            if (half) prefetch_row(later + stride * size, width * size);
            if (!half) memcpy(out, (const float *)v + key * stride + j, width * 4);
            else if (key + 1 < n) for (long i = 0; i < width; i++) out[i] = first[i] | (uint32_t)second[i] << 16;
            else for (long i = 0; i < width; i++) out[i] = first[i];
        }
    }
}

// out (all rows, n) = weights (rows[w], depth), below each other, times x (depth, n), or x (n, depth) if by_rows; plus
// residual, if given. A weight has as many rows as a block or more; its last block may compute some of them again. In
// bfloat16 depth is a multiple of 32.
void product(const char *const *weights, const long *rows, long n_weights, const char *x, const void *residual,
             void *out, int half, int by_rows, long depth, long n, int threads) {
    const long size = half ? 2 : 4, block = half ? TILE_ROWS : VECTOR_ROWS, width = padded(n), height = padded(depth);
    const long step = half ? 0 : block * size * PANEL / width;  // all panels together fetch a block
    char *panels = aligned_alloc(64, height * width * size);
    #pragma omp parallel num_threads(threads)
    {
        float sums[block * width];
        tile_config previous;
        if (half) configure_tiles(&previous);
        #pragma omp for
        for (long j = 0; j < n; j += PANEL) {
            void *panel = panels + j * height * size;
            long columns = n - j < PANEL ? n - j : PANEL, units = depth * size / 4;
            if (by_rows) pack_columns((const uint32_t *)x + j * units, units, panel, columns, units, height * size / 4);
            else pack_rows(x + j * size, n, panel, half, depth, columns);
        }
        for (long w = 0, above = 0; w < n_weights; above += rows[w++] * n) {
            #pragma omp for nowait
            for (long at = 0; at < rows[w]; at += block) {
                long start = at + block > rows[w] ? rows[w] - block : at;
                const char *left = weights[w] + start * depth * size, *ahead = left + block * depth * size;
                multiply(left, depth, panels, height, depth, sums, width, n, half, ahead, step);
                for (long r = 0; r < block; r++)
                    for (long i = 0; i < n; i += 16) {
                        long index = above + (start + r) * n + i;
                        __m512 y = _mm512_loadu_ps(sums + r * width + i);
                        if (residual) y += load_vector(residual, half, index, lane_mask(n - i));
                        store_vector(out, half, index, lane_mask(n - i), y);
                    }
            }
        }
        if (half) _tile_loadconfig(&previous);
    }
    free(panels);
}

// weights = 2^(scale * (score - largest)) of n scores, then zeros up to `padded`; their sum is returned.
static inline float softmax_row(const float *scores, void *weights, int half, float scale, long n, long padded) {
    __m512 largest = _mm512_set1_ps(scores[0]), sum = _mm512_setzero_ps();
    for (long i = 0; i < n; i += 16)
        largest = _mm512_mask_max_ps(largest, lane_mask(n - i), largest, _mm512_loadu_ps(scores + i));
    __m512 offset = _mm512_set1_ps(-scale * _mm512_reduce_max_ps(largest));
    for (long i = 0; i < padded; i += 16) {
        __m512 y = exp2_vector(_mm512_loadu_ps(scores + i) * scale + offset, half);
        if (n - i < 16) y = _mm512_maskz_mov_ps(n > i ? lane_mask(n - i) : 0, y);
        sum += y;
        store_vector(weights, half, i, 0xffff, y);
    }
    return _mm512_reduce_add_ps(sum);
}

static inline void divide_row(const float *sums, float total, void *out, int half, long n) {
    for (long i = 0; i < n; i += 16)
        store_vector(out, half, i, lane_mask(n - i), _mm512_loadu_ps(sums + i) / total);
}

// q (B, H, T, D), k and v (B, H_kv, S, D) with strides of batch, head and row; out (B, T, H, D). With `causal`, S is T
// and a query sees its own and earlier keys.
void attention(const char *q, const char *k, const char *v, char *out, const long *q_stride, const long *k_stride,
               const long *v_stride, int half, int causal, long B, long H, long H_kv, long T, long S, long D,
               int threads) {
    const long size = half ? 2 : 4, rows = half ? TILE_ROWS : VECTOR_ROWS, n_blocks = (T + rows - 1) / rows;
    const long width = padded(D), n_parts = B * H % threads && B * H < 4 * threads && n_blocks >= 4 ? 4 : 1;
    const long stride = padded(S) + PANEL;  // rows that lie a power of two apart would compete for places in the cache
    const long panels = padded(S) * width * size, block = rows * stride * 4;
    const float scale = 1.44269504f / sqrtf(D);  // 2^(x / ln 2) is e^x
    #pragma omp parallel num_threads(threads)
    {
        tile_config previous;
        if (half) configure_tiles(&previous);
        char *keys = aligned_alloc(64, 2 * panels + 2 * block + rows * width * 8), *values = keys + panels;
        float *scores = (float *)(values + panels), *sums = (float *)((char *)scores + 2 * block), total[TILE_ROWS];
        char *weights = half ? (char *)scores + block : (char *)scores, *queries = (char *)(sums + rows * width);
        memset(queries, 0, rows * width * size);
        #pragma omp for schedule(dynamic)
        for (long unit = 0; unit < B * H * n_parts; unit++) {
            long part = unit % n_parts, b = unit / n_parts / H, h = unit / n_parts % H, kv = h / (H / H_kv);
            long start = part * n_blocks / n_parts * rows, stop = (part + 1) * n_blocks / n_parts * rows;
            if (stop > T) stop = T;
            long n_keys = causal ? stop : S;
            const char *k_head = k + (b * k_stride[0] + kv * k_stride[1]) * size;
            const char *v_head = v + (b * v_stride[0] + kv * v_stride[1]) * size;
            const long units = D * size / 4, k_units = k_stride[2] * size / 4;
            pack_columns((const uint32_t *)k_head, k_units, (uint32_t *)keys, n_keys, units, width * size / 4);
            pack_rows(v_head, v_stride[2], values, half, n_keys, D);
            for (long t = start; t < stop; t += rows) {
                long n = stop - t < rows ? stop - t : rows, visible = causal ? t + n : S;
                for (long r = 0; r < n; r++)
                    memcpy(queries + r * width * size,
                           q + (b * q_stride[0] + h * q_stride[1] + (t + r) * q_stride[2]) * size, D * size);
                multiply(queries, width, keys, width, D, scores, stride, visible, half, queries, 0);
                for (long r = 0; r < n; r++) {
                    long seen = causal ? t + r + 1 : S, at = r * stride;
                    if (half) total[r] = softmax_row(scores + at, weights + 2 * at, 1, scale, seen, padded(visible));
                    else total[r] = softmax_row(scores + at, weights + 4 * at, 0, scale, seen, padded(visible));
                }
                multiply(weights, stride, values, padded(n_keys), visible, sums, width, D, half, weights, 0);
                for (long r = 0; r < n; r++)
                    divide_row(sums + r * width, total[r], out + ((b * T + t + r) * H + h) * D * size, half, D);
            }
        }
        free(keys);
        if (half) _tile_loadconfig(&previous);
    }
}
