#include "core/threads.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool in_set(const cb_processor_set *set, uint32_t processor) {
    return set->words[processor / 64] >> (processor % 64) & 1;
}

/* Opens <root><path>; NULL if it is not there. */
static FILE *open_under(const char *root, const char *path) {
    char full[PATH_MAX];
    int length = snprintf(full, sizeof full, "%s%s", root, path);
    return length > 0 && (size_t)length < sizeof full ? fopen(full, "re") : NULL;
}

/* "0-3,8,10-11" */
static bool read_list(const char *root, const char *path, cb_processor_set *set) {
    FILE *file = open_under(root, path);
    if (file == NULL)
        return false;
    memset(set, 0, sizeof *set);
    uint32_t count = 0;
    unsigned first, last;
    while (fscanf(file, "%u", &first) == 1) {
        last = first;
        int next = fgetc(file);
        if (next == '-') {
            if (fscanf(file, "%u", &last) != 1)
                break;
            next = fgetc(file);
        }
        for (unsigned i = first; i <= last && i < CB_MOST_PROCESSORS; i++, count++)
            set->words[i / 64] |= UINT64_C(1) << (i % 64);
        if (next != ',')
            break;
    }
    fclose(file);
    return count > 0;
}

static void read_affinity(const char *root, cb_processor_set *set) {
    if (root[0] != '\0' && read_list(root, "/sys/devices/system/cpu/online", set))
        return;
    if (!cb_thread_place(set))
        set->words[0] = 1;
}

static uint32_t count_set(const cb_processor_set *set) {
    uint32_t count = 0;
    for (size_t i = 0; i < CB_MOST_PROCESSORS / 64; i++)
        count += (uint32_t)__builtin_popcountll(set->words[i]);
    return count > 0 ? count : 1;
}

/* The first of its core's processors that we may use; alone on its core when that is not known. */
static bool first_of_core(const char *root, const cb_processor_set *usable, uint32_t processor) {
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/topology/thread_siblings_list", processor);
    cb_processor_set siblings;
    bool first = true;
    if (read_list(root, path, &siblings))
        for (uint32_t other = 0; other < processor && first; other++)
            first = !(in_set(&siblings, other) && in_set(usable, other));
    return first;
}

static uint32_t count_cores(const char *root, const cb_processor_set *usable) {
    uint32_t cores = 0;
    for (uint32_t processor = 0; processor < CB_MOST_PROCESSORS; processor++)
        cores += in_set(usable, processor) && first_of_core(root, usable, processor);
    return cores > 0 ? cores : 1;
}

/* ---- cgroup quota ---- */

static bool read_line(const char *root, const char *folder, const char *name, char *line, int size) {
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (length < 0 || (size_t)length >= sizeof path)
        return false;
    FILE *file = open_under(root, path);
    if (file == NULL)
        return false;
    bool got = fgets(line, size, file) != NULL;
    fclose(file);
    return got;
}

/* floor(quota / period), at least 1; UINT32_MAX without a limit. */
static uint32_t folder_quota(const char *root, const char *folder, bool version_2) {
    char line[128];
    long long quota = -1, period = -1;
    if (version_2) {
        if (!read_line(root, folder, "cpu.max", line, sizeof line) || sscanf(line, "%lld %lld", &quota, &period) != 2)
            return UINT32_MAX;
    } else {
        if (!read_line(root, folder, "cpu.cfs_quota_us", line, sizeof line) || sscanf(line, "%lld", &quota) != 1)
            return UINT32_MAX;
        if (!read_line(root, folder, "cpu.cfs_period_us", line, sizeof line) || sscanf(line, "%lld", &period) != 1)
            return UINT32_MAX;
    }
    if (quota < 0 || period <= 0)
        return UINT32_MAX;
    long long processors = quota / period;
    return processors < 1 ? 1 : processors > INT_MAX ? UINT32_MAX : (uint32_t)processors;
}

/* The least quota of `group` (a path below `mount`) and all its parents. */
static uint32_t group_quota(const char *root, const char *mount, const char *group, bool version_2) {
    char folder[PATH_MAX];
    /* A group outside our namespace's root is shown as "/..": only the mount itself can be read. */
    if (strstr(group, "/..") != NULL)
        group = "";
    int length = snprintf(folder, sizeof folder, "%s%s", strcmp(mount, "/") == 0 ? "" : mount, group);
    if (length < 0 || (size_t)length >= sizeof folder)
        return UINT32_MAX;
    size_t mount_length = strlen(mount);
    uint32_t least = UINT32_MAX;
    for (;;) {
        uint32_t quota = folder_quota(root, folder, version_2);
        if (quota < least)
            least = quota;
        char *slash = strrchr(folder, '/');
        if (slash == NULL || (size_t)(slash - folder) < mount_length)
            return least;
        *slash = '\0';
    }
}

static bool has_word(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *p = list; (p = strstr(p, word)) != NULL; p += length)
        if ((p == list || p[-1] == ',') && (p[length] == ',' || p[length] == '\0'))
            return true;
    return false;
}

