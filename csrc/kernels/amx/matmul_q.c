/* Quantised matmul for AMX int8 tiles.
 *
 * A tile register holds 16 rows of 64 bytes. tdpbssd adds the product of a tile of activations (16 rows) and a tile of
 * weights (16 output rows), both signed bytes, to a tile of 16 x 16 int32; tiled16x4 is the layout it wants of the
 * weights. The contract scales each group of 32 k by itself, so a product has K = 32 (half of what the instruction
 * could do), and leaves through memory (nothing else reads tiles) to be converted and scaled in AVX-512.
 *
 * One block of k at a time, the activation rows are gathered into panels of up to 16, and each weight tile is unpacked
 * and goes through all panels. A panel times a weight tile is a step: its four products begin while those of the step
 * before are stored and, shortly after, scaled.
 *
 * What seems to bound it: while any tile instruction is under way, only one of the two ports that multiply floats
 * works, so AVX-512 arithmetic was measured at one instruction a cycle. A row of a product takes two of them and a
 * block's row one more, so 36 cycles for a product of 16 rows, which the tiles do in 16. bf16 tiles, whose products
 * need no conversion, were faster with zeros and as slow as these with numbers.
 *
 * Tiles belong to the thread: they are configured at the start of a call and released at its end, so that no other
 * code meets them and the kernel has nothing to save when it switches threads. */
#include <immintrin.h>

#include "kernels/tile.h"
#include "kernels/vec.h"

#define FEWEST_ROWS 3 /* fewer are faster without tiles */
#define PANEL_ROWS 16
#define CHUNK_ROWS 96  /* activation rows taken together: a block of them stays in the first cache */
#define CHUNK_TILES 16 /* weight tiles that share the gathered rows */
#define PREFETCH_PIECES 8
#define WEIGHT_GROUP_BYTES (TILE_GROUP * CB_LANES)

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* tmm0 .. 3: products of the four groups. tmm4, tmm5: weights of the first two groups, kept for all panels; tmm7: of
 * the others. tmm6: activations. */
static void configure_tiles(uint32_t panel_rows) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const bool weights = i == 4 || i == 5 || i == 7;
        config.rows[i] = (uint8_t)(weights ? TILE_GROUP / 4 : panel_rows);
        config.row_bytes[i] = (uint16_t)(i == 6 ? TILE_GROUP : 64);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* GCC's intrinsics do not say what memory they touch. These are volatile, so they stay in order among themselves and
 * behind MEMORY_WRITTEN(). */
#define MEMORY_WRITTEN() __asm__ volatile("" : : : "memory")
#define TILE_LOAD(tile, p, offset, stride)                                                                             \
    __asm__ volatile("tileloadd %c2(%0,%1,1), %%tmm" #tile : : "r"(p), "r"((int64_t)(stride)), "i"(offset))
#define TILE_STORE(tile, p, offset)                                                                                    \
    __asm__ volatile("tilestored %%tmm" #tile ", %c2(%0,%1,1)" : : "r"(p), "r"((int64_t)64), "i"(offset) : "memory")
#define TILE_MULTIPLY(product, x, w)                                                                                   \
    __asm__ volatile("tilezero %%tmm" #product "\n\ttdpbssd %%tmm" #w ", %%tmm" #x ", %%tmm" #product : :)

typedef struct scratch {
    quantised_row row[CHUNK_ROWS];
    int8_t x[CHUNK_ROWS][CB_ACTIVATION_BLOCK];   /* a block of the rows */
    int8_t weights[CB_ACTIVATION_BLOCK / 4][64]; /* 4 bits unpacked */
    /* The last step's scales are used when the next tile's or block's are there already. */
    float weight_scales[2][TILE_GROUPS][CB_LANES];
    float x_scales[2][CHUNK_ROWS];
    int32_t product[TILE_GROUPS][PANEL_ROWS][CB_LANES];
    float sum[CHUNK_TILES][CHUNK_ROWS + 1][CB_LANES]; /* + 1: tiles begin in different sets of the cache */
    float nowhere[PANEL_ROWS][CB_LANES];              /* the sum of the step before the first */
    float zeros[PANEL_ROWS][CB_LANES];                /* the sums before the first block */
} scratch;

/* ---- a step ---- */

/* What is left to do with a step's products. */
typedef struct unscaled {
    const float *weight_scales, *x_scales;
    const float *from; /* the sums before, */
    float *sum;        /* and after */
} unscaled;

VEC_INLINE void add_group(__m512 t[PANEL_ROWS], const scratch *s, uint32_t group, const unscaled *done,
                          const uint32_t rows) {
    const __m512 scale = _mm512_load_ps(done->weight_scales + group * CB_LANES);
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(s->product[group][r]));
        t[r] = _mm512_fmadd_ps(dot, scale, t[r]);
    }
}

#define START_GROUP(group, weight_tile)                                                                                \
    do {                                                                                                               \
        TILE_STORE(group, s->product, (group) * sizeof s->product[0]);                                                 \
        TILE_LOAD(6, x, (group) * TILE_GROUP, CB_ACTIVATION_BLOCK);                                                    \
        if ((group) >= 2)                                                                                              \
            TILE_LOAD(7, weights, (group) * WEIGHT_GROUP_BYTES, 64);                                                   \
        TILE_MULTIPLY(group, 6, weight_tile);                                                                          \
    } while (0)

/* Starts the products of a panel and scales those of the step before. A store waits for its product, so each comes
 * four products later. */
VEC_INLINE void step(scratch *s, const int8_t *x, const int8_t *weights, const unscaled *done, const uint32_t rows) {
    __m512 t[PANEL_ROWS];
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++)
        t[r] = _mm512_setzero_ps();
    START_GROUP(0, 4);
    START_GROUP(1, 5);
    add_group(t, s, 0, done, rows);
    START_GROUP(2, 7);
    add_group(t, s, 1, done, rows);
    START_GROUP(3, 7);
    add_group(t, s, 2, done, rows);
    add_group(t, s, 3, done, rows);
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const __m512 sum = _mm512_load_ps(done->from + r * CB_LANES);
        _mm512_store_ps(done->sum + r * CB_LANES, _mm512_fmadd_ps(t[r], _mm512_set1_ps(done->x_scales[r]), sum));
    }
}

