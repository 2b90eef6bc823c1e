/* ring.h — bounded single-producer single-consumer rings in shared memory.
 *
 * Two kinds.  sv_ring carries fixed records: requests (parent to worker) and completions (worker
 * to parent).  sv_byte_ring carries messages of varying length: infos (worker to parent).
 *
 * Both have a shared part (tail, written by the producer only; head, written by the consumer only;
 * each on a cache line of its own) and a private handle in each process.  Positions count up and
 * wrap at 2**32; `position & mask` is the place.  The payload is written first and the tail is then
 * stored with release; the consumer's acquire load of the tail makes the payload visible.  The
 * head travels back the same way, so that a place is reused only after it was read.
 *
 * Preconditions: one producer and one consumer at a time; the capacity is a power of two, at most
 * 2**30.  There are never many producers, because one that died between claiming and publishing a
 * place would leave a hole for ever.
 *
 * Trust: capacity, mask and base pointers are in the private handle, and what is read from the
 * shared part is checked before use.  A corrupt segment gives SV_RING_CORRUPT, never an access out
 * of bounds.  A record has a checksum of itself and its position, so that a reader takes only what was
 * put at this place in this lap: after a wrong record it could wait for ever for a message that never
 * comes.  A handle caches the other side's position, so that only a full or an empty ring costs a
 * cache miss.
 */
#ifndef SHMVEC_RING_H
#define SHMVEC_RING_H

#include <string.h>

#include "fault.h"
#include "platform.h"
#include "sum.h"

typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint32_t tail; /* producer's line */
    alignas(SV_CACHE_LINE) _Atomic uint32_t head; /* consumer's line */
} sv_ring_shared;

_Static_assert(sizeof(sv_ring_shared) == 2 * SV_CACHE_LINE, "one line a side");

enum { SV_RING_CORRUPT = -1, SV_RING_NO = 0, SV_RING_YES = 1 };

/* ---- fixed records ------------------------------------------------------------------------ */

/* A request for the envs [first, first + count), or the answer to one. */
typedef struct {
    uint32_t first;
    uint32_t count;
    uint32_t operation; /* request: what to do; completion: flags that describe the answer */
    uint32_t sequence;  /* the request's number; a completion repeats it */
} sv_record;

typedef struct {
    sv_record record;
    uint32_t sum; /* of the record and its position */
    uint32_t unused[3];
} sv_slot;

_Static_assert(sizeof(sv_slot) == 32, "slots tile cache lines");

typedef struct {
    sv_ring_shared *shared;
    sv_slot *slots;
    uint32_t capacity;
    uint32_t position;      /* of this side: the producer's tail, or the consumer's head */
    uint32_t peer_position; /* of the other side, when it was last read */
} sv_ring;

/* Bytes in the segment of a ring of `capacity` records. */
static inline size_t sv_ring_bytes(uint32_t capacity)
{
    return sizeof(sv_ring_shared) + (size_t)capacity * sizeof(sv_slot);
}

static inline uint32_t sv_record_sum(const sv_record *record, uint32_t position)
{
    uint64_t sum = sv_sum_pair(SV_SUM_START + position, record->first, record->count);
    return (uint32_t)sv_sum_pair(sum, record->operation, record->sequence);
}

static inline void sv_ring_attach_producer(sv_ring *ring, void *base, uint32_t capacity)
{
    ring->shared = base;
    ring->slots = (sv_slot *)((char *)base + sizeof(sv_ring_shared));
    ring->capacity = capacity;
    /* relaxed: this side's position.  The other one is read when the ring seems full. */
    ring->position = atomic_load_explicit(&ring->shared->tail, memory_order_relaxed);
    ring->peer_position = ring->position - capacity;
}

static inline void sv_ring_attach_consumer(sv_ring *ring, void *base, uint32_t capacity)
{
    ring->shared = base;
    ring->slots = (sv_slot *)((char *)base + sizeof(sv_ring_shared));
    ring->capacity = capacity;
    /* relaxed: this side's position.  The other one is read when the ring seems empty. */
    ring->position = atomic_load_explicit(&ring->shared->head, memory_order_relaxed);
    ring->peer_position = ring->position;
}

