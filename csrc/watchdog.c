/* watchdog.c — see watchdog.h. */
#include "watchdog.h"

#include <errno.h>
#include <limits.h>
#include <linux/close_range.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "family.h"
#include "thread.h"

static struct {
    pid_t owner; /* the process that has started the thread, which a forked child does not have */
    pthread_t thread;
    pid_t thread_id;
    int parent;
    uint64_t mark;
} watchdog;

/* Whether the kernel says that a descriptor is a pidfd; true where the kernel does not say. */
static bool is_pidfd(int descriptor)
{
    return syscall(SYS_pidfd_send_signal, descriptor, 0, NULL, 0) == 0 || errno != EBADF;
}

/* Gives this thread a descriptor table of its own, with only this descriptor. */
static void isolate_descriptor(unsigned descriptor)
{
    syscall(SYS_close_range, descriptor + 1, UINT_MAX, CLOSE_RANGE_UNSHARE);
    if (descriptor > 0)
        syscall(SYS_close_range, 0, descriptor - 1, CLOSE_RANGE_UNSHARE);
}

static void *watch(void *unused)
{
    struct pollfd parent = {.fd = watchdog.parent, .events = POLLIN};
    (void)unused;
    watchdog.thread_id = (pid_t)syscall(SYS_gettid);
    isolate_descriptor((unsigned)parent.fd);
    while (poll(&parent, 1, -1) < 0) /* where a stop cancels it */
        ;
    if (parent.revents & POLLIN && is_pidfd(parent.fd)) {
        sv_family_kill(watchdog.mark);
        kill(getpgrp() == getpid() ? 0 : getpid(), SIGKILL);
    }
    return NULL;
}

int sv_watchdog_start(int parent_pidfd, uint64_t mark)
{
    if (watchdog.owner == getpid())
        return EBUSY;
    if (!is_pidfd(parent_pidfd))
        return EBADF;
    watchdog.parent = parent_pidfd;
    watchdog.mark = mark;
    int error = sv_thread_start(&watchdog.thread, watch, NULL);
    if (error == 0)
        watchdog.owner = getpid();
    return error;
}

void sv_watchdog_stop(void)
{
    if (watchdog.owner != getpid())
        return;
    pthread_cancel(watchdog.thread);
    pthread_join(watchdog.thread, NULL);
    /* The kernel counts it for a moment longer. */
    while (syscall(SYS_tgkill, watchdog.owner, watchdog.thread_id, 0) == 0)
        sched_yield();
    watchdog.owner = 0;
}
