/* marks.h — marks rows of memory that are lent, which nobody writes before they are given back.
 *
 * Each row has a mark, a byte in a NumPy array.  One thread lends rows, finds free ones and has
 * workers write there; any thread may give rows back.  A borrower reads a row before it gives the row
 * back (release), and the lender asks workers to write only after it has found the row free (acquire).
 */
#ifndef SHMVEC_MARKS_H
#define SHMVEC_MARKS_H

#include "platform.h"

static inline _Atomic uint8_t *sv_mark_at(uint8_t *marks, size_t row)
{
    return (_Atomic uint8_t *)(void *)(marks + row);
}

static inline void sv_marks_set(uint8_t *marks, size_t first, size_t count)
{
    /* relaxed: the lending thread has found these rows free. */
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
