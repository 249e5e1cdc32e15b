/* What this machine can do right now, one JSON line for each question:
 *
 *   probes bandwidth THREADS MIB      memory reads, the best of three ways to read; GB/s
 *   probes int8 THREADS               multiply-adds of the int8 units on registers alone; TOPS (2 for each)
 *   probes disk FILE                  O_DIRECT reads of a file by four threads; GB/s
 *   probes steady THREADS MIB COUNT   milliseconds of COUNT equal portions of work (reading MIB): the jitter that
 *                                     any program sees here
 *
 * Compiled for this machine (-march=native); never part of a release. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define MAX_THREADS 256
#define LINE 64
#define HUGE_PAGE (2u << 20)

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int fail(const char *what) {
    fprintf(stderr, "probes: %s: %s\n", what, strerror(errno));
    return 1;
}

/* ---- a team of threads that starts together ---- */

typedef struct team team;
typedef void (*team_work)(const team *team, unsigned member);

struct team {
    team_work work;
    unsigned threads;
    const uint8_t *memory;
    uint64_t bytes;
    int variant;
    uint64_t repeats;
    pthread_barrier_t barrier;
    bool stop;
};

static volatile uint64_t sink; /* keeps results alive */

typedef struct member {
    team *team;
    unsigned number;
    pthread_t thread;
} member;

static void *member_main(void *argument) {
    member *self = argument;
    for (;;) {
        pthread_barrier_wait(&self->team->barrier);
        if (self->team->stop)
            return NULL;
        self->team->work(self->team, self->number);
        pthread_barrier_wait(&self->team->barrier);
    }
}

static member members[MAX_THREADS];

static int team_start(team *team) {
    if (pthread_barrier_init(&team->barrier, NULL, team->threads) != 0)
        return fail("barrier");
    for (unsigned i = 1; i < team->threads; i++) {
        members[i] = (member){.team = team, .number = i};
        if ((errno = pthread_create(&members[i].thread, NULL, member_main, &members[i])) != 0)
            return fail("thread");
    }
    return 0;
}

/* One run of the work by all; returns its seconds. */
static double team_run(team *team) {
    pthread_barrier_wait(&team->barrier);
    const double start = seconds();
    team->work(team, 0);
    pthread_barrier_wait(&team->barrier);
    return seconds() - start;
}

static void team_stop(team *team) {
    team->stop = true;
    pthread_barrier_wait(&team->barrier);
    for (unsigned i = 1; i < team->threads; i++)
        pthread_join(members[i].thread, NULL);
}

/* ---- memory ---- */

typedef uint64_t line __attribute__((vector_size(LINE)));

enum { PLAIN, PREFETCHED, STREAMS, VARIANTS };
static const char *const variant_names[VARIANTS] = {"plain", "prefetched", "streams"};

