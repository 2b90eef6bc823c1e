/* test_ring.c — order, fullness, wrap and corruption of both rings; a reader never sees a
 * half-written slot. */
#include "ring.h"
#include "check.h"

#define CAPACITY 64
#define BYTES 256

struct shared {
    alignas(SV_CACHE_LINE) char records[sizeof(sv_ring_shared) + CAPACITY * sizeof(sv_slot)];
    alignas(SV_CACHE_LINE) char messages[sizeof(sv_ring_shared) + BYTES];
    uint32_t rounds;
};

static void test_records(uint32_t start)
{
    struct shared *shared = shared_memory(sizeof *shared);
    sv_ring_shared *ring = (sv_ring_shared *)(void *)shared->records;
    atomic_store(&ring->tail, start);
    atomic_store(&ring->head, start);
    sv_ring producer, consumer;
    sv_ring_attach_producer(&producer, shared->records, CAPACITY);
    sv_ring_attach_consumer(&consumer, shared->records, CAPACITY);
    sv_record record = {0};
    CHECK(sv_ring_try_pop(&consumer, &record) == SV_RING_NO);
    for (uint32_t lap = 0; lap < 3; lap++) {
        for (uint32_t i = 0; i < CAPACITY; i++) {
            record = (sv_record){.first = i, .count = lap, .operation = 7, .sequence = ~i};
            CHECK(sv_ring_room(&producer) == CAPACITY - i);
            CHECK(sv_ring_try_push(&producer, &record) == SV_RING_YES);
        }
        CHECK(sv_ring_room(&producer) == 0);
        CHECK(sv_ring_try_push(&producer, &record) == SV_RING_NO);
        CHECK(sv_ring_peek(&consumer) == SV_RING_YES);
        for (uint32_t i = 0; i < CAPACITY; i++) {
            CHECK(sv_ring_try_pop(&consumer, &record) == SV_RING_YES);
            CHECK(record.first == i && record.count == lap && record.sequence == ~i);
            CHECK(sv_ring_room(&producer) == i + 1);
        }
        CHECK(sv_ring_peek(&consumer) == SV_RING_NO);
    }
    /* A tail or a head that cannot be is refused, and the ring recovers when it is sane again. */
    uint32_t sane = atomic_load(&ring->tail);
    atomic_store(&ring->tail, sane + CAPACITY + 1);
    CHECK(sv_ring_waiting(&consumer) == 0);
    CHECK(sv_ring_try_pop(&consumer, &record) == SV_RING_CORRUPT);
    atomic_store(&ring->tail, sane);
    CHECK(sv_ring_try_pop(&consumer, &record) == SV_RING_NO);
    /* A record that a damaged tail hides is there again when that is announced. */
    CHECK(sv_ring_try_push(&producer, &record) == SV_RING_YES);
    CHECK(sv_ring_waiting(&consumer) == 1);
    atomic_store(&ring->tail, sane);
    CHECK(sv_ring_waiting(&consumer) == 0 && sv_ring_peek(&consumer) == SV_RING_NO);
    sv_ring_announce(&producer);
    CHECK(sv_ring_waiting(&consumer) == 1);
    CHECK(sv_ring_try_pop(&consumer, &record) == SV_RING_YES);
    CHECK(sv_ring_waiting(&consumer) == 0);
    while (sv_ring_try_push(&producer, &record) == SV_RING_YES)
        ;
    atomic_store(&ring->head, sane + 5 * CAPACITY);
    CHECK(sv_ring_room(&producer) == 0);
    CHECK(sv_ring_try_push(&producer, &record) == SV_RING_CORRUPT);
    munmap(shared, sizeof *shared);
}

