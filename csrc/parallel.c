/* parallel.c — threads that share the turns of one loop at a time. */
#include "parallel.h"

#include "thread.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

struct sv_parallel {
    pthread_mutex_t lock;
    pthread_cond_t loop_begun;
    pthread_cond_t all_left;
    /* Under the lock. */
    sv_turn turn; /* NULL: there is no loop */
    void *argument;
    size_t count;
    uint64_t loop;   /* the number of the loop; a thread enters each loop once */
    uint32_t inside; /* threads that take turns, including callers of sv_parallel_finish */
    bool ending;
    /* relaxed: it only hands out numbers, and the lock orders what turns read and write. */
    atomic_size_t next;
    pid_t owner;
    uint32_t threads;
    pthread_t thread[];
};

/* Takes turns until all are taken.  The caller holds the lock, which is released meanwhile. */
static void take_turns(sv_parallel *parallel)
{
    sv_turn turn = parallel->turn;
    void *argument = parallel->argument;
    size_t count = parallel->count;
    parallel->inside++;
    pthread_mutex_unlock(&parallel->lock);
    for (;;) {
        size_t index = atomic_fetch_add_explicit(&parallel->next, 1, memory_order_relaxed);
        if (index >= count)
            break;
        turn(argument, index);
    }
    pthread_mutex_lock(&parallel->lock);
    if (--parallel->inside == 0)
        pthread_cond_broadcast(&parallel->all_left);
}

static void *serve(void *argument)
{
    sv_parallel *parallel = argument;
    uint64_t last = 0;
    pthread_mutex_lock(&parallel->lock);
    for (;;) {
        while (!parallel->ending && (parallel->turn == NULL || parallel->loop == last))
            pthread_cond_wait(&parallel->loop_begun, &parallel->lock);
        if (parallel->ending)
            break;
        last = parallel->loop;
        take_turns(parallel);
    }
    pthread_mutex_unlock(&parallel->lock);
    return NULL;
}

sv_parallel *sv_parallel_new(uint32_t threads)
{
    sv_parallel *parallel = calloc(1, sizeof *parallel + threads * sizeof(pthread_t));
    if (parallel == NULL)
        return NULL;
    pthread_mutex_init(&parallel->lock, NULL);
    pthread_cond_init(&parallel->loop_begun, NULL);
    pthread_cond_init(&parallel->all_left, NULL);
    parallel->owner = getpid();
    for (; parallel->threads < threads; parallel->threads++)
        if (sv_thread_start(&parallel->thread[parallel->threads], serve, parallel) != 0) {
            sv_parallel_free(parallel);
            return NULL;
        }
    return parallel;
}

void sv_parallel_begin(sv_parallel *parallel, sv_turn turn, void *argument, size_t count)
{
    pthread_mutex_lock(&parallel->lock);
    parallel->turn = turn;
    parallel->argument = argument;
    parallel->count = count;
    parallel->loop++;
    atomic_store_explicit(&parallel->next, 0, memory_order_relaxed);
    if (parallel->threads > 0)
        pthread_cond_broadcast(&parallel->loop_begun);
    pthread_mutex_unlock(&parallel->lock);
}

void sv_parallel_finish(sv_parallel *parallel)
{
    pthread_mutex_lock(&parallel->lock);
    if (parallel->turn != NULL) {
        take_turns(parallel);
        parallel->turn = NULL; /* all turns are taken: threads that wake up now stay outside */
    }
    while (parallel->inside > 0)
        pthread_cond_wait(&parallel->all_left, &parallel->lock);
    pthread_mutex_unlock(&parallel->lock);
}

void sv_parallel_free(sv_parallel *parallel)
{
    if (parallel == NULL)
        return;
    if (parallel->owner == getpid()) { /* else the threads, and maybe the lock, are the parent's */
        sv_parallel_finish(parallel);
        pthread_mutex_lock(&parallel->lock);
        parallel->ending = true;
        pthread_cond_broadcast(&parallel->loop_begun);
        pthread_mutex_unlock(&parallel->lock);
        for (uint32_t i = 0; i < parallel->threads; i++)
            pthread_join(parallel->thread[i], NULL);
        pthread_cond_destroy(&parallel->all_left);
        pthread_cond_destroy(&parallel->loop_begun);
        pthread_mutex_destroy(&parallel->lock);
    }
    free(parallel);
}
