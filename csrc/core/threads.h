/* The processors this process may use, and threads on them. */
#ifndef CB_THREADS_H
#define CB_THREADS_H

#include <pthread.h>

#include "core/core.h"

#define CB_MOST_PROCESSORS 16384

typedef struct cb_processor_set {
    uint64_t words[CB_MOST_PROCESSORS / 64];
} cb_processor_set;

/* min(affinity, cgroup quota): threads beyond it take turns, so waiting threads must not spin. */
uint32_t cb_available_processors(const char *system_root);
/* Up to `count` processors of the affinity mask, one of each core before a second one of any; returns how many. */
uint32_t cb_choose_processors(const char *system_root, uint32_t count, uint32_t *processors);
bool cb_pin_thread(pthread_t thread, uint32_t processor);
/* The calling thread's mask, and back to it. */
bool cb_thread_place(cb_processor_set *set);
void cb_thread_put_back(const cb_processor_set *set);

#endif