/* What is not as it was put there is refused, whichever bit was flipped, and taken once it is. */
static void test_damaged_records(uint32_t start)
{
    struct shared *shared = shared_memory(sizeof *shared);
    sv_ring_shared *ring = (sv_ring_shared *)(void *)shared->records;
    atomic_store(&ring->tail, start);
    atomic_store(&ring->head, start);
    sv_ring producer, consumer;
    sv_ring_attach_producer(&producer, shared->records, CAPACITY);
    sv_ring_attach_consumer(&consumer, shared->records, CAPACITY);
    sv_record record = {.first = 3, .count = 1, .operation = 1, .sequence = start}, taken;
    CHECK(sv_ring_try_push(&producer, &record) == SV_RING_YES);
    sv_slot *slot = &producer.slots[start % CAPACITY];
    for (size_t bit = 0; bit < 8 * offsetof(sv_slot, unused); bit++) {
        ((unsigned char *)slot)[bit / 8] ^= (unsigned char)(1u << bit % 8);
        CHECK(sv_ring_try_pop(&consumer, &taken) == SV_RING_CORRUPT);
        ((unsigned char *)slot)[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    CHECK(sv_ring_try_pop(&consumer, &taken) == SV_RING_YES);
    CHECK(memcmp(&record, &taken, sizeof record) == 0);
    /* A tail that runs ahead shows what was never written, or a record of an earlier lap. */
    atomic_store(&ring->tail, start + 2);
    CHECK(sv_ring_try_pop(&consumer, &taken) == SV_RING_CORRUPT);
    for (uint32_t i = 1; i < CAPACITY; i++) {
        CHECK(sv_ring_try_push(&producer, &record) == SV_RING_YES);
        CHECK(sv_ring_try_pop(&consumer, &taken) == SV_RING_YES);
    }
    atomic_store(&ring->tail, start + CAPACITY + 1);
    CHECK(sv_ring_try_pop(&consumer, &taken) == SV_RING_CORRUPT);
    munmap(shared, sizeof *shared);
}

static void test_messages(uint32_t start)
{
    struct shared *shared = shared_memory(sizeof *shared);
    sv_ring_shared *ring = (sv_ring_shared *)(void *)shared->messages;
    atomic_store(&ring->tail, start);
    atomic_store(&ring->head, start);
    sv_byte_ring producer, consumer;
    sv_byte_ring_attach_producer(&producer, shared->messages, BYTES);
    sv_byte_ring_attach_consumer(&consumer, shared->messages, BYTES);
    const void *payload;
    uint32_t bytes, tag;
    CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_NO);
    CHECK(sv_byte_ring_reserve(&producer, sv_message_max_bytes(BYTES) + 1, 0) == NULL); /* never fits */
    for (uint32_t size = 0; size <= sv_message_max_bytes(BYTES); size++) {
        char *room = sv_byte_ring_reserve(&producer, size, size);
        CHECK(room != NULL);
        memset(room, (int)size, size);
        CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_NO);
        sv_byte_ring_commit(&producer);
        CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_YES);
        CHECK(bytes == size && tag == size);
        for (uint32_t i = 0; i < bytes; i++)
            CHECK(((const unsigned char *)payload)[i] == (unsigned char)size);
        sv_byte_ring_release(&consumer);
    }
    /* Full: nothing is overwritten. */
    uint32_t sent = 0;
    char *room;
    while ((room = sv_byte_ring_reserve(&producer, 8, sent)) != NULL) {
        memset(room, (int)sent, 8);
        sv_byte_ring_commit(&producer);
        sent++;
    }
    CHECK(sent == BYTES / 16 || sent == BYTES / 16 - 1);
    /* Messages keep their room until they are released. */
    for (uint32_t i = 0; i < sent; i++) {
        CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_YES && tag == i);
        CHECK(i > 0 || sv_byte_ring_reserve(&producer, 8, 0) == NULL);
        sv_byte_ring_release(&consumer);
    }
    CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_NO);
    CHECK(atomic_load(&ring->head) == producer.position);
    /* Lengths that cannot be are refused. */
    const uint32_t lies[] = {BYTES, BYTES + 1, UINT32_MAX, UINT32_MAX - 7, 64};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        char *header = (char *)sv_byte_ring_reserve(&producer, 8, 0) - sizeof(sv_message_header);
        memcpy(header, &lies[i], sizeof lies[i]);
        sv_byte_ring_commit(&producer);
        CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_CORRUPT);
        const uint32_t truth = 8;
        memcpy(header, &truth, sizeof truth);
        CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_YES);
        sv_byte_ring_release(&consumer);
    }
    atomic_store(&ring->tail, producer.position + BYTES + 8);
    CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_CORRUPT);
    atomic_store(&ring->tail, producer.position);
    /* So is a filler that does not end where the buffer does. */
    char *header = (char *)sv_byte_ring_reserve(&producer, 8, 0) - sizeof(sv_message_header);
    const sv_message_header filler = {.bytes = 8, .tag = SV_FILLER};
    memcpy(header, &filler, sizeof filler);
    sv_byte_ring_commit(&producer);
    CHECK(header + 16 < producer.buffer + BYTES);
    CHECK(sv_byte_ring_peek(&consumer, &payload, &bytes, &tag) == SV_RING_CORRUPT);
    munmap(shared, sizeof *shared);
}

