#include "experts/slots.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define MOST_SIZES 256 /* that are told apart */
#define HUGE_2M (UINT64_C(1) << 21)
#define HUGE_1G (UINT64_C(1) << 30)

#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif

typedef struct size_count {
    uint64_t size;
    uint32_t count;
} size_count;

/* ---- classes ---- */

static uint64_t unit_bytes(void) {
    long page = sysconf(_SC_PAGESIZE);
    return page > CB_SLOT_UNIT ? (uint64_t)page : CB_SLOT_UNIT;
}

/* Adds a record's size to the sorted table. False when the table is full. */
static bool add_size(size_count *sizes, uint32_t *count, uint64_t size) {
    uint32_t low = 0, high = *count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (sizes[middle].size < size)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < *count && sizes[low].size == size) {
        sizes[low].count++;
        return true;
    }
    if (*count == MOST_SIZES)
        return false;
    memmove(&sizes[low + 1], &sizes[low], (*count - low) * sizeof *sizes);
    sizes[low] = (size_count){size, 1};
    (*count)++;
    return true;
}

/* Sizes of all records rounded up to `unit`. */
static bool collect_sizes(const cb_model *model, uint64_t unit, size_count *sizes, uint32_t *count) {
    *count = 0;
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count; i++)
            if (!add_size(sizes, count, cb_round_up(model->sets[s].experts[i].size, unit)))
                return false;
    return true;
}

/* The partition of n sorted sizes into runs, one for each class, that pads least. cost[k][i]: the first i sizes in at
 * most k + 1 classes; a class is as large as the last of its sizes. */
static void choose_classes(cb_slots *slots, const size_count *sizes, uint32_t n) {
    uint64_t cost[CB_SLOT_CLASSES][MOST_SIZES + 1];
    uint16_t start[CB_SLOT_CLASSES][MOST_SIZES + 1];
    for (uint32_t k = 0; k < CB_SLOT_CLASSES; k++) {
        cost[k][0] = 0;
        for (uint32_t i = 1; i <= n; i++) {
            uint64_t padding = 0;
            cost[k][i] = UINT64_MAX;
            start[k][i] = 0;
            for (uint32_t from = i; from-- > 0;) {
                padding += sizes[from].count * (sizes[i - 1].size - sizes[from].size);
                if (k == 0 && from > 0)
                    continue;
                uint64_t total = padding + (k == 0 ? 0 : cost[k - 1][from]);
                if (total < cost[k][i]) {
                    cost[k][i] = total;
                    start[k][i] = (uint16_t)from;
                }
            }
        }
    }
    /* From the last class to the first. */
    cb_slot_class reversed[CB_SLOT_CLASSES];
    uint32_t found = 0;
    for (uint32_t end = n, k = CB_SLOT_CLASSES - 1; end > 0; end = start[k][end], k -= k > 0) {
        cb_slot_class class = {.slot_bytes = sizes[end - 1].size};
        for (uint32_t i = start[k][end]; i < end; i++)
            class.record_count += sizes[i].count;
        reversed[found++] = class;
    }
    slots->class_count = found;
    for (uint32_t c = 0; c < found; c++)
        slots->classes[c] = reversed[found - 1 - c];
}

void cb_slots_choose(cb_slots *slots, const cb_model *model, uint64_t page_bytes) {
    *slots = (cb_slots){.page_bytes = page_bytes};
    size_count sizes[MOST_SIZES];
    uint32_t n;
    /* So many different sizes are not told apart exactly: each step doubles the unit. */
    for (uint64_t unit = unit_bytes(); !collect_sizes(model, unit, sizes, &n); unit *= 2)
        ;
    choose_classes(slots, sizes, n);
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count; i++) {
            uint64_t size = model->sets[s].experts[i].size;
            slots->wasted_bytes += slots->classes[cb_slots_class(slots, size)].slot_bytes - size;
        }
}

uint32_t cb_slots_class(const cb_slots *slots, uint64_t record_bytes) {
    uint32_t c = 0;
    while (slots->classes[c].slot_bytes < record_bytes)
        c++;
    return c;
}

uint64_t cb_slots_bytes(const cb_slots *slots, uint32_t each) {
    uint64_t bytes = 0;
    for (uint32_t c = 0; c < slots->class_count; c++)
        bytes += slots->classes[c].slot_bytes * (each == UINT32_MAX ? slots->classes[c].record_count : each);
    return cb_round_up(bytes, slots->page_bytes);
}

/* The class with the smallest part of its records in slots that one slot more fits; class_count: none. */
static uint32_t poorest_class(const cb_slots *slots, uint64_t left) {
    uint32_t poorest = slots->class_count;
    for (uint32_t c = 0; c < slots->class_count; c++) {
        const cb_slot_class *class = &slots->classes[c];
        if (class->slot_count == class->record_count || class->slot_bytes > left)
            continue;
        const cb_slot_class *other = poorest < slots->class_count ? &slots->classes[poorest] : NULL;
        if (other == NULL ||
            (uint64_t) class->slot_count * other->record_count < (uint64_t)other->slot_count * class->record_count)
            poorest = c;
    }
    return poorest;
}