/* Producer: appends a record.  SV_RING_NO when the ring is full. */
static inline int sv_ring_try_push(sv_ring *ring, const sv_record *record)
{
    if (ring->position - ring->peer_position >= ring->capacity) {
        /* acquire: pairs with the release of the head in sv_ring_try_pop: the place was read. */
        ring->peer_position = atomic_load_explicit(&ring->shared->head, memory_order_acquire);
        uint32_t used = ring->position - ring->peer_position;
        if (used > ring->capacity)
            return SV_RING_CORRUPT;
        if (used == ring->capacity)
            return SV_RING_NO;
    }
    sv_slot *slot = &ring->slots[ring->position & (ring->capacity - 1)];
    slot->record = *record;
    slot->sum = sv_record_sum(record, ring->position);
    SV_FAULT(6);
    ring->position++;
    /* release: pairs with the acquire of the tail in sv_ring_peek; record and payload first. */
    atomic_store_explicit(&ring->shared->tail, ring->position, memory_order_release);
    return SV_RING_YES;
}

/* Producer: the number of records for which there is room; 0 if the head is damaged. */
static inline uint32_t sv_ring_room(const sv_ring *ring)
{
    /* acquire: pairs with the release of the head in sv_ring_try_pop: these places were read. */
    uint32_t used =
        ring->position - atomic_load_explicit(&ring->shared->head, memory_order_acquire);
    return used <= ring->capacity ? ring->capacity - used : 0;
}

/* Producer: stores the tail once more, which repairs it if it was damaged. */
static inline void sv_ring_announce(const sv_ring *ring)
{
    /* release: as in sv_ring_try_push. */
    atomic_store_explicit(&ring->shared->tail, ring->position, memory_order_release);
}

/* Consumer: whether a record waits. */
static inline int sv_ring_peek(sv_ring *ring)
{
    if (ring->position == ring->peer_position) {
        /* acquire: pairs with the release of the tail in sv_ring_try_push. */
        ring->peer_position = atomic_load_explicit(&ring->shared->tail, memory_order_acquire);
        uint32_t used = ring->peer_position - ring->position;
        if (used > ring->capacity) {
            ring->peer_position = ring->position; /* so that the next call loads the tail again */
            return SV_RING_CORRUPT;
        }
        return used > 0;
    }
    return SV_RING_YES;
}

/* Consumer: the number of records that wait; 0 if the tail is damaged. */
static inline uint32_t sv_ring_waiting(const sv_ring *ring)
{
    /* acquire: pairs with the release of the tail in sv_ring_try_push. */
    uint32_t used =
        atomic_load_explicit(&ring->shared->tail, memory_order_acquire) - ring->position;
    return used <= ring->capacity ? used : 0;
}

/* Consumer: takes the oldest record.  SV_RING_NO when the ring is empty. */
static inline int sv_ring_try_pop(sv_ring *ring, sv_record *record)
{
    int found = sv_ring_peek(ring);
    if (found != SV_RING_YES)
        return found;
    const sv_slot *slot = &ring->slots[ring->position & (ring->capacity - 1)];
    *record = slot->record;
    if (slot->sum != sv_record_sum(record, ring->position)) {
        ring->peer_position = ring->position; /* as in sv_ring_peek */
        return SV_RING_CORRUPT;
    }
    ring->position++;
    /* release: pairs with the acquire of the head in sv_ring_try_push: read before reuse. */
    atomic_store_explicit(&ring->shared->head, ring->position, memory_order_release);
    return SV_RING_YES;
}

/* ---- messages ----------------------------------------------------------------------------- */

/* A message is an 8-byte header {payload bytes, tag} and its payload, padded to 8 bytes.  A message is
 * never split: if the end of the buffer is too near, a filler (tag SV_FILLER) skips to the beginning.
 * So payloads are read and written in place, without a copy. */

typedef struct {
    uint32_t bytes;
    uint32_t tag;
} sv_message_header;

#define SV_FILLER UINT32_MAX

typedef struct {
    sv_ring_shared *shared;
    char *buffer;
    uint32_t capacity;
    uint32_t position;
    uint32_t peer_position;
    uint32_t pending; /* bytes of the message that is reserved or peeked */
} sv_byte_ring;

static inline size_t sv_byte_ring_bytes(uint32_t capacity)
{
    return sizeof(sv_ring_shared) + (size_t)capacity;
}

static inline void sv_byte_ring_attach_producer(sv_byte_ring *ring, void *base, uint32_t capacity)
{
    ring->shared = base;
    ring->buffer = (char *)base + sizeof(sv_ring_shared);
    ring->capacity = capacity;
    ring->pending = 0;
    /* relaxed: this side's position.  Masked: it is a multiple of 8 unless the segment is damaged. */
    ring->position = atomic_load_explicit(&ring->shared->tail, memory_order_relaxed) & ~7u;
    ring->peer_position = ring->position - capacity;
}

