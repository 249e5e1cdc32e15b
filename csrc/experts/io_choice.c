#include "experts/io_choice.h"

#include <fcntl.h>

#include "experts/io_threads.h"
#include "experts/slots.h"
#include "file/bytes.h"

#define MOST_BYTES (UINT64_C(32) << 20)
#define MOST_NANOSECONDS UINT64_C(100000000)
#define MOST_ROUNDS 8
#define MOST_SAMPLES 32 /* of a round */

/* In this order a disk or a processor that becomes slower or faster meanwhile favours neither way. */
static const bool round_is_direct[MOST_ROUNDS] = {true, false, false, true, true, false, false, true};

typedef struct sample {
    uint64_t offset, size; /* of a record, or of its first part */
    uint64_t start, end;   /* times */
    uint64_t done;
    bool failed;
} sample;

/* Rounds of reads, some of which run at the same time, as they do when a layer waits for its experts. */
typedef struct probe {
    cb_record_file *file;
    uint8_t *memory;
    uint64_t most_bytes;                    /* of a sample, and of the part of `memory` that a thread has */
    uint32_t round_count, batch, in_flight; /* batch: samples of a round */
    sample samples[MOST_ROUNDS][MOST_SAMPLES];
    uint64_t bytes[MOST_ROUNDS], nanoseconds[MOST_ROUNDS];
    uint32_t round; /* that runs; in the end: how many ran */
    uint64_t deadline;
    atomic_uint next, next_memory;
} probe;

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Of the records that can be read both ways. */
static uint32_t count_records(const cb_model *model, uint64_t *largest) {
    uint32_t count = 0;
    *largest = 0;
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count; i++) {
            const cb_expert *expert = &model->sets[s].experts[i];
            if (!cb_record_is_aligned(expert))
                continue;
            count++;
            *largest = expert->size > *largest ? expert->size : *largest;
        }
    return count;
}

/* Takes one record of each of as many equal stretches as there are samples, which one by the clock: what the last start
 * read may be in the page cache when the rest is not, or the other way round. Neighbours go to different rounds. */
static void choose_samples(probe *p, uint32_t record_count) {
    const cb_model *model = p->file->model;
    uint32_t wanted = p->round_count * p->batch, stretch = record_count / wanted, chosen = 0, seen = 0;
    uint64_t random = cb_now();
    uint32_t next = (uint32_t)(random % stretch);
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count && chosen < wanted; i++) {
            const cb_expert *expert = &model->sets[s].experts[i];
            if (!cb_record_is_aligned(expert) || seen++ != next)
                continue;
            p->samples[chosen % p->round_count][chosen / p->round_count] =
                (sample){.offset = expert->offset, .size = least(expert->size, p->most_bytes)};
            chosen++;
            random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            next = chosen * stretch + (uint32_t)((random >> 33) % stretch);
        }
}

/* False: there is nothing to compare. */
static bool prepare(probe *p, uint32_t threads, uint64_t memory_bytes) {
    uint64_t largest;
    uint32_t count = count_records(p->file->model, &largest);
    p->round_count = count < MOST_ROUNDS ? count / 2 * 2 : MOST_ROUNDS;
    if (p->round_count == 0 || largest == 0)
        return false;
    uint64_t round_bytes = MOST_BYTES / p->round_count;
    p->in_flight = (uint32_t)least(threads, count / p->round_count);
    p->most_bytes = least(cb_round_up(largest, CB_SLOT_UNIT), round_bytes / p->in_flight / CB_SLOT_UNIT * CB_SLOT_UNIT);
    p->batch = (uint32_t)least(least(MOST_SAMPLES, round_bytes / p->most_bytes), count / p->round_count);
    p->in_flight = (uint32_t)least(p->in_flight, memory_bytes / p->most_bytes);
    if (p->in_flight == 0)
        return false;
    choose_samples(p, count);
    /* Else the first round would pay for the pages of all. */
    for (uint64_t at = 0; at < p->in_flight * p->most_bytes; at += CB_SLOT_UNIT)
        ((volatile uint8_t *)p->memory)[at] = 0;
    return true;
}

static void read_sample(const probe *p, sample *s, uint8_t *memory) {
    s->start = cb_now();
    do {
        uint64_t piece = least(s->size - s->done, CB_READ_PIECE);
        int cause;
        uint64_t got = cb_record_read_piece(p->file, round_is_direct[p->round], s->offset + s->done, memory + s->done,
                                            piece, &cause);
        s->done += got;
        s->failed = got < piece;
        s->end = cb_now();
    } while (s->done < s->size && !s->failed && s->end < p->deadline);
}

