/* check.h — what the C tests share: checks, threads that end, and processes over one mapping. */
#ifndef SHMVEC_CHECK_H
#define SHMVEC_CHECK_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "platform.h"

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);         \
            abort();                                                                              \
        }                                                                                         \
    } while (0)

/* Every wait of a test has this deadline; past it the test fails instead of hanging. */
#define DEADLINE_S 60

static inline void start_deadline(void)
{
    alarm(DEADLINE_S); /* SIGALRM ends the process: the runner sees the signal */
}

static inline pthread_t start_thread(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, argument) == 0);
    return thread;
}

static inline void join_thread(pthread_t thread)
{
    CHECK(pthread_join(thread, NULL) == 0);
}

/* Zeroed memory that a fork shares. */
static inline void *shared_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static inline pid_t start_process(void (*body)(void *), void *argument)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        start_deadline(); /* alarms are not inherited */
        body(argument);
        _exit(0);
    }
    return child;
}

static inline void join_process(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Rounds of a stress test: argv[1], else a number that takes about a second. */
static inline uint32_t rounds_or(int argc, char **argv, uint32_t rounds)
{
    return argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : rounds;
}

#endif
