/* The measurement that --io auto is decided by: what it reads, how long, and what it makes of it. Reads of this program
 * go through a pread of its own, which fails as a test says, and nothing but a read takes time on its clock: so slow
 * machines, and sanitizers, see what fast ones see.
 *
 *   test_io_choice FOLDER */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "experts/io_choice.h"
#include "experts/store.h"

#define MIB (UINT64_C(1) << 20)
#define SLOT 4096
#define READ 100   /* microseconds that a read takes */
#define SLOW 40000 /* or takes more */

static const char *folder;

/* ---- reads, as the tests want them ---- */

typedef struct seen_read {
    uint64_t offset, size;
    bool direct;
} seen_read;

static struct {
    pthread_mutex_t lock;
    seen_read reads[4096];
    uint32_t count, in_flight, most_in_flight;
    uint32_t wait_for;        /* a read goes on when so many run */
    uint32_t microseconds[2]; /* that each takes more, [direct] */
    uint32_t slow_reads[2];   /* that are still to be so slow */
    int error[2];             /* that each fails with */
} seen = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Atomic uint64_t microseconds_gone = 1;

int clock_gettime(clockid_t clock, struct timespec *now) {
    (void)clock;
    uint64_t gone = atomic_load(&microseconds_gone);
    *now = (struct timespec){.tv_sec = (time_t)(gone / 1000000), .tv_nsec = (long)(gone % 1000000 * 1000)};
    return 0;
}

ssize_t pread(int fd, void *buffer, size_t size, off_t offset) {
    bool direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    pthread_mutex_lock(&seen.lock);
    CHECK(seen.count < sizeof seen.reads / sizeof *seen.reads);
    seen.reads[seen.count++] = (seen_read){(uint64_t)offset, size, direct};
    seen.in_flight++;
    seen.most_in_flight = seen.in_flight > seen.most_in_flight ? seen.in_flight : seen.most_in_flight;
    uint32_t microseconds = seen.slow_reads[direct] > 0 ? seen.microseconds[direct] : 0;
    seen.slow_reads[direct] -= microseconds > 0;
    pthread_mutex_unlock(&seen.lock);
    for (int i = 0; i < 2000; i++) {
        pthread_mutex_lock(&seen.lock);
        bool go_on = seen.most_in_flight >= seen.wait_for;
        pthread_mutex_unlock(&seen.lock);
        if (go_on)
            break;
        usleep(1000);
    }
    atomic_fetch_add(&microseconds_gone, READ + microseconds);
    ssize_t got = -1;
    errno = seen.error[direct];
    if (errno == 0)
        got = syscall(SYS_pread64, fd, buffer, size, offset);
    int cause = errno;
    pthread_mutex_lock(&seen.lock);
    seen.in_flight--;
    pthread_mutex_unlock(&seen.lock);
    errno = cause;
    return got;
}

static void forget_reads(void) {
    seen.count = seen.most_in_flight = seen.wait_for = 0;
    memset(seen.slow_reads, 0, sizeof seen.slow_reads);
    memset(seen.error, 0, sizeof seen.error);
}

static void make_slow(bool direct, uint32_t microseconds, uint32_t reads) {
    seen.microseconds[direct] = microseconds;
    seen.slow_reads[direct] = reads;
}

/* ---- files with records ---- */

typedef struct test_file {
    cb_model model;
    cb_expert_set set;
    cb_record_file file;
    uint64_t memory_bytes;
    uint8_t *memory; /* what follows it cannot be accessed */
} test_file;

/* `count` records of `size` bytes, which are holes of the file; the first one is aligned, and `gap` lies before each
 * further one. Memory: for `threads` records. */
