/* Numbers that look random and are the same in each run. */
#ifndef DRAW_H
#define DRAW_H

#include <stdint.h>

/* 0 .. below - 1 */
static inline uint32_t draw(uint32_t below) {
    static uint64_t state = 1;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32) % below;
}

#endif
