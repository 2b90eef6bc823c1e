/* text.h — a text that a worker publishes about its envs, for envs.stats() and top.
 *
 * A worker writes it once, before it serves, into memory that is zero.  So a reader sees all of it or
 * nothing, except while a worker is replaced, when it may see parts of two texts.  Even in a damaged
 * segment a text has at most SV_TEXT_BYTES bytes.
 */
#ifndef SHMVEC_TEXT_H
#define SHMVEC_TEXT_H

#include "platform.h"

#include <string.h>

#define SV_TEXT_BYTES 1016

typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint64_t length; /* in bytes; 0: it is not written yet */
    char bytes[SV_TEXT_BYTES];
} sv_text;

_Static_assert(sizeof(sv_text) % SV_CACHE_LINE == 0, "lines of its own");

/* The worker: publishes its text.  Precondition: length <= SV_TEXT_BYTES. */
static inline void sv_text_publish(sv_text *text, const char *bytes, uint64_t length)
{
    memcpy(text->bytes, bytes, length);
    /* release: pairs with the acquire of sv_text_length: a reader that sees the length sees the text. */
    atomic_store_explicit(&text->length, length, memory_order_release);
}

/* A reader: the number of bytes; 0 if there are none, or the length is damaged. */
static inline uint64_t sv_text_length(const sv_text *text)
{
    /* acquire: pairs with the release of sv_text_publish. */
    uint64_t length = atomic_load_explicit(&text->length, memory_order_acquire);
    return length <= SV_TEXT_BYTES ? length : 0;
}

#endif