bool cb_slots_divide(cb_slots *slots, uint64_t bytes) {
    uint64_t usable = bytes / slots->page_bytes * slots->page_bytes;
    bool all = bytes >= cb_slots_bytes(slots, UINT32_MAX);
    if (!all && usable < cb_slots_bytes(slots, 1))
        return false;
    uint64_t needed = 0, left = usable, beside_first = 0;
    for (uint32_t c = 0; c < slots->class_count; c++) {
        const cb_slot_class *class = &slots->classes[c];
        needed += class->slot_bytes * (class->record_count - 1);
        beside_first += class->slot_bytes;
    }
    left -= all ? 0 : beside_first;
    uint64_t shared = left;
    for (uint32_t c = 0; c < slots->class_count; c++) {
        cb_slot_class *class = &slots->classes[c];
        if (all) {
            class->slot_count = class->record_count;
            continue;
        }
        /* Rounded down as a double; a part too small by one is mended below. */
        uint32_t more = (uint32_t)((double)(class->record_count - 1) * ((double)shared / (double)needed));
        if (class->slot_bytes * more > left)
            more = (uint32_t)(left / class->slot_bytes);
        class->slot_count = 1 + more;
        left -= class->slot_bytes * more;
    }
    for (uint32_t c; !all && (c = poorest_class(slots, left)) < slots->class_count;) {
        slots->classes[c].slot_count++;
        left -= slots->classes[c].slot_bytes;
    }
    slots->slot_count = 0;
    slots->used_bytes = 0;
    for (uint32_t c = 0; c < slots->class_count; c++) {
        slots->classes[c].first_slot = slots->slot_count;
        slots->slot_count += slots->classes[c].slot_count;
        slots->used_bytes += slots->classes[c].slot_count * slots->classes[c].slot_bytes;
    }
    return true;
}

/* ---- memory ---- */

uint64_t cb_page_bytes(uint32_t pages) { return pages == COLIBRI_PAGES_1G ? HUGE_1G : unit_bytes(); }

void cb_warn(char *warning, size_t warning_size, const char *format, ...) {
    size_t used = strlen(warning);
    if (used > 0)
        used += (size_t)snprintf(warning + used, warning_size - used, "; ");
    if (used >= warning_size)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(warning + used, warning_size - used, format, arguments);
    va_end(arguments);
}

static bool huge_pages_are_off(void) {
    char text[64] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    bool off = file == NULL || fgets(text, sizeof text, file) == NULL || strstr(text, "[never]") != NULL;
    if (file != NULL)
        fclose(file);
    return off;
}

/* Address space aligned to the page size: more is asked for, and what sticks out is given back. */
static uint8_t *map_aligned(uint64_t bytes, uint64_t alignment) {
    uint8_t *start = mmap(NULL, bytes + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    uint64_t before = -(uintptr_t)start & (alignment - 1);
    if (before > 0)
        munmap(start, before);
    munmap(start + before + bytes, alignment - before);
    return start + before;
}

static void lock_slots(const cb_slots *slots, char *warning, size_t warning_size) {
    if (mlock(slots->memory, slots->mapped_bytes) == 0)
        return;
    int cause = errno;
    char most[32] = "none";
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(most, sizeof most, "%llu bytes", (unsigned long long)limit.rlim_cur);
    cb_warn(warning, warning_size,
            "%" PRIu64 " bytes of experts could not be locked in memory (%s); the limit of this process "
            "(ulimit -l) is %s",
            slots->mapped_bytes, strerror(cause), most);
}

colibri_status cb_slots_map(cb_slots *slots, const char *label, uint32_t pages, bool lock, char *warning,
                            size_t warning_size, cb_error *error) {
    uint64_t bytes = cb_round_up(slots->used_bytes, slots->page_bytes);
    if (bytes == 0)
        return COLIBRI_OK;
    if (pages == COLIBRI_PAGES_1G) {
        uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (30 << MAP_HUGE_SHIFT), -1, 0);
        if (memory != MAP_FAILED) {
            slots->memory = memory;
        } else {
            cb_warn(warning, warning_size,
                    "the kernel gave no %" PRIu64 " GiB in huge pages of 1 GiB (%s), pages of the usual size are used",
                    bytes >> 30, strerror(errno));
            bytes = cb_round_up(slots->used_bytes, unit_bytes());
        }
    }
    if (slots->memory == NULL)
        slots->memory = map_aligned(bytes, pages == COLIBRI_PAGES_OFF ? unit_bytes() : HUGE_2M);
    if (slots->memory == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for %" PRIu64 " bytes of experts", label,
                       bytes);
    slots->mapped_bytes = bytes;
    /* Whole huge pages only: what is left over at the end keeps pages of the usual size, so that the mapping never
     * takes more than its size. */
    if (pages == COLIBRI_PAGES_2M || pages == COLIBRI_PAGES_AUTO) {
        int cause = madvise(slots->memory, bytes / HUGE_2M * HUGE_2M, MADV_HUGEPAGE) != 0 ? errno : 0;
        if (pages == COLIBRI_PAGES_2M && (cause != 0 || huge_pages_are_off())) {
            cb_warn(warning, warning_size,
                    "the kernel gives no huge pages of 2 MiB (%s), pages of the usual size are used",
                    cause != 0 ? strerror(cause) : "transparent_hugepage is off");
        }
    }
    if (lock)
        lock_slots(slots, warning, warning_size);
    uint8_t *memory = slots->memory;
    for (uint32_t c = 0; c < slots->class_count; c++) {
        slots->classes[c].memory = memory;
        memory += slots->classes[c].slot_count * slots->classes[c].slot_bytes;
    }
    return COLIBRI_OK;
}

void cb_slots_unmap(cb_slots *slots) {
    if (slots->memory != NULL)
        munmap(slots->memory, slots->mapped_bytes);
    slots->memory = NULL;
}
