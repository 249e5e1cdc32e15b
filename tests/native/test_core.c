/* Checksum, processor counting, float environment, thread pool. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/core.h"
#include "core/crc32c.h"
#include "core/threads.h"
#include "float_mode.h"

static int failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                    \
            failures++;                                                                                                \
        }                                                                                                              \
    } while (0)

/* ---- failure of thread starts, by standing before the C library's function ---- */

static int threads_allowed = -1; /* -1: all */

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    typedef int create_function(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    static create_function *create;
    if (create == NULL)
        *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    if (threads_allowed == 0)
        return EAGAIN;
    if (threads_allowed > 0)
        threads_allowed--;
    return create(thread, attributes, start, argument);
}

/* ---- checksum and memory ---- */

static void test_checksum(void) {
    static const struct {
        uint8_t first;
        int8_t step;
        uint32_t crc;
    } vectors[] = {{0, 0, 0x8a9136aa}, {0xff, 0, 0x62a8ab43}, {0, 1, 0x46dd794e}, {31, -1, 0x113fdb5c}};
    uint8_t bytes[32];
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        for (int j = 0; j < 32; j++)
            bytes[j] = (uint8_t)(vectors[i].first + j * vectors[i].step);
        CHECK(cb_crc32c(0, bytes, 32) == vectors[i].crc);
        CHECK(cb_crc32c_table(0, bytes, 32) == vectors[i].crc);
    }
    CHECK(cb_crc32c(0, "123456789", 9) == 0xe3069283);
    CHECK(cb_crc32c(0, NULL, 0) == 0);

    /* Long buffers are cut into three streams: every size about the limits, odd starts, and in pieces. */
    uint64_t size = 400000;
    uint8_t *data = cb_alloc(size);
    CHECK(data != NULL);
    uint64_t random = 88172645463325252u;
    for (uint64_t i = 0; i < size; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        data[i] = (uint8_t)random;
    }
    static const uint64_t sizes[] = {1, 7, 8, 9, 1000, 16383, 16384, 16385, 16400, 98303, 98304, 98305, 200001, 399000};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (uint64_t start = 0; start < 9; start++) {
            uint32_t expected = cb_crc32c_table(0, data + start, sizes[i]);
            CHECK(cb_crc32c(0, data + start, sizes[i]) == expected);
            uint64_t cut = sizes[i] / 3;
            CHECK(cb_crc32c(cb_crc32c(0, data + start, cut), data + start + cut, sizes[i] - cut) == expected);
        }
    }
    cb_free(data);
}

static void test_memory(void) {
    static const uint64_t sizes[] = {0, 1, 63, 64, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint8_t *memory = cb_alloc(sizes[i]);
        CHECK(memory != NULL);
        CHECK((uintptr_t)memory % (sizes[i] >= 1 << 20 ? 4096 : 64) == 0);
        for (uint64_t j = 0; j < sizes[i]; j++)
            if (memory[j] != 0) {
                CHECK(!"memory is zero");
                break;
            }
        memset(memory, 1, sizes[i]);
        cb_free(memory);
    }
    cb_free(NULL);
    CHECK(cb_alloc(UINT64_MAX) == NULL);
    CHECK(cb_alloc(UINT64_MAX / 2) == NULL);
    CHECK(cb_multiply(UINT64_C(1) << 32, UINT64_C(1) << 32) == UINT64_MAX);
    CHECK(cb_multiply(3, 5) == 15);
}

static void test_messages(void) {
    cb_error error;
    CHECK(cb_fail(&error, COLIBRI_IO, "%s %d", "a", 1) == COLIBRI_IO);
    CHECK(error.status == COLIBRI_IO && strcmp(error.message, "a 1") == 0);
    char small[3];
    cb_copy_message(&error, small, sizeof small);
    CHECK(strcmp(small, "a ") == 0);
    cb_copy_message(&error, NULL, 0);
    char long_text[2000];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    cb_fail(&error, COLIBRI_IO, "%s", long_text);
    CHECK(strlen(error.message) == COLIBRI_MESSAGE_SIZE - 1);
}

/* ---- processor ---- */

