/* test_parallel.c — each turn of a loop is taken once, whoever takes it, and none after its end. */
#include "parallel.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { TURNS = 1000 };

typedef struct {
    unsigned char taken[TURNS]; /* not atomic: two that take a turn are a race */
    size_t count;
} loop;

static void take(void *argument, size_t index)
{
    loop *of = argument;
    CHECK(index < of->count);
    of->taken[index]++;
}

static void test_loops(uint32_t threads, uint32_t rounds)
{
    static loop loops[2]; /* a late thread would write to the one before */
    sv_parallel *parallel = sv_parallel_new(threads);
    CHECK(parallel != NULL);
    sv_parallel_finish(parallel); /* there is none */
    for (uint32_t round = 0; round < rounds; round++) {
        loop *now = &loops[round % 2];
        memset(now, 0, sizeof *now);
        now->count = round % 7 == 0 ? 0 : round % TURNS;
        sv_parallel_begin(parallel, take, now, now->count);
        sv_parallel_finish(parallel);
        for (size_t i = 0; i < TURNS; i++)
            CHECK(now->taken[i] == (i < now->count));
        memset(now, 0, sizeof *now); /* as the caller does: its results are its own now */
    }
    sv_parallel_free(parallel);
}

static void test_ended_within_a_loop(void)
{
    static loop last;
    sv_parallel *parallel = sv_parallel_new(2);
    last.count = TURNS;
    sv_parallel_begin(parallel, take, &last, TURNS);
    sv_parallel_free(parallel);
    for (size_t i = 0; i < TURNS; i++)
        CHECK(last.taken[i] == 1);
}

static void test_a_child_frees_what_it_has_inherited(void)
{
    sv_parallel *parallel = sv_parallel_new(2);
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        sv_parallel_free(parallel);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    sv_parallel_free(parallel);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 20000);
    start_deadline();
    test_loops(0, 200);
    test_loops(1, rounds);
    test_loops(3, rounds);
    test_ended_within_a_loop();
    test_a_child_frees_what_it_has_inherited();
    sv_parallel_free(NULL);
    return 0;
}
