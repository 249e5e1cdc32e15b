/* Reads expert records: past the page cache where file and system allow it, and checks them. */
#ifndef CB_EXPERT_IO_H
#define CB_EXPERT_IO_H

#include "file/model.h"

/* Large enough for the disk, small enough that its checksum is taken from the cache. */
#define CB_READ_PIECE (UINT64_C(1) << 20)

typedef struct cb_record_file {
    const cb_model *model;
    uint32_t verify; /* COLIBRI_VERIFY_* */
    int fd;          /* through the page cache, any offset and size */
    int direct_fd;   /* past it: offset, size and memory multiples of CB_SLOT_UNIT; -1: none */
    atomic_bool direct;
} cb_record_file;

/* io: COLIBRI_IO_*. AUTO reads through the page cache when each record is read only once (`resident`), as it may hold
 * the file already, and past it otherwise, until experts/io_choice.h has measured which is faster.
 * `memory` (the size of the largest slot) is for a first read, which tells whether the file system can do it. Refused:
 * one sentence in `warning`, and reads go through the page cache. */
void cb_record_file_open(cb_record_file *file, const cb_model *model, uint32_t io, uint32_t verify, bool resident,
                         uint8_t *memory, char *warning, size_t warning_size);
/* Reads that begin from now on go through the page cache. Not while another thread reads. */
void cb_record_file_leave_direct(cb_record_file *file);
void cb_record_file_close(cb_record_file *file);
/* Where it begins allows reads past the page cache. */
bool cb_record_is_aligned(const cb_expert *expert);
/* Reads [offset, offset + size), of which `memory` has room for the size rounded up. Fewer bytes: *cause as for
 * cb_read_at. A count that is short, or that the file system refuses, is completed through the page cache, which takes
 * every offset. Any thread. */
uint64_t cb_record_read_piece(cb_record_file *file, bool direct, uint64_t offset, uint8_t *memory, uint64_t size,
                              int *cause);
/* `memory`: aligned to CB_SLOT_UNIT, with room for the record rounded up to it. first: this record is read for the
 * first time (COLIBRI_VERIFY_FULL then checks its SHA-256). Any thread. */
colibri_status cb_record_read(cb_record_file *file, uint32_t set, uint32_t expert, uint8_t *memory, bool first,
                              cb_error *error);

#endif
