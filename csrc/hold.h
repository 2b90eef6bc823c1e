/* hold.h — memory that somebody looks at, and that is not written again before he is done with it.
 *
 * Blocks of memory are counted: how many arrays live in one.  Rows of results are marked, a byte each:
 * whether a batch shows it that was handed out.  One thread hands out, finds what is free and has
 * workers write there; any thread may be the one that is done.
 *
 * What somebody has read there he has read before he says that he is done (release), and whoever has
 * found that (acquire) asks workers to write after that.
 */
#ifndef SHMVEC_HOLD_H
#define SHMVEC_HOLD_H

#include "platform.h"

typedef struct {
    _Atomic uint32_t count;
} sv_hold;

static inline void sv_hold_take(sv_hold *hold)
{
    /* relaxed: whoever takes has found it free, or holds it. */
    atomic_fetch_add_explicit(&hold->count, 1, memory_order_relaxed);
}

/* Returns whether that was the last one. */
static inline bool sv_hold_drop(sv_hold *hold)
{
    /* release: pairs with the acquire of sv_hold_is_free, and of others' drops: the last one knows
     * that all are done. */
    return atomic_fetch_sub_explicit(&hold->count, 1, memory_order_acq_rel) == 1;
}

static inline bool sv_hold_is_free(const sv_hold *hold)
{
    /* acquire: pairs with the release of sv_hold_drop. */
    return atomic_load_explicit(&hold->count, memory_order_acquire) == 0;
}

/* Marks of rows, which lie in memory of others' (arrays of NumPy's): bytes, of which each is its own. */
static inline _Atomic uint8_t *sv_mark_at(uint8_t *marks, size_t row)
{
    return (_Atomic uint8_t *)(void *)(marks + row);
}

static inline void sv_marks_set(uint8_t *marks, size_t first, size_t count)
{
    /* relaxed: as sv_hold_take. */
    for (size_t row = first; row < first + count; row++)
        atomic_store_explicit(sv_mark_at(marks, row), 1, memory_order_relaxed);
}

static inline void sv_marks_clear(uint8_t *marks, size_t first, size_t count)
{
    /* release: pairs with the acquire of sv_is_marked. */
    for (size_t row = first; row < first + count; row++)
        atomic_store_explicit(sv_mark_at(marks, row), 0, memory_order_release);
}

static inline bool sv_is_marked(const uint8_t *marks, size_t row)
{
    /* acquire: pairs with the release of sv_marks_clear. */
    return atomic_load_explicit((const _Atomic uint8_t *)(const void *)(marks + row),
                                memory_order_acquire)
           != 0;
}

_Static_assert(sizeof(_Atomic uint8_t) == 1 && ATOMIC_CHAR_LOCK_FREE == 2, "a mark is a byte");

#endif
