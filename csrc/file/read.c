/* The only place that reads the file. */
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

colibri_status cb_model_read(const cb_model *model, uint64_t offset, void *buffer, uint64_t size, cb_error *error) {
    uint64_t done = 0;
    while (done < size) {
        uint64_t want = size - done < MOST_AT_ONCE ? size - done : MOST_AT_ONCE;
        ssize_t got = pread(model->fd, (char *)buffer + done, (size_t)want, (off_t)(offset + done));
        if (got > 0) {
            done += (uint64_t)got;
            continue;
        }
        if (got < 0 && errno == EINTR)
            continue;
        return cb_fail(error, COLIBRI_IO,
                       "%s: reading %" PRIu64 " bytes at offset %" PRIu64 " gave only %" PRIu64 ": %s", cb_label(model),
                       size, offset, done, got < 0 ? strerror(errno) : "the file ends there, it was cut while in use");
    }
    return COLIBRI_OK;
}