/* ---- a chunk ---- */

/* Of the call: `count` activation rows from `row` on, in panels, and `tiles` weight tiles from `tile` on. */
typedef struct chunk {
    uint32_t row, count, panels;
    uint32_t tile, tiles;
} chunk;

/* Rows that fill the last panel repeat the chunk's first. */
static void find_rows(scratch *s, const cb_matmul *job, const chunk *c, uint32_t padded) {
    for (uint32_t i = 0; i < padded; i++) {
        s->row[i] = row_of(job, c->row + (i < c->count ? i : 0));
    }
}

static void gather_rows(scratch *s, uint64_t block, uint32_t padded) {
    for (uint32_t i = 0; i < padded; i++) {
        memcpy(s->x[i], s->row[i].codes + block * CB_ACTIVATION_BLOCK, CB_ACTIVATION_BLOCK);
        s->x_scales[block % 2][i] = s->row[i].scales[block];
    }
}

/* Codes made signed bytes. */
VEC_INLINE void unpack_codes(scratch *s, const uint8_t *codes) {
    const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(8);
    VEC_UNROLL
    for (uint32_t i = 0; i < TILE_CODE_BYTES(4) / 64; i++) {
        const __m512i pair = _mm512_loadu_si512(codes + i * 64);
        const __m512i low = _mm512_and_si512(pair, nibble);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble);
        _mm512_store_si512(s->weights[2 * i], _mm512_sub_epi8(low, zero));
        _mm512_store_si512(s->weights[2 * i + 1], _mm512_sub_epi8(high, zero));
    }
}

/* A piece is a block of a weight tile. They are numbered in the order of use, which is not that of memory, so the
 * hardware does not see them coming. */
VEC_INLINE void prefetch_piece(const chunk *c, const uint8_t *tiles, uint64_t piece, uint64_t blocks,
                               const uint32_t bits) {
    const uint64_t block = piece / c->tiles, tile = piece % c->tiles;
    if (block < blocks) {
        const uint8_t *p = tiles + (tile * blocks + block) * TILE_BLOCK_BYTES(bits);
        for (uint32_t line = 0; line < TILE_BLOCK_BYTES(bits); line += 64) {
            _mm_prefetch((const char *)p + line, _MM_HINT_T1);
        }
    }
}

