/* Opens a .cbi file: header, section table, checksums of all sections but the weights. */
#include "file/model.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file/bytes.h"
#include "file/sha256.h"

#define HEADER_SIZE 128
#define ENTRY_SIZE 64
#define MAX_SECTIONS 64
#define FORMAT_VERSION 1u
#define READ_BUFFER (UINT64_C(1) << 20)

enum { FLAG_CRITICAL = 1, FLAG_DATA = 2 };
enum { SECTION_PROGRAM = 1, SECTION_TENSORS, SECTION_EXPERTS, SECTION_TENSOR_DATA, SECTION_EXPERT_DATA };
enum { KNOWN_SECTIONS = 11 };

static const struct {
    const char *name;
    uint16_t flags;
} known[KNOWN_SECTIONS] = {
    [SECTION_PROGRAM] = {"program", FLAG_CRITICAL},
    [SECTION_TENSORS] = {"tensors", FLAG_CRITICAL},
    [SECTION_EXPERTS] = {"experts", FLAG_CRITICAL},
    [SECTION_TENSOR_DATA] = {"tensor data", FLAG_CRITICAL | FLAG_DATA},
    [SECTION_EXPERT_DATA] = {"expert data", FLAG_CRITICAL | FLAG_DATA},
    [6] = {"tokenizer", 0},
    [7] = {"chat template", 0},
    [8] = {"settings", 0},
    [9] = {"metadata", 0},
    [10] = {"tokenizer tables", 0},
};

typedef struct header {
    uint32_t alignment, section_count, table_crc;
    uint64_t table_offset;
} header;

static colibri_status open_file(cb_model *model, cb_error *error) {
    /* Without O_NONBLOCK opening a pipe would wait for a writer. */
    model->fd = open(model->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (model->fd < 0)
        return cb_fail(error, COLIBRI_IO, "%s: cannot be opened: %s", cb_label(model), strerror(errno));
    struct stat status;
    if (fstat(model->fd, &status) != 0)
        return cb_fail(error, COLIBRI_IO, "%s: cannot be examined: %s", cb_label(model), strerror(errno));
    if (S_ISDIR(status.st_mode))
        return cb_fail(error, COLIBRI_IO, "%s: is a directory, give a .cbi file", cb_label(model));
    if (!S_ISREG(status.st_mode))
        return cb_fail(error, COLIBRI_IO, "%s: is not a regular file, give a .cbi file", cb_label(model));
    if (status.st_size == 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: is empty", cb_label(model));
    model->file_size = (uint64_t)status.st_size;
    return COLIBRI_OK;
}

static colibri_status read_header(cb_model *model, header *h, cb_error *error) {
    const char *label = cb_label(model);
    uint8_t bytes[HEADER_SIZE] = {0};
    uint64_t size = model->file_size < HEADER_SIZE ? model->file_size : HEADER_SIZE;
    if (cb_model_read(model, 0, bytes, size, error) != COLIBRI_OK)
        return error->status;
    if (size < 8 || memcmp(bytes, "COLIBRI", 8) != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: is not a .cbi file (it does not begin with COLIBRI)", label);
    if (size >= 12 && cb_u32(bytes + 8) != FORMAT_VERSION)
        return cb_fail(error, COLIBRI_UNSUPPORTED,
                       "%s: has format version %u, this build reads version %u; convert the model again", label,
                       cb_u32(bytes + 8), FORMAT_VERSION);
    if (size < HEADER_SIZE)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: is cut short: %" PRIu64 " bytes, the header alone has %d", label,
                       size, HEADER_SIZE);
    if (cb_u32(bytes + 124) != cb_crc32c(0, bytes, 124))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: the header is damaged (its checksum differs)", label);
    if (cb_u32(bytes + 12) != HEADER_SIZE)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: header size is %u, not %d", label, cb_u32(bytes + 12),
                       HEADER_SIZE);
    h->alignment = cb_u32(bytes + 16);
    if (h->alignment < 64 || h->alignment > 65536 || (h->alignment & (h->alignment - 1)) != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: alignment is %u, not a power of two from 64 to 65536", label,
                       h->alignment);
    if (cb_u32(bytes + 20) != COLIBRI_CONTRACT_VERSION)
        return cb_fail(error, COLIBRI_UNSUPPORTED,
                       "%s: has numeric contract version %u, this build computes version %d", label, cb_u32(bytes + 20),
                       COLIBRI_CONTRACT_VERSION);
    if (cb_u64(bytes + 24) != 0)
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: needs features 0x%" PRIx64 " that this build lacks", label,
                       cb_u64(bytes + 24));
    if (cb_u64(bytes + 32) != model->file_size)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: has %" PRIu64 " bytes, its header says %" PRIu64 "; it was cut short or changed", label,
                       model->file_size, cb_u64(bytes + 32));
    h->section_count = cb_u32(bytes + 48);
    if (h->section_count < 1 || h->section_count > MAX_SECTIONS)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section count is %u, not 1 to %d", label, h->section_count,
                       MAX_SECTIONS);
    h->table_offset = cb_u64(bytes + 40);
    if (h->table_offset % 8 != 0 || h->table_offset < HEADER_SIZE)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: section table offset is %" PRIu64 ", not a multiple of 8 behind the header", label,
                       h->table_offset);
    if (!cb_fits(h->table_offset, (uint64_t)h->section_count * ENTRY_SIZE, model->file_size))
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: section table of %u entries at offset %" PRIu64 " does not end inside the file", label,
                       h->section_count, h->table_offset);
    if (cb_u32(bytes + 52) != 0 || cb_u32(bytes + 56) != 1)
        return cb_fail(error, COLIBRI_UNSUPPORTED,
                       "%s: is volume %u of %u; files in several volumes are not supported by this build", label,
                       cb_u32(bytes + 52), cb_u32(bytes + 56));
    if (!cb_all_zero(bytes + 96, 28))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: the reserved bytes of the header are not zero", label);
    h->table_crc = cb_u32(bytes + 60);
    memcpy(model->digest, bytes + 64, sizeof model->digest);
    return COLIBRI_OK;
}

