#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/core.h"

colibri_status cb_fail(cb_error *error, colibri_status status, const char *format, ...) {
    error->status = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return status;
}

void cb_copy_message(const cb_error *error, char *message, size_t message_size) {
    if (message == NULL || message_size == 0)
        return;
    size_t length = strnlen(error->message, sizeof error->message);
    if (length > message_size - 1)
        length = message_size - 1;
    memcpy(message, error->message, length);
    message[length] = '\0';
}