/* This process's group in the cgroup v2 tree, or in the v1 tree of the cpu controller. */
static bool own_group(const char *root, bool version_2, char group[PATH_MAX]) {
    FILE *file = open_under(root, "/proc/self/cgroup");
    if (file == NULL)
        return false;
    char *line = NULL;
    size_t capacity = 0;
    bool found = false;
    while (!found && getline(&line, &capacity, file) > 0) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path++ = '\0';
        controllers++;
        found = version_2 ? controllers[0] == '\0' : has_word(controllers, "cpu");
        if (found)
            snprintf(group, PATH_MAX, "%s", strcmp(path, "/") == 0 ? "" : path);
    }
    free(line);
    fclose(file);
    return found;
}

/* mountinfo writes space, tab, newline and backslash as \ooo. */
static void decode_octal(char *text) {
    char *to = text;
    for (const char *from = text; *from != '\0'; to++) {
        if (from[0] == '\\' && strspn(from + 1, "01234567") >= 3) {
            *to = (char)((from[1] - '0') << 6 | (from[2] - '0') << 3 | (from[3] - '0'));
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = '\0';
}

/* One line: "id parent device root mount options [optional ...] - type source super_options". */
static bool parse_mount(char *line, bool version_2, char **mount_root, char **mount) {
    char *rest = strstr(line, " - ");
    if (rest == NULL)
        return false;
    *rest = '\0';
    char *save = NULL;
    const char *type = strtok_r(rest + 3, " \n", &save);
    strtok_r(NULL, " \n", &save);
    const char *options = strtok_r(NULL, " \n", &save);
    if (type == NULL || strcmp(type, version_2 ? "cgroup2" : "cgroup") != 0)
        return false;
    if (!version_2 && (options == NULL || !has_word(options, "cpu")))
        return false;
    save = NULL;
    char *fields[5];
    for (int i = 0; i < 5; i++)
        if ((fields[i] = strtok_r(i == 0 ? line : NULL, " ", &save)) == NULL)
            return false;
    *mount_root = fields[3];
    *mount = fields[4];
    decode_octal(*mount_root);
    decode_octal(*mount);
    return true;
}

static uint32_t tree_quota(const char *root, bool version_2) {
    char group[PATH_MAX] = "";
    bool found = own_group(root, version_2, group);
    uint32_t least = UINT32_MAX;
    bool mounted = false;
    FILE *file = open_under(root, "/proc/self/mountinfo");
    if (file != NULL) {
        char *line = NULL;
        size_t capacity = 0;
        while (getline(&line, &capacity, file) > 0) {
            char *mount_root, *mount;
            if (!parse_mount(line, version_2, &mount_root, &mount))
                continue;
            mounted = true;
            /* A container sees its own group as the root of the mount. */
            size_t prefix = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
            bool inside = strncmp(group, mount_root, prefix) == 0 && (group[prefix] == '/' || group[prefix] == '\0');
            uint32_t quota = group_quota(root, mount, inside ? group + prefix : "", version_2);
            if (quota < least)
                least = quota;
        }
        free(line);
        fclose(file);
    }
    if (mounted)
        return least;
    const char *const usual[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"};
    for (int i = version_2 ? 0 : 1; i < (version_2 ? 1 : 3); i++) {
        uint32_t quota = group_quota(root, usual[i], found ? group : "", version_2);
        if (quota < least)
            least = quota;
    }
    return least;
}

/* "/" and NULL become "", so that paths can be appended. */
static const char *clean_root(const char *root) { return root == NULL || strcmp(root, "/") == 0 ? "" : root; }

static uint32_t least_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

uint32_t cb_available_processors(const char *system_root) {
    const char *root = clean_root(system_root);
    cb_processor_set usable;
    read_affinity(root, &usable);
    return least_of(count_set(&usable), least_of(tree_quota(root, true), tree_quota(root, false)));
}

uint32_t cb_count_threads(const char *system_root) {
    const char *root = clean_root(system_root);
    cb_processor_set usable;
    read_affinity(root, &usable);
    return least_of(cb_available_processors(root), count_cores(root, &usable));
}

uint32_t cb_choose_processors(const char *system_root, uint32_t count, uint32_t *processors) {
    const char *root = clean_root(system_root);
    cb_processor_set usable;
    read_affinity(root, &usable);
    uint32_t chosen = 0;
    for (int first = 1; first >= 0; first--)
        for (uint32_t processor = 0; processor < CB_MOST_PROCESSORS && chosen < count; processor++)
            if (in_set(&usable, processor) && first_of_core(root, &usable, processor) == first)
                processors[chosen++] = processor;
    return chosen;
}

bool cb_pin_thread(pthread_t thread, uint32_t processor) {
    cb_processor_set set = {{0}};
    set.words[processor / 64] = UINT64_C(1) << (processor % 64);
    return pthread_setaffinity_np(thread, sizeof set.words, (const cpu_set_t *)(const void *)set.words) == 0;
}

bool cb_thread_place(cb_processor_set *set) {
    memset(set, 0, sizeof *set);
    return sched_getaffinity(0, sizeof set->words, (cpu_set_t *)(void *)set->words) == 0;
}

void cb_thread_put_back(const cb_processor_set *set) {
    sched_setaffinity(0, sizeof set->words, (const cpu_set_t *)(const void *)set->words);
}