/* Checks the section's place and flags; known sections go to `sections` by type. */
static colibri_status check_entry(const cb_model *model, const header *h, const uint8_t *entry, uint32_t index,
                                  cb_section sections[KNOWN_SECTIONS], cb_error *error) {
    const char *label = cb_label(model);
    uint32_t type = cb_u32(entry);
    uint16_t version = cb_u16(entry + 4), flags = cb_u16(entry + 6);
    uint64_t offset = cb_u64(entry + 8), size = cb_u64(entry + 16);
    bool is_known = type >= 1 && type < KNOWN_SECTIONS;
    char name[32] = "unknown";
    if (is_known)
        memcpy(name, known[type].name, strlen(known[type].name) + 1);
    if (flags & ~(FLAG_CRITICAL | FLAG_DATA))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): flags 0x%x are unknown", label, index, name,
                       flags);
    if (!is_known && (flags & FLAG_CRITICAL))
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: section %u: critical type %u is not known to this build", label,
                       index, type);
    if (is_known && version != 1)
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: section %u (%s): has version %u, this build reads version 1",
                       label, index, name, version);
    if (is_known && flags != known[type].flags)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): flags are 0x%x, not 0x%x", label, index, name,
                       flags, known[type].flags);
    uint32_t unit = flags & FLAG_DATA ? h->alignment : 64;
    if (offset % unit != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): offset %" PRIu64 " is not a multiple of %u",
                       label, index, name, offset, unit);
    if (!cb_fits(offset, size, model->file_size))
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: section %u (%s): %" PRIu64 " bytes at offset %" PRIu64 " do not end inside the file", label,
                       index, name, size, offset);
    if (cb_u32(entry + 28) != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): the reserved field is not zero", label, index,
                       name);
    if ((flags & FLAG_DATA) && (cb_u32(entry + 24) != 0 || !cb_all_zero(entry + 32, 32)))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): a data section must have checksum and digest 0",
                       label, index, name);
    if (!is_known)
        return COLIBRI_OK;
    if (sections[type].found)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): occurs twice", label, index, name);
    sections[type] = (cb_section){true, offset, size};
    return COLIBRI_OK;
}

static colibri_status check_overlap(const cb_model *model, const header *h, const uint8_t *table, cb_error *error) {
    cb_range ranges[MAX_SECTIONS + 2];
    uint32_t n = h->section_count, a, b;
    for (uint32_t i = 0; i < n; i++)
        ranges[i] = (cb_range){cb_u64(table + i * ENTRY_SIZE + 8), cb_u64(table + i * ENTRY_SIZE + 16), i};
    ranges[n] = (cb_range){0, HEADER_SIZE, n};
    ranges[n + 1] = (cb_range){h->table_offset, (uint64_t)n * ENTRY_SIZE, n + 1};
    if (!cb_find_overlap(ranges, n + 2, &a, &b))
        return COLIBRI_OK;
    if (a > b) {
        uint32_t swap = a;
        a = b;
        b = swap;
    }
    if (b >= n)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u overlaps the %s", cb_label(model), a,
                       b == n ? "header" : "section table");
    return cb_fail(error, COLIBRI_BAD_FILE, "%s: sections %u and %u overlap", cb_label(model), a, b);
}

static colibri_status check_bytes(const cb_model *model, const uint8_t *entry, uint32_t index, uint8_t *buffer,
                                  cb_error *error) {
    uint64_t offset = cb_u64(entry + 8), size = cb_u64(entry + 16);
    uint32_t crc = 0;
    cb_sha256 hash;
    cb_sha256_start(&hash);
    for (uint64_t done = 0; done < size;) {
        uint64_t piece = size - done < READ_BUFFER ? size - done : READ_BUFFER;
        if (cb_model_read(model, offset + done, buffer, piece, error) != COLIBRI_OK)
            return error->status;
        crc = cb_crc32c(crc, buffer, piece);
        cb_sha256_add(&hash, buffer, piece);
        done += piece;
    }
    uint8_t digest[32];
    cb_sha256_finish(&hash, digest);
    uint32_t type = cb_u32(entry);
    const char *name = type >= 1 && type < KNOWN_SECTIONS ? known[type].name : "unknown";
    if (crc != cb_u32(entry + 24))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): is damaged (its checksum differs)",
                       cb_label(model), index, name);
    if (memcmp(digest, entry + 32, 32) != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: section %u (%s): its SHA-256 differs from the table's",
                       cb_label(model), index, name);
    return COLIBRI_OK;
}

