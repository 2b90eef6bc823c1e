/* check.h — what the C tests share: checks, a deadline, and threads and processes over one mapping. */
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

/* Zeroed memory that a fork shares. */
static inline void *shared_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

/* Somebody who runs beside the test: a thread (which sanitizers watch) or a process. */
typedef struct {
    void (*body)(void *);
    void *argument;
    bool is_process;
    pthread_t thread;
    pid_t process;
} runner;

static inline void *runner_thread(void *argument)
{
    runner *self = argument;
    self->body(self->argument);
    return NULL;
}

static inline void run(runner *self, bool as_process, void (*body)(void *), void *argument)
{
    *self = (runner){.body = body, .argument = argument, .is_process = as_process};
    if (!as_process) {
        CHECK(pthread_create(&self->thread, NULL, runner_thread, self) == 0);
        return;
    }
    self->process = fork();
    CHECK(self->process >= 0);
    if (self->process == 0) {
        start_deadline(); /* alarms are not inherited */
        body(argument);
        _exit(0);
    }
}

static inline void join(runner *self)
{
    if (!self->is_process) {
        CHECK(pthread_join(self->thread, NULL) == 0);
        return;
    }
    int status;
    CHECK(waitpid(self->process, &status, 0) == self->process);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Rounds of a stress test, all of which take about a second: of argv[1] rounds one. */
static inline uint32_t rounds_of(int argc, char **argv, uint32_t rounds)
{
    return argc > 1 ? rounds / (uint32_t)strtoul(argv[1], NULL, 10) : rounds;
}

#endif
