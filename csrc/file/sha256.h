#ifndef CB_SHA256_H
#define CB_SHA256_H

#include <stdint.h>

typedef struct cb_sha256 {
    uint32_t state[8];
    uint64_t size;
    uint8_t block[64];
} cb_sha256;

void cb_sha256_start(cb_sha256 *hash);
void cb_sha256_add(cb_sha256 *hash, const void *data, uint64_t size);
void cb_sha256_finish(cb_sha256 *hash, uint8_t digest[32]);

#endif
