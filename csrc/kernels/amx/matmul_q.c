/* Quantised matmul for AMX int8 tiles.
 *
 * A tile register holds 16 rows of 64 bytes. tdpbssd multiplies a tile of activations (up to 16 rows x 32 codes) with
 * a tile of weights and adds into 16 x 16 int32; the layout tiled16x4 is the one it wants of the weights: 8 steps are
 * a group of 16 output rows. The contract scales each group by itself, so a product has K = 32 and its result leaves
 * through memory (tiles cannot be read otherwise) to be converted and scaled in AVX-512.
 *
 * A chunk of k at a time, the activation rows are gathered into panels of up to 16 rows, each weight tile is unpacked
 * once, and goes through all panels. One panel times one block is an item of a pipeline: its four products are
 * started while those of the item before are stored, and the stored ones are scaled two groups later.
 *
 * Tiles belong to the thread: they are configured at the start of a call and released at its end, so that no other
 * code meets them and the kernel has nothing to save when it switches threads. |values| < 2^20 all along. */
#include <immintrin.h>

#include "kernels/tile.h"
#include "kernels/vec.h"

#define FEWEST_ROWS 9 /* fewer are faster without tiles */
#define PANEL_ROWS 16
#define CHUNK_ROWS 64  /* activation rows taken together */
#define CHUNK_BLOCKS 4 /* of k: codes of 64 rows and of a weight tile stay in the first cache */
#define CHUNK_TILES 16 /* weight tiles that share the gathered rows */

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* tmm0 .. tmm3: products of the groups of a block; tmm4, tmm5: activations; tmm6, tmm7: weights. */
VEC_INLINE void configure_tiles(uint32_t panel_rows) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = i == 4 || i == 5 ? TILE_GROUP : 64;
        config.rows[i] = (uint8_t)(i < 6 ? panel_rows : TILE_GROUP / 4);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* GCC's intrinsics do not say what memory they touch. Loads are volatile too, so they stay behind the stores: */
#define MEMORY_WRITTEN() __asm__ volatile("" : : : "memory")
#define TILE_LOAD(tile, p, stride)                                                                                     \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(p), "r"((int64_t)(stride)))
#define TILE_STORE(tile, p)                                                                                            \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(p), "r"((int64_t)64) : "memory")
#define TILE_MULTIPLY(product, x, w)                                                                                   \
    __asm__ volatile("tilezero %%tmm" #product "\n\ttdpbssd %%tmm" #w ", %%tmm" #x ", %%tmm" #product : :)

typedef struct scratch {
    int8_t x[CHUNK_BLOCKS][CHUNK_ROWS][CB_ACTIVATION_BLOCK];
    int8_t weights[CHUNK_BLOCKS][CB_ACTIVATION_BLOCK / 4][64]; /* 4 bits unpacked */
    float weight_scales[CHUNK_BLOCKS][TILE_GROUPS][CB_LANES];
    float x_scales[CHUNK_BLOCKS][CHUNK_ROWS];
    int32_t product[TILE_GROUPS][PANEL_ROWS][CB_LANES];
    float sum[CHUNK_TILES][CHUNK_ROWS][CB_LANES];
    float nowhere[PANEL_ROWS][CB_LANES]; /* the sum of the item before the first */
} scratch;

/* What is left to do with an item's products. */
typedef struct item {
    const float *weight_scales, *x_scales;
    float *sum;
} item;

VEC_INLINE void clear(__m512 t[PANEL_ROWS], const uint32_t rows) {
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++)
        t[r] = _mm512_setzero_ps();
}

VEC_INLINE void add_group(__m512 t[PANEL_ROWS], const scratch *s, uint32_t group, const item *done,
                          const uint32_t rows) {
    const __m512 scale = _mm512_load_ps(done->weight_scales + group * CB_LANES);
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        t[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(s->product[group][r])), scale, t[r]);
    }
}

VEC_INLINE void add_block(const __m512 t[PANEL_ROWS], const item *done, const uint32_t rows) {
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        float *sum = done->sum + r * CB_LANES;
        _mm512_store_ps(sum, _mm512_fmadd_ps(t[r], _mm512_set1_ps(done->x_scales[r]), _mm512_load_ps(sum)));
    }
}

#define START_GROUP(group, x_tile, w_tile)                                                                             \
    do {                                                                                                               \
        TILE_STORE(group, s->product[group]);                                                                          \
        TILE_LOAD(x_tile, x + (group) * TILE_GROUP, CB_ACTIVATION_BLOCK);                                              \
        TILE_LOAD(w_tile, w + (group) * TILE_GROUP * CB_LANES, 64);                                                    \
        TILE_MULTIPLY(group, x_tile, w_tile);                                                                          \
    } while (0)

/* One weight tile, unpacked, times all panels, for `blocks` blocks. */
VEC_INLINE void multiply_panels(scratch *s, const int8_t *weights, uint64_t block_bytes, uint32_t blocks, uint32_t tile,
                                uint32_t panels, const uint32_t rows) {
    item current = {s->weight_scales[0][0], s->x_scales[0], s->nowhere[0]}, previous = current;
    __m512 t[PANEL_ROWS];
    clear(t, rows);
    for (uint32_t i = 0; i <= blocks * panels; i++) { /* once more than there are items, to store the last */
        const uint32_t block = i / panels < blocks ? i / panels : 0;
        const uint32_t row = i % panels * rows;
        const int8_t *x = s->x[block][row];
        const int8_t *w = weights + block * block_bytes;
        START_GROUP(0, 4, 6);
        add_group(t, s, 2, &previous, rows);
        START_GROUP(1, 5, 7);
        add_group(t, s, 3, &previous, rows);
        add_block(t, &previous, rows);
        clear(t, rows);
        START_GROUP(2, 4, 6);
        add_group(t, s, 0, &current, rows);
        START_GROUP(3, 5, 7);
        add_group(t, s, 1, &current, rows);
        previous = current;
        current = (item){s->weight_scales[block][0], s->x_scales[block] + row, s->sum[tile][row]};
    }
    add_group(t, s, 2, &previous, rows);
    add_group(t, s, 3, &previous, rows);
    add_block(t, &previous, rows);
}

