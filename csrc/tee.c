/* tee.c — see tee.h. */
#include "tee.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "platform.h"
#include "thread.h"

#define ROUNDS 8                   /* reads of one pipe before the others' turn */
#define STOP_NS SV_NS_PER_S        /* for the thread to end before a fork */
#define NS_PER_MS INT64_C(1000000)

/* What a descriptor meant when it was opened. */
struct file {
    dev_t device;
    ino_t number;
};

enum kind { PLAIN, SOCKET, BLOCKING };

struct sv_tee {
    sv_tee *next;
    bool listed;  /* the thread has it */
    bool kept;    /* who has opened it has it */
    int source;   /* -1: there is no writer any more */
    int target;   /* -1: what comes is dropped */
    enum kind kind; /* of target */
    struct file source_is, target_is;
    bool polled, readable; /* source, in the thread's last poll */
    bool blocked;          /* target takes nothing at the moment */
    bool guarded;          /* another one is in the middle of a line */
    bool midline;          /* the last byte passed on ended no line */
    int64_t since;         /* when the oldest byte came that is no whole line yet */
    uint64_t taken, passed; /* bytes so far */
    uint64_t hurry;         /* up to here nothing is held back */
    size_t begin, end;      /* what of held waits */
    char last[SV_TEE_LAST];
    char held[SV_TEE_HELD];
};

/* Of one process.  All of it and of every tee is guarded by the lock, which the thread gives up for
 * its poll alone; the thread alone closes descriptors and takes tees from the list. */
static struct {
    pid_t owner; /* a fork inherits this, not the thread */
    pthread_mutex_t lock;
    pthread_cond_t moved; /* something was passed on, or the thread has ended */
    sv_tee *first;
    size_t count;
    unsigned pauses;
    bool running, stopping;
    pid_t thread_id;
    int alarm; /* an eventfd that ends the thread's poll; -1: none */
    struct file alarm_is;
} tees = {.alarm = -1};

static void set_up(void)
{
    pthread_condattr_t monotonic;
    tees.first = NULL;
    tees.count = 0;
    tees.pauses = 0;
    tees.running = tees.stopping = false;
    tees.thread_id = 0;
    tees.alarm = -1;
    pthread_mutex_init(&tees.lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&tees.moved, &monotonic);
    pthread_condattr_destroy(&monotonic);
    tees.owner = getpid();
}

static bool is_here(void)
{
    return tees.owner == getpid();
}

/* Waits for `moved`; false: the deadline has passed. */
static bool wait_until(int64_t deadline)
{
    struct timespec until = {.tv_sec = (time_t)(deadline / SV_NS_PER_S),
                             .tv_nsec = (long)(deadline % SV_NS_PER_S)};
    return pthread_cond_timedwait(&tees.moved, &tees.lock, &until) != ETIMEDOUT;
}

/* ---- files ----------------------------------------------------------------------------------- */

static bool look_at(int descriptor, struct file *file, mode_t *mode)
{
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) != 0)
        return false;
    *file = (struct file){status.st_dev, status.st_ino};
    *mode = status.st_mode;
    return true;
}

static bool is_still(int descriptor, struct file file)
{
    struct file now;
    mode_t mode;
    return look_at(descriptor, &now, &mode) && now.device == file.device
           && now.number == file.number;
}

static void close_if_still(int descriptor, struct file file)
{
    if (is_still(descriptor, file))
        close(descriptor);
}

static bool has_alarm(void)
{
    return is_still(tees.alarm, tees.alarm_is);
}

/* Returns 0, or an errno. */
static int open_alarm(void)
{
    mode_t mode;
    if (has_alarm())
        return 0;
    tees.alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return look_at(tees.alarm, &tees.alarm_is, &mode) ? 0 : errno;
}

static void close_alarm(void)
{
    close_if_still(tees.alarm, tees.alarm_is);
    tees.alarm = -1;
}