static colibri_status read_sections(cb_model *model, const header *h, cb_section sections[KNOWN_SECTIONS],
                                    cb_error *error) {
    uint8_t table[MAX_SECTIONS * ENTRY_SIZE];
    uint64_t table_size = (uint64_t)h->section_count * ENTRY_SIZE;
    if (cb_model_read(model, h->table_offset, table, table_size, error) != COLIBRI_OK)
        return error->status;
    if (cb_crc32c(0, table, table_size) != h->table_crc)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: the section table is damaged (its checksum differs)",
                       cb_label(model));
    cb_sha256 hash;
    uint8_t digest[32];
    cb_sha256_start(&hash);
    cb_sha256_add(&hash, table, table_size);
    cb_sha256_finish(&hash, digest);
    if (memcmp(digest, model->digest, 32) != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: the digest differs from the section table's SHA-256",
                       cb_label(model));
    for (uint32_t i = 0; i < h->section_count; i++)
        if (check_entry(model, h, table + i * ENTRY_SIZE, i, sections, error) != COLIBRI_OK)
            return error->status;
    if (check_overlap(model, h, table, error) != COLIBRI_OK)
        return error->status;

    uint8_t *buffer = cb_alloc(model->file_size < READ_BUFFER ? model->file_size : READ_BUFFER);
    if (buffer == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory to read it", cb_label(model));
    colibri_status status = COLIBRI_OK;
    for (uint32_t i = 0; i < h->section_count && status == COLIBRI_OK; i++)
        if (!(cb_u16(table + i * ENTRY_SIZE + 6) & FLAG_DATA))
            status = check_bytes(model, table + i * ENTRY_SIZE, i, buffer, error);
    cb_free(buffer);
    return status;
}

static colibri_status load_section(const cb_model *model, cb_section section, uint8_t **bytes, cb_error *error) {
    *bytes = cb_alloc(section.size);
    if (*bytes == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for %" PRIu64 " bytes", cb_label(model),
                       section.size);
    return cb_model_read(model, section.offset, *bytes, section.size, error);
}

static colibri_status read_parts(cb_model *model, uint32_t alignment, const cb_section sections[KNOWN_SECTIONS],
                                 cb_error *error) {
    for (int type = SECTION_PROGRAM; type <= SECTION_EXPERTS; type++) {
        cb_section section = sections[type];
        if (!section.found && type == SECTION_EXPERTS)
            continue;
        if (!section.found)
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: has no section '%s'", cb_label(model), known[type].name);
        uint8_t *bytes;
        colibri_status status = load_section(model, section, &bytes, error);
        if (status == COLIBRI_OK) {
            if (type == SECTION_PROGRAM)
                status = cb_read_program(model, bytes, section.size, error);
            else if (type == SECTION_TENSORS)
                status = cb_read_tensor_directory(model, bytes, section.size, sections[SECTION_TENSOR_DATA], error);
            else
                status = cb_read_expert_directory(model, bytes, section.size, sections[SECTION_EXPERT_DATA], alignment,
                                                  error);
        }
        cb_free(bytes);
        if (status != COLIBRI_OK)
            return status;
    }
    return COLIBRI_OK;
}

colibri_status cb_model_open(const char *path, cb_model **result, cb_error *error) {
    *result = NULL;
    cb_model *model = cb_alloc(sizeof *model);
    char *copy = cb_alloc(strlen(path) + 1);
    if (model == NULL || copy == NULL) {
        cb_free(model);
        cb_free(copy);
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory to open a model");
    }
    memcpy(copy, path, strlen(path));
    model->path = copy;
    model->fd = -1;
    header h;
    cb_section sections[KNOWN_SECTIONS] = {0};
    if (open_file(model, error) != COLIBRI_OK || read_header(model, &h, error) != COLIBRI_OK ||
        read_sections(model, &h, sections, error) != COLIBRI_OK ||
        read_parts(model, h.alignment, sections, error) != COLIBRI_OK ||
        cb_validate_program(model, error) != COLIBRI_OK) {
        cb_model_close(model);
        return error->status;
    }
    *result = model;
    return COLIBRI_OK;
}

void cb_model_close(cb_model *model) {
    if (model == NULL)
        return;
    if (model->fd >= 0)
        close(model->fd);
    /* All tensors lie in one block, which begins with the first; all experts in one array likewise. */
    if (model->tensors != NULL)
        cb_free((void *)(uintptr_t)model->tensors[0].data);
    if (model->sets != NULL)
        cb_free(model->sets[0].experts);
    cb_free(model->tensors);
    cb_free(model->sets);
    cb_free(model->program.values);
    cb_free(model->program.states);
    cb_free(model->program.ops);
    cb_free(model->path);
    cb_free(model);
}
