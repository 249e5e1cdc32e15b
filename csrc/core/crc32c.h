/* The table version of the checksum, beside the processor's own (for tests). */
#ifndef CB_CRC32C_H
#define CB_CRC32C_H

#include "core/core.h"

uint32_t cb_crc32c_table(uint32_t crc, const void *data, uint64_t size);

#endif
