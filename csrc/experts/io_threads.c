#include "experts/io_threads.h"

#include <signal.h>

int cb_io_threads_start(pthread_t *threads, uint32_t count, void *(*run)(void *), void *argument, uint32_t *started) {
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, CB_IO_STACK_BYTES);
    /* Threads inherit the mask: a signal of the program is never handled on one of them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = 0;
    for (*started = 0; *started < count && failure == 0; *started += failure == 0)
        failure = pthread_create(&threads[*started], &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return failure;
}

void cb_io_threads_join(const pthread_t *threads, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}
