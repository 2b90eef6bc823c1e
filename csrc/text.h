/* text.h — a text that a worker publishes about its envs, for envs.stats() and top.
 *
 * The worker writes it when it begins to serve, and seldom afterwards; it is the only writer.  A
 * reader that comes while it writes finds that out and comes again: `changes` is odd for as long as
 * the text is being changed, and another number afterwards (a sequence lock).  Whatever a damaged
 * segment holds, a reader gets at most SV_TEXT_BYTES bytes.
 */
#ifndef SHMVEC_TEXT_H
#define SHMVEC_TEXT_H

#include "platform.h"

#include <string.h>

#define SV_TEXT_WORDS 126
#define SV_TEXT_BYTES (SV_TEXT_WORDS * sizeof(uint64_t))

typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint64_t changes;
    _Atomic uint64_t length; /* in bytes */
    _Atomic uint64_t words[SV_TEXT_WORDS];
} sv_text;

_Static_assert(sizeof(sv_text) % SV_CACHE_LINE == 0, "lines of its own");

/* The worker: changes the text.  Precondition: length <= SV_TEXT_BYTES. */
static inline void sv_text_write(sv_text *text, const char *bytes, uint64_t length)
{
    /* relaxed: this is the only writer. */
    uint64_t changes = atomic_load_explicit(&text->changes, memory_order_relaxed) | 1;
    atomic_store_explicit(&text->changes, changes, memory_order_relaxed);
    /* release: each pairs with its acquire in sv_text_read, which then sees `changes` odd, or newer. */
    atomic_store_explicit(&text->length, length, memory_order_release);
    for (uint64_t i = 0; i * sizeof(uint64_t) < length; i++) {
        uint64_t left = length - i * sizeof(uint64_t), word = 0;
        memcpy(&word, bytes + i * sizeof word, left < sizeof word ? left : sizeof word);
        atomic_store_explicit(&text->words[i], word, memory_order_release);
    }
    /* release: pairs with the acquire of `changes`, which shows all of the text. */
    atomic_store_explicit(&text->changes, changes + 1, memory_order_release);
}

/* A reader: copies the text, and returns its length; -1: it is being changed. */
static inline int64_t sv_text_read(const sv_text *text, char bytes[SV_TEXT_BYTES])
{
    /* acquire: pairs with the last release of sv_text_write. */
    uint64_t changes = atomic_load_explicit(&text->changes, memory_order_acquire);
    /* acquire: pairs with the releases in sv_text_write: with what is newer comes a newer `changes`. */
    uint64_t length = atomic_load_explicit(&text->length, memory_order_acquire);
    if (changes & 1 || length > SV_TEXT_BYTES)
        return -1;
    for (uint64_t i = 0; i * sizeof(uint64_t) < length; i++) {
        uint64_t word = atomic_load_explicit(&text->words[i], memory_order_acquire);
        memcpy(bytes + i * sizeof word, &word, sizeof word);
    }
    /* relaxed: the acquires before it keep it behind them. */
    bool is_whole = atomic_load_explicit(&text->changes, memory_order_relaxed) == changes;
    return is_whole ? (int64_t)length : -1;
}

#endif
