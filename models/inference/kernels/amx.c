// AMX: matrix tiles of 16 rows of 64 bytes. Other levels need no state.
#if LEVEL == AMX
#ifdef EMULATE_AMX
#include "amx_emulation.h"
#endif

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_state;

// Configure this thread's tiles; other libraries in the process may use them, so their configuration is restored.
static amx_state begin_multiply(void) {
    amx_state previous, config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_storeconfig(&previous);
    _tile_loadconfig(&config);
    return previous;
}

static void end_multiply(const amx_state *previous) {
    if (previous->palette) _tile_loadconfig(previous);
    else _tile_release();
}

#define TILES(type, left_tile, right_tile, sum_tile) \
    if (type == INT8) _tile_dpbusd(sum_tile, left_tile, right_tile); \
    else _tile_dpbf16ps(sum_tile, left_tile, right_tile)

// Sums (32, 16 or 32 tokens) of 32 rows: 2 x 2 amx tiles. `add` keeps what sums held.
INLINE void multiply_tiles(const long type, const char *left, long stride, const char *panel, long units, void *sums,
                           long vectors, int add) {
    char *low = (char *)sums + 16 * PANEL * 4;
    if (add) {
        _tile_loadd(0, sums, PANEL * 4);
        _tile_loadd(1, (char *)sums + 64, PANEL * 4);
        _tile_loadd(2, low, PANEL * 4);
        _tile_loadd(3, low + 64, PANEL * 4);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (long u = 0; u < units; u += 16) {
        _tile_loadd(4, left + u * 4, stride);
        _tile_loadd(5, left + 16 * stride + u * 4, stride);
        _tile_loadd(6, panel + u * PANEL * 4, PANEL * 4);
        TILES(type, 4, 6, 0);
        TILES(type, 5, 6, 2);
        if (vectors == 1) continue;
        _tile_loadd(7, panel + u * PANEL * 4 + 64, PANEL * 4);
        TILES(type, 4, 7, 1);
        TILES(type, 5, 7, 3);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(2, low, PANEL * 4);
    if (vectors == 1) return;
    _tile_stored(1, (char *)sums + 64, PANEL * 4);
    _tile_stored(3, low + 64, PANEL * 4);
}

#else
typedef int amx_state;
static amx_state begin_multiply(void) { return 0; }
static void end_multiply(const amx_state *previous) { (void)previous; }
#endif
