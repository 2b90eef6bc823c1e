"""The shared segment in Python: a validated mapping, arrays over its slabs, and its counters.

An ``Insight`` reads the counters of a vector env, for the parent and, from outside, for ``top``. It
never writes, and reads only what lies before the rings. Even if the segment is damaged, it returns
numbers, and indices of envs that exist.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core.csrc cimport (
    SV_IN_RESET,
    SV_IN_SEVERAL,
    SV_IN_STEP,
    SV_NOTICE_CLOSED,
    SV_NOTICE_OPEN,
    SV_TEXT_BYTES,
    SV_TIMING_WORDS,
    sv_busy_doing,
    sv_busy_env,
    sv_busy_for,
    sv_busy_name,
    sv_counter_at,
    sv_counter_get,
    sv_counter_line,
    sv_counter_set,
    sv_counters,
    sv_fault_lines,
    sv_notice,
    sv_notice_state,
    sv_now_ns,
    sv_on_cores_lines,
    sv_segment,
    sv_segment_counters,
    sv_segment_format,
    sv_segment_front,
    sv_segment_map,
    sv_segment_notice,
    sv_segment_open,
    sv_segment_past,
    sv_segment_plan,
    sv_segment_reserve,
    sv_segment_sizes,
    sv_segment_text,
    sv_segment_timings,
    sv_segment_unmap,
    sv_text,
    sv_text_length,
    sv_timings,
    sv_timings_read,
    sv_wait_lines,
    sv_work_lines,
)

import os
from itertools import groupby

import numpy as np


cdef bint _plan(sv_segment *plan, num_workers, num_envs, records, info_bytes,
                action_bytes, slab_bytes) except -1:
    """Computes a layout; capacities are rounded up to powers of two."""
    cdef sv_segment_sizes sizes
    sizes.num_workers = num_workers
    sizes.num_envs = num_envs
    sizes.ring_capacity = 1 << max(6, (records - 1).bit_length())
    sizes.info_capacity = 1 << max(12, (info_bytes - 1).bit_length())
    sizes.action_capacity = 1 << max(6, (action_bytes - 1).bit_length())
    sizes.reserved = 0
    sizes.slab_bytes = slab_bytes
    if not sv_segment_plan(&sizes, plan):
        raise ValueError(
            f"no segment can hold {num_workers} workers, {num_envs} envs, rings of {records} "
            f"records, {info_bytes} and {action_bytes} bytes, and {slab_bytes} bytes of slabs"
        )
    return True


def segment_bytes(num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes):
    cdef sv_segment plan
    _plan(&plan, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes)
    return plan.total_bytes


def reserve_pages(int descriptor, nbytes):
    cdef int error = sv_segment_reserve(descriptor, nbytes)
    if error != 0:
        raise OSError(error, os.strerror(error))


cdef class MappedMemory:  # a garbage collection could free a memoryview's buffer under arrays
    cdef void *_base
    cdef Py_ssize_t _nbytes

    def __cinit__(self, int descriptor, Py_ssize_t nbytes):
        cdef int error = sv_segment_map(descriptor, nbytes, &self._base)
        if error != 0:
            raise OSError(error, os.strerror(error))
        self._nbytes = nbytes

    def __dealloc__(self):
        if self._nbytes > 0:
            sv_segment_unmap(self._base, self._nbytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._base, self._nbytes, False, flags)

    def __len__(self):
        return self._nbytes


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class Segment:
    def __cinit__(self, memory, writable=True):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.memory = memory
        self.base = <char *>self._export.buf

    def __dealloc__(self):
        # The mapping lives on while arrays made by array() do: each holds its own export.
        PyBuffer_Release(&self._export)

    @staticmethod
    def create(memory, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes):
        cdef Segment segment = Segment(memory)
        _plan(&segment.plan, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes)
        if <Py_ssize_t>segment.plan.total_bytes > segment._export.len:
            raise ValueError(
                f"the segment needs {segment.plan.total_bytes} bytes but the mapping has "
                f"{segment._export.len}"
            )
        sv_segment_format(segment.base, &segment.plan)
        return segment

    @staticmethod
    def open(memory):
        cdef Segment segment = Segment(memory)
        if not sv_segment_open(segment.base, segment._export.len, &segment.plan):
            raise ValueError(
                "the shared memory holds no shmvec segment of this version; "
                "parent and workers must run the same shmvec"
            )
        return segment

    @staticmethod
    def look(memory, nbytes):
        cdef Segment segment = Segment(memory, False)
        if (segment._export.len < <Py_ssize_t>sizeof(sv_segment)
                or not sv_segment_open(segment.base, nbytes, &segment.plan)):
            raise ValueError("it is damaged, or of another version of shmvec")
        return segment

    @property
    def front(self):
        return sv_segment_front(&self.plan)

    cdef bint has_front(self) noexcept:
        return self._export.len >= <Py_ssize_t>sv_segment_front(&self.plan)

    @property
    def num_workers(self):
        return self.plan.sizes.num_workers

    @property
    def num_envs(self):
        return self.plan.sizes.num_envs

    def array(self, Py_ssize_t offset, shape, dtype):
        array = np.ndarray(
            shape, dtype, buffer=self.memory, offset=<Py_ssize_t>self.plan.slabs + offset
        )
        if offset < 0 or offset + array.nbytes > <Py_ssize_t>self.plan.sizes.slab_bytes:
            raise ValueError(f"an array of {array.nbytes} bytes at {offset} is outside the slabs")
        return array


cdef list _lines(const sv_counter_line *line):
    cdef list lines = []
    while line.name is not NULL:
        lines.append((line.name.decode(), line.heading.decode(), line.help.decode()))
        line += 1
    return lines


COUNTERS = {
    "waits": _lines(sv_wait_lines),
    "work": _lines(sv_work_lines),
    "on_cores": _lines(sv_on_cores_lines),
    "faults": _lines(sv_fault_lines),
}


cdef dict _counted(const sv_counter_line *line, void *structure):
    """The counters of a table, by name."""
    cdef dict found = {}
    while line.name is not NULL:
        found[line.name.decode()] = sv_counter_get(sv_counter_at(structure, line))
        line += 1
    return found


cdef bytes packed_words(words):
    """A text that says something in words of each env; what has no room is cut off."""
    runs = [(" ".join(each.split()), len(list(envs))) for each, envs in groupby(words)]
    text = "".join([f"{count}\t{each}\n" for each, count in runs]).encode("utf-8", "replace")
    return text[:SV_TEXT_BYTES]


cdef list unpacked_words(bytes text, count):
    """What a text says of each of `count` envs, or of the first ones, however damaged it is."""
    cdef list words = []
    for line in text.decode("utf-8", "replace").splitlines():
        number, tab, each = line.partition("\t")
        if tab and number.isdecimal():
            each = "".join([letter if letter.isprintable() else "?" for letter in each])
            words += [each] * min(int(number), count - len(words))
    return words


cdef class Insight:
    """Reads the counters of a segment's vector env."""

    cdef Segment segment
    cdef sv_notice *notice

    def __init__(self, Segment segment):
        if not segment.has_front():
            raise ValueError("it is shorter than its header says")
        self.segment = segment
        self.notice = sv_segment_notice(segment.base, &segment.plan)

    cdef sv_counters *of(self, uint32_t worker) noexcept:
        return sv_segment_counters(self.segment.base, &self.segment.plan, worker)

    # ---- the vector env ----------------------------------------------------------------------

    @property
    def in_use(self):
        cdef uint64_t state = sv_notice_state(self.notice)
        if state > SV_NOTICE_CLOSED:
            raise ValueError("it is damaged: whether it is in use makes no sense")
        return state == SV_NOTICE_OPEN

    @property
    def process(self):
        return sv_counter_get(&self.notice.parent.process)

    @property
    def processes(self):
        cdef uint32_t worker
        if self.num_workers == 0:
            return []
        return [sv_counter_get(&self.of(worker).process)
                for worker in range(self.segment.plan.sizes.num_workers)]

    @property
    def num_workers(self):
        # Without processes the segment has rings for one worker all the same.
        return self.segment.num_workers if sv_counter_get(&self.notice.num_processes) else 0

    @property
    def caller_steps(self):
        return 0 < sv_counter_get(&self.notice.num_processes) < self.segment.num_workers

    @property
    def number(self):
        return sv_counter_get(&self.notice.number)

    @property
    def options(self):
        return sv_counter_get(&self.notice.options)

    @options.setter
    def options(self, uint64_t options):
        sv_counter_set(&self.notice.options, options)

    @property
    def nbytes(self):
        return self.segment.plan.total_bytes

    @property
    def num_envs(self):
        return self.segment.num_envs

    @property
    def cores(self):
        cdef uint64_t cores = sv_counter_get(&self.notice.cores)
        return cores or 1

    @property
    def elapsed_s(self):
        cdef uint64_t elapsed = <uint64_t>sv_now_ns() - sv_counter_get(&self.notice.began)
        return 1e-9 * max(0, <int64_t>elapsed)

    # ---- counts so far -----------------------------------------------------------------------

    def parent(self):
        cdef int64_t elapsed
        cdef dict found = _counted(sv_wait_lines, &self.notice.parent)
        # A wait that is not over counts as parked: it is a long one, or does not matter.
        if sv_busy_for(&self.notice.parent.activity, sv_now_ns(), &elapsed) != 0:
            found["park_ns"] += max(0, elapsed)
        return found

    def workers(self):
        cdef sv_counters *past
        cdef uint32_t worker
        cdef list found = []
        for worker in range(self.segment.plan.sizes.num_workers):
            past = sv_segment_past(self.segment.base, &self.segment.plan, worker)
            before = _counted(sv_wait_lines, past) | _counted(sv_work_lines, past)
            now = (_counted(sv_wait_lines, self.of(worker))
                   | _counted(sv_work_lines, self.of(worker)))
            found.append({name: count + before[name] for name, count in now.items()})
        for worker, (first, count) in enumerate(self.ranges()):
            self.add_request_in_progress(worker, first, count, found[worker])
        return found

    cdef int add_request_in_progress(self, uint32_t worker, uint32_t first, uint32_t count,
                                 dict found) except -1:
        """Adds a worker's request in progress to its counts, by the histograms of its envs.

        A worker counts when it answers, while histograms follow each step. They also have the steps
        that a worker made and did not count before it died.
        """
        cdef sv_timings *timings
        cdef uint64_t busy, steps = 0, resets = 0, step_ns = 0, reset_ns = 0
        cdef int64_t elapsed
        cdef uint32_t env, bucket
        for env in range(first, first + count):
            timings = sv_segment_timings(self.segment.base, &self.segment.plan, env)
            step_ns += sv_counter_get(&timings.step.total_ns)
            reset_ns += sv_counter_get(&timings.reset.total_ns)
            for bucket in range(SV_TIMING_WORDS - 2):
                steps += sv_counter_get(&timings.step.buckets[bucket])
                resets += sv_counter_get(&timings.reset.buckets[bucket])
        found["steps"] = max(found["steps"], steps)
        found["resets"] = max(found["resets"], resets)
        if sv_counter_get(&self.of(worker).overlaps):  # its envs' times add up to more than its own
            return 0
        busy = sv_busy_for(&self.of(worker).activity, sv_now_ns(), &elapsed)
        if busy != 0 and elapsed > 0:
            if sv_busy_doing(busy) == SV_IN_STEP:
                step_ns += elapsed
            elif sv_busy_doing(busy) == SV_IN_RESET:
                reset_ns += elapsed
        found["step_ns"] = max(found["step_ns"], step_ns)
        found["reset_ns"] = max(found["reset_ns"], reset_ns)
        return 0

    def ranges(self):
        cdef sv_counters *past
        cdef uint32_t worker
        cdef uint64_t end = 0, first, count, num_envs = self.segment.plan.sizes.num_envs
        cdef list found = []
        for worker in range(self.segment.plan.sizes.num_workers):
            past = sv_segment_past(self.segment.base, &self.segment.plan, worker)
            first, count = sv_counter_get(&past.first_env), sv_counter_get(&past.num_envs)
            if not end <= first <= num_envs or count > num_envs - first:
                first, count = end, 0  # damaged
            end = first + count
            found.append((first, count))
        return found

    def on_cores_before(self):
        cdef uint32_t worker
        return [_counted(sv_on_cores_lines, self.of(worker))
                for worker in range(self.segment.plan.sizes.num_workers)]

    def faults(self):
        return _counted(sv_fault_lines, self.notice)

    def timings(self):
        cdef uint32_t env
        cdef uint32_t num_envs = self.segment.plan.sizes.num_envs
        found = np.empty((num_envs, 2, SV_TIMING_WORDS), np.uint64)
        cdef uint64_t[:, :, ::1] words = found
        for env in range(num_envs):
            sv_timings_read(sv_segment_timings(self.segment.base, &self.segment.plan, env),
                            &words[env, 0, 0])
        return found

    def wrappers(self):
        cdef sv_text *text
        cdef uint32_t worker
        cdef list found = [], words
        for worker, (_, count) in enumerate(self.ranges()):
            text = sv_segment_text(self.segment.base, &self.segment.plan, worker)
            words = unpacked_words(text.bytes[:sv_text_length(text)], count)
            found += words + [""] * (count - len(words))
        return found

    # ---- operations in progress --------------------------------------------------------------

    def doing(self, at=None):
        cdef uint32_t worker
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int64_t now = sv_now_ns() if at is None else at
        cdef list found = []
        for worker, (first, count) in enumerate(self.ranges()):
            busy = sv_busy_for(&self.of(worker).activity, now, &elapsed)
            if sv_busy_doing(busy) == SV_IN_SEVERAL:
                found.append(self.doing_longest(first, count, now))
            elif busy != 0 and sv_busy_env(busy) < self.segment.plan.sizes.num_envs:
                found.append((sv_busy_env(busy), sv_busy_name(busy).decode(),
                              1e-9 * max(0, elapsed), 0))
            else:  # or the segment is damaged
                found.append(None)
        return found

    cdef object doing_longest(self, uint32_t first, uint32_t count, int64_t now):
        """What has been in progress for longest in these envs, and the number of others."""
        cdef uint32_t env
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int others = -1
        longest = None
        for env in range(first, first + count):
            busy = sv_busy_for(
                &sv_segment_timings(self.segment.base, &self.segment.plan, env).activity, now,
                &elapsed)
            if busy == 0 or sv_busy_doing(busy) == SV_IN_SEVERAL:
                continue
            others += 1
            if longest is None or 1e-9 * elapsed > longest[2]:
                longest = env, sv_busy_name(busy).decode(), 1e-9 * max(0, elapsed)
        return None if longest is None else (*longest, others)

    @property
    def overlaps(self):
        cdef uint32_t worker
        return any([sv_counter_get(&self.of(worker).overlaps) != 0
                    for worker in range(self.segment.plan.sizes.num_workers)])

    def waiting(self):
        cdef int64_t elapsed
        if sv_busy_for(&self.notice.parent.activity, sv_now_ns(), &elapsed) == 0:
            return None
        return 1e-9 * max(0, elapsed)