static void test_isa(void) {
    cb_isa isa = CB_ISA_COUNT;
    cb_error error;
    CHECK(cb_isa_supported(CB_ISA_SCALAR));
    CHECK(cb_isa_choose("scalar", &isa, &error) == COLIBRI_OK && isa == CB_ISA_SCALAR);
    CHECK(cb_isa_choose(NULL, &isa, &error) == COLIBRI_OK && cb_isa_supported(isa));
    cb_isa best = isa;
    for (int other = 0; other < CB_ISA_COUNT; other++) {
        const char *name = cb_isa_name((cb_isa)other);
        colibri_status status = cb_isa_choose(name, &isa, &error);
        if (!cb_isa_supported((cb_isa)other) || other > (int)best) {
            CHECK(status == COLIBRI_UNSUPPORTED && strstr(error.message, name) != NULL);
            CHECK(strstr(error.message, cb_isa_supported((cb_isa)other) ? "refused" : "not supported") != NULL);
        } else {
            CHECK(status == COLIBRI_OK && (int)isa == other);
        }
    }
    CHECK(cb_isa_choose("", &isa, &error) == COLIBRI_OK && isa == best);
    CHECK(cb_isa_choose("sse9", &isa, &error) == COLIBRI_UNSUPPORTED);
    CHECK(strstr(error.message, "'sse9' is unknown") != NULL && strstr(error.message, "scalar") != NULL);
}

/* The kernel refuses tiles where a thread's signal stack could not hold them. In a process of its own: once given,
 * the permission stays. */