static void produce(void *argument)
{
    struct shared *shared = argument;
    sv_ring ring;
    sv_byte_ring messages;
    sv_ring_attach_producer(&ring, shared->records, CAPACITY);
    sv_byte_ring_attach_producer(&messages, shared->messages, BYTES);
    for (uint32_t i = 0; i < shared->rounds; i++) {
        uint32_t size = i * 2654435761u % sv_message_max_bytes(BYTES);
        char *room;
        while ((room = sv_byte_ring_reserve(&messages, size, i)) == NULL)
            sv_yield();
        memset(room, (int)i, size);
        sv_byte_ring_commit(&messages);
        sv_record record = {.first = i, .count = i * 3, .operation = ~i, .sequence = i + 1};
        while (sv_ring_try_push(&ring, &record) != SV_RING_YES)
            sv_yield();
    }
}

static void consume(struct shared *shared)
{
    sv_ring ring;
    sv_byte_ring messages;
    sv_ring_attach_consumer(&ring, shared->records, CAPACITY);
    sv_byte_ring_attach_consumer(&messages, shared->messages, BYTES);
    for (uint32_t i = 0; i < shared->rounds; i++) {
        sv_record record = {0};
        int found;
        while ((found = sv_ring_try_pop(&ring, &record)) == SV_RING_NO)
            sv_yield();
        CHECK(found == SV_RING_YES && record.first == i && record.count == i * 3);
        CHECK(record.operation == ~i && record.sequence == i + 1);
        const void *payload;
        uint32_t bytes, tag;
        /* The message was published before its record, so it must be there. */
        CHECK(sv_byte_ring_peek(&messages, &payload, &bytes, &tag) == SV_RING_YES);
        CHECK(tag == i && bytes == i * 2654435761u % sv_message_max_bytes(BYTES));
        for (uint32_t b = 0; b < bytes; b++)
            CHECK(((const unsigned char *)payload)[b] == (unsigned char)i);
        sv_byte_ring_release(&messages);
    }
}

static void test_stream(bool process, uint32_t start, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    shared->rounds = rounds;
    sv_ring_shared *rings[] = {(sv_ring_shared *)(void *)shared->records,
                               (sv_ring_shared *)(void *)shared->messages};
    for (int i = 0; i < 2; i++) {
        atomic_store(&rings[i]->tail, start & ~7u);
        atomic_store(&rings[i]->head, start & ~7u);
    }
    runner producer;
    run(&producer, process, produce, shared);
    consume(shared);
    join(&producer);
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 100000);
    start_deadline();
    test_records(0);
    test_records(UINT32_MAX - 20);
    test_damaged_records(0);
    test_damaged_records(UINT32_MAX);
    test_messages(0);
    test_messages((UINT32_MAX - 200) & ~7u);
    test_stream(false, UINT32_MAX - 1000, rounds);
    test_stream(true, (UINT32_C(1) << 31) - 1000, rounds);
    return 0;
}