static void wake(void)
{
    const uint64_t one = 1;
    ssize_t ignored = has_alarm() ? write(tees.alarm, &one, sizeof one) : 0; /* full: it is awake */
    (void)ignored;
}

/* A descriptor of ours for what the caller's means. */
static int open_target(sv_tee *tee, int target)
{
    mode_t mode;
    int flags = fcntl(target, F_GETFL);
    tee->target = -1;
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY
        || !look_at(target, &tee->target_is, &mode))
        return 0;
    if (S_ISFIFO(mode) || S_ISCHR(mode)) {
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", target);
        tee->kind = PLAIN;
        tee->target = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
        if (tee->target >= 0 && is_still(tee->target, tee->target_is))
            return 0;
        if (tee->target >= 0) /* /dev/tty and the like: another one each time */
            close(tee->target);
    }
    tee->kind = S_ISREG(mode) ? PLAIN : S_ISSOCK(mode) ? SOCKET : BLOCKING;
    tee->target = fcntl(target, F_DUPFD_CLOEXEC, 3);
    return tee->target < 0 ? errno : 0;
}

static int open_pipe(sv_tee *tee, int *end)
{
    int ends[2];
    mode_t mode;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return errno;
    tee->source = ends[0];
    *end = ends[1];
    fcntl(tee->source, F_SETFL, O_NONBLOCK); /* of this end's description alone */
    look_at(tee->source, &tee->source_is, &mode);
    return 0;
}

/* ---- one tee --------------------------------------------------------------------------------- */

static void remember(sv_tee *tee, const char *bytes, size_t count)
{
    for (size_t done = 0; done < count;) {
        size_t at = (size_t)((tee->taken + done) % SV_TEE_LAST);
        size_t part = count - done < SV_TEE_LAST - at ? count - done : SV_TEE_LAST - at;
        memcpy(tee->last + at, bytes + done, part);
        done += part;
    }
    tee->taken += count;
}

/* Takes what is in the pipe.  The thread alone, which may be polling it, closes it. */
static void take_in(sv_tee *tee, int64_t now, bool is_thread)
{
    if (tee->source < 0)
        return;
    if (!is_still(tee->source, tee->source_is)) {
        tee->source = -1; /* somebody has closed it */
        return;
    }
    for (int round = 0; round < ROUNDS; round++) {
        if (tee->begin > 0 && tee->end == SV_TEE_HELD) {
            memmove(tee->held, tee->held + tee->begin, tee->end - tee->begin);
            tee->end -= tee->begin;
            tee->begin = 0;
        }
        size_t room = SV_TEE_HELD - tee->end;
        if (room == 0)
            return;
        ssize_t count = read(tee->source, tee->held + tee->end, room);
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (count <= 0) { /* the last writer is gone */
            if (!is_thread)
                return;
            close(tee->source);
            tee->source = -1;
            return;
        }
        if (tee->begin == tee->end)
            tee->since = now;
        remember(tee, tee->held + tee->end, (size_t)count);
        tee->end += (size_t)count;
    }
}

/* How much of what is held may be passed on now, in one write. */
static size_t ready(const sv_tee *tee, int64_t now)
{
    const char *from = tee->held + tee->begin;
    size_t size = tee->end - tee->begin;
    /* A pipe takes so much whole, or not at all. */
    size_t piece = size < PIPE_BUF ? size : PIPE_BUF;
    const char *ending = memrchr(from, '\n', piece);
    if (ending == NULL && size > piece)
        ending = memchr(from + piece, '\n', size - piece);
    if (ending == NULL)
        ending = memrchr(from, '\r', piece); /* a bar that shows progress */
    if (ending != NULL)
        return (size_t)(ending - from) + 1;
    bool enough = tee->source < 0 || tee->passed < tee->hurry || size == SV_TEE_HELD
                  || now - tee->since >= SV_TEE_HOLD_NS;
    return enough ? size : 0;
}

