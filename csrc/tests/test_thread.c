/* test_thread.c — a thread of ours takes no signal, and leaves its starter's mask as it was. */
#include "thread.h"

#include <signal.h>
#include <stdbool.h>
#include <unistd.h>

#include "check.h"

static bool deaf;

static void *listen_for_signals(void *unused)
{
    sigset_t blocked;
    (void)unused;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    deaf = sigismember(&blocked, SIGTERM) == 1 && sigismember(&blocked, SIGALRM) == 1
           && sigismember(&blocked, SIGCHLD) == 1;
    return NULL;
}

int main(void)
{
    sigset_t one, before, after;
    pthread_t thread;
    start_deadline();
    sigemptyset(&one);
    sigaddset(&one, SIGUSR2);
    pthread_sigmask(SIG_SETMASK, &one, &before);
    CHECK(sv_thread_start(&thread, listen_for_signals, NULL) == 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    CHECK(sigismember(&after, SIGUSR2) == 1 && sigismember(&after, SIGTERM) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(deaf);
    return 0;
}
