/* Whether records are read past the page cache or through it, measured with some of them.
 *
 * Which is faster cannot be told from the file system: a file that is in the page cache is read at the speed of memory,
 * another one at best at the speed of the disk. docs/adr/0010-page-cache.md. */
#ifndef CB_IO_CHOICE_H
#define CB_IO_CHOICE_H

#include "experts/io.h"

/* Bytes for each second; both 0: not measured. */
typedef struct cb_io_rates {
    uint64_t direct, buffered;
} cb_io_rates;

/* Reads up to 32 MiB of records that lie all over the file, for about 100 ms at most: half of them past the page cache
 * and half, other ones, through it, on `threads` threads at a time. Nothing but the page cache changes, and what does
 * not seem to have been there before is given back. Not measured when a read or a thread fails, which is then for those
 * to tell who need them, and when there are fewer than two records that can be read both ways.
 * `memory`: aligned to CB_SLOT_UNIT, with room for the largest record; more lets more threads read. */
void cb_io_measure(cb_record_file *file, uint32_t threads, uint8_t *memory, uint64_t memory_bytes, cb_io_rates *rates);

/* Direct, unless buffered is clearly faster and stays so. Reading through the page cache takes a processor's time and
 * memory that is charged to this process's control group, so a small gain is none. And pages go when memory is short:
 * `absent_bytes`, the records that have no slot, must fit in `page_cache_bytes` (0: not known, taken to be enough).
 * What was not measured is read direct. */
bool cb_io_prefers_direct(const cb_io_rates *rates, uint64_t absent_bytes, uint64_t page_cache_bytes);

#endif
