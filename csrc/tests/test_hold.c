/* test_hold.c — what is written again nobody reads any more, whoever was done with it last. */
#include "hold.h"

#include "check.h"

#define NUM_READERS 2
#define NUM_ROWS 3

struct shared {
    sv_hold hold;
    uint8_t marks[NUM_ROWS];
    _Atomic uint32_t round; /* that is handed out */
    uint32_t rounds;
    uint32_t held, shown[NUM_ROWS]; /* no atomics: what is guarded */
};

static void test_one(void)
{
    sv_hold hold = {0};
    uint8_t marks[] = {0, 0, 0, 0};
    CHECK(sv_hold_is_free(&hold));
    sv_hold_take(&hold);
    sv_hold_take(&hold);
    CHECK(!sv_hold_drop(&hold) && !sv_hold_is_free(&hold));
    CHECK(sv_hold_drop(&hold) && sv_hold_is_free(&hold));
    sv_marks_set(marks, 1, 2);
    CHECK(!sv_is_marked(marks, 0) && sv_is_marked(marks, 1) && sv_is_marked(marks, 2));
    sv_marks_clear(marks, 1, 1);
    CHECK(!sv_is_marked(marks, 1) && sv_is_marked(marks, 2) && !sv_is_marked(marks, 3));
}

/* Looks at what is handed out, in order, and is done with it. */
static void look(void *argument)
{
    struct shared *shared = argument;
    for (uint32_t round = 1; round <= shared->rounds; round++) {
        /* acquire: pairs with the release of the round that is handed out. */
        while (atomic_load_explicit(&shared->round, memory_order_acquire) < round)
            sv_yield();
        CHECK(shared->held == round);
        sv_hold_drop(&shared->hold);
    }
}

static void look_at_rows(void *argument)
{
    struct shared *shared = argument;
    for (uint32_t round = 1; round <= shared->rounds; round++) {
        /* acquire: as in look. */
        while (atomic_load_explicit(&shared->round, memory_order_acquire) < round)
            sv_yield();
        for (uint32_t row = 0; row < NUM_ROWS; row++)
            CHECK(shared->shown[row] == round);
        sv_marks_clear(shared->marks, 0, NUM_ROWS);
    }
}

static bool is_free(const struct shared *shared)
{
    for (uint32_t row = 0; row < NUM_ROWS; row++)
        if (sv_is_marked(shared->marks, row))
            return false;
    return sv_hold_is_free(&shared->hold);
}

static void test_readers(uint32_t rounds)
{
    struct shared shared = {.rounds = rounds};
    runner readers[NUM_READERS + 1];
    for (uint32_t i = 0; i <= NUM_READERS; i++)
        run(&readers[i], false, i < NUM_READERS ? look : look_at_rows, &shared);
    for (uint32_t round = 1; round <= rounds; round++) {
        while (!is_free(&shared))
            sv_yield();
        shared.held = round;
        for (uint32_t row = 0; row < NUM_ROWS; row++)
            shared.shown[row] = round;
        for (uint32_t i = 0; i < NUM_READERS; i++)
            sv_hold_take(&shared.hold);
        sv_marks_set(shared.marks, 0, NUM_ROWS);
        /* release: what is handed out is there. */
        atomic_store_explicit(&shared.round, round, memory_order_release);
    }
    for (uint32_t i = 0; i <= NUM_READERS; i++)
        join(&readers[i]);
}

int main(int argc, char **argv)
{
    start_deadline();
    test_one();
    test_readers(rounds_or(argc, argv, 30000));
    return 0;
}
