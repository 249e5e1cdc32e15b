#include "experts/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "experts/slots.h"
#include "file/bytes.h"
#include "file/sha256.h"

bool cb_record_is_aligned(const cb_expert *expert) { return expert->offset % CB_SLOT_UNIT == 0; }

/* The same file again, also when its name is gone or means another one now. */
static int open_again(const cb_model *model, int flags) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", model->fd);
    return open(name, O_RDONLY | O_CLOEXEC | flags);
}

uint64_t cb_record_read_piece(cb_record_file *file, bool direct, uint64_t offset, uint8_t *memory, uint64_t size,
                              int *cause) {
    uint64_t done = 0;
    *cause = 0;
    if (direct) {
        ssize_t got;
        do
            got = pread(file->direct_fd, memory, cb_round_up(size, CB_SLOT_UNIT), (off_t)offset);
        while (got < 0 && errno == EINTR);
        if (got < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {
            atomic_store_explicit(&file->direct, false, memory_order_relaxed);
        } else if (got < 0) {
            *cause = errno;
            return 0;
        } else {
            done = (uint64_t)got < size ? (uint64_t)got : size;
        }
    }
    return done == size ? size : done + cb_read_at(file->fd, offset + done, memory + done, size - done, cause);
}

void cb_record_file_open(cb_record_file *file, const cb_model *model, uint32_t io, uint32_t verify, bool resident,
                         uint8_t *memory, char *warning, size_t warning_size) {
    *file = (cb_record_file){.model = model, .verify = verify, .fd = model->fd, .direct_fd = -1};
    const cb_expert *probe = NULL;
    for (uint32_t s = 0; s < model->set_count && probe == NULL; s++)
        for (uint32_t i = 0; i < model->sets[s].count && probe == NULL; i++)
            if (cb_record_is_aligned(&model->sets[s].experts[i]))
                probe = &model->sets[s].experts[i];
    bool wanted = io == COLIBRI_IO_DIRECT || (io == COLIBRI_IO_AUTO && !resident);
    const char *refusal = NULL;
    if (wanted && model->set_count > 0 && probe == NULL) {
        refusal = "no record begins at a multiple of 4096";
    } else if (wanted && probe != NULL) {
        int cause = 0;
        file->direct_fd = open_again(model, O_DIRECT);
        if (file->direct_fd < 0) {
            refusal = strerror(errno);
        } else {
            atomic_store(&file->direct, true);
            /* An error of the disk is not refused here but told to whoever asks for this record. */
            cb_record_read_piece(file, true, probe->offset, memory,
                                 probe->size < CB_READ_PIECE ? probe->size : CB_READ_PIECE, &cause);
            if (!atomic_load(&file->direct))
                refusal = strerror(EINVAL);
        }
    }
    if (refusal != NULL)
        cb_warn(warning, warning_size, "the file cannot be read past the page cache (%s), reads go through it",
                refusal);
    if (!resident) {
        /* Records are read whole and in any order: what lies beyond one is not wanted. */
        int own = open_again(model, 0);
        if (own >= 0) {
            file->fd = own;
            posix_fadvise(own, 0, 0, POSIX_FADV_RANDOM);
        }
    }
}

void cb_record_file_leave_direct(cb_record_file *file) {
    atomic_store(&file->direct, false);
    close(file->direct_fd);
    file->direct_fd = -1;
}

void cb_record_file_close(cb_record_file *file) {
    if (file->direct_fd >= 0)
        close(file->direct_fd);
    if (file->fd != file->model->fd)
        close(file->fd);
}

colibri_status cb_record_read(cb_record_file *file, uint32_t set, uint32_t expert_index, uint8_t *memory, bool first,
                              cb_error *error) {
    const cb_model *model = file->model;
    const cb_expert *expert = &model->sets[set].experts[expert_index];
    char what[COLIBRI_MESSAGE_SIZE / 2];
    snprintf(what, sizeof what, "%s: expert %u of layer %u", cb_label(model), expert_index, model->sets[set].layer);
    bool direct = cb_record_is_aligned(expert);
    uint32_t crc = 0;
    for (uint64_t done = 0; done < expert->size;) {
        uint64_t piece = expert->size - done < CB_READ_PIECE ? expert->size - done : CB_READ_PIECE;
        int cause;
        uint64_t got = cb_record_read_piece(file, direct && atomic_load_explicit(&file->direct, memory_order_relaxed),
                                            expert->offset + done, memory + done, piece, &cause);
        if (got < piece)
            return cb_fail_read(error, what, expert->offset, expert->size, done + got, cause);
        if (file->verify != COLIBRI_VERIFY_OFF)
            crc = cb_crc32c(crc, memory + done, piece);
        done += piece;
    }
    if (file->verify != COLIBRI_VERIFY_OFF && crc != expert->crc32c)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s is damaged (the checksum of %" PRIu64 " bytes at offset %" PRIu64 " differs)", what,
                       expert->size, expert->offset);
    if (file->verify == COLIBRI_VERIFY_FULL && first) {
        uint8_t digest[sizeof expert->sha256];
        cb_sha256 hash;
        cb_sha256_start(&hash);
        cb_sha256_add(&hash, memory, expert->size);
        cb_sha256_finish(&hash, digest);
        if (memcmp(digest, expert->sha256, sizeof digest) != 0)
            return cb_fail(error, COLIBRI_BAD_FILE,
                           "%s is damaged (the SHA-256 of %" PRIu64 " bytes at offset %" PRIu64 " differs)", what,
                           expert->size, expert->offset);
    }
    return COLIBRI_OK;
}