/* The main function of a thread. However late it comes, it reads once. */
static void *read_samples(void *argument) {
    probe *p = argument;
    uint8_t *memory = p->memory + atomic_fetch_add(&p->next_memory, 1) * p->most_bytes;
    do {
        uint32_t i = atomic_fetch_add(&p->next, 1);
        if (i >= p->batch)
            break;
        read_sample(p, &p->samples[p->round][i], memory);
    } while (cb_now() < p->deadline);
    return NULL;
}

/* A round takes from the start of its first read to the end of its last. False: something failed. */
static bool run_round(probe *p) {
    pthread_t threads[CB_IO_MOST_THREADS];
    uint32_t started;
    uint64_t start = UINT64_MAX, end = 0;
    p->deadline = cb_now() + MOST_NANOSECONDS / MOST_ROUNDS;
    atomic_store(&p->next, 0);
    atomic_store(&p->next_memory, 0);
    int failure = cb_io_threads_start(threads, p->in_flight, read_samples, p, &started);
    cb_io_threads_join(threads, started);
    for (uint32_t i = 0; i < p->batch; i++) {
        const sample *s = &p->samples[p->round][i];
        if (s->failed)
            return false;
        if (s->end == 0)
            continue;
        p->bytes[p->round] += s->done;
        start = least(start, s->start);
        end = s->end > end ? s->end : end;
    }
    p->nanoseconds[p->round] = end > start ? end - start : 1;
    return failure == 0 && atomic_load(&p->file->direct);
}

static bool run_rounds(probe *p) {
    uint64_t start = cb_now();
    for (p->round = 0; p->round < p->round_count; p->round++) {
        /* Both ways have been read once: a disk that is so slow has shown it. */
        if (p->round >= 2 && cb_now() - start > MOST_NANOSECONDS)
            break;
        if (!run_round(p))
            return false;
    }
    return true;
}

/* Of three rounds or more the slowest is left out: a thread that had to wait for a processor would decide otherwise. */
static uint64_t rate_of(const probe *p, bool direct) {
    double bytes = 0, seconds = 0, longest = 0, longest_bytes = 0;
    uint32_t count = 0;
    for (uint32_t round = 0; round < p->round; round++) {
        if (round_is_direct[round] != direct)
            continue;
        double now_bytes = (double)p->bytes[round], now = (double)p->nanoseconds[round] * 1e-9;
        if (now * longest_bytes >= longest * now_bytes) {
            longest = now;
            longest_bytes = now_bytes;
        }
        bytes += now_bytes;
        seconds += now;
        count++;
    }
    double rate = count > 2 ? (bytes - longest_bytes) / (seconds - longest) : bytes / seconds;
    return rate < 1 ? 1 : (uint64_t)rate;
}

static bool is_clearly_faster(double rate, double other) { return rate > 1.25 * other; }

/* Of single reads, in bytes for each second of theirs. */
static double direct_speed(const probe *p) {
    double bytes = 0, nanoseconds = 0;
    for (uint32_t round = 0; round < p->round_count; round++)
        for (uint32_t i = 0; i < p->batch && round_is_direct[round]; i++) {
            bytes += (double)p->samples[round][i].done;
            nanoseconds += (double)(p->samples[round][i].end - p->samples[round][i].start);
        }
    return nanoseconds > 0 ? bytes / nanoseconds * 1e9 : 0;
}

/* What this probe has brought into the page cache would look like a cached file to the next one. What was there before
 * stays: it was read as only memory is. */
static void give_back(const probe *p) {
    double direct = direct_speed(p);
    for (uint32_t round = 0; round < p->round_count; round++)
        for (uint32_t i = 0; i < p->batch && !round_is_direct[round]; i++) {
            const sample *s = &p->samples[round][i];
            double seconds = (double)(s->end - s->start) * 1e-9;
            if (s->done > 0 && !is_clearly_faster((double)s->done, direct * seconds))
                posix_fadvise(p->file->fd, (off_t)s->offset, (off_t)cb_round_up(s->done, CB_SLOT_UNIT),
                              POSIX_FADV_DONTNEED);
        }
}

void cb_io_measure(cb_record_file *file, uint32_t threads, uint8_t *memory, uint64_t memory_bytes, cb_io_rates *rates) {
    probe p = {.file = file, .memory = memory};
    *rates = (cb_io_rates){0, 0};
    if (!prepare(&p, threads, memory_bytes))
        return;
    if (run_rounds(&p))
        *rates = (cb_io_rates){.direct = rate_of(&p, true), .buffered = rate_of(&p, false)};
    give_back(&p);
}

bool cb_io_prefers_direct(const cb_io_rates *rates, uint64_t absent_bytes, uint64_t page_cache_bytes) {
    if (rates->direct == 0 || rates->buffered == 0)
        return true;
    if (page_cache_bytes != 0 && page_cache_bytes < absent_bytes)
        return true;
    return !is_clearly_faster((double)rates->buffered, (double)rates->direct);
}