static void test_tiles_refused(void) {
    if (!cb_isa_supported(CB_ISA_AMX))
        return;
    pid_t child = fork();
    if (child == 0) {
        static char memory[4096];
        cb_isa isa = CB_ISA_COUNT;
        cb_error error;
        CHECK(sigaltstack(&(stack_t){.ss_sp = memory, .ss_size = sizeof memory}, NULL) == 0);
        CHECK(cb_isa_choose("amx", &isa, &error) == COLIBRI_UNSUPPORTED && isa == CB_ISA_COUNT);
        CHECK(strstr(error.message, "cpu 'amx' is refused by the kernel (") != NULL);
        CHECK(strstr(error.message, "choose from: avx512, ") != NULL && strstr(error.message, "amx,") == NULL);
        CHECK(cb_isa_choose(NULL, &isa, &error) == COLIBRI_OK && isa == CB_ISA_AVX512);
        _exit(failures != 0);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_float_environment(void) {
    const uint64_t before = get_mode();
    set_mode(MODE_HOSTILE);
    CHECK(!denormals_live());
    cb_float_environment environment = cb_float_enter();
    CHECK(denormals_live());
    CHECK(get_mode() == MODE_WANTED);
    cb_float_leave(environment);
    CHECK(get_mode() == MODE_HOSTILE);
    CHECK(!denormals_live());
    set_mode(before);
}

/* ---- counting processors ---- */

static char root[] = "/tmp/colibri-root-XXXXXX";

static void put(const char *path, const char *text) {
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    CHECK(file != NULL);
    if (file != NULL) {
        fputs(text, file);
        fclose(file);
    }
}

static void clear_root(void) {
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s/*", root);
    CHECK(system(command) == 0);
}

static void put_processors(int count, int threads_per_core) {
    char text[64], path[128];
    snprintf(text, sizeof text, "0-%d\n", count - 1);
    put("/sys/devices/system/cpu/online", text);
    int cores = count / threads_per_core;
    for (int i = 0; i < count; i++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", i);
        if (threads_per_core == 1)
            snprintf(text, sizeof text, "%d\n", i);
        else
            snprintf(text, sizeof text, "%d,%d\n", i % cores, i % cores + cores);
        put(path, text);
    }
}

static const char mounts_v2[] = "24 1 0:22 / /proc rw,nosuid - proc proc rw\n"
                                "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
static const char mounts_v1[] = "30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                                "31 24 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
                                "32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n";

static void test_count_v2(void) {
    put_processors(12, 1);
    CHECK(cb_count_threads(root) == 12);
    put("/proc/self/cgroup", "0::/user/app\n");
    put("/proc/self/mountinfo", mounts_v2);
    static const struct {
        const char *text;
        uint32_t threads;
    } quotas[] = {{"150000 100000\n", 1}, {"765000 100000\n", 7}, {"max 100000\n", 12}, {"50000 100000\n", 1},
                  {"4000000 1000\n", 12}, {"100000 0\n", 12},     {"rubbish\n", 12},    {"400000 100000", 4}};
    for (size_t i = 0; i < sizeof quotas / sizeof quotas[0]; i++) {
        put("/sys/fs/cgroup/user/app/cpu.max", quotas[i].text);
        CHECK(cb_count_threads(root) == quotas[i].threads);
    }
    /* The least of all parents counts, and a neighbour's does not. */
    put("/sys/fs/cgroup/user/app/cpu.max", "max 100000\n");
    put("/sys/fs/cgroup/user/cpu.max", "300000 100000\n");
    put("/sys/fs/cgroup/other/cpu.max", "100000 100000\n");
    CHECK(cb_count_threads(root) == 3);
    put("/sys/fs/cgroup/cpu.max", "200000 100000\n");
    CHECK(cb_count_threads(root) == 2);
    put("/sys/fs/cgroup/cpu.max", "900000 100000\n");
    CHECK(cb_count_threads(root) == 3);
    /* A group whose folder is not there, as in a container: its parents are still read. */
    put("/proc/self/cgroup", "0::/user/gone/deeper\n");
    CHECK(cb_count_threads(root) == 3);
    clear_root();

    /* A container that sees its own group as the root of the mount; a mount point with a space. */
    put_processors(12, 1);
    put("/proc/self/cgroup", "0::/docker/abc/job\n");
    put("/proc/self/mountinfo", "30 24 0:26 /docker/abc /my\\040cgroup rw - cgroup2 cgroup2 rw\n");
    put("/my cgroup/job/cpu.max", "500000 100000\n");
    CHECK(cb_count_threads(root) == 5);
    put("/my cgroup/cpu.max", "250000 100000\n");
    CHECK(cb_count_threads(root) == 2);
    put("/proc/self/cgroup", "0::/../outside\n");
    CHECK(cb_count_threads(root) == 2);
    clear_root();

    /* No mountinfo, no cgroup file: the usual place. */
    put_processors(12, 1);
    put("/sys/fs/cgroup/cpu.max", "600000 100000\n");
    CHECK(cb_count_threads(root) == 6);
    clear_root();
}

static void test_count_v1(void) {
    put_processors(12, 1);
    put("/proc/self/cgroup", "11:memory:/big\n10:cpuset:/set\n4:cpu,cpuacct:/a/b\n0::/ignored\n");
    put("/proc/self/mountinfo", mounts_v1);
    put("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n");
    CHECK(cb_count_threads(root) == 12);
    put("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "765000\n");
    CHECK(cb_count_threads(root) == 7);
    put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "150000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
    CHECK(cb_count_threads(root) == 1);
    clear_root();
    put_processors(12, 1);
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "320000\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(cb_count_threads(root) == 3);
    clear_root();
}

static void test_count_cores(void) {
    put_processors(16, 2);
    CHECK(cb_count_threads(root) == 8);
    CHECK(cb_available_processors(root) == 16);
    /* 0 and 8 share a core; 3 has one to itself as its sibling 11 is not usable. */
    put("/sys/devices/system/cpu/online", "0,3,8\n");
    CHECK(cb_count_threads(root) == 2);
    put("/sys/devices/system/cpu/online", "5\n");
    CHECK(cb_count_threads(root) == 1);
    clear_root();
    /* To pin to: one of each core first. */
    put_processors(8, 2);
    uint32_t processors[9] = {0};
    static const uint32_t expected[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    CHECK(cb_choose_processors(root, 9, processors) == 8 && memcmp(processors, expected, sizeof expected) == 0);
    put("/sys/devices/system/cpu/online", "1,5-7\n"); /* 1 and 5 share a core */
    CHECK(cb_choose_processors(root, 3, processors) == 3);
    CHECK(processors[0] == 1 && processors[1] == 6 && processors[2] == 7);
    CHECK(cb_choose_processors(root, 4, processors) == 4 && processors[3] == 5);
    clear_root();
    put("/sys/devices/system/cpu/online", "0-3\n");
    CHECK(cb_count_threads(root) == 4);
    clear_root();
}

static void test_affinity(void) {
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    uint32_t all = cb_count_threads("/");
    CHECK(all >= 1 && all <= (uint32_t)CPU_COUNT(&before));
    CHECK(cb_count_threads(NULL) == all);
    int first = 0;
    while (!CPU_ISSET(first, &before))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(cb_count_threads("/") == 1);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
    CHECK(cb_count_threads("/") == all);
}

/* ---- pool ---- */

#define MOST_TASKS 1000

typedef struct tally {
    _Atomic uint32_t runs[MOST_TASKS];
    uint32_t plain[MOST_TASKS]; /* not atomic: what tasks write must be seen after the call */
    _Atomic uint32_t bad_worker;
    uint32_t threads;
} tally;

static void count_task(void *context, uint32_t task, uint32_t worker) {
    tally *t = context;
    atomic_fetch_add(&t->runs[task], 1);
    t->plain[task]++;
    if (worker >= t->threads)
        atomic_fetch_add(&t->bad_worker, 1);
}

static cb_pool *open_pool(uint32_t threads) {
    cb_pool *pool;
    cb_error error;
    CHECK(cb_pool_open(threads, NULL, &pool, &error) == COLIBRI_OK);
    CHECK(cb_pool_threads(pool) == threads);
    return pool;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static const uint32_t thread_counts[] = {1, 2, 3, 8};

static void test_pool_counts(void) {
    static const uint32_t counts[] = {0, 1, 2, 3, 7, 1000};
    for (size_t i = 0; i < sizeof thread_counts / sizeof thread_counts[0]; i++) {
        cb_pool *pool = open_pool(thread_counts[i]);
        for (size_t j = 0; j < sizeof counts / sizeof counts[0]; j++) {
            static tally t;
            memset(&t, 0, sizeof t);
            t.threads = thread_counts[i];
            cb_pool_run(pool, counts[j], count_task, &t);
            for (uint32_t k = 0; k < MOST_TASKS; k++)
                if (t.runs[k] != (k < counts[j]) || t.plain[k] != t.runs[k])
                    CHECK(!"each task runs once");
            CHECK(t.bad_worker == 0);
        }
        cb_pool_close(pool);
    }
    cb_pool_close(NULL);
}

static void test_pool_stress(void) {
    for (size_t i = 0; i < sizeof thread_counts / sizeof thread_counts[0]; i++) {
        cb_pool *pool = open_pool(thread_counts[i]);
        static tally t;
        memset(&t, 0, sizeof t);
        t.threads = thread_counts[i];
        uint64_t start = now();
        const uint32_t calls = 10000;
        for (uint32_t call = 0; call < calls; call++) {
            cb_pool_run(pool, 1 + call % 13, count_task, &t);
            /* Now and then the workers are asleep when the next call comes. */
            if (call % 2000 == 0)
                usleep(2000);
        }
        printf("pool: %u threads, %.1f us a call\n", thread_counts[i], (double)(now() - start) / calls / 1e3);
        for (uint32_t k = 0; k < 13; k++) {
            uint32_t expected = 0;
            for (uint32_t call = 0; call < calls; call++)
                expected += k < 1 + call % 13;
            CHECK(t.runs[k] == expected && t.plain[k] == expected);
        }
        cb_pool_close(pool);
    }
}

typedef struct order {
    _Atomic uint64_t sum;
    uint32_t last[8]; /* per worker: tasks are taken in ascending order */
    _Atomic uint32_t falls;
} order;

static void order_task(void *context, uint32_t task, uint32_t worker) {
    order *o = context;
    if (task < o->last[worker])
        atomic_fetch_add(&o->falls, 1);
    o->last[worker] = task;
    atomic_fetch_add_explicit(&o->sum, task, memory_order_relaxed);
}

static void test_pool_order(void) {
    cb_pool *pool = open_pool(3);
    order o = {0};
    const uint64_t count = 300000;
    cb_pool_run(pool, (uint32_t)count, order_task, &o);
    CHECK(o.sum == count * (count - 1) / 2);
    CHECK(o.falls == 0);
    cb_pool_close(pool);
}

typedef struct meeting {
    _Atomic uint32_t arrived;
    uint32_t threads;
    _Atomic uint32_t unblocked_signals, flushing, wrong_name;
} meeting;

/* Waits until every thread has a task, so that each is looked at. */
static void meet_task(void *context, uint32_t task, uint32_t worker) {
    meeting *m = context;
    (void)task;
    atomic_fetch_add(&m->arrived, 1);
    while (atomic_load(&m->arrived) < m->threads)
        sched_yield();
    if (worker == 0)
        return;
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    if (!sigismember(&mask, SIGINT) || !sigismember(&mask, SIGTERM) || !sigismember(&mask, SIGALRM))
        atomic_fetch_add(&m->unblocked_signals, 1);
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strcmp(name, "colibri") != 0)
        atomic_fetch_add(&m->wrong_name, 1);
    if (!denormals_live())
        atomic_fetch_add(&m->flushing, 1);
}

static void test_pool_workers(void) {
    const uint64_t before = get_mode();
    set_mode(MODE_FLUSHING);
    cb_pool *pool = open_pool(3);
    meeting m = {.threads = 3};
    cb_pool_run(pool, 3, meet_task, &m);
    CHECK(m.arrived == 3 && m.unblocked_signals == 0 && m.flushing == 0 && m.wrong_name == 0);
    cb_pool_close(pool);
    set_mode(before);
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    CHECK(!sigismember(&mask, SIGINT));
}

static double cpu_milliseconds(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
}

static void test_pool_idle(void) {
    for (size_t i = 0; i < sizeof thread_counts / sizeof thread_counts[0]; i++) {
        cb_pool *pool = open_pool(thread_counts[i]);
        static tally t;
        t.threads = thread_counts[i];
        cb_pool_run(pool, 8, count_task, &t);
        cb_pool_begin(pool); /* and that there will be work soon is believed for a moment only */
        usleep(5000);
        double before = cpu_milliseconds();
        usleep(200000);
        CHECK(cpu_milliseconds() - before < 20);
        cb_pool_end(pool);
        cb_pool_close(pool);
    }
}

static void slow_task(void *context, uint32_t task, uint32_t worker) {
    (void)context;
    (void)worker;
    if (task > 0)
        usleep(100000);
}

/* The caller, too, sleeps while a worker does the last task. */
static void test_pool_caller_sleeps(void) {
    cb_pool *pool = open_pool(2);
    double before = cpu_milliseconds();
    cb_pool_run(pool, 2, slow_task, NULL);
    CHECK(cpu_milliseconds() - before < 20);
    cb_pool_close(pool);
}

static uint32_t count_tasks_of_process(void) {
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/task");
    while (folder != NULL && readdir(folder) != NULL)
        count++;
    if (folder != NULL)
        closedir(folder);
    return count;
}

static void test_pool_failure(void) {
    cb_pool *pool;
    cb_error error;
    CHECK(cb_pool_open(0, NULL, &pool, &error) == COLIBRI_INVALID);
    uint32_t before = count_tasks_of_process();
    for (int allowed = 0; allowed < 4; allowed++) {
        threads_allowed = allowed;
        CHECK(cb_pool_open(5, NULL, &pool, &error) == COLIBRI_OUT_OF_MEMORY);
        CHECK(pool == NULL);
        char expected[64];
        snprintf(expected, sizeof expected, "thread %d of 5 could not be started", allowed + 2);
        CHECK(strstr(error.message, expected) != NULL);
    }
    threads_allowed = -1;
    /* A joined thread may be listed for a moment longer. */
    for (int i = 0; i < 100 && count_tasks_of_process() > before; i++)
        usleep(1000);
    CHECK(count_tasks_of_process() <= before);
    pool = open_pool(5);
    cb_pool_close(pool);
}

int main(void) {
    test_checksum();
    test_memory();
    test_messages();
    test_tiles_refused();
    test_isa();
    test_float_environment();
    CHECK(mkdtemp(root) != NULL);
    test_count_v2();
    test_count_v1();
    test_count_cores();
    CHECK(rmdir(root) == 0);
    test_affinity();
    test_pool_counts();
    test_pool_stress();
    test_pool_order();
    test_pool_workers();
    test_pool_idle();
    test_pool_caller_sleeps();
    test_pool_failure();
    if (failures == 0)
        puts("core: ok");
    return failures != 0;
}
