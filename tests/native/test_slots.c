/* Size classes: the least padding there can be, and how memory is divided among them. */
#include "check.h"
#include "draw.h"
#include "experts/slots.h"

static uint64_t padding_of(const cb_slots *slots, const cb_model *model) {
    uint64_t padding = 0;
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count; i++) {
            uint64_t size = model->sets[s].experts[i].size;
            uint32_t c = cb_slots_class(slots, size);
            CHECK(c < slots->class_count && slots->classes[c].slot_bytes >= size);
            padding += slots->classes[c].slot_bytes - size;
        }
    return padding;
}

/* The least padding of sizes[0..n) units in at most `left` classes, by trying everything. */
static uint64_t least_padding(const uint32_t *sizes, uint32_t n, uint32_t left) {
    if (n == 0)
        return 0;
    uint64_t least = UINT64_MAX, padding = 0;
    for (uint32_t from = n; from-- > 0;) {
        padding += sizes[n - 1] - sizes[from];
        if (left == 1 && from > 0)
            continue;
        uint64_t rest = least_padding(sizes, from, left - 1);
        least = rest != UINT64_MAX && padding + rest < least ? padding + rest : least;
    }
    return least;
}

static void test_classes(void) {
    for (int round = 0; round < 40; round++) {
        uint32_t n = 1 + draw(12), sizes[12];
        cb_expert experts[12] = {0};
        cb_expert_set set = {.count = n, .experts = experts};
        cb_model model = {.set_count = 1, .sets = &set};
        for (uint32_t i = 0; i < n; i++)
            sizes[i] = (i == 0 ? 0 : sizes[i - 1]) + 1 + draw(30);
        for (uint32_t i = 0; i < n; i++)
            experts[i].size = sizes[n - 1 - i] * UINT64_C(4096);
        cb_slots slots;
        cb_slots_choose(&slots, &model, 4096);
        CHECK(slots.class_count <= CB_SLOT_CLASSES && slots.class_count <= n);
        CHECK(slots.wasted_bytes == padding_of(&slots, &model));
        CHECK(slots.wasted_bytes == 4096 * least_padding(sizes, n, CB_SLOT_CLASSES));

        uint64_t all = cb_slots_bytes(&slots, UINT32_MAX), least = cb_slots_bytes(&slots, 1);
        CHECK(!cb_slots_divide(&slots, least - 1));
        for (uint64_t bytes = least; bytes <= all; bytes += 4096) {
            CHECK(cb_slots_divide(&slots, bytes));
            CHECK(slots.used_bytes <= bytes);
            bool full = true;
            uint64_t smallest_missing = UINT64_MAX;
            for (uint32_t c = 0; c < slots.class_count; c++) {
                const cb_slot_class *class = &slots.classes[c];
                CHECK(class->slot_count >= 1 && class->slot_count <= class->record_count);
                if (class->slot_count < class->record_count) {
                    full = false;
                    smallest_missing = class->slot_bytes < smallest_missing ? class->slot_bytes : smallest_missing;
                }
            }
            CHECK(full == (bytes == all));
            CHECK(full || bytes - slots.used_bytes < smallest_missing);
        }
        CHECK(cb_slots_divide(&slots, UINT64_MAX) && slots.slot_count == n);
    }

    /* More sizes than are told apart: still every record has a class, and little is wasted. */
    enum { MANY = 3000 };
    cb_expert *experts = calloc(MANY, sizeof *experts);
    cb_expert_set set = {.count = MANY, .experts = experts};
    cb_model model = {.set_count = 1, .sets = &set};
    uint64_t total = 0;
    for (uint32_t i = 0; i < MANY; i++)
        total += experts[i].size = 1000000 + i * UINT64_C(5000);
    cb_slots slots;
    cb_slots_choose(&slots, &model, 4096);
    CHECK(slots.class_count == CB_SLOT_CLASSES && slots.wasted_bytes == padding_of(&slots, &model));
    CHECK(slots.wasted_bytes < total / 8);
    free(experts);

    /* Classes get equal parts of their records. */
    cb_expert mixed[300] = {0};
    set = (cb_expert_set){.count = 300, .experts = mixed};
    for (uint32_t i = 0; i < 300; i++)
        mixed[i].size = i < 200 ? 8192 : 81920;
    cb_slots_choose(&slots, &model, 4096);
    CHECK(slots.class_count == 2 && cb_slots_divide(&slots, cb_slots_bytes(&slots, UINT32_MAX) / 2));
    CHECK(slots.classes[0].slot_count >= 98 && slots.classes[0].slot_count <= 102);
    CHECK(slots.classes[1].slot_count >= 49 && slots.classes[1].slot_count <= 50);
}

int main(void) {
    test_classes();
    return 0;
}