static test_file *make_file(uint32_t count, uint64_t size, uint64_t gap, uint32_t threads) {
    test_file *made = calloc(1, sizeof *made);
    char path[1000];
    snprintf(path, sizeof path, "%s/records.bin", folder);
    made->set = (cb_expert_set){.count = count, .experts = calloc(count, sizeof *made->set.experts)};
    for (uint32_t i = 0; i < count; i++)
        made->set.experts[i] = (cb_expert){.offset = SLOT + i * (cb_round_up(size, SLOT) + gap), .size = size};
    made->model = (cb_model){.path = strdup(path), .set_count = 1, .sets = &made->set};
    made->model.fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    made->model.file_size = SLOT + count * (cb_round_up(size, SLOT) + gap);
    CHECK(made->model.fd >= 0 && ftruncate(made->model.fd, (off_t)made->model.file_size) == 0);
    CHECK(fsync(made->model.fd) == 0);
    made->memory_bytes = threads * cb_round_up(size, SLOT);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), mapped = cb_round_up(made->memory_bytes, page);
    uint8_t *start = mmap(NULL, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED && mprotect(start + mapped, page, PROT_NONE) == 0);
    made->memory = start + mapped - made->memory_bytes;
    char warning[COLIBRI_MESSAGE_SIZE] = "";
    forget_reads();
    cb_record_file_open(&made->file, &made->model, COLIBRI_IO_AUTO, COLIBRI_VERIFY_CRC, false, made->memory, warning,
                        sizeof warning);
    forget_reads();
    return made;
}

static void free_file(test_file *made) {
    cb_record_file_close(&made->file);
    close(made->model.fd);
    unlink(made->model.path);
    free(made->model.path);
    free(made->set.experts);
    free(made);
}

static cb_io_rates measure(test_file *made, uint32_t threads) {
    cb_io_rates rates = {7, 7};
    cb_io_measure(&made->file, threads, made->memory, made->memory_bytes, &rates);
    return rates;
}

static bool is_measured(cb_io_rates rates) {
    CHECK((rates.direct == 0) == (rates.buffered == 0));
    return rates.direct != 0;
}

static const cb_expert *record_of(const test_file *made, const seen_read *read) {
    for (uint32_t i = 0; i < made->set.count; i++) {
        const cb_expert *expert = &made->set.experts[i];
        if (read->offset >= expert->offset &&
            read->offset + read->size <= expert->offset + cb_round_up(expert->size, SLOT))
            return expert;
    }
    return NULL;
}

/* Every read lies in one record, no record is read both ways, and both ways read as much. Returns the bytes of all. */
static uint64_t check_reads(const test_file *made) {
    uint64_t bytes[2] = {0, 0};
    for (uint32_t i = 0; i < seen.count; i++) {
        const cb_expert *record = record_of(made, &seen.reads[i]);
        CHECK(record != NULL && cb_record_is_aligned(record));
        for (uint32_t j = 0; j < i; j++)
            CHECK(record_of(made, &seen.reads[j]) != record ||
                  (seen.reads[j].direct == seen.reads[i].direct && seen.reads[j].offset != seen.reads[i].offset));
        bytes[seen.reads[i].direct] += cb_round_up(seen.reads[i].size, SLOT);
    }
    CHECK(bytes[0] == bytes[1]);
    return bytes[0] + bytes[1];
}

/* ---- the decision ---- */

