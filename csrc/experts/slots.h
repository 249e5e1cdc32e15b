/* Memory for records, cut into slots of at most 8 sizes.
 *
 * A slot never changes its size, so nothing ever has to be moved: docs/adr/0006-size-classes.md. */
#ifndef CB_SLOTS_H
#define CB_SLOTS_H

#include "file/model.h"

#define CB_SLOT_CLASSES 8
#define CB_SLOT_UNIT 4096 /* slots begin and end at multiples: reads past the page cache ask for it */

typedef struct cb_slot_class {
    uint64_t slot_bytes;
    uint32_t record_count; /* of the model */
    uint32_t slot_count, first_slot;
    uint8_t *memory;
} cb_slot_class;

typedef struct cb_slots {
    uint32_t class_count, slot_count;
    cb_slot_class classes[CB_SLOT_CLASSES]; /* by rising size */
    uint64_t wasted_bytes;                  /* with a slot for every record */
    uint64_t page_bytes;                    /* memory is had in multiples */
    uint64_t used_bytes;                    /* of all slots */
    uint8_t *memory;
    uint64_t mapped_bytes;
} cb_slots;

/* Chooses the classes for the records of a model, with the least waste. page_bytes: see cb_page_bytes. */
void cb_slots_choose(cb_slots *slots, const cb_model *model, uint64_t page_bytes);
uint32_t cb_slots_class(const cb_slots *slots, uint64_t record_bytes);
/* Bytes with `each` slots in every class, UINT32_MAX: with one for every record. */
uint64_t cb_slots_bytes(const cb_slots *slots, uint32_t each);
/* Gives every class the same part of what its records need, and at least one slot. False: too few bytes. */
bool cb_slots_divide(cb_slots *slots, uint64_t bytes);

/* Adds a sentence; `warning` holds a string. */
void cb_warn(char *warning, size_t warning_size, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Of what colibri_pages asks for. */
uint64_t cb_page_bytes(uint32_t pages);
/* Maps the memory; what the kernel refuses of pages and locking goes to `warning` as sentences. */
colibri_status cb_slots_map(cb_slots *slots, const char *label, uint32_t pages, bool lock, char *warning,
                            size_t warning_size, cb_error *error);
void cb_slots_unmap(cb_slots *slots);

#endif