VEC_INLINE void multiply(scratch *s, const cb_matmul *job, const chunk *c, const uint32_t rows, const uint32_t bits) {
    const uint64_t blocks = blocks_of(job);
    const uint64_t tile_bytes = blocks * TILE_BLOCK_BYTES(bits);
    const uint8_t *tiles = job->tiles + c->tile * tile_bytes;
    unscaled done = {s->weight_scales[1][0], s->x_scales[1], s->zeros[0], s->nowhere[0]};
    for (uint64_t piece = 0; piece < PREFETCH_PIECES; piece++) {
        prefetch_piece(c, tiles, piece, blocks, bits);
    }
    for (uint64_t block = 0; block < blocks; block++) {
        gather_rows(s, block, c->panels * rows);
        const uint8_t *packed = tiles + block * TILE_BLOCK_BYTES(bits);
        for (uint32_t tile = 0; tile < c->tiles; tile++, packed += tile_bytes) {
            prefetch_piece(c, tiles, block * c->tiles + tile + PREFETCH_PIECES, blocks, bits);
            /* Of the step before only the scales are still needed: two sets suffice. */
            float *weight_scales = s->weight_scales[(block * c->tiles + tile) % 2][0];
            for (uint32_t g = 0; g < TILE_GROUPS; g++) {
                const void *halves = packed + TILE_CODE_BYTES(bits) + g * CB_LANES * 2;
                const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
                _mm512_store_ps(weight_scales + g * CB_LANES, scales);
            }
            const int8_t *weights = (const int8_t *)packed;
            if (bits == 4) {
                unpack_codes(s, packed);
                weights = s->weights[0];
            }
            MEMORY_WRITTEN();
            TILE_LOAD(4, weights, 0, 64);
            TILE_LOAD(5, weights, WEIGHT_GROUP_BYTES, 64);
            for (uint32_t panel = 0; panel < c->panels; panel++) {
                const uint32_t row = panel * rows;
                step(s, s->x[row], weights, &done, rows);
                float *sum = s->sum[tile][row];
                done = (unscaled){weight_scales, s->x_scales[block % 2] + row, block == 0 ? s->zeros[0] : sum, sum};
            }
        }
    }
    /* Once more for the last products; what it starts is dropped. */
    step(s, s->x[0], s->weights[0], &done, rows);
    for (uint32_t i = 0; i < c->count; i++) {
        float *out = job->out + (c->row + i) * job->out_stride;
        for (uint32_t tile = 0; tile < c->tiles; tile++) {
            const uint32_t first = (c->tile + tile) * CB_LANES, lanes = job->rows - first;
            const __mmask16 stored = lanes < CB_LANES ? (__mmask16)((1u << lanes) - 1) : (__mmask16)0xffff;
            _mm512_mask_storeu_ps(out + first, stored, _mm512_load_ps(s->sum[tile][i]));
        }
    }
}

VEC_INLINE void matmul(const cb_matmul *job, const uint32_t bits) {
    _Alignas(64) scratch s;
    memset(s.zeros, 0, sizeof s.zeros);
    memset(s.nowhere, 0, sizeof s.nowhere); /* this and its scales: any bits would do, but denormals are slow */
    memset(s.weight_scales, 0, sizeof s.weight_scales);
    memset(s.x_scales, 0, sizeof s.x_scales);
    const uint32_t all_tiles = job->rows / CB_LANES + (job->rows % CB_LANES != 0);
    chunk c = {0};
    for (; c.row < job->count; c.row += c.count) {
        c.count = job->count - c.row < CHUNK_ROWS ? job->count - c.row : CHUNK_ROWS;
        /* Panels of like height, since the time of a step grows with it; of a height that multiply() is made for. */
        c.panels = (c.count + PANEL_ROWS - 1) / PANEL_ROWS;
        const uint32_t rows = (uint32_t)cb_round_up((c.count + c.panels - 1) / c.panels, 2);
        configure_tiles(rows);
        find_rows(&s, job, &c, c.panels * rows);
        for (c.tile = 0; c.tile < all_tiles; c.tile += c.tiles) {
            c.tiles = all_tiles - c.tile < CHUNK_TILES ? all_tiles - c.tile : CHUNK_TILES;
            if (rows == 16) {
                multiply(&s, job, &c, 16, bits);
            } else if (rows == 14) {
                multiply(&s, job, &c, 14, bits);
            } else if (rows == 12) {
                multiply(&s, job, &c, 12, bits);
            } else if (rows == 10) {
                multiply(&s, job, &c, 10, bits);
            } else if (rows == 8) {
                multiply(&s, job, &c, 8, bits);
            } else if (rows == 6) {
                multiply(&s, job, &c, 6, bits);
            } else {
                multiply(&s, job, &c, 4, bits);
            }
        }
    }
    __asm__ volatile("tilerelease");
}

void kernel_matmul_q8_g32_amx(const cb_matmul *job) {
    if (job->count < FEWEST_ROWS) {
        kernel_matmul_q8_g32_avx512(job);
    } else {
        matmul(job, 8);
    }
}

void kernel_matmul_q4_g32_amx(const cb_matmul *job) {
    if (job->count < FEWEST_ROWS) {
        kernel_matmul_q4_g32_avx512(job);
    } else {
        matmul(job, 4);
    }
}
