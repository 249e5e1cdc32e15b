/* How the file is read; experts/io.c besides reads records past the page cache. */
#include "file/model.h"
#include "file/bytes.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "build with 64-bit file offsets");

/* Linux moves at most 2^31 - 4096 bytes in one call, whatever is asked for. */
#define MOST_AT_ONCE (UINT64_C(1) << 30)

uint64_t cb_read_at(int fd, uint64_t offset, void *buffer, uint64_t size, int *cause) {
    uint64_t done = 0;
    *cause = 0;
    while (done < size) {
        uint64_t want = size - done < MOST_AT_ONCE ? size - done : MOST_AT_ONCE;
        ssize_t got = pread(fd, (char *)buffer + done, (size_t)want, (off_t)(offset + done));
        if (got > 0) {
            done += (uint64_t)got;
        } else if (got == 0) {
            break;
        } else if (errno != EINTR) {
            *cause = errno;
            break;
        }
    }
    return done;
}

colibri_status cb_fail_read(cb_error *error, const char *what, uint64_t offset, uint64_t size, uint64_t got,
                            int cause) {
    return cb_fail(error, COLIBRI_IO, "%s: reading %" PRIu64 " bytes at offset %" PRIu64 " gave only %" PRIu64 ": %s",
                   what, size, offset, got,
                   cause != 0 ? strerror(cause) : "the file ends there, it was cut while in use");
}

colibri_status cb_model_read(const cb_model *model, uint64_t offset, void *buffer, uint64_t size, cb_error *error) {
    int cause;
    uint64_t got = cb_read_at(model->fd, offset, buffer, size, &cause);
    return got == size ? COLIBRI_OK : cb_fail_read(error, cb_label(model), offset, size, got, cause);
}