static uint64_t read_lines(const uint8_t *memory, uint64_t bytes, int variant) {
    line a = {0}, b = {0}, c = {0}, d = {0};
    const line *lines = (const line *)(const void *)memory;
    const uint64_t count = bytes / LINE / 4 * 4, quarter = count / 4;
    if (variant == STREAMS) { /* four places at once: four hardware prefetchers */
        const line *second = lines + quarter, *third = second + quarter, *fourth = third + quarter;
        for (uint64_t i = 0; i < quarter; i++)
            a ^= lines[i], b ^= second[i], c ^= third[i], d ^= fourth[i];
    } else {
        for (uint64_t i = 0; i < count; i += 4) {
            if (variant == PREFETCHED) { /* beyond the end is harmless */
                __builtin_prefetch((const uint8_t *)(lines + i) + 4096, 0, 3);
                __builtin_prefetch((const uint8_t *)(lines + i) + 4096 + LINE, 0, 3);
                __builtin_prefetch((const uint8_t *)(lines + i) + 4096 + 2 * LINE, 0, 3);
                __builtin_prefetch((const uint8_t *)(lines + i) + 4096 + 3 * LINE, 0, 3);
            }
            a ^= lines[i], b ^= lines[i + 1], c ^= lines[i + 2], d ^= lines[i + 3];
        }
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

static void read_share(const team *team, unsigned number) {
    const uint64_t share = team->bytes / team->threads / LINE * LINE;
    sink ^= read_lines(team->memory + number * share, share, team->variant);
}

static uint8_t *take_memory(uint64_t bytes) {
    uint8_t *memory = aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (!memory)
        return NULL;
    madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 1, bytes);
    return memory;
}

static int probe_bandwidth(unsigned threads, uint64_t mebibytes) {
    team team = {.work = read_share, .threads = threads, .bytes = mebibytes << 20};
    uint8_t *memory = take_memory(team.bytes);
    if (!memory)
        return fail("memory");
    team.memory = memory;
    if (team_start(&team))
        return 1;
    double best = 0;
    printf("{\"threads\": %u, \"mib\": %llu", threads, (unsigned long long)mebibytes);
    for (team.variant = 0; team.variant < VARIANTS; team.variant++) {
        double fastest = 1e9;
        for (int pass = 0; pass < 6; pass++) {
            const double taken = team_run(&team);
            fastest = taken < fastest ? taken : fastest;
        }
        const double rate = (double)team.bytes / fastest * 1e-9;
        printf(", \"%s_gb_per_s\": %.3f", variant_names[team.variant], rate);
        best = rate > best ? rate : best;
    }
    printf(", \"gb_per_s\": %.3f}\n", best);
    team_stop(&team);
    free(memory);
    return 0;
}

static int probe_steady(unsigned threads, uint64_t mebibytes, unsigned count) {
    team team = {.work = read_share, .threads = threads, .bytes = mebibytes << 20, .variant = PREFETCHED};
    uint8_t *memory = take_memory(team.bytes);
    if (!memory)
        return fail("memory");
    team.memory = memory;
    if (team_start(&team))
        return 1;
    for (int i = 0; i < 5; i++)
        team_run(&team);
    printf("{\"threads\": %u, \"ms\": [", threads);
    for (unsigned i = 0; i < count; i++)
        printf("%s%.4f", i ? ", " : "", team_run(&team) * 1e3);
    printf("]}\n");
    team_stop(&team);
    free(memory);
    return 0;
}

/* ---- int8 units ---- */

#if defined(__x86_64__)

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#define AMX_OPS (4 * 16 * 16 * 64 * 2) /* of one repeat */
#define VNNI_OPS (16 * 16 * 4 * 2)

static bool have_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1))
        return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

__attribute__((target("amx-tile,amx-int8"))) static void amx_work(const team *team, unsigned number) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++)
        config.row_bytes[i] = 64, config.rows[i] = 16;
    uint8_t tile[1024] __attribute__((aligned(64)));
    memset(tile, (int)number + 1, sizeof tile);
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, tile, 64);
    _tile_loadd(5, tile, 64);
    _tile_loadd(6, tile, 64);
    _tile_loadd(7, tile, 64);
    for (uint64_t i = 0; i < team->repeats; i++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, tile, 64);
    sink ^= tile[0];
    _tile_release();
}

#define STEP(x) x = _mm512_dpbusd_epi32(x, u, w)
__attribute__((target("avx512f,avx512vnni"))) static void vnni_work(const team *team, unsigned number) {
    const __m512i u = _mm512_set1_epi8((char)(number + 1)), w = _mm512_set1_epi8(3);
    __m512i a = u, b = w, c = u, d = w, e = u, f = w, g = u, h = w, i = u, j = w, k = u, l = w, m = u, n = w, o = u,
            p = w;
    for (uint64_t repeat = 0; repeat < team->repeats; repeat++) {
        STEP(a), STEP(b), STEP(c), STEP(d), STEP(e), STEP(f), STEP(g), STEP(h);
        STEP(i), STEP(j), STEP(k), STEP(l), STEP(m), STEP(n), STEP(o), STEP(p);
        /* Otherwise the compiler may keep the sums in memory or drop a step. */
        __asm__ volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h));
        __asm__ volatile("" : "+v"(i), "+v"(j), "+v"(k), "+v"(l), "+v"(m), "+v"(n), "+v"(o), "+v"(p));
    }
    a = a ^ b ^ c ^ d ^ e ^ f ^ g ^ h ^ i ^ j ^ k ^ l ^ m ^ n ^ o ^ p;
    sink ^= (uint64_t)_mm512_reduce_add_epi32(a);
}