static inline void sv_byte_ring_attach_consumer(sv_byte_ring *ring, void *base, uint32_t capacity)
{
    ring->shared = base;
    ring->buffer = (char *)base + sizeof(sv_ring_shared);
    ring->capacity = capacity;
    ring->pending = 0;
    /* relaxed and masked: as above. */
    ring->position = atomic_load_explicit(&ring->shared->head, memory_order_relaxed) & ~7u;
    ring->peer_position = ring->position;
}

static inline uint32_t sv_message_bytes(uint32_t payload)
{
    return (uint32_t)sizeof(sv_message_header) + ((payload + 7u) & ~7u);
}

/* The longest payload that always fits into an empty ring; a filler may need as much again. */
static inline uint32_t sv_message_max_bytes(uint32_t capacity)
{
    return capacity / 2 - (uint32_t)sizeof(sv_message_header);
}

/* Producer: room for a message of `bytes`, or NULL when it does not fit now.  The caller writes the
 * payload, then calls sv_byte_ring_commit; if it reserves again instead, the message is abandoned. */
static inline void *sv_byte_ring_reserve(sv_byte_ring *ring, uint32_t bytes, uint32_t tag)
{
    if (bytes > sv_message_max_bytes(ring->capacity))
        return NULL;
    uint32_t need = sv_message_bytes(bytes);
    uint32_t place = ring->position & (ring->capacity - 1);
    uint32_t to_end = ring->capacity - place;
    uint32_t skip = need > to_end ? to_end : 0;
    if (ring->capacity - (ring->position - ring->peer_position) < need + skip) {
        /* acquire: pairs with the release of the head in sv_byte_ring_release. */
        ring->peer_position = atomic_load_explicit(&ring->shared->head, memory_order_acquire);
        uint32_t used = ring->position - ring->peer_position;
        if (used > ring->capacity || ring->capacity - used < need + skip)
            return NULL;
    }
    if (skip) {
        sv_message_header filler = {.bytes = skip - (uint32_t)sizeof filler, .tag = SV_FILLER};
        memcpy(ring->buffer + place, &filler, sizeof filler);
        place = 0;
    }
    sv_message_header header = {.bytes = bytes, .tag = tag};
    memcpy(ring->buffer + place, &header, sizeof header);
    ring->pending = skip + need;
    return ring->buffer + place + sizeof header;
}

/* Producer: publishes the reserved message. */
static inline void sv_byte_ring_commit(sv_byte_ring *ring)
{
    SV_FAULT(4);
    ring->position += ring->pending;
    ring->pending = 0;
    /* release: pairs with the acquire of the tail in sv_byte_ring_peek. */
    atomic_store_explicit(&ring->shared->tail, ring->position, memory_order_release);
}

/* Consumer: the oldest message in place, valid until sv_byte_ring_release.  *payload, *bytes and
 * *tag are set on SV_RING_YES. */
static inline int sv_byte_ring_peek(sv_byte_ring *ring, const void **payload, uint32_t *bytes,
                                    uint32_t *tag)
{
    for (;;) {
        if (ring->position == ring->peer_position) {
            /* acquire: pairs with the release of the tail in sv_byte_ring_commit. */
            ring->peer_position = atomic_load_explicit(&ring->shared->tail, memory_order_acquire);
            uint32_t used = ring->peer_position - ring->position;
            if (used > ring->capacity || used % 8 != 0) {
                ring->peer_position = ring->position;
                return SV_RING_CORRUPT;
            }
            if (used == 0)
                return SV_RING_NO;
        }
        uint32_t place = ring->position & (ring->capacity - 1);
        sv_message_header header; /* read once, since the writer may change it */
        memcpy(&header, ring->buffer + place, sizeof header);
        uint32_t available = ring->peer_position - ring->position;
        if (header.bytes > ring->capacity || sv_message_bytes(header.bytes) > available ||
            sv_message_bytes(header.bytes) > ring->capacity - place)
            return SV_RING_CORRUPT;
        ring->pending = sv_message_bytes(header.bytes);
        if (header.tag != SV_FILLER) {
            *payload = ring->buffer + place + sizeof header;
            *bytes = header.bytes;
            *tag = header.tag;
            return SV_RING_YES;
        }
        /* A filler reaches the end of the buffer and never fills all of it, so there is at most one. */
        if (place == 0 || ring->pending != ring->capacity - place)
            return SV_RING_CORRUPT;
        ring->position += ring->pending;
    }
}

/* Consumer: moves to the next message, and gives back the room of the peeked one. */
static inline void sv_byte_ring_release(sv_byte_ring *ring)
{
    ring->position += ring->pending;
    ring->pending = 0;
    /* release: pairs with the acquire of the head in sv_byte_ring_reserve. */
    atomic_store_explicit(&ring->shared->head, ring->position, memory_order_release);
}

#endif
