/* test_guard.c — of threads that enter at once one is inside, and sees what others did there. */
#include "guard.h"

#include "check.h"

#define NUM_THREADS 4

struct shared {
    sv_guard guard;
    pthread_barrier_t begin;
    uint32_t rounds;
    uint64_t inside; /* no atomic: what is guarded */
};

struct thread {
    struct shared *shared;
    uint64_t name, done, refused;
};

static void test_one(void)
{
    sv_guard guard = {0};
    CHECK(sv_guard_enter(&guard, 1) && !sv_guard_enter(&guard, 2));
    CHECK(!sv_guard_enter(&guard, 1));
    CHECK(sv_guard_is_mine(&guard, 1) && !sv_guard_is_mine(&guard, 2));
    sv_guard_leave(&guard);
    CHECK(sv_guard_enter(&guard, 2) && !sv_guard_enter(&guard, 1));
    sv_guard_leave(&guard);
    CHECK(!sv_guard_is_mine(&guard, 2) && sv_guard_enter(&guard, 1));
}

static void enter_and_leave(void *argument)
{
    struct thread *self = argument;
    struct shared *shared = self->shared;
    pthread_barrier_wait(&shared->begin);
    for (uint32_t round = 0; round < shared->rounds;) {
        if (!sv_guard_enter(&shared->guard, self->name)) {
            self->refused++;
            sv_yield();
            continue;
        }
        round++;
        shared->inside++;
        CHECK(!sv_guard_enter(&shared->guard, self->name));
        shared->inside++;
        self->done += 2;
        sv_guard_leave(&shared->guard);
    }
}

static void test_threads(uint32_t rounds)
{
    struct shared shared = {.rounds = rounds};
    struct thread threads[NUM_THREADS];
    runner runners[NUM_THREADS];
    uint64_t done = 0;
    CHECK(pthread_barrier_init(&shared.begin, NULL, NUM_THREADS) == 0);
    for (uint32_t i = 0; i < NUM_THREADS; i++) {
        threads[i] = (struct thread){.shared = &shared, .name = i + 1};
        run(&runners[i], false, enter_and_leave, &threads[i]);
    }
    for (uint32_t i = 0; i < NUM_THREADS; i++) {
        join(&runners[i]);
        done += threads[i].done;
    }
    pthread_barrier_destroy(&shared.begin);
    CHECK(shared.inside == done && done == (uint64_t)2 * NUM_THREADS * rounds);
}

int main(int argc, char **argv)
{
    start_deadline();
    test_one();
    test_threads(rounds_of(argc, argv, 1000000));
    return 0;
}
