/* How many processors this process may use. */
#ifndef CB_THREADS_H
#define CB_THREADS_H

#include "core/core.h"

/* min(affinity, cgroup quota): threads beyond it take turns, so waiting threads must not spin. */
uint32_t cb_available_processors(const char *system_root);

#endif
