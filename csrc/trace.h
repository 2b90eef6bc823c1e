/* trace.h — records what parent and workers do at which time, in rings that overwrite their oldest
 * entries.
 *
 * Each process that records has a ring of its own, in memory that is made when a trace begins and is
 * then handed to the workers.  Without a trace the pointer is null and a record costs a branch.  An
 * entry has begin, end, kind and env, and is written when it ends.  A ring has one writer: the parent,
 * or a worker, and after its death the successor, which continues after the entries that it finds.  It
 * has one reader: the parent, once, when the trace is over, while writers may still write.
 *
 * No side waits.  A writer that has filled the ring overwrites the oldest entries, read or not.  So
 * the reader takes a copy, and then finds out which entries may have been overwritten meanwhile:
 *
 *     writer, entry p:                          reader:
 *         slot[p mod size], with release            tail, with acquire
 *         tail = p + 1, with release                slots, with acquire
 *                                                   tail again: keeps p > tail - size
 *
 * The first pairing (tail) makes the entries before the tail visible.  The second (slots) makes the
 * copy safe: a reader that has seen a word of entry p + size also sees the tail that its writer had
 * stored before, p + size, or a later one, and so discards p.  What it keeps is whole.  (With fences the
 * words could be relaxed, but sanitizers do not know fences; on x86 both are plain moves.)  The reader
 * must assume that one slot is being written, so of `size` entries it sees the last size - 1.
 *
 * Time is CLOCK_MONOTONIC, in ns, in every process, so that all entries lie on one axis.  Waits read
 * the clock in any case.  For steps, a worker reads it once a request, and adds the ticks of its core's
 * counter since then (see sv_ticks).  It learns the length of a tick over all of its life.  So ticks are
 * never compared between processes, nor over more than a request.  If a worker is moved in the middle
 * of a request to a core whose counter differs, that request's steps are displaced by the difference.
 * So entries may be out of order, and the Python code that reads them sorts them.
 *
 * Trust: the writer's position, the size and all pointers are in private handles.  A damaged tail or
 * slot gives wrong entries, never an access out of bounds.
 *
 * `on` is written by the parent, on a line of its own; it is a hint, and relaxed.  A worker that finds
 * it off releases the memory.  The parent does not read what is written before that.
 */
#ifndef SHMVEC_TRACE_H
#define SHMVEC_TRACE_H

#include "platform.h"

#define SV_TRACE_MIN_SIZE 16

/* Kinds of entries.  sv_trace_enter records spans that follow each other, sv_trace_add any. */
enum sv_trace_kind {
    SV_TRACE_NOTHING, /* not recorded; an empty slot has this kind */
    /* Of workers. */
    SV_TRACE_STEP, /* an env's step, and taking its results */
    SV_TRACE_RESET,
    SV_TRACE_CALL,   /* a method or an attribute of an env */
    SV_TRACE_ERROR,  /* at a moment: an env has raised */
    SV_TRACE_ATTACH, /* at a moment: another process writes from here on, whose number is `env` */
    /* Waits of either. */
    SV_TRACE_PAUSE,
    SV_TRACE_YIELD,
    SV_TRACE_PARK,
    /* Of the parent. */
    SV_TRACE_SEND,
    SV_TRACE_TAKE,
    SV_TRACE_CALLER, /* the caller's code is at work */
    SV_TRACE_HERE,   /* the envs are stepped in this process */
    SV_TRACE_KINDS
};

typedef struct {
    int64_t begin;
    int64_t end;
    uint32_t env;
    uint32_t kind;
} sv_trace_entry;

typedef struct {
    _Atomic uint64_t begin;
    _Atomic uint64_t end;
    _Atomic uint64_t what; /* kind << 32 | env */
} sv_trace_slot;

typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint64_t tail; /* entries ever written, by the writer */
} sv_trace_ring;

typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint32_t on; /* whether to record, by the parent */
} sv_trace_switch;

_Static_assert(SV_TRACE_MIN_SIZE * sizeof(sv_trace_slot) % SV_CACHE_LINE == 0,
               "the next ring begins on a line of its own");

/* A writer's handle. */
typedef struct {
    sv_trace_switch *recording;
    sv_trace_ring *ring;
    sv_trace_slot *slots;
    uint64_t mask;
    uint64_t position;  /* the writer's position */
    uint32_t idle_kind;  /* the kind of span that follows a wait */
    uint32_t current_kind; /* the kind of the span in progress */
    int64_t since;  /* the begin of the span in progress */
} sv_trace;

