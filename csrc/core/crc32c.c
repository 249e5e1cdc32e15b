#include "core/crc32c.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* Castagnoli, bits reflected */

#if defined(__x86_64__)
#include <immintrin.h>
#define HARDWARE_CRC 1
#define HARDWARE_TARGET __attribute__((target("sse4.2")))
#define CRC_BYTE(crc, byte) _mm_crc32_u8(crc, byte)
#define CRC_WORD(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define HARDWARE_CRC 1
#define HARDWARE_TARGET __attribute__((target("+crc")))
#define CRC_BYTE(crc, byte) __crc32cb(crc, byte)
#define CRC_WORD(crc, word) __crc32cd(crc, word)
#else
#define HARDWARE_CRC 0
#endif

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void make_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
        table[0][byte] = crc;
    }
    for (int i = 1; i < 8; i++)
        for (uint32_t byte = 0; byte < 256; byte++)
            table[i][byte] = (table[i - 1][byte] >> 8) ^ table[0][table[i - 1][byte] & 0xff];
}

uint32_t cb_crc32c_table(uint32_t crc, const void *data, uint64_t size) {
    pthread_once(&table_once, make_table);
    const uint8_t *p = data;
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8) {
        crc ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        crc = table[7][crc & 0xff] ^ table[6][crc >> 8 & 0xff] ^ table[5][crc >> 16 & 0xff] ^ table[4][crc >> 24] ^
              table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    for (; size > 0; size--, p++)
        crc = (crc >> 8) ^ table[0][(crc ^ *p) & 0xff];
    return ~crc;
}

#if HARDWARE_CRC

/* The instruction takes one word a cycle but answers after three, so three streams run side by
 * side. Below LEAST, joining them costs more than it saves. */
#define LEAST 16384
#define MOST_STREAM 32768

/* a * b modulo the polynomial; bit 31 is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= -(a >> bit & 1) & b;
        b = (b >> 1) ^ (-(b & 1) & POLYNOMIAL);
    }
    return product;
}

/* x^(8 * bytes): what a CRC is multiplied by when that many bytes follow. */
static uint32_t shift_by(uint64_t bytes) {
    uint32_t result = 0x80000000u;
    for (uint32_t power = 0x00800000u; bytes != 0; bytes >>= 1, power = multiply(power, power))
        if (bytes & 1)
            result = multiply(result, power);
    return result;
}

static inline uint64_t load_word(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

HARDWARE_TARGET static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, uint64_t size) {
    crc = ~crc;
    if (size >= LEAST) {
        uint64_t stream = size / 24 * 8 < MOST_STREAM ? size / 24 * 8 : MOST_STREAM;
        uint32_t shift = shift_by(stream);
        for (; size >= 3 * stream; size -= 3 * stream, p += 3 * stream) {
            uint32_t a = crc, b = 0, c = 0;
            for (uint64_t i = 0; i < stream; i += 8) {
                a = CRC_WORD(a, load_word(p + i));
                b = CRC_WORD(b, load_word(p + stream + i));
                c = CRC_WORD(c, load_word(p + 2 * stream + i));
            }
            crc = multiply(multiply(a, shift) ^ b, shift) ^ c;
        }
    }
    for (; size >= 8; size -= 8, p += 8)
        crc = CRC_WORD(crc, load_word(p));
    for (; size > 0; size--, p++)
        crc = CRC_BYTE(crc, *p);
    return ~crc;
}

static bool have_hardware(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#else
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

#endif

uint32_t cb_crc32c(uint32_t crc, const void *data, uint64_t size) {
#if HARDWARE_CRC
    if (have_hardware())
        return crc_hardware(crc, data, size);
#endif
    return cb_crc32c_table(crc, data, size);
}
