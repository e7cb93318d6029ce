// AMX's tile instructions in plain C, so that the level "amx" is tested on CPUs without AMX. See Intel's Architecture
// Instruction Set Extensions Programming Reference, chapter 3.
typedef struct { uint8_t bytes[16][64]; } emulated_tile;
static __thread emulated_tile tiles[8];
static __thread uint8_t tile_config[64];

#define _tile_loadconfig(config) memcpy(tile_config, config, 64)
#define _tile_storeconfig(config) memcpy(config, tile_config, 64)
#define _tile_release() memset(tile_config, 0, 64)
#define _tile_zero(t) memset(&tiles[t], 0, sizeof tiles[t])
#define _tile_loadd(t, base, stride) \
    for (int row = 0; row < 16; row++) memcpy(tiles[t].bytes[row], (const char *)(base) + row * (stride), 64)
#define _tile_stored(t, base, stride) \
    for (int row = 0; row < 16; row++) memcpy((char *)(base) + row * (stride), tiles[t].bytes[row], 64)
#define _tile_dpbf16ps(to, a, b) multiply_emulated(&tiles[to], &tiles[a], &tiles[b], BFLOAT16)
#define _tile_dpbusd(to, a, b) multiply_emulated(&tiles[to], &tiles[a], &tiles[b], INT8)

// to (16, 16) += a (16, 16 units) times b (16 units, 16)
static void multiply_emulated(emulated_tile *to, const emulated_tile *a, const emulated_tile *b, int type) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float sum;
            int32_t exact;
            memcpy(&sum, &to->bytes[m][4 * n], 4), memcpy(&exact, &to->bytes[m][4 * n], 4);
            for (int k = 0; k < 16; k++) {
                const uint16_t *x = (const uint16_t *)&a->bytes[m][4 * k], *y = (const uint16_t *)&b->bytes[k][4 * n];
                for (int j = 0; j < 2 && type == BFLOAT16; j++) sum += from_bf16(x[j]) * from_bf16(y[j]);
                for (int j = 0; j < 4 && type == INT8; j++)
                    exact += a->bytes[m][4 * k + j] * (int8_t)b->bytes[k][4 * n + j];
            }
            memcpy(&to->bytes[m][4 * n], type == INT8 ? (void *)&exact : (void *)&sum, 4);
        }
}