/* Bytes of a ring.  `size`: entries; a power of two, at least SV_TRACE_MIN_SIZE. */
static inline size_t sv_trace_ring_bytes(uint32_t size)
{
    return sizeof(sv_trace_ring) + (size_t)size * sizeof(sv_trace_slot);
}

/* Bytes of so many rings, which begin as zeros. */
static inline size_t sv_trace_bytes(uint32_t rings, uint32_t size)
{
    return sizeof(sv_trace_switch) + rings * sv_trace_ring_bytes(size);
}

static inline sv_trace_ring *sv_trace_ring_at(void *base, uint32_t size, uint32_t index)
{
    return (sv_trace_ring *)(void *)((char *)base + sizeof(sv_trace_switch) +
                                     index * sv_trace_ring_bytes(size));
}

/* Parent: sets whether writers record. */
static inline void sv_trace_turn(void *base, bool on)
{
    /* relaxed: a hint. */
    atomic_store_explicit(&((sv_trace_switch *)base)->on, on, memory_order_relaxed);
}

static inline bool sv_trace_is_on(const sv_trace *trace)
{
    /* relaxed: a hint. */
    return atomic_load_explicit(&trace->recording->on, memory_order_relaxed) != 0;
}

/* Writer: takes a ring, and continues after its last entry.  `idle_kind`: the kind of span after a
 * wait. */
static inline void sv_trace_attach(sv_trace *trace, void *base, uint32_t size, uint32_t index,
                                   uint32_t idle_kind)
{
    *trace = (sv_trace){.recording = base,
                        .ring = sv_trace_ring_at(base, size, index),
                        .mask = size - 1,
                        .idle_kind = idle_kind};
    trace->slots = (sv_trace_slot *)(void *)(trace->ring + 1);
    /* relaxed: written by this process, or by one that is dead. */
    trace->position = atomic_load_explicit(&trace->ring->tail, memory_order_relaxed);
}

/* Writer: records a span that is over. */
static inline void sv_trace_add(sv_trace *trace, uint32_t kind, uint32_t env, int64_t begin,
                                int64_t end)
{
    sv_trace_slot *slot = &trace->slots[trace->position & trace->mask];
    /* release: pairs with the acquire of sv_trace_read, which then sees the tail before this. */
    atomic_store_explicit(&slot->begin, (uint64_t)begin, memory_order_release);
    atomic_store_explicit(&slot->end, (uint64_t)end, memory_order_release);
    atomic_store_explicit(&slot->what, (uint64_t)kind << 32 | env, memory_order_release);
    /* release: pairs with the acquire of the tail in sv_trace_read; the entry first. */
    atomic_store_explicit(&trace->ring->tail, ++trace->position, memory_order_release);
}

/* Writer: begins a span, and records the one before, which is over. */
static inline void sv_trace_enter(sv_trace *trace, uint32_t kind, int64_t now)
{
    if (trace->current_kind == kind)
        return;
    if (trace->current_kind != SV_TRACE_NOTHING && now > trace->since)
        sv_trace_add(trace, trace->current_kind, 0, trace->since, now);
    trace->current_kind = kind;
    trace->since = now;
}

/* Reader: copies the entries of a ring, oldest first, to room for `size`; returns how many.  *lost:
 * how many older entries were overwritten. */
static inline uint32_t sv_trace_read(void *base, uint32_t size, uint32_t index,
                                     sv_trace_entry *entries, uint64_t *lost)
{
    const sv_trace_ring *ring = sv_trace_ring_at(base, size, index);
    const sv_trace_slot *slots = (const sv_trace_slot *)(const void *)(ring + 1);
    /* acquire: pairs with the release of the tail in sv_trace_add: the entries are there. */
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    uint32_t count = tail < size ? (uint32_t)tail : size;
    for (uint32_t i = 0; i < count; i++) {
        const sv_trace_slot *slot = &slots[(tail - count + i) & (size - 1)];
        /* acquire: pairs with the release of the slot in sv_trace_add: see the essay. */
        entries[i].begin = (int64_t)atomic_load_explicit(&slot->begin, memory_order_acquire);
        entries[i].end = (int64_t)atomic_load_explicit(&slot->end, memory_order_acquire);
        uint64_t what = atomic_load_explicit(&slot->what, memory_order_acquire);
        entries[i].env = (uint32_t)what;
        entries[i].kind = (uint32_t)(what >> 32);
    }
    /* relaxed: ordered by the acquires above. */
    uint64_t now = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint32_t first = 0;
    while (first < count && now - (tail - count + first) >= size)
        first++;
    for (uint32_t i = first; i < count; i++)
        entries[i - first] = entries[i];
    *lost = tail - count + first;
    return count - first;
}

#endif