static double unit_rate(team_work work, unsigned threads, uint64_t operations) {
    team team = {.work = work, .threads = threads, .repeats = 1000};
    if (team_start(&team))
        return 0;
    const double first = team_run(&team);
    team.repeats = (uint64_t)(1000 * 0.03 / (first > 1e-6 ? first : 1e-6)) + 1; /* about 30 ms */
    double fastest = 1e9;
    for (int pass = 0; pass < 5; pass++) {
        const double taken = team_run(&team) / (double)team.repeats;
        fastest = taken < fastest ? taken : fastest;
    }
    team_stop(&team);
    return (double)operations * threads / fastest * 1e-12;
}

static int probe_int8(unsigned threads) {
    printf("{\"threads\": %u", threads);
    if (have_amx())
        printf(", \"amx_tops\": %.4f", unit_rate(amx_work, threads, AMX_OPS));
    if (__builtin_cpu_supports("avx512vnni"))
        printf(", \"vnni_tops\": %.4f", unit_rate(vnni_work, threads, VNNI_OPS));
    printf("}\n");
    return 0;
}

#else

static int probe_int8(unsigned threads) {
    printf("{\"threads\": %u}\n", threads); /* no probe for the units of this architecture */
    return 0;
}

#endif

/* ---- disk ---- */

#define DISK_THREADS 4
#define DISK_PIECE (4u << 20)

static int disk_descriptor;
static bool disk_failed;

static void disk_work(const team *team, unsigned number) {
    void *buffer = aligned_alloc(4096, DISK_PIECE);
    for (uint64_t piece = number; buffer && piece < team->bytes / DISK_PIECE; piece += team->threads)
        if (pread(disk_descriptor, buffer, DISK_PIECE, (off_t)(piece * DISK_PIECE)) != DISK_PIECE)
            disk_failed = true;
    disk_failed |= !buffer;
    free(buffer);
}

static int probe_disk(const char *path) {
    struct stat status;
    disk_descriptor = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (disk_descriptor < 0 || fstat(disk_descriptor, &status) != 0)
        return fail(path);
    team team = {.work = disk_work, .threads = DISK_THREADS, .bytes = (uint64_t)status.st_size};
    if (team.bytes > 1u << 30)
        team.bytes = 1u << 30;
    if (team.bytes < DISK_PIECE) {
        fprintf(stderr, "probes: %s: shorter than %u bytes\n", path, DISK_PIECE);
        return 1;
    }
    if (team_start(&team))
        return 1;
    const double taken = team_run(&team);
    team_stop(&team);
    close(disk_descriptor);
    if (disk_failed) {
        fprintf(stderr, "probes: %s: an O_DIRECT read failed\n", path);
        return 1;
    }
    printf("{\"gb_per_s\": %.3f, \"mib\": %llu}\n", (double)(team.bytes / DISK_PIECE * DISK_PIECE) / taken * 1e-9,
           (unsigned long long)(team.bytes >> 20));
    return 0;
}

/* A positive whole number up to `most`, or 0. */
static unsigned number_of(const char *text, unsigned most) {
    char *end;
    const unsigned long value = strtoul(text, &end, 10);
    return *text < '0' || *text > '9' || *end || value > most ? 0 : (unsigned)value;
}

int main(int argument_count, char **arguments) {
    const char *what = argument_count > 1 ? arguments[1] : "";
    if (strcmp(what, "disk") == 0 && argument_count == 3)
        return probe_disk(arguments[2]);
    unsigned numbers[3] = {0};
    for (int i = 2; i < argument_count && i < 5; i++)
        numbers[i - 2] = number_of(arguments[i], i == 2 ? MAX_THREADS : 1u << 20);
    if (strcmp(what, "bandwidth") == 0 && argument_count == 4 && numbers[0] && numbers[1])
        return probe_bandwidth(numbers[0], numbers[1]);
    if (strcmp(what, "int8") == 0 && argument_count == 3 && numbers[0])
        return probe_int8(numbers[0]);
    if (strcmp(what, "steady") == 0 && argument_count == 5 && numbers[0] && numbers[1] && numbers[2])
        return probe_steady(numbers[0], numbers[1], numbers[2]);
    fprintf(stderr, "usage: probes bandwidth THREADS MIB | int8 THREADS | disk FILE | steady THREADS MIB COUNT\n");
    return 2;
}