VEC_INLINE void gather_rows(scratch *s, const cb_matmul *job, uint64_t first_block, uint32_t blocks, uint32_t padded) {
    for (uint32_t i = 0; i < padded; i++) {
        const quantised_row x = row_of(job, i < job->count ? i : 0);
        for (uint32_t b = 0; b < blocks; b++) {
            memcpy(s->x[b][i], x.codes + (first_block + b) * CB_ACTIVATION_BLOCK, CB_ACTIVATION_BLOCK);
            s->x_scales[b][i] = x.scales[first_block + b];
        }
    }
}

/* Scales, and the codes of 4 bits, made signed. */
VEC_INLINE void unpack_tile(scratch *s, const uint8_t *tile, uint32_t blocks, const uint32_t bits) {
    const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(8);
    for (uint32_t b = 0; b < blocks; b++, tile += TILE_BLOCK_BYTES(bits)) {
        if (bits == 4) {
            VEC_UNROLL
            for (uint32_t i = 0; i < TILE_CODE_BYTES(4) / 64; i++) {
                const __m512i pair = _mm512_loadu_si512(tile + i * 64);
                const __m512i low = _mm512_and_si512(pair, nibble);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble);
                _mm512_store_si512(s->weights[b][2 * i], _mm512_sub_epi8(low, zero));
                _mm512_store_si512(s->weights[b][2 * i + 1], _mm512_sub_epi8(high, zero));
            }
        }
        VEC_UNROLL
        for (uint32_t g = 0; g < TILE_GROUPS; g++) {
            const void *scales = tile + TILE_CODE_BYTES(bits) + g * CB_LANES * 2;
            _mm512_store_ps(s->weight_scales[b][g], _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales)));
        }
    }
}

/* At most CHUNK_ROWS activation rows and CHUNK_TILES weight tiles. */
VEC_INLINE void multiply(scratch *s, const cb_matmul *job, uint32_t panels, const uint32_t rows, const uint32_t bits) {
    const uint64_t all_blocks = blocks_of(job);
    const uint32_t tiles = (job->rows + CB_LANES - 1) / CB_LANES;
    for (uint32_t tile = 0; tile < tiles; tile++) {
        memset(s->sum[tile], 0, panels * rows * sizeof s->sum[tile][0]);
    }
    for (uint64_t block = 0; block < all_blocks; block += CHUNK_BLOCKS) {
        const uint32_t blocks = all_blocks - block < CHUNK_BLOCKS ? (uint32_t)(all_blocks - block) : CHUNK_BLOCKS;
        gather_rows(s, job, block, blocks, panels * rows);
        for (uint32_t tile = 0; tile < tiles; tile++) {
            const uint8_t *packed = job->tiles + (tile * all_blocks + block) * TILE_BLOCK_BYTES(bits);
            unpack_tile(s, packed, blocks, bits);
            MEMORY_WRITTEN();
            if (bits == 4) {
                multiply_panels(s, s->weights[0][0], sizeof s->weights[0], blocks, tile, panels, rows);
            } else {
                multiply_panels(s, (const int8_t *)packed, TILE_BLOCK_BYTES(8), blocks, tile, panels, rows);
            }
        }
    }
    for (uint32_t i = 0; i < job->count; i++) {
        for (uint32_t tile = 0; tile < tiles; tile++) {
            const uint32_t first = tile * CB_LANES, lanes = job->rows - first;
            const __mmask16 stored = lanes < CB_LANES ? (__mmask16)((1u << lanes) - 1) : (__mmask16)0xffff;
            _mm512_mask_storeu_ps(job->out + i * job->out_stride + first, stored, _mm512_load_ps(s->sum[tile][i]));
        }
    }
}

VEC_INLINE void matmul(const cb_matmul *whole, const uint32_t bits) {
    _Alignas(4096) scratch s;
    memset(s.product, 0, sizeof s.product);
    for (uint32_t row = 0; row < whole->count; row += CHUNK_ROWS) {
        cb_rows x = *whole->x;
        cb_matmul job = *whole;
        job.count = whole->count - row < CHUNK_ROWS ? whole->count - row : CHUNK_ROWS;
        job.x = &x;
        if (whole->index) {
            job.index = whole->index + row;
        } else {
            x.codes += row * blocks_of(whole) * CB_ACTIVATION_BLOCK;
            x.scales += row * blocks_of(whole);
        }
        /* Panels of like size; a tile's time grows with its rows. */
        const uint32_t panels = (job.count + PANEL_ROWS - 1) / PANEL_ROWS;
        const uint32_t rows = (job.count + panels - 1) / panels;
        configure_tiles(rows > 12 ? 16 : rows > 8 ? 12 : 8);
        for (uint32_t first = 0; first < whole->rows; first += CHUNK_TILES * CB_LANES) {
            job.tiles = whole->tiles + first / CB_LANES * blocks_of(whole) * TILE_BLOCK_BYTES(bits);
            job.rows = whole->rows - first < CHUNK_TILES * CB_LANES ? whole->rows - first : CHUNK_TILES * CB_LANES;
            job.out = whole->out + row * whole->out_stride + first;
            if (rows > 12) {
                multiply(&s, &job, panels, 16, bits);
            } else if (rows > 8) {
                multiply(&s, &job, panels, 12, bits);
            } else {
                multiply(&s, &job, panels, 8, bits);
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
