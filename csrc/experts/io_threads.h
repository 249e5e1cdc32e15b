/* Threads that read: how they are made. */
#ifndef CB_IO_THREADS_H
#define CB_IO_THREADS_H

#include <pthread.h>
#include <stdint.h>

#define CB_IO_MOST_THREADS 16
#define CB_IO_STACK_BYTES (UINT64_C(256) << 10) /* of each; a memory plan counts them */

/* Starts `count` threads; *started: how many there are then, also after a failure. Returns 0 or an errno value. */
int cb_io_threads_start(pthread_t *threads, uint32_t count, void *(*run)(void *), void *argument, uint32_t *started);
void cb_io_threads_join(const pthread_t *threads, uint32_t count);

#endif
