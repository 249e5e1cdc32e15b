/* Preloaded before a program: reads fail as told by COLIBRI_FAULT, words separated by blanks.
 *
 *   open-direct    opening with O_DIRECT: EINVAL           read-direct    reading past the page cache: EINVAL
 *   short          at most 1 to 7 bytes for each read      interrupt      every third read: EINTR
 *   eio=OFFSET     reads that take in OFFSET: EIO          flip=OFFSET    lowest bit of that byte differs
 *   cut=OFFSET     the file ends there
 *   file=WORD      only for files whose path contains WORD (all words before and after) */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static atomic_uint reads;

/* The text behind "word=", "" for the word alone, or NULL. */
static const char *find_fault(const char *word) {
    const char *faults = getenv("COLIBRI_FAULT");
    size_t length = strlen(word);
    while (faults != NULL && *faults != '\0') {
        faults += strspn(faults, " ");
        if (strncmp(faults, word, length) == 0 && strchr(" =", faults[length]) != NULL)
            return faults[length] == '=' ? faults + length + 1 : "";
        faults += strcspn(faults, " ");
    }
    return NULL;
}

static int is_meant(int fd) {
    char link[64], path[4096], word[256];
    const char *wanted = find_fault("file");
    if (wanted == NULL)
        return 1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    snprintf(word, sizeof word, "%.*s", (int)strcspn(wanted, " "), wanted);
    return strstr(path, word) != NULL;
}

static int takes_in(const char *offset, size_t size, off_t start, off_t *at) {
    if (offset == NULL)
        return 0;
    *at = (off_t)strtoll(offset, NULL, 0);
    return *at >= start && *at < start + (off_t)size;
}

EXPORT ssize_t pread(int fd, void *buffer, size_t size, off_t offset) {
    ssize_t (*real)(int, void *, size_t, off_t); /* looked up each time: several threads come here */
    *(void **)&real = dlsym(RTLD_NEXT, "pread");
    if (getenv("COLIBRI_FAULT") == NULL || !is_meant(fd))
        return real(fd, buffer, size, offset);
    unsigned count = atomic_fetch_add(&reads, 1);
    int direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    off_t at;
    if (direct && find_fault("read-direct") != NULL) {
        errno = EINVAL;
        return -1;
    }
    if (find_fault("interrupt") != NULL && count % 3 == 2) {
        errno = EINTR;
        return -1;
    }
    if (takes_in(find_fault("eio"), size, offset, &at)) {
        errno = EIO;
        return -1;
    }
    const char *cut = find_fault("cut");
    if (cut != NULL) {
        off_t end = (off_t)strtoll(cut, NULL, 0);
        if (offset >= end)
            return 0;
        if (!direct && (off_t)size > end - offset)
            size = (size_t)(end - offset);
    }
    size_t most = size;
    if (find_fault("short") != NULL && size > 1 + count % 7)
        most = 1 + count % 7;
    ssize_t got = real(fd, buffer, direct ? size : most, offset);
    if (got > (ssize_t)most)
        got = (ssize_t)most;
    if (cut != NULL && got > (off_t)strtoll(cut, NULL, 0) - offset)
        got = (ssize_t)((off_t)strtoll(cut, NULL, 0) - offset);
    if (got > 0 && takes_in(find_fault("flip"), (size_t)got, offset, &at))
        ((unsigned char *)buffer)[at - offset] ^= 1;
    return got;
}

EXPORT ssize_t pread64(int fd, void *buffer, size_t size, off_t offset) { return pread(fd, buffer, size, offset); }

EXPORT int open(const char *path, int flags, ...) {
    int (*real)(const char *, int, ...);
    *(void **)&real = dlsym(RTLD_NEXT, "open");
    va_list arguments;
    va_start(arguments, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, unsigned) : 0;
    va_end(arguments);
    if ((flags & O_DIRECT) && find_fault("open-direct") != NULL) {
        errno = EINVAL;
        return -1;
    }
    return real(path, flags, mode);
}

EXPORT int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, unsigned) : 0;
    va_end(arguments);
    return open(path, flags, mode);
}
