/* test_marks.c — rows that are written again are read by no borrower any more. */
#include "marks.h"

#include "check.h"

#define NUM_READERS 3
#define NUM_ROWS 3

struct shared {
    uint8_t marks[NUM_READERS * NUM_ROWS];
    _Atomic uint32_t reader; /* the number of the next one */
    _Atomic uint32_t round;  /* that is lent */
    uint32_t rounds;
    uint32_t shown[NUM_READERS * NUM_ROWS]; /* no atomics: what is guarded */
};

static void test_one(void)
{
    uint8_t marks[] = {0, 0, 0, 0};
    sv_marks_set(marks, 1, 2);
    CHECK(!sv_is_marked(marks, 0) && sv_is_marked(marks, 1) && sv_is_marked(marks, 2));
    sv_marks_clear(marks, 1, 1);
    CHECK(!sv_is_marked(marks, 1) && sv_is_marked(marks, 2) && !sv_is_marked(marks, 3));
}

/* Reads its rows of each round, in order, and gives them back. */
static void read_rows(void *argument)
{
    struct shared *shared = argument;
    uint32_t first = NUM_ROWS * atomic_fetch_add(&shared->reader, 1);
    for (uint32_t round = 1; round <= shared->rounds; round++) {
        /* acquire: pairs with the release of the round that is lent. */
        while (atomic_load_explicit(&shared->round, memory_order_acquire) < round)
            sv_yield();
        for (uint32_t row = first; row < first + NUM_ROWS; row++)
            CHECK(shared->shown[row] == round);
        sv_marks_clear(shared->marks, first, NUM_ROWS);
    }
}

static bool is_free(const struct shared *shared)
{
    for (uint32_t row = 0; row < NUM_READERS * NUM_ROWS; row++)
        if (sv_is_marked(shared->marks, row))
            return false;
    return true;
}

static void test_readers(uint32_t rounds)
{
    struct shared shared = {.rounds = rounds};
    runner readers[NUM_READERS];
    for (uint32_t i = 0; i < NUM_READERS; i++)
        run(&readers[i], false, read_rows, &shared);
    for (uint32_t round = 1; round <= rounds; round++) {
        while (!is_free(&shared))
            sv_yield();
        for (uint32_t row = 0; row < NUM_READERS * NUM_ROWS; row++)
            shared.shown[row] = round;
        sv_marks_set(shared.marks, 0, NUM_READERS * NUM_ROWS);
        /* release: what is lent is there. */
        atomic_store_explicit(&shared.round, round, memory_order_release);
    }
    for (uint32_t i = 0; i < NUM_READERS; i++)
        join(&readers[i]);
}

int main(int argc, char **argv)
{
    start_deadline();
    test_one();
    test_readers(rounds_of(argc, argv, 30000));
    return 0;
}
