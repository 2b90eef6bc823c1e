"""The boundary to csrc: every C name that Cython uses is declared here, and nowhere else."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmvec._core.counters cimport sv_counts


cdef extern from "platform.h" nogil:
    int64_t sv_now_ns()
    uint64_t sv_ticks()
    const uint32_t SV_EVERYONE


cdef extern from "affinity.h" nogil:
    ctypedef struct sv_affinity:
        int count
    void sv_affinity_narrow(sv_affinity *saved, uint32_t index)
    void sv_affinity_widen(const sv_affinity *saved)


cdef extern from "pages.h" nogil:
    ctypedef struct sv_area:
        pass
    bint sv_area_add(sv_area *area, void *start, size_t bytes, const uint8_t *marks,
                     size_t num_rows)
    void sv_area_remove(sv_area *area)
    bint sv_area_is_common(const sv_area *area)


cdef extern from "guard.h" nogil:
    ctypedef struct sv_guard:
        pass
    bint sv_guard_enter(sv_guard *guard, uint64_t me)
    bint sv_guard_is_mine(const sv_guard *guard, uint64_t me)
    void sv_guard_leave(sv_guard *guard)


cdef extern from "marks.h" nogil:
    void sv_marks_set(uint8_t *marks, size_t first, size_t count)
    void sv_marks_clear(uint8_t *marks, size_t first, size_t count)
    bint sv_is_marked(const uint8_t *marks, size_t row)


cdef extern from "bell.h" nogil:
    ctypedef struct sv_bell:
        pass
    bint sv_bell_ring(sv_bell *bell, uint32_t mask)
    uint32_t sv_bell_mask(uint32_t index)
    void sv_bell_doze(sv_bell *bell)
    void sv_bell_awake(sv_bell *bell)
    bint sv_bell_has_dozers(sv_bell *bell)


cdef extern from "completion.h" nogil:
    ctypedef struct sv_completion:
        pass
    void sv_completion_issue(sv_completion *completion, uint32_t count)
    uint32_t sv_completion_left(sv_completion *completion)
    uint32_t sv_completion_done(sv_completion *completion)
    bint sv_completion_reached(uint32_t done, uint32_t target)
    bint sv_completion_check(sv_completion *completion, uint32_t target)
    bint sv_completion_add(sv_completion *completion)
    bint sv_completion_arm(sv_completion *completion, uint32_t target)


cdef extern from "counters.h" nogil:
    ctypedef uint64_t sv_counter "_Atomic uint64_t"

    ctypedef struct sv_activity:
        pass
    ctypedef struct sv_counters:
        sv_activity activity
        sv_counter overlaps
        sv_counter requests
        sv_counter steps
        sv_counter process
        sv_counter first_env
        sv_counter num_envs
    ctypedef struct sv_counter_line:
        const char *name
        const char *heading
        const char *help
    const sv_counter_line *sv_wait_lines  # each table ends with a line that has no name
    const sv_counter_line *sv_work_lines
    const sv_counter_line *sv_on_cores_lines
    sv_counter *sv_counter_at(void *structure, const sv_counter_line *line)
    void sv_counters_publish(sv_counters *counters, const sv_counts *counts)
    enum sv_doing:
        SV_IN_STEP
        SV_IN_RESET
        SV_IN_CALL
        SV_IN_SEVERAL
    uint64_t sv_busy(uint32_t env, sv_doing doing)
    uint64_t sv_busy_env(uint64_t busy)
    sv_doing sv_busy_doing(uint64_t busy)
    const char *sv_busy_name(uint64_t busy)
    void sv_busy_begin(sv_activity *activity, uint64_t busy, int64_t now)
    uint64_t sv_busy_for(const sv_activity *activity, int64_t now, int64_t *elapsed)
    uint64_t sv_counter_get(const sv_counter *counter)
    void sv_counter_set(sv_counter *counter, uint64_t value)


cdef extern from "timings.h" nogil:
    enum:
        SV_TIMING_WORDS
    ctypedef struct sv_timing:
        sv_counter total_ns
        sv_counter buckets[1]
    ctypedef struct sv_timings:
        sv_timing step
        sv_timing reset
        sv_activity activity
    void sv_timing_add(sv_timing *timing, int64_t elapsed)
    void sv_timings_read(const sv_timings *timings, uint64_t *words)


cdef extern from "text.h" nogil:
    enum:
        SV_TEXT_BYTES
    ctypedef struct sv_text:
        char *bytes
    void sv_text_publish(sv_text *text, const char *data, uint64_t length)
    uint64_t sv_text_length(const sv_text *text)


cdef extern from "notice.h" nogil:
    enum:
        SV_NOTICE_OPEN
        SV_NOTICE_CLOSED
    const sv_counter_line *sv_fault_lines
    ctypedef struct sv_notice:
        sv_counters parent
        sv_counter began
        sv_counter num_processes
        sv_counter cores
        sv_counter number
        sv_counter options
    void sv_notice_open(sv_notice *notice, uint64_t process, uint64_t num_processes)
    void sv_notice_close(sv_notice *notice)
    uint64_t sv_notice_state(const sv_notice *notice)
    void sv_notice_begin_wait(sv_notice *notice, int64_t now)
    void sv_notice_end_wait(sv_notice *notice)


cdef extern from "trace.h" nogil:
    enum:
        SV_TRACE_NOTHING
        SV_TRACE_STEP
        SV_TRACE_RESET
        SV_TRACE_CALL
        SV_TRACE_ERROR
        SV_TRACE_ATTACH
        SV_TRACE_PAUSE
        SV_TRACE_YIELD
        SV_TRACE_PARK
        SV_TRACE_SEND
        SV_TRACE_TAKE
        SV_TRACE_CALLER
        SV_TRACE_HERE
    ctypedef struct sv_trace_entry:
        pass
    ctypedef struct sv_trace:
        pass
    size_t sv_trace_bytes(uint32_t rings, uint32_t size)
    void sv_trace_turn(void *base, bint on)
    bint sv_trace_is_on(const sv_trace *trace)
    void sv_trace_attach(sv_trace *trace, void *base, uint32_t size, uint32_t index,
                         uint32_t idle_kind)
    void sv_trace_add(sv_trace *trace, uint32_t kind, uint32_t env, int64_t begin, int64_t end)
    void sv_trace_enter(sv_trace *trace, uint32_t kind, int64_t now)
    uint32_t sv_trace_read(void *base, uint32_t size, uint32_t index, sv_trace_entry *entries,
                           uint64_t *lost)


cdef extern from "ring.h" nogil:
    enum:
        SV_RING_CORRUPT
        SV_RING_NO
        SV_RING_YES

    ctypedef struct sv_record:
        uint32_t first
        uint32_t count
        uint32_t operation
        uint32_t sequence

    ctypedef struct sv_ring:
        pass
    void sv_ring_attach_producer(sv_ring *ring, void *base, uint32_t capacity)
    void sv_ring_attach_consumer(sv_ring *ring, void *base, uint32_t capacity)
    int sv_ring_peek(sv_ring *ring)
    uint32_t sv_ring_room(const sv_ring *ring)
    int sv_ring_try_push(sv_ring *ring, const sv_record *record)
    void sv_ring_announce(const sv_ring *ring)
    uint32_t sv_ring_waiting(const sv_ring *ring)
    int sv_ring_try_pop(sv_ring *ring, sv_record *record)

    ctypedef struct sv_byte_ring:
        pass
    void sv_byte_ring_attach_producer(sv_byte_ring *ring, void *base, uint32_t capacity)
    void sv_byte_ring_attach_consumer(sv_byte_ring *ring, void *base, uint32_t capacity)
    void *sv_byte_ring_reserve(sv_byte_ring *ring, uint32_t nbytes, uint32_t tag)
    void sv_byte_ring_commit(sv_byte_ring *ring)
    int sv_byte_ring_peek(sv_byte_ring *ring, const void **payload, uint32_t *nbytes,
                          uint32_t *tag)
    void sv_byte_ring_release(sv_byte_ring *ring)


cdef extern from "sum.h" nogil:
    const uint64_t SV_SUM_START
    uint64_t sv_sum(uint64_t sum, uint64_t word)
    uint64_t sv_sum_pair(uint64_t sum, uint32_t low, uint32_t high)
    uint64_t sv_sum_bytes(uint64_t sum, const void *start, size_t count)


cdef extern from "wait.h" nogil:
    enum:
        SV_WAIT_READY
        SV_WAIT_SLICE
        SV_WAIT_CORRUPT

    ctypedef struct sv_budget:
        int64_t pause
        int64_t yield_ "yield"
        int64_t linger
        int64_t window

    ctypedef struct sv_policy:
        pass
    void sv_policy_set(sv_policy *policy, sv_budget budget, bint homing, uint32_t cores)

    ctypedef struct sv_waiter:
        sv_trace *trace
        sv_budget budget
        int64_t answers_left
        bint homing
        int64_t typical
        int64_t park_cost
        int64_t ended_at
    void sv_waiter_init(sv_waiter *waiter, sv_budget budget, bint homing, sv_counts *counts)
    void sv_waiter_follow(sv_waiter *waiter, const sv_policy *policy, sv_counts *counts)
    int sv_wait_request(sv_waiter *waiter, sv_bell *bell, sv_ring *requests, uint32_t index,
                        int64_t slice_ns)
    int sv_wait_completion(sv_waiter *waiter, sv_completion *completion, uint32_t target,
                           int64_t slice_ns)


cdef extern from "handler.h" nogil:
    int sv_handler_guard(int number, int descriptor, const void *code, size_t bytes)

cdef extern from "family.h" nogil:
    int sv_family_lead(uint64_t mark)
    void sv_family_reap(const uint64_t *marks, uint32_t count)
    uint32_t sv_family_signal(const uint64_t *marks, uint32_t count, int number, int spared)


cdef extern from "watchdog.h" nogil:
    int sv_watchdog_start(int parent_pidfd, uint64_t mark)
    void sv_watchdog_stop()


cdef extern from "fault.h" nogil:
    int sv_fault_point
    enum:
        SV_FAULT_POINTS
    void SV_FAULT(int point)


cdef extern from "segment.h" nogil:
    ctypedef struct sv_segment_sizes:
        uint32_t num_workers
        uint32_t num_envs
        uint32_t ring_capacity
        uint32_t info_capacity
        uint32_t action_capacity
        uint32_t reserved
        uint64_t slab_bytes

    ctypedef struct sv_segment:
        sv_segment_sizes sizes
        uint64_t slabs
        uint64_t total_bytes
    bint sv_segment_plan(const sv_segment_sizes *sizes, sv_segment *plan)
    void sv_segment_format(void *base, const sv_segment *plan)
    bint sv_segment_open(const void *base, uint64_t mapped, sv_segment *copy)
    void sv_segment_renew(void *base, const sv_segment *plan, uint32_t worker)
    int sv_segment_reserve(int descriptor, uint64_t nbytes)
    int sv_segment_map(int descriptor, uint64_t nbytes, void **base)
    sv_bell *sv_segment_bell(void *base, const sv_segment *plan)
    sv_completion *sv_segment_completion(void *base, const sv_segment *plan)
    sv_policy *sv_segment_policy(void *base, const sv_segment *plan)
    sv_notice *sv_segment_notice(void *base, const sv_segment *plan)
    sv_counters *sv_segment_past(void *base, const sv_segment *plan, uint32_t worker)
    uint64_t sv_segment_head_bytes(const sv_segment *plan)
    sv_counters *sv_segment_counters(void *base, const sv_segment *plan, uint32_t worker)
    sv_timings *sv_segment_timings(void *base, const sv_segment *plan, uint32_t env)
    sv_text *sv_segment_text(void *base, const sv_segment *plan, uint32_t worker)
    void *sv_segment_requests(void *base, const sv_segment *plan, uint32_t worker)
    void *sv_segment_completions(void *base, const sv_segment *plan, uint32_t worker)
    void *sv_segment_infos(void *base, const sv_segment *plan, uint32_t worker)
    void *sv_segment_actions(void *base, const sv_segment *plan, uint32_t worker)


cdef extern from "parallel.h" nogil:
    ctypedef struct sv_parallel:
        pass
    ctypedef void (*sv_turn)(void *argument, size_t index) noexcept nogil
    sv_parallel *sv_parallel_new(uint32_t threads)
    void sv_parallel_begin(sv_parallel *parallel, sv_turn turn, void *argument, size_t count)
    void sv_parallel_finish(sv_parallel *parallel)
    void sv_parallel_free(sv_parallel *parallel)
