/* For debugging: names the expert when memory of a guarded store is touched that no call holds. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "experts/store_parts.h"

#define MOST_STORES 16

static const cb_expert_store *_Atomic stores[MOST_STORES];
static struct sigaction before;
static _Atomic bool installed;

typedef struct line {
    char text[256];
    size_t length;
} line;

/* In a signal handler nothing of stdio may be used. */
static void add_text(line *line, const char *text) {
    while (*text != '\0' && line->length < sizeof line->text - 1)
        line->text[line->length++] = *text++;
}

static void add_number(line *line, uint32_t number) {
    char digits[11];
    size_t i = sizeof digits - 1;
    digits[i] = '\0';
    do
        digits[--i] = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    add_text(line, digits + i);
}

static void tell(const cb_expert_store *store, const cb_store_place *place) {
    line line = {.length = 0};
    add_text(&line, "colibri: access to a slot that no call holds (");
    add_text(&line, place->state);
    if (place->set != CB_NONE) {
        add_text(&line, ", expert ");
        add_number(&line, place->expert);
        add_text(&line, " of layer ");
        add_number(&line, store->model->sets[place->set].layer);
    }
    add_text(&line, ")\n");
    ssize_t ignored = write(STDERR_FILENO, line.text, line.length);
    (void)ignored;
}

/* Afterwards the access is tried again, and takes the course it would have taken without us. */
static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)context;
    for (int i = 0; i < MOST_STORES; i++) {
        const cb_expert_store *store = atomic_load(&stores[i]);
        cb_store_place place;
        if (store != NULL && cb_store_slot_at(store, info->si_addr, &place))
            tell(store, &place);
    }
    sigaction(signal, &before, NULL);
    atomic_store(&installed, false);
}

bool cb_guard_add(const cb_expert_store *store) {
    if (!store->guard)
        return false;
    for (int i = 0; i < MOST_STORES; i++) {
        const cb_expert_store *none = NULL;
        if (!atomic_compare_exchange_strong(&stores[i], &none, store))
            continue;
        struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
        sigemptyset(&action.sa_mask);
        if (!atomic_exchange(&installed, true))
            sigaction(SIGSEGV, &action, &before);
        return true;
    }
    return false;
}

void cb_guard_remove(const cb_expert_store *store) {
    for (int i = 0; i < MOST_STORES; i++) {
        const cb_expert_store *held = store;
        atomic_compare_exchange_strong(&stores[i], &held, NULL);
    }
}