static bool is_in_midline(const sv_tee *tee)
{
    return tee->midline && tee->begin < tee->end && tee->target >= 0;
}

static bool is_guarded(const sv_tee *tee)
{
    for (const sv_tee *other = tees.first; other != NULL; other = other->next)
        if (other != tee && is_in_midline(other)
            && other->target_is.device == tee->target_is.device
            && other->target_is.number == tee->target_is.number)
            return true;
    return false;
}

static ssize_t put(const sv_tee *tee, size_t size)
{
    const char *bytes = tee->held + tee->begin;
    if (tee->kind == SOCKET)
        return send(tee->target, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (tee->kind == BLOCKING) { /* as far as can be seen it takes a little */
        struct pollfd target = {.fd = tee->target, .events = POLLOUT};
        if (poll(&target, 1, 0) == 0) {
            errno = EAGAIN;
            return -1;
        }
        size = size < PIPE_BUF ? size : PIPE_BUF;
    }
    return write(tee->target, bytes, size);
}

static void pass_on(sv_tee *tee, int64_t now)
{
    tee->blocked = tee->guarded = false;
    while (tee->begin < tee->end) {
        if (tee->target >= 0 && !is_still(tee->target, tee->target_is))
            tee->target = -1;
        if (tee->target < 0) {
            tee->passed += tee->end - tee->begin;
            tee->begin = tee->end;
            break;
        }
        size_t size = ready(tee, now);
        if (size == 0)
            break;
        tee->guarded = is_guarded(tee);
        if (tee->guarded)
            break;
        ssize_t count = put(tee, size);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno == EAGAIN) {
            tee->blocked = true;
            break;
        }
        if (count <= 0) { /* nobody reads it any more, or the disk is full */
            tee->passed += tee->end - tee->begin;
            tee->begin = tee->end;
            break;
        }
        tee->begin += (size_t)count;
        tee->passed += (size_t)count;
        tee->midline = tee->held[tee->begin - 1] != '\n';
        tee->since = now;
    }
    if (tee->begin == tee->end)
        tee->begin = tee->end = 0;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Fills in what to wait for; returns how many, and in *until when to look without a reason. */
static nfds_t what_to_wait_for(struct pollfd *polled, int64_t *until)
{
    nfds_t count = 0;
    polled[count++] = (struct pollfd){.fd = tees.alarm, .events = POLLIN};
    *until = INT64_MAX;
    for (sv_tee *tee = tees.first; tee != NULL; tee = tee->next) {
        size_t waiting = tee->end - tee->begin;
        tee->polled = tee->source >= 0 && waiting < SV_TEE_HELD;
        if (tee->polled)
            polled[count++] = (struct pollfd){.fd = tee->source, .events = POLLIN};
        if (tee->blocked)
            polled[count++] = (struct pollfd){.fd = tee->target, .events = POLLOUT};
        else if (tee->guarded && !is_guarded(tee))
            *until = 0; /* the other's line has come to its end since: nobody else would tell */
        else if (waiting > 0 && !tee->guarded && tee->since + SV_TEE_HOLD_NS < *until)
            *until = tee->since + SV_TEE_HOLD_NS;
    }
    return count;
}

static void sleep_in_poll(struct pollfd *polled, nfds_t count, int64_t until)
{
    int timeout = -1;
    if (until != INT64_MAX) {
        int64_t left = until - sv_now_ns();
        timeout = left <= 0 ? 0 : (int)(left / NS_PER_MS) + 1;
    }
    pthread_mutex_unlock(&tees.lock);
    int awake = poll(polled, count, timeout);
    pthread_mutex_lock(&tees.lock);
    nfds_t at = 1; /* those that are new meanwhile were not asked for */
    for (sv_tee *tee = tees.first; tee != NULL; tee = tee->next) {
        tee->readable = tee->polled && awake > 0 && polled[at].revents != 0;
        at += tee->polled + tee->blocked;
        tee->polled = false;
    }
    uint64_t ignored;
    while (has_alarm() && read(tees.alarm, &ignored, sizeof ignored) < 0 && errno == EINTR)
        ;
}

static void work(void)
{
    int64_t now = sv_now_ns();
    for (sv_tee *tee = tees.first; tee != NULL; tee = tee->next)
        if (tee->readable)
            take_in(tee, now, true);
    for (sv_tee *tee = tees.first; tee != NULL; tee = tee->next)
        if (is_in_midline(tee))
            pass_on(tee, now);
    for (sv_tee *tee = tees.first; tee != NULL; tee = tee->next)
        pass_on(tee, now);
    for (sv_tee **at = &tees.first; *at != NULL;) {
        sv_tee *tee = *at;
        if (tee->source >= 0 || tee->begin < tee->end) {
            at = &tee->next;
            continue;
        }
        *at = tee->next;
        tees.count--;
        close_if_still(tee->target, tee->target_is);
        tee->target = -1;
        tee->listed = false;
        if (!tee->kept)
            free(tee);
    }
    pthread_cond_broadcast(&tees.moved);
}

static void *copy(void *unused)
{
    struct pollfd *polled = NULL;
    size_t room = 0;
    (void)unused;
    pthread_mutex_lock(&tees.lock);
    tees.thread_id = (pid_t)syscall(SYS_gettid);
    while (!tees.stopping && tees.first != NULL) {
        size_t needed = 1 + 2 * tees.count;
        if (needed > room) {
            struct pollfd *larger = realloc(polled, needed * sizeof *polled);
            if (larger == NULL)
                break; /* the next tee starts another thread */
            polled = larger;
            room = needed;
        }
        (void)open_alarm(); /* somebody may have closed it */
        int64_t until;
        nfds_t count = what_to_wait_for(polled, &until);
        sleep_in_poll(polled, count, until);
        work();
    }
    free(polled);
    if (tees.first == NULL)
        close_alarm();
    tees.running = false;
    pthread_cond_broadcast(&tees.moved);
    pthread_mutex_unlock(&tees.lock);
    return NULL;
}

static int start_copying(void)
{
    pthread_t thread;
    if (tees.running || tees.pauses > 0 || tees.first == NULL)
        return 0;
    int error = open_alarm();
    if (error == 0)
        error = sv_thread_start(&thread, copy);
    if (error == 0)
        pthread_detach(thread);
    tees.running = error == 0;
    return error;
}

/* ---- what is offered ------------------------------------------------------------------------- */

int sv_tee_open(int target, sv_tee **opened, int *end)
{
    if (tees.owner == 0)
        set_up();
    else if (!is_here())
        sv_tee_forget();
    sv_tee *tee = malloc(sizeof *tee); /* its pages come with their use */
    if (tee == NULL)
        return ENOMEM;
    memset(tee, 0, offsetof(sv_tee, last));
    int error = open_pipe(tee, end);
    if (error != 0) {
        free(tee);
        return error;
    }
    error = open_target(tee, target);
    pthread_mutex_lock(&tees.lock);
    if (error == 0) {
        tee->kept = tee->listed = true;
        tee->next = tees.first;
        tees.first = tee;
        tees.count++;
        error = start_copying();
        if (error != 0) {
            tees.first = tee->next;
            tees.count--;
        } else if (tees.running)
            wake();
    }
    pthread_mutex_unlock(&tees.lock);
    if (error != 0) {
        if (tee->target >= 0)
            close(tee->target);
        close(tee->source);
        close(*end);
        free(tee);
        return error;
    }
    *opened = tee;
    return 0;
}

size_t sv_tee_last(sv_tee *tee, char *bytes, size_t most)
{
    if (!is_here())
        return 0;
    pthread_mutex_lock(&tees.lock);
    take_in(tee, sv_now_ns(), false);
    if (tees.running)
        wake();
    size_t there = tee->taken < SV_TEE_LAST ? (size_t)tee->taken : SV_TEE_LAST;
    size_t count = there < most ? there : most;
    for (size_t i = 0; i < count; i++)
        bytes[i] = tee->last[(tee->taken - count + i) % SV_TEE_LAST];
    pthread_mutex_unlock(&tees.lock);
    return count;
}

/* From now on nothing is held back of what is there. */
static uint64_t hurry(sv_tee *tee)
{
    int waiting = 0;
    if (tee->source >= 0 && is_still(tee->source, tee->source_is)
        && ioctl(tee->source, FIONREAD, &waiting) != 0)
        waiting = 0;
    tee->hurry = tee->taken + (uint64_t)waiting;
    if (tees.running)
        wake();
    return tee->hurry;
}

bool sv_tee_settle(sv_tee *tee, int64_t patience_ns)
{
    if (!is_here())
        return false;
    pthread_mutex_lock(&tees.lock);
    uint64_t goal = hurry(tee), before = tee->passed;
    int64_t deadline = sv_now_ns() + patience_ns;
    while (tee->listed && tee->passed < goal && wait_until(deadline))
        if (tee->passed != before) {
            before = tee->passed;
            deadline = sv_now_ns() + patience_ns;
        }
    bool done = !tee->listed || tee->passed >= goal;
    pthread_mutex_unlock(&tees.lock);
    return done;
}

/* Whether nothing is left to do but for the thread to close it, and itself if it was the last. */
static bool is_at_its_end(const sv_tee *tee)
{
    struct pollfd source = {.fd = tee->source, .events = POLLIN};
    if (!tee->listed)
        return tees.first == NULL && tees.running;
    if (!tees.running || tee->begin < tee->end)
        return false;
    return tee->source < 0 || (poll(&source, 1, 0) == 1 && source.revents == POLLHUP);
}

void sv_tee_close(sv_tee *tee)
{
    bool mine = is_here();
    if (mine) {
        pthread_mutex_lock(&tees.lock);
        hurry(tee);
        int64_t deadline = sv_now_ns() + STOP_NS;
        while (is_at_its_end(tee) && wait_until(deadline))
            ;
        tee->kept = false;
    }
    bool gone = mine && !tee->listed;
    if (mine)
        pthread_mutex_unlock(&tees.lock);
    if (gone)
        free(tee);
}

void sv_tee_pause(void)
{
    if (!is_here())
        return;
    pthread_mutex_lock(&tees.lock);
    int64_t deadline = sv_now_ns() + STOP_NS;
    tees.pauses++;
    tees.stopping = true;
    if (tees.running)
        wake();
    while (tees.running && wait_until(deadline))
        ;
    pid_t thread = tees.running ? 0 : tees.thread_id;
    tees.thread_id = tees.running ? tees.thread_id : 0;
    pthread_mutex_unlock(&tees.lock);
    /* The kernel counts it for a moment longer: until it has run once more, where cores are few. */
    deadline = sv_now_ns() + STOP_NS;
    while (thread != 0 && syscall(SYS_tgkill, tees.owner, thread, 0) == 0
           && sv_now_ns() < deadline)
        sv_yield();
}

void sv_tee_resume(void)
{
    if (!is_here())
        return;
    pthread_mutex_lock(&tees.lock);
    if (tees.pauses > 0 && --tees.pauses == 0) {
        tees.stopping = false;
        start_copying();
    }
    pthread_mutex_unlock(&tees.lock);
}

void sv_tee_forget(void)
{
    if (tees.owner == 0 || is_here())
        return;
    for (sv_tee *tee = tees.first, *next; tee != NULL; tee = next) {
        next = tee->next;
        close_if_still(tee->source, tee->source_is);
        close_if_still(tee->target, tee->target_is);
        tee->source = tee->target = -1;
        tee->listed = false;
        if (!tee->kept)
            free(tee);
    }
    close_alarm();
    set_up();
}