static void test_decision(void) {
    const struct {
        cb_io_rates rates;
        uint64_t absent, room;
        bool direct;
    } cases[] = {
        {{0, 0}, 100, 1000, true},       /* not measured */
        {{100, 100}, 100, 1000, true},   /* as fast */
        {{100, 125}, 100, 1000, true},   /* hardly faster */
        {{100, 126}, 100, 1000, false},  /* clearly faster, */
        {{100, 126}, 100, 100, false},   /* with just enough memory, */
        {{100, 126}, 100, 99, true},     /* with too little, */
        {{100, 126}, 100, 0, false},     /* with an amount not known */
        {{1, UINT64_MAX}, 100, 1, true}, /* memory that is not there is worth nothing */
        {{1, UINT64_MAX}, 0, 1, false},  {{UINT64_MAX, 1}, 0, 0, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK(cb_io_prefers_direct(&cases[i].rates, cases[i].absent, cases[i].room) == cases[i].direct);
}

/* ---- the measurement ---- */

static void test_what_is_read(void) {
    const struct {
        uint32_t count, threads, rooms, expected; /* expected: reads at a time */
        uint64_t size;
    } cases[] = {
        {64, 1, 1, 1, 5000},    {64, 2, 2, 2, 5000},    {64, 16, 16, 8, 4096},  {300, 16, 16, 16, 4096},
        {65, 16, 3, 3, 9000},   {9, 16, 16, 1, 5000},   {4, 2, 2, 1, 100},      {3, 2, 2, 1, 5000},
        {2, 8, 8, 1, 5000},     {40, 2, 2, 2, MIB},     {40, 2, 1, 1, 3 * MIB}, {70, 16, 2, 2, 3000001},
        {8, 3, 3, 1, 40 * MIB}, {24, 3, 3, 3, 9 * MIB},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_file *made = make_file(cases[i].count, cases[i].size, 0, cases[i].rooms);
        seen.wait_for = cases[i].expected;
        CHECK(is_measured(measure(made, cases[i].threads)));
        uint64_t bytes = check_reads(made), rounds = cases[i].count < 8 ? cases[i].count / 2 * 2 : 8;
        CHECK(bytes <= 32 * MIB && seen.count >= rounds * cases[i].expected);
        CHECK(seen.reads[0].direct && (rounds == 2 || seen.reads[seen.count - 1].direct));
        CHECK(seen.most_in_flight <= cases[i].threads);
        if (cases[i].size <= MIB) {
            uint64_t each = cb_round_up(cases[i].size, SLOT), batch = 32 * MIB / rounds / each;
            batch = batch > 32 ? 32 : batch;
            batch = batch > cases[i].count / rounds ? cases[i].count / rounds : batch;
            CHECK(seen.most_in_flight == cases[i].expected && bytes == rounds * batch * each);
        }
        free_file(made);
    }
}

static void test_too_few_records(void) {
    for (uint32_t count = 0; count < 2; count++) {
        test_file *made = make_file(count, 5000, 0, 1);
        CHECK(!is_measured(measure(made, 2)) && seen.count == 0);
        free_file(made);
    }
}

/* Of 12 records every other is. */
static void test_not_all_are_aligned(void) {
    test_file *made = make_file(12, 5000, SLOT / 2, 2);
    CHECK(is_measured(measure(made, 1)));
    check_reads(made);
    free_file(made);
}

static void test_the_faster_way_wins(void) {
    test_file *made = make_file(40, MIB, 0, 2);
    for (int slow = 0; slow < 2; slow++) {
        forget_reads();
        make_slow(slow, SLOW, UINT32_MAX);
        cb_io_rates rates = measure(made, 2);
        CHECK(is_measured(rates) && cb_io_prefers_direct(&rates, 0, 0) == (slow == 0));
        CHECK((slow ? rates.direct : rates.buffered) < 2 * MIB * 1000000 / SLOW);
    }
    free_file(made);
}

/* Of the reads of one way each takes a while, and a single one of the other way is held up for longer. */
static void test_a_stall_does_not_decide(void) {
    test_file *made = make_file(40, 5000, 0, 2);
    for (int slow = 0; slow < 2; slow++) {
        forget_reads();
        make_slow(slow, SLOW / 40, UINT32_MAX);
        make_slow(!slow, SLOW, 1);
        cb_io_rates rates = measure(made, 2);
        CHECK(is_measured(rates) && cb_io_prefers_direct(&rates, 0, 0) == (slow == 0));
    }
    free_file(made);
}

static void test_a_slow_disk(void) {
    test_file *made = make_file(40, 4 * MIB, 0, 2);
    make_slow(false, 60000, UINT32_MAX);
    make_slow(true, 60000, UINT32_MAX);
    CHECK(is_measured(measure(made, 2)));
    CHECK(seen.count == 4); /* a piece for each thread each way */
    free_file(made);
}

static void test_errors(void) {
    test_file *made = make_file(40, 5000, 0, 2);
    for (int way = 0; way < 2; way++) {
        forget_reads();
        seen.error[way] = EIO;
        CHECK(!is_measured(measure(made, 2)));
    }
    CHECK(ftruncate(made->model.fd, 5 * SLOT) == 0); /* most records are beyond the end */
    forget_reads();
    CHECK(!is_measured(measure(made, 2)));
    /* Refused after all: whoever reads sees it. */
    CHECK(ftruncate(made->model.fd, (off_t)made->model.file_size) == 0);
    forget_reads();
    seen.error[1] = EINVAL;
    CHECK(!is_measured(measure(made, 2)) && !atomic_load(&made->file.direct));
    free_file(made);
}

/* Pages of the file that are in the page cache. */
static uint64_t cached_pages(const test_file *made) {
    static unsigned char pages[65536];
    uint64_t size = made->model.file_size, count = 0;
    void *mapped = mmap(NULL, size, PROT_READ, MAP_SHARED, made->model.fd, 0);
    CHECK(mapped != MAP_FAILED && size / SLOT < sizeof pages && mincore(mapped, size, pages) == 0);
    munmap(mapped, size);
    for (uint64_t i = 0; i * (uint64_t)sysconf(_SC_PAGESIZE) < size; i++)
        count += pages[i] & 1;
    return count;
}

static void test_nothing_is_left_behind(void) {
    test_file *made = make_file(40, MIB, 0, 2);
    CHECK(pread(made->model.fd, made->memory, SLOT, 0) == SLOT);
    uint64_t before = cached_pages(made);
    CHECK(posix_fadvise(made->model.fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    if (before > 0 && cached_pages(made) == 0) { /* a file system in memory has no page cache besides */
        make_slow(false, SLOW, UINT32_MAX);
        CHECK(is_measured(measure(made, 2)) && cached_pages(made) == 0);
        forget_reads();
        make_slow(true, SLOW, UINT32_MAX);
        CHECK(is_measured(measure(made, 2)) && cached_pages(made) > 0);
    }
    free_file(made);
}

/* ---- in the store ---- */

static void test_store(void) {
    test_file *made = make_file(40, MIB, 0, 2);
    const struct {
        uint32_t io, slow;
        uint64_t page_cache_bytes;
        uint32_t slots, verify;
        bool direct, measured;
    } cases[] = {
        {COLIBRI_IO_AUTO, 0, 0, 2, COLIBRI_VERIFY_CRC, true, true},
        {COLIBRI_IO_AUTO, 1, 0, 2, COLIBRI_VERIFY_CRC, false, true},
        {COLIBRI_IO_AUTO, 1, 38 * MIB, 2, COLIBRI_VERIFY_FULL, false, true},
        {COLIBRI_IO_AUTO, 1, 38 * MIB - 1, 2, COLIBRI_VERIFY_CRC, true, true},
        {COLIBRI_IO_AUTO, 1, 0, 40, COLIBRI_VERIFY_OFF, false, false},
        {COLIBRI_IO_DIRECT, 1, 0, 2, COLIBRI_VERIFY_CRC, true, false},
        {COLIBRI_IO_BUFFERED, 0, 0, 2, COLIBRI_VERIFY_CRC, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int guard = 0; guard < 2; guard++) {
            cb_store_options options = {.io = cases[i].io,
                                        .slot_bytes = cases[i].slots * MIB,
                                        .page_cache_bytes = cases[i].page_cache_bytes,
                                        .verify = cases[i].verify,
                                        .guard = guard};
            cb_error error = {0};
            cb_expert_store *store;
            forget_reads();
            make_slow(cases[i].slow, cases[i].slots == 40 ? 0 : SLOW, UINT32_MAX);
            /* The records' checksums are wrong, which is not for the opening to tell. */
            CHECK(cb_expert_store_open(&made->model, &options, &store, &error) == COLIBRI_OK);
            CHECK(cb_expert_store_is_direct(store) == cases[i].direct);
            CHECK(is_measured(cb_expert_store_io_rates(store)) == cases[i].measured);
            CHECK(cb_store_warning(store) == NULL);
            if (!cases[i].measured && cases[i].slots == 2)
                CHECK(seen.count == (cases[i].io == COLIBRI_IO_DIRECT)); /* that tells whether it can be done */
            cb_expert_store_close(store);
        }
    free_file(made);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    folder = argv[1];
    CHECK(mkdir(folder, 0755) == 0 || access(folder, W_OK) == 0);
    test_decision();
    test_too_few_records();
    test_file *probe = make_file(2, 5000, 0, 1);
    bool direct = atomic_load(&probe->file.direct);
    free_file(probe);
    if (direct) {
        test_what_is_read();
        test_not_all_are_aligned();
        test_the_faster_way_wins();
        test_a_stall_does_not_decide();
        test_a_slow_disk();
        test_errors();
        test_nothing_is_left_behind();
        test_store();
    } else {
        puts("the file system has no reads past the page cache: the measurement is not tested");
    }
    rmdir(folder);
    return 0;
}
