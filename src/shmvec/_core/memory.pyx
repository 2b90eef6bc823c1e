"""What caller and workers have of the shared memory: the segment, and the slabs in it.

By section: NumPy's arrays in C; the segment and its counters; codecs, which write and read values
of spaces in slabs; rows of results, and how they are lent.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
    Py_buffer,
)
from cpython.list cimport PyList_GET_ITEM
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcpy, memset, strcmp
from posix.mman cimport munmap

from shmvec._core cimport csrc as c
from shmvec._core.texts cimport PyUnicode_DATA, measure, text_of, width_of

import os
from copy import deepcopy
from itertools import groupby
from weakref import ref

import numpy as np

from shmvec._pickling import EMPTY_DICT


# ==== arrays ======================================================================================
#
# Python takes as long to read an attribute of an array as to copy a few numbers. So on the step's
# path C reads the fields of NumPy's arrays. It does so without NumPy's headers: a build would need
# NumPy, of a new enough version. The declarations here are NumPy's binary interface, on which every
# compiled extension depends: neither the fields of an array nor the places of functions in NumPy's
# table change. The fields of a dtype differ between 1.x and 2.x, and are not read here. The import
# of this module checks all of it, and refuses a NumPy that differs.

try:
    from numpy._core import _multiarray_umath as _umath
except ImportError:  # an older one
    from numpy.core import _multiarray_umath as _umath

# Places in the table, as in NumPy's __multiarray_api.h.
ABI_VERSION = 0       # PyArray_GetNDArrayCVersion
API_VERSION = 211     # PyArray_GetNDArrayCFeatureVersion
NEW_LIKE_ARRAY = 277  # PyArray_NewLikeArray

cdef unsigned int _MIN_API_VERSION = 0xf  # the version of NumPy 1.22
cdef int _C_ORDER = 0

ctypedef unsigned int (*Version)() noexcept
ctypedef object (*NewLikeArray)(PyObject *prototype, int order, PyObject *dtype, int subok)

cdef NewLikeArray _new_like_array


def array_fields(array):
    """What C reads of an array: address, shape, size, and: of its dtype, contiguous, aligned."""
    cdef int axis
    shape = tuple([shape_of(array)[axis] for axis in range(ndim_of(array))])
    return (<size_t>data_of(array), shape, size_of(array), has_dtype(array, array.dtype),
            is_contiguous(array), is_aligned(array))


def array_attributes(array):
    """The same, by NumPy's attributes."""
    return (array.__array_interface__["data"][0], array.shape, array.size, True,
            array.flags.c_contiguous, array.flags.aligned)


cdef int _check_numpy() except -1:
    global _new_like_array
    cdef void **table
    try:
        table = <void **>PyCapsule_GetPointer(_umath._ARRAY_API, NULL)
    except (AttributeError, ValueError) as error:
        raise _unknown_numpy_error("it shows no table of functions") from error
    cdef unsigned int abi = (<Version>table[<int>ABI_VERSION])()
    if abi >> 24 not in (1, 2):
        raise _unknown_numpy_error(f"its binary interface is {abi:#x}")
    if (<Version>table[<int>API_VERSION])() < _MIN_API_VERSION:
        raise _unknown_numpy_error("it is too old")
    _new_like_array = <NewLikeArray>table[<int>NEW_LIKE_ARRAY]
    contiguous = np.zeros((4, 2, 3), np.int16)
    unaligned = np.zeros(9, np.uint8)[1:].view(np.int16)
    floats = new_like_as(contiguous, np.dtype(np.float32))
    for array in (contiguous, contiguous[1:, :, 2], contiguous[0, 1, 2:], unaligned,
                  new_like(contiguous), floats):
        if array_fields(array) != array_attributes(array):
            raise _unknown_numpy_error("its arrays are not laid out as those of 1.x and 2.x")
    is_unreferenced = _fields(contiguous).weakreflist is NULL
    reference = ref(contiguous)
    if not is_unreferenced or _fields(contiguous).weakreflist is not <PyObject *>reference:
        raise _unknown_numpy_error(
            "its arrays do not keep weak references where those of 1.x and 2.x do")
    return 0


cdef object _unknown_numpy_error(str what):
    return ImportError(f"shmvec does not know NumPy {np.__version__}: {what}. "
                       "It needs NumPy 1.24 or newer, of 1.x or 2.x.")


cdef object new_like(object array):
    return _new_like_array(<PyObject *>array, _C_ORDER, NULL, False)


cdef object new_like_as(object array, object dtype):
    Py_INCREF(dtype)  # the call takes this reference
    return _new_like_array(<PyObject *>array, _C_ORDER, <PyObject *>dtype, False)


_check_numpy()


cdef extern from *:
    """
    /* Whether there is only one reference. Without a GIL the count does not say so. */
    #ifdef Py_GIL_DISABLED
    #define sv_is_unshared(object) 0
    #else
    #define sv_is_unshared(object) (Py_REFCNT(object) == 1)
    #endif
    """
    bint sv_is_unshared(PyObject *object) noexcept

cdef Py_ssize_t _MIN_NOGIL_BYTES = 1 << 16  # of a copy that releases the GIL

# Flags of a new array: contiguous in C's order, owner of its data, aligned, writable.
cdef int _NEW_ARRAY_FLAGS = 0x1 | 0x4 | 0x100 | 0x400
cdef Py_ssize_t _MAX_POOLED = 3  # a user holds the last array, and often the one before


cdef inline void _copy_bytes(void *target, const void *source, Py_ssize_t nbytes) noexcept:
    if nbytes < _MIN_NOGIL_BYTES:
        memcpy(target, source, nbytes)
    else:
        with nogil:
            memcpy(target, source, nbytes)


cdef class Pool:
    """Hands out contiguous arrays like a template, whose elements must not be objects.

    It hands an array out again when nobody holds it any more. That takes a fraction of the time
    for a new one, and a batch step needs four.
    """

    def __init__(self, template, pools_large=False):
        """Takes an array, and whether large ones are kept, too; else malloc keeps their memory."""
        self.template = template
        self.pools_large = pools_large
        self.nbytes = size_of(template) * <Py_ssize_t>template.itemsize
        self.arrays = []
        self.next_index = 0

    cdef object new(self):
        """An array with any content."""
        cdef Py_ssize_t i = 0
        cdef object array
        cdef PyObject *pooled
        while i < len(self.arrays):
            pooled = PyList_GET_ITEM(self.arrays, i)  # borrowed: a reference would count
            if self.is_free(pooled):
                return self.arrays[i]
            if sv_is_unshared(pooled):  # its shape was changed, or it has a weak reference
                del self.arrays[i]
                self.next_index = 0
            else:
                i += 1
        array = new_like(self.template)
        if self.nbytes >= _MIN_NOGIL_BYTES and not self.pools_large:
            return array
        if len(self.arrays) < _MAX_POOLED:
            self.arrays.append(array)
        else:
            self.arrays[self.next_index] = array
            self.next_index = (self.next_index + 1) % _MAX_POOLED
        return array

    cdef object copy(self):
        """A copy of the template."""
        cdef object array = self.new()
        _copy_bytes(data_of(array), data_of(self.template), self.nbytes)
        return array

    cdef bint is_free(self, PyObject *array) noexcept:
        """Whether only the pool has an array, and nobody has changed it, such as its shape."""
        cdef Fields *fields = <Fields *>array
        cdef Fields *template = _fields(self.template)
        cdef int axis
        if (not sv_is_unshared(array) or fields.weakreflist is not NULL or fields.base is not NULL
                or fields.descr is not template.descr
                or fields.flags & _NEW_ARRAY_FLAGS != _NEW_ARRAY_FLAGS
                or fields.nd != template.nd):
            return False
        for axis in range(template.nd):
            if fields.dimensions[axis] != template.dimensions[axis]:
                return False
        return True


cdef object array_over(object exporter, char *start, tuple shape, object dtype):
    """An array over an exporter's memory, from `start` on. It keeps the exporter."""
    cdef Py_buffer view
    PyObject_GetBuffer(exporter, &view, PyBUF_WRITABLE)
    cdef Py_ssize_t offset = start - <char *>view.buf
    PyBuffer_Release(&view)
    return np.ndarray(shape, dtype, exporter, offset)


# ==== segment =====================================================================================


cdef bint _plan(c.sv_segment *plan, num_workers, num_envs, records, info_bytes,
                action_bytes, slab_bytes) except -1:
    """Computes a layout. Capacities are rounded up to powers of two.

    Each ring has room for `records` requests or completions; the rings of messages have
    `info_bytes` to the caller, and `action_bytes` to a worker.
    """
    cdef c.sv_segment_sizes sizes
    sizes.num_workers = num_workers
    sizes.num_envs = num_envs
    sizes.ring_capacity = 1 << max(6, (records - 1).bit_length())
    sizes.info_capacity = 1 << max(12, (info_bytes - 1).bit_length())
    sizes.action_capacity = 1 << max(6, (action_bytes - 1).bit_length())
    sizes.reserved = 0
    sizes.slab_bytes = slab_bytes
    if not c.sv_segment_plan(&sizes, plan):
        raise ValueError(
            f"no segment can hold {num_workers} workers, {num_envs} envs, rings of {records} "
            f"records, {info_bytes} and {action_bytes} bytes, and {slab_bytes} bytes of slabs"
        )
    return True


def segment_bytes(num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes):
    cdef c.sv_segment plan
    _plan(&plan, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes)
    return plan.total_bytes


def reserve_pages(int descriptor, nbytes):
    """Sizes a shared-memory descriptor and reserves all its pages."""
    cdef int error = c.sv_segment_reserve(descriptor, nbytes)
    if error != 0:
        raise OSError(error, os.strerror(error))


cdef class MappedMemory:
    """Shared memory, mapped as long as this object or an array over it lives.

    A garbage collection could free the buffer of Python's mmap under arrays.
    """

    cdef void *_base
    cdef Py_ssize_t _nbytes

    def __cinit__(self, int descriptor, Py_ssize_t nbytes):
        cdef int error = c.sv_segment_map(descriptor, nbytes, &self._base)
        if error != 0:
            raise OSError(error, os.strerror(error))
        self._nbytes = nbytes

    def __dealloc__(self):
        if self._nbytes > 0:
            munmap(self._base, self._nbytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._base, self._nbytes, False, flags)

    def __len__(self):
        return self._nbytes


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class Segment:
    """A mapping of a segment, whose layout csrc/segment.h describes."""

    def __cinit__(self, memory, writable=True):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.memory = memory
        self.base = <char *>self._export.buf

    def __dealloc__(self):
        # Arrays made by array() keep the mapping: each has an export of its own.
        PyBuffer_Release(&self._export)

    @staticmethod
    def create(memory, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes):
        """Formats zeroed memory."""
        cdef Segment segment = Segment(memory)
        _plan(&segment.plan, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes)
        if <Py_ssize_t>segment.plan.total_bytes > segment._export.len:
            raise ValueError(
                f"the segment needs {segment.plan.total_bytes} bytes but the mapping has "
                f"{segment._export.len}"
            )
        c.sv_segment_format(segment.base, &segment.plan)
        return segment

    @staticmethod
    def open(memory):
        """Attaches to a segment that another process has created; validates it first."""
        cdef Segment segment = Segment(memory)
        if not c.sv_segment_open(segment.base, segment._export.len, &segment.plan):
            raise ValueError(
                "the shared memory holds no shmvec segment of this version; "
                "parent and workers must run the same shmvec"
            )
        return segment

    @staticmethod
    def look(memory, nbytes):
        """Reads, for an `Insight` from outside, the front of a segment of so many bytes.

        The memory is read-only or a copy, of the header alone or of all of the `front`.
        """
        cdef Segment segment = Segment(memory, False)
        if (segment._export.len < <Py_ssize_t>sizeof(c.sv_segment)
                or not c.sv_segment_open(segment.base, nbytes, &segment.plan)):
            raise ValueError("it is damaged, or of another version of shmvec")
        return segment

    @property
    def front(self):
        """The number of bytes at the begin that onlookers read."""
        return c.sv_segment_head_bytes(&self.plan)

    cdef bint has_front(self) noexcept:
        return self._export.len >= <Py_ssize_t>c.sv_segment_head_bytes(&self.plan)

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


cdef list _counter_lines(const c.sv_counter_line *line):
    cdef list lines = []
    while line.name is not NULL:
        lines.append((line.name.decode(), line.heading.decode(), line.help.decode()))
        line += 1
    return lines


COUNTERS = {  # the tables of csrc/counters.h
    "waits": _counter_lines(c.sv_wait_lines),
    "work": _counter_lines(c.sv_work_lines),
    "on_cores": _counter_lines(c.sv_on_cores_lines),
    "faults": _counter_lines(c.sv_fault_lines),
}


cdef dict _read_counters(const c.sv_counter_line *line, void *structure):
    """{name: count} of a table."""
    cdef dict counts = {}
    while line.name is not NULL:
        counts[line.name.decode()] = c.sv_counter_get(c.sv_counter_at(structure, line))
        line += 1
    return counts


cdef bytes pack_words(words):
    """Packs a str for each env; what does not fit an sv_text is cut off."""
    runs = [(" ".join(each.split()), len(list(envs))) for each, envs in groupby(words)]
    text = "".join([f"{count}\t{each}\n" for each, count in runs]).encode("utf-8", "replace")
    return text[:c.SV_TEXT_BYTES]


cdef list unpack_words(bytes text, count):
    """A str for each of `count` envs, or for the first ones if the text is damaged."""
    cdef list words = []
    for line in text.decode("utf-8", "replace").splitlines():
        number, tab, each = line.partition("\t")
        if tab and number.isdecimal():
            each = "".join([letter if letter.isprintable() else "?" for letter in each])
            words += [each] * min(int(number), count - len(words))
    return words


cdef class Insight:
    """The counters and other facts that a segment publishes about its vector env.

    The caller reads them, and ``top`` from outside; both read only the `front`. Also if the segment
    is damaged, it returns numbers, and indices of envs that exist.
    """

    cdef Segment segment
    cdef c.sv_notice *notice

    def __init__(self, Segment segment):
        if not segment.has_front():
            raise ValueError("it is shorter than its header says")
        self.segment = segment
        self.notice = c.sv_segment_notice(segment.base, &segment.plan)

    cdef c.sv_counters *counters_of(self, uint32_t worker) noexcept:
        return c.sv_segment_counters(self.segment.base, &self.segment.plan, worker)

    # ---- the vector env ----------------------------------------------------------------------

    @property
    def in_use(self):
        """Whether the segment was opened, and not closed since."""
        cdef uint64_t state = c.sv_notice_state(self.notice)
        if state > c.SV_NOTICE_CLOSED:
            raise ValueError("it is damaged: whether it is in use makes no sense")
        return state == c.SV_NOTICE_OPEN

    @property
    def process(self):
        return c.sv_counter_get(&self.notice.parent.process)

    @property
    def processes(self):
        """The workers' process ids, as the caller sees them; 0: the worker is being started."""
        cdef uint32_t worker
        if self.num_workers == 0:
            return []
        return [c.sv_counter_get(&self.counters_of(worker).process)
                for worker in range(self.segment.plan.sizes.num_workers)]

    @property
    def num_workers(self):
        # Without processes the segment still has rings for one worker.
        return self.segment.num_workers if c.sv_counter_get(&self.notice.num_processes) else 0

    @property
    def caller_steps(self):
        """Whether the parent is the last worker."""
        return 0 < c.sv_counter_get(&self.notice.num_processes) < self.segment.num_workers

    @property
    def number(self):
        """Its number among the vector envs of its process, from 1; closed ones count, too."""
        return c.sv_counter_get(&self.notice.number)

    @property
    def options(self):
        """A bit for each option that is set, among those that stats.py may advise."""
        return c.sv_counter_get(&self.notice.options)

    @options.setter
    def options(self, uint64_t options):
        c.sv_counter_set(&self.notice.options, options)

    @property
    def nbytes(self):
        return self.segment.plan.total_bytes

    @property
    def num_envs(self):
        return self.segment.num_envs

    @property
    def cores(self):
        cdef uint64_t cores = c.sv_counter_get(&self.notice.cores)
        return cores or 1

    @property
    def elapsed_s(self):
        cdef uint64_t elapsed = <uint64_t>c.sv_now_ns() - c.sv_counter_get(&self.notice.began)
        return 1e-9 * max(0, <int64_t>elapsed)

    # ---- counts so far -----------------------------------------------------------------------

    def parent(self):
        """SV_WAITS of the caller."""
        cdef int64_t elapsed
        cdef dict counts = _read_counters(c.sv_wait_lines, &self.notice.parent)
        # A wait that is not over counts as parked: it is long, or does not matter.
        if c.sv_busy_for(&self.notice.parent.activity, c.sv_now_ns(), &elapsed) != 0:
            counts["park_ns"] += max(0, elapsed)
        return counts

    def workers(self):
        """SV_WAITS and SV_WORK of each worker and its predecessors, with the present request."""
        cdef c.sv_counters *past
        cdef uint32_t worker
        cdef list counts = []
        for worker in range(self.segment.plan.sizes.num_workers):
            past = c.sv_segment_past(self.segment.base, &self.segment.plan, worker)
            before = _read_counters(c.sv_wait_lines, past) | _read_counters(c.sv_work_lines, past)
            now = (_read_counters(c.sv_wait_lines, self.counters_of(worker))
                   | _read_counters(c.sv_work_lines, self.counters_of(worker)))
            counts.append({name: count + before[name] for name, count in now.items()})
        for worker, (first, count) in enumerate(self.ranges()):
            self.add_request_in_progress(worker, first, count, counts[worker])
        return counts

    cdef int add_request_in_progress(self, uint32_t worker, uint32_t first, uint32_t count,
                                     dict counts) except -1:
        """Adds a worker's request in progress to its counts, by the histograms of its envs.

        A worker counts when it answers, but adds each step to the histograms. These also have the
        steps that a worker made and did not count before it died.
        """
        cdef c.sv_timings *timings
        cdef uint64_t busy, steps = 0, resets = 0, step_ns = 0, reset_ns = 0
        cdef int64_t elapsed
        cdef uint32_t env, bucket
        for env in range(first, first + count):
            timings = c.sv_segment_timings(self.segment.base, &self.segment.plan, env)
            step_ns += c.sv_counter_get(&timings.step.total_ns)
            reset_ns += c.sv_counter_get(&timings.reset.total_ns)
            for bucket in range(c.SV_TIMING_WORDS - 2):
                steps += c.sv_counter_get(&timings.step.buckets[bucket])
                resets += c.sv_counter_get(&timings.reset.buckets[bucket])
        counts["steps"] = max(counts["steps"], steps)
        counts["resets"] = max(counts["resets"], resets)
        if c.sv_counter_get(&self.counters_of(worker).overlaps):  # its envs' times add up to more
            return 0
        busy = c.sv_busy_for(&self.counters_of(worker).activity, c.sv_now_ns(), &elapsed)
        if busy != 0 and elapsed > 0:
            if c.sv_busy_doing(busy) == c.SV_IN_STEP:
                step_ns += elapsed
            elif c.sv_busy_doing(busy) == c.SV_IN_RESET:
                reset_ns += elapsed
        counts["step_ns"] = max(counts["step_ns"], step_ns)
        counts["reset_ns"] = max(counts["reset_ns"], reset_ns)
        return 0

    def ranges(self):
        """The envs of each worker: (the first one, their number)."""
        cdef c.sv_counters *past
        cdef uint32_t worker
        cdef uint64_t end = 0, first, count, num_envs = self.segment.plan.sizes.num_envs
        cdef list ranges = []
        for worker in range(self.segment.plan.sizes.num_workers):
            past = c.sv_segment_past(self.segment.base, &self.segment.plan, worker)
            first, count = c.sv_counter_get(&past.first_env), c.sv_counter_get(&past.num_envs)
            if not end <= first <= num_envs or count > num_envs - first:
                first, count = end, 0  # damaged
            end = first + count
            ranges.append((first, count))
        return ranges

    def on_cores_before(self):
        """SV_ON_CORES of each worker's process before it began to serve."""
        cdef uint32_t worker
        return [_read_counters(c.sv_on_cores_lines, self.counters_of(worker))
                for worker in range(self.segment.plan.sizes.num_workers)]

    def faults(self):
        return _read_counters(c.sv_fault_lines, self.notice)

    def timings(self):
        """By env, for steps and for resets: sum and longest in ns, and the buckets of timings.h."""
        cdef uint32_t env
        cdef uint32_t num_envs = self.segment.plan.sizes.num_envs
        timings = np.empty((num_envs, 2, c.SV_TIMING_WORDS), np.uint64)
        cdef uint64_t[:, :, ::1] words = timings
        for env in range(num_envs):
            c.sv_timings_read(c.sv_segment_timings(self.segment.base, &self.segment.plan, env),
                              &words[env, 0, 0])
        return timings

    def wrappers(self):
        """What each env's worker has published about its wrappers, a str; "": nothing."""
        cdef c.sv_text *text
        cdef uint32_t worker
        cdef list wrappers = [], words
        for worker, (_, count) in enumerate(self.ranges()):
            text = c.sv_segment_text(self.segment.base, &self.segment.plan, worker)
            words = unpack_words(text.bytes[:c.sv_text_length(text)], count)
            wrappers += words + [""] * (count - len(words))
        return wrappers

    # ---- operations in progress --------------------------------------------------------------

    def doing(self, at=None):
        """What each worker does: (env, "step", "reset" or "call", seconds, other envs), or None.

        If a worker is busy with several envs, it is the operation that has taken longest so far.
        Seconds are counted until `at`, in ns of the monotonic clock; None: until now.
        """
        cdef uint32_t worker
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int64_t now = c.sv_now_ns() if at is None else at
        cdef list operations = []
        for worker, (first, count) in enumerate(self.ranges()):
            busy = c.sv_busy_for(&self.counters_of(worker).activity, now, &elapsed)
            if c.sv_busy_doing(busy) == c.SV_IN_SEVERAL:
                operations.append(self.longest_operation(first, count, now))
            elif busy != 0 and c.sv_busy_env(busy) < self.segment.plan.sizes.num_envs:
                operations.append((c.sv_busy_env(busy), c.sv_busy_name(busy).decode(),
                                   1e-9 * max(0, elapsed), 0))
            else:  # nothing, or the segment is damaged
                operations.append(None)
        return operations

    cdef object longest_operation(self, uint32_t first, uint32_t count, int64_t now):
        cdef uint32_t env
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int others = -1
        longest = None
        for env in range(first, first + count):
            busy = c.sv_busy_for(
                &c.sv_segment_timings(self.segment.base, &self.segment.plan, env).activity, now,
                &elapsed)
            if busy == 0 or c.sv_busy_doing(busy) == c.SV_IN_SEVERAL:
                continue
            others += 1
            if longest is None or 1e-9 * elapsed > longest[2]:
                longest = env, c.sv_busy_name(busy).decode(), 1e-9 * max(0, elapsed)
        return None if longest is None else (*longest, others)

    @property
    def overlaps(self):
        cdef uint32_t worker
        return any([c.sv_counter_get(&self.counters_of(worker).overlaps) != 0
                    for worker in range(self.segment.plan.sizes.num_workers)])

    def waiting(self):
        """Seconds for which the caller has been waiting; None: it is not waiting."""
        cdef int64_t elapsed
        if c.sv_busy_for(&self.notice.parent.activity, c.sv_now_ns(), &elapsed) == 0:
            return None
        return 1e-9 * max(0, elapsed)


# ==== codecs ======================================================================================
#
# Codecs write and read values of Gymnasium spaces, in slabs of shared memory or in messages. There
# is a codec for each leaf of a space; they are nested like the space. Workers write the
# observations and read the actions of one env; the caller reads the observations and writes the
# actions of all. Batches equal ``SyncVectorEnv``'s: the same containers, dtypes and scalar types.

# Imported after the check of NumPy's arrays: these import code that is compiled for them.
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

cdef object _ndarray = np.ndarray


cdef class Codec:
    """Values of one space, for one env or for all."""

    cdef int write(self, Py_ssize_t env, object value) except -1:
        raise NotImplementedError

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        """Writes a value if it reads back with the same type, dtype and shape; else False."""
        return False

    cdef object read(self, Py_ssize_t env):
        raise NotImplementedError

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        raise NotImplementedError

    cdef object gather(self, const Py_ssize_t[::1] envs):
        raise NotImplementedError

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        """An array (*lead, ...) over a lease's rows, from `first` on. It keeps the lease."""
        raise NotImplementedError

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        """Copies a row of a codec of the same space to a row of this codec."""
        raise NotImplementedError

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        raise NotImplementedError

    def put(self, Py_ssize_t env, value):
        self.write(env, value)

    def get(self, Py_ssize_t env):
        return self.read(env)

    def put_rows(self, envs, values):
        self.write_rows(envs, values)


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class _Rows:
    """An array (num_envs, ...) in a slab, and the address of its first row."""

    cdef object array
    cdef object dtype
    cdef Py_ssize_t itemsize
    cdef char *base
    cdef Py_ssize_t row_bytes
    cdef Py_ssize_t num_envs
    cdef Py_buffer _export

    def __cinit__(self, array):
        PyObject_GetBuffer(array, &self._export, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE
                           | PyBUF_FORMAT)
        self.array = array
        self.dtype = array.dtype
        self.itemsize = array.itemsize
        self.base = <char *>self._export.buf
        self.num_envs = len(array)
        self.row_bytes = array.nbytes // self.num_envs

    def __dealloc__(self):
        PyBuffer_Release(&self._export)

    cdef bint copy_from(self, object value, Py_ssize_t row):
        """Copies an array of exactly a row's format and shape; False: it has others."""
        cdef char *target = self.base + row * self.row_bytes
        cdef Py_buffer view
        if type(value) is not _ndarray or not self.has_shape_of_row(value):
            return False
        # The usual case first: for a buffer NumPy makes a description of each array.
        if has_dtype(value, self.dtype) and is_contiguous(value):
            memcpy(target, data_of(value), self.row_bytes)
            return True
        if PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0:
            return False
        cdef bint fits = strcmp(view.format, self._export.format) == 0
        if fits:
            memcpy(target, view.buf, self.row_bytes)
        PyBuffer_Release(&view)
        return fits

    cdef bint has_shape_of_row(self, object value) noexcept:
        cdef const Py_ssize_t *shape = shape_of(self.array) + 1
        cdef int axis
        if ndim_of(value) != ndim_of(self.array) - 1:
            return False
        for axis in range(ndim_of(value)):
            if shape_of(value)[axis] != shape[axis]:
                return False
        return True


cdef object copy_array(object array, Py_ssize_t itemsize):
    """A copy of a contiguous array, whose elements must not be objects."""
    # It takes a quarter of the time of the array's method `copy`.
    cdef object copy = new_like(array)
    _copy_bytes(data_of(copy), data_of(array), size_of(array) * itemsize)
    return copy


cdef void *address_of(object array) except? NULL:
    """The address of an array's data, valid while somebody holds the array."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
    cdef void *start = view.buf
    PyBuffer_Release(&view)
    return start


cdef void _gather_rows(char *target, const char *base, Py_ssize_t nbytes,
                       const Py_ssize_t[::1] rows) noexcept nogil:
    """Copies rows of so many bytes, one after the other."""
    cdef Py_ssize_t i
    if nbytes == 1:
        for i in range(rows.shape[0]):
            target[i] = base[rows[i]]
    elif nbytes == 8:
        for i in range(rows.shape[0]):
            (<int64_t *>target)[i] = (<const int64_t *>base)[rows[i]]
    else:
        for i in range(rows.shape[0]):
            memcpy(target + i * nbytes, base + rows[i] * nbytes, nbytes)


# {dtype of a scalar space: types of numbers that NumPy casts to it in the same way as an array}
cdef dict _DIRECT_TYPES = {
    np.dtype(np.int64): (int, bool, np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32,
                         np.uint32),
    np.dtype(np.float64): (float, np.float32),
    np.dtype(np.float32): (float, np.float64),
}


cdef class ArrayCodec(Codec):
    """Observations of Box, Discrete, MultiDiscrete and MultiBinary."""

    cdef _Rows rows
    cdef Pool copy_pool          # for all rows
    cdef Pool gather_pool        # for as many rows as were gathered last; None: none were
    cdef bint scalar
    cdef object shape
    cdef object dtype
    cdef object last_cast_dtype  # of the last value that was cast to `dtype`
    cdef frozenset direct_types  # see `_DIRECT_TYPES`

    def __init__(self, array):
        self.rows = _Rows(array)
        self.copy_pool = Pool(array)
        self.shape = array.shape[1:]
        self.scalar = self.shape == ()
        self.dtype = array.dtype
        self.direct_types = frozenset({self.dtype.type, *_DIRECT_TYPES.get(self.dtype, ())})

    cdef int write(self, Py_ssize_t env, object value) except -1:
        try:
            if self.scalar and type(value) in self.direct_types:
                self.rows.array[env] = value
                return 0
            if self.rows.copy_from(value, env):
                return 0
        except (BufferError, ValueError, OverflowError):
            pass  # not contiguous, of a dtype without a buffer format, or a large integer
        array = np.asarray(value)
        if array.shape != self.shape:
            # Shapes may differ only in axes of length 1: else reshaping would mix up elements.
            if [n for n in array.shape if n != 1] != [n for n in self.shape if n != 1]:
                raise ValueError(f"shape {array.shape} does not fit {self.shape}")
            array = array.reshape(self.shape)
        dtype = array.dtype
        if dtype is not self.last_cast_dtype:
            if not np.can_cast(dtype, self.dtype, "same_kind"):
                raise TypeError(f"Cannot cast array data from {dtype!r} to {self.dtype!r} "
                                "according to the rule 'same_kind'")
            self.last_cast_dtype = dtype
        self.rows.array[env, ...] = array
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        if self.scalar:
            if type(value) is not self.dtype.type:
                return False
            self.rows.array[env] = value
            return True
        try:
            return self.rows.copy_from(value, env)
        except (BufferError, ValueError):
            return False

    cdef object read(self, Py_ssize_t env):
        return self.rows.array[env] if self.scalar else self.rows.array[env].copy()

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        cdef object array = self.rows.array
        if count >= 0 and count < self.rows.num_envs:
            array = array[first:first + count]
            return copy_array(array, self.rows.itemsize) if copy else array
        return self.copy_pool.copy() if copy else array

    cdef object gather(self, const Py_ssize_t[::1] envs):
        if self.gather_pool is None or shape_of(self.gather_pool.template)[0] != envs.shape[0]:
            self.gather_pool = Pool(np.empty((envs.shape[0], *self.shape), self.dtype))
        cdef object array = self.gather_pool.new()
        cdef char *target = <char *>data_of(array)
        cdef char *base = self.rows.base
        cdef Py_ssize_t nbytes = self.rows.row_bytes
        if envs.shape[0] * nbytes < _MIN_NOGIL_BYTES:
            _gather_rows(target, base, nbytes, envs)
        else:
            with nogil:
                _gather_rows(target, base, nbytes, envs)
        return array

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        return array_over(lease, self.rows.base + first * self.rows.row_bytes,
                          lead + self.shape, self.dtype)

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef _Rows rows = (<ArrayCodec>source).rows
        memcpy(self.rows.base + target * self.rows.row_bytes, rows.base + row * rows.row_bytes,
               self.rows.row_bytes)
        return 0


class OtherShapeError(ValueError):
    """There is an action for each env, but of another shape than their space's, or masked."""

    actions = None  # an array


# The dtypes in which actions may travel; an index in this tuple is the code in shared memory.
cdef tuple _FORMATS = tuple([
    np.dtype(name) for name in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8",
                                "f2", "f4", "f8", "longdouble")
])
cdef dict _FORMAT_CODES = {dtype: code for code, dtype in enumerate(_FORMATS)}
cdef Py_ssize_t[13] _ITEMSIZES = [dtype.itemsize for dtype in _FORMATS]
ACTION_ITEMSIZE = 8  # bytes of a row for each element, at least
cdef dict _KIND_RANKS = {"b": 0, "u": 1, "i": 1, "f": 2}


cdef class ActionCodec(Codec):
    """Actions of Box, Discrete, MultiDiscrete and MultiBinary.

    An env gets its action in the dtype that the user chose, as from ``SyncVectorEnv``: a float64
    action for a float32 space is not rounded on its way. So each row has room for wider elements
    than the space's, and a byte for the code of its dtype.
    """

    cdef object memory
    cdef uint8_t[::1] codes        # by env: the index in `_FORMATS` of its action's dtype
    cdef char *base
    cdef Py_ssize_t capacity       # bytes of a row
    cdef uint32_t fitting_formats  # a bit for each format in which an action fits a row
    cdef object shape
    cdef Py_ssize_t ndim
    cdef Py_ssize_t size
    cdef object dtype
    cdef object space
    cdef bint scalar
    cdef list arrays               # the rows as an array of each format, made when first used
    cdef list format_rows          # a list of views of the rows of each of these arrays
    cdef object last_dtype         # of the last batch
    cdef int last_code             # of this dtype

    def __init__(self, memory, codes, shape, dtype, space):
        """Takes a byte array (num_envs, row capacity) and one (num_envs,) for the codes."""
        self.memory = memory
        self.codes = codes
        self.base = <char *>address_of(memory)
        self.capacity = memory.shape[1]
        self.shape = shape
        self.ndim = len(shape)
        self.scalar = shape == ()
        self.size = int(np.prod(shape))
        self.fitting_formats = sum([
            1 << code for code, dtype in enumerate(_FORMATS)
            if dtype.itemsize * self.size <= self.capacity
        ])
        self.dtype = np.dtype(dtype).newbyteorder("=")  # all formats have this byte order
        self.space = space
        self.arrays = [None] * len(_FORMATS)
        self.format_rows = [None] * len(_FORMATS)
        self.last_code = -1
        codes[:] = _FORMAT_CODES[self.dtype]

    cdef object rows(self, int code):
        """The slab as an array (num_envs, *shape) of a format."""
        if self.arrays[code] is None:
            dtype = _FORMATS[code]
            row = np.empty(self.shape, dtype)
            self.arrays[code] = np.ndarray(
                (len(self.memory), *self.shape), dtype, self.memory,
                strides=(self.capacity, *row.strides))
            self.format_rows[code] = list(self.arrays[code])
        return self.arrays[code]

    cdef object read(self, Py_ssize_t env):
        cdef int code = self.codes[env]
        if code >= 32 or not self.fitting_formats >> code & 1:
            raise RuntimeError(f"the segment is damaged: action format {code} of env {env}")
        cdef object array = self.rows(code)
        # A copy, because the env may keep its action.
        if self.scalar:
            return array[env]
        return copy_array((<list>self.format_rows[code])[env], _ITEMSIZES[code])

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        cdef object array = values
        if type(values) is not _ndarray or not self.has_last_format(values, envs.shape[0]):
            array = self.check_actions(values, envs.shape[0])
        cdef int code = self.last_code
        cdef const char *source = <const char *>data_of(array)
        cdef Py_ssize_t nbytes = self.size * _ITEMSIZES[code]
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            memcpy(self.base + envs[i] * self.capacity, source + i * nbytes, nbytes)
            self.codes[envs[i]] = code
        return 0

    cdef bint has_last_format(self, object values, Py_ssize_t count):
        """Whether an array is contiguous, of the last batch's dtype, and of the right shape."""
        cdef const Py_ssize_t *shape = shape_of(values)
        cdef Py_ssize_t axis
        if (not has_dtype(values, self.last_dtype) or not is_contiguous(values)
                or ndim_of(values) != 1 + self.ndim or shape[0] != count):
            return False
        for axis in range(self.ndim):
            if shape[1 + axis] != <Py_ssize_t>(<tuple>self.shape)[axis]:
                return False
        return True

    cdef object check_actions(self, object values, Py_ssize_t count):
        """The actions as a contiguous array, whose format becomes the last one; or raises."""
        try:
            array = np.asarray(values)
        except (ValueError, TypeError) as error:
            raise self.action_error(f"they are no array of numbers ({error})", count) from error
        except RuntimeError as error:  # a tensor of torch's that requires gradients
            if type(error) is not RuntimeError:
                raise
            raise self.action_error(
                f"NumPy cannot read them ({error})", count, RuntimeError) from error
        cdef object kind = array.dtype.kind
        if kind not in _KIND_RANKS:
            raise self.action_error(f"they have dtype {array.dtype}", count, TypeError)
        if array.ndim == 0:
            raise self.action_error(f"they are one {type(values).__name__}", count, TypeError)
        if len(array) != count:
            raise self.action_error(f"there are {len(array)}", count)
        if _KIND_RANKS[kind] > _KIND_RANKS[self.dtype.kind] and not (
            # a Box of bools takes 0 and 1
            self.dtype.kind == "b" and kind in "iu"
        ):
            raise self.action_error(f"they have dtype {array.dtype}", count, TypeError)
        if array.shape != (count, *self.shape):
            error = self.action_error(f"they have shape {array.shape}", count, OtherShapeError)
            error.actions = array
            raise error
        if isinstance(values, np.ma.MaskedArray):  # a slab has no room for the mask
            error = self.action_error("they are a masked array", count, OtherShapeError)
            error.actions = values
            raise error
        native = array.dtype.newbyteorder("=")
        if native not in _FORMAT_CODES or native.itemsize * self.size > self.capacity:
            native = self.dtype
        self.last_code = _FORMAT_CODES[native]
        self.last_dtype = array.dtype if array.dtype == native else None
        return np.ascontiguousarray(array, native)

    cdef object action_error(self, what, Py_ssize_t count, kind=ValueError):
        return kind(
            f"wrong actions: {what}. {count} envs with action space {self.space} need "
            f"an array of shape {(count, *self.shape)} and dtype {self.dtype}"
            " (or one that converts to it without loss of kind). Nothing was sent to any env."
        )


TEXT_HEAD = 2  # words of a text's row before its characters: their number and their bound
cdef Py_ssize_t _HEAD_WORDS = TEXT_HEAD


cdef class TextCodec(Codec):
    """Strings of Text spaces, in Python's own format of characters, so that any can travel."""

    cdef _Rows rows
    cdef Py_ssize_t max_length

    def __init__(self, array):
        """Takes a uint32 array (num_envs, TEXT_HEAD + longest text)."""
        self.rows = _Rows(array)
        self.max_length = array.shape[1] - _HEAD_WORDS

    cdef uint32_t *row_of(self, Py_ssize_t env) noexcept:
        return <uint32_t *>(self.rows.base + env * self.rows.row_bytes)

    cdef int write(self, Py_ssize_t env, object value) except -1:
        cdef uint32_t *row = self.row_of(env)
        cdef uint32_t[2] head
        if not isinstance(value, str):
            raise TypeError(f"a Text space needs a str, got {type(value).__name__}: {value!r}")
        cdef Py_ssize_t nbytes = measure(value, head)
        if len(<str>value) > self.max_length:
            raise ValueError(
                f"a text of {len(<str>value)} characters does not fit a Text space with "
                f"max_length={self.max_length}: {value!r}"
            )
        memcpy(row, head, 4 * _HEAD_WORDS)
        memcpy(row + _HEAD_WORDS, PyUnicode_DATA(value), nbytes)
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        if type(value) is not str or len(<str>value) > self.max_length:
            return False
        self.write(env, value)
        return True

    cdef object read(self, Py_ssize_t env):
        cdef uint32_t *row = self.row_of(env)
        cdef Py_ssize_t length = row[0]
        cdef object text = None
        if length <= self.max_length:
            text = text_of(row + _HEAD_WORDS, length, row[1])
        if text is None:
            raise RuntimeError(f"the segment is damaged: what is in row {env} is no text")
        return text

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef const uint32_t *source_row = (<TextCodec>source).row_of(row)
        cdef Py_ssize_t nbytes = source_row[0] * width_of(source_row[1])
        if nbytes > 4 * self.max_length:
            raise RuntimeError(f"the segment is damaged: what is in row {row} is no text")
        memcpy(self.row_of(target), source_row, 4 * _HEAD_WORDS + nbytes)
        return 0

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        cdef Py_ssize_t row
        if count < 0:
            count = self.rows.num_envs
        return tuple([self.read(row) for row in range(first, first + count)])

    cdef object gather(self, const Py_ssize_t[::1] envs):
        cdef Py_ssize_t i
        return tuple([self.read(envs[i]) for i in range(envs.shape[0])])

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        return tuple([self.read(row) for row in range(first, first + lead[0])])

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        texts = tuple(values)
        if len(texts) != len(envs):
            raise ValueError(
                f"wrong actions: there are {len(texts)} texts for {len(envs)} envs. "
                "Nothing was sent to any env."
            )
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            try:
                self.write(envs[i], texts[i])
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"wrong action for env {envs[i]}: {error}. Nothing was sent to any env."
                ) from error
        return 0


cdef class DictCodec(Codec):
    """Values of a Dict space: plain dicts in the space's order of keys, like Gymnasium's."""

    cdef tuple keys
    cdef tuple codecs

    def __init__(self, codecs):
        self.keys = tuple(codecs)
        self.codecs = tuple(codecs.values())

    cdef int write(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.keys)):
            (<Codec>self.codecs[i]).write(env, value[self.keys[i]])
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        if type(value) is not dict or tuple(value) != self.keys:
            return False
        for i in range(len(self.keys)):
            if not (<Codec>self.codecs[i]).keep(env, value[self.keys[i]]):
                return False
        return True

    cdef object read(self, Py_ssize_t env):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).read(env)
        return values

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).batch(copy, first, count)
        return values

    cdef object gather(self, const Py_ssize_t[::1] envs):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).gather(envs)
        return values

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).view(lease, first, lead)
        return values

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.keys)):
            (<Codec>self.codecs[i]).copy_row((<DictCodec>source).codecs[i], row, target)
        return 0

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        cdef Py_ssize_t i
        for key in self.keys:
            try:
                values[key]
            except (KeyError, TypeError, IndexError) as error:
                raise type(error)(
                    f"wrong actions: a Dict action space needs a mapping with the keys "
                    f"{list(self.keys)}, each holding the values of all envs; {key!r} is "
                    "missing. Nothing was sent to any env."
                ) from error
        for i in range(len(self.keys)):
            (<Codec>self.codecs[i]).write_rows(envs, values[self.keys[i]])
        return 0


cdef class TupleCodec(Codec):
    """Values of a Tuple space."""

    cdef tuple codecs

    def __init__(self, codecs):
        self.codecs = tuple(codecs)

    cdef int write(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        if len(value) < len(self.codecs):
            raise IndexError(f"a Tuple space of {len(self.codecs)} parts got {len(value)}")
        for i in range(len(self.codecs)):
            (<Codec>self.codecs[i]).write(env, value[i])
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        if type(value) is not tuple or len(value) != len(self.codecs):
            return False
        for i in range(len(self.codecs)):
            if not (<Codec>self.codecs[i]).keep(env, value[i]):
                return False
        return True

    cdef object read(self, Py_ssize_t env):
        return tuple([(<Codec>codec).read(env) for codec in self.codecs])

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        return tuple([(<Codec>codec).batch(copy, first, count) for codec in self.codecs])

    cdef object gather(self, const Py_ssize_t[::1] envs):
        return tuple([(<Codec>codec).gather(envs) for codec in self.codecs])

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        return tuple([(<Codec>codec).view(lease, first, lead) for codec in self.codecs])

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.codecs)):
            (<Codec>self.codecs[i]).copy_row((<TupleCodec>source).codecs[i], row, target)
        return 0

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        cdef Py_ssize_t i
        if len(values) != len(self.codecs):
            raise ValueError(
                f"wrong actions: a Tuple action space of {len(self.codecs)} parts needs a tuple "
                f"of that many, each holding the values of all envs; got {len(values)}. "
                "Nothing was sent to any env."
            )
        for i in range(len(self.codecs)):
            (<Codec>self.codecs[i]).write_rows(envs, values[i])
        return 0


cdef class MessageCodec(Codec):
    """Values that travel as messages, one an env, and lie in no slab.

    It is for spaces without a fixed size (Sequence, Graph, OneOf, a class of the user's), and for
    all spaces with ``shared_memory=False``. Gymnasium's functions split and join the batches.
    """

    def __init__(self, space, num_envs, explain_error):
        """`explain_error` returns the error to raise, by envs, values and the error of joining."""
        self.space = space
        self.explain_error = explain_error
        self.num_envs = num_envs  # of whichever frame: only the last values are kept
        self.batched_spaces = {}  # by number of envs, made when first needed
        self.values = [_empty_value(space) for _ in range(num_envs)]
        self.arrays = create_empty_array(space, num_envs)

    cdef int write(self, Py_ssize_t env, object value) except -1:
        self.values[env % self.num_envs] = value
        return 0

    cdef object read(self, Py_ssize_t env):
        return self.values[env % self.num_envs]

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        self.arrays = self.join(range(self.num_envs), self.arrays)
        return deepcopy(self.arrays) if copy else self.arrays

    cdef object gather(self, const Py_ssize_t[::1] envs):
        indices = [env % self.num_envs for env in envs]
        if not indices:
            return create_empty_array(self.space, 0)
        return self.join(indices, create_empty_array(self.space, len(indices)))

    cdef object join(self, envs, object arrays):
        cdef list values = [self.values[env] for env in envs]
        try:
            return concatenate(self.space, values, arrays)
        except Exception as error:
            explained = self.explain_error(envs, values, error)
            if explained is error:
                raise
            raise explained from error

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        return 0

    cdef list split(self, object batch, Py_ssize_t count):
        """Splits a batch of actions into a list of `count`."""
        if count not in self.batched_spaces:
            self.batched_spaces[count] = batch_space(self.space, count)
        try:
            actions = list(iterate(self.batched_spaces[count], batch))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise type(error)(f"wrong actions: {error}. Nothing was sent to any env.") from error
        if len(actions) != count:
            raise ValueError(
                f"wrong actions: there are {len(actions)} for {count} envs. "
                "Nothing was sent to any env."
            )
        return actions


cdef object _empty_value(object space):
    """The observation of an env that was never reset: zeros if the space has them, else None."""
    if isinstance(space, Dict):
        return {key: _empty_value(part) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple([_empty_value(part) for part in space.spaces])
    values = create_empty_array(space, 1)
    return None if values is None else values[0]


cdef class StepLog:
    """Base of a log of envs' steps, in memory that the caller and the workers have."""

    # ---- a worker ----------------------------------------------------------------------------

    cpdef int attach(self, Py_ssize_t first, Py_ssize_t count) except -1:
        """Begins to log the steps of these envs."""
        return 0

    cpdef int interrupt(self, Py_ssize_t env) except -1:
        """Notes that what precedes the next step of an env is unknown."""
        return 0

    cdef int put_start(self, Py_ssize_t env, Py_ssize_t num_unpublished,
                       object observation) except -1:
        """Logs the first observation of an episode, after so many unpublished records."""
        return 0

    cdef int put_step(self, Py_ssize_t env, object action, object observation, Results results,
                      Py_ssize_t row) except -1:
        """Logs a step, and the observation after it. Reward and flags are in a row of results."""
        return 0

    cdef int publish(self, Py_ssize_t env, Py_ssize_t count) except -1:
        """Publishes what was put. It is the last act of a request."""
        return 0

    # ---- the caller --------------------------------------------------------------------------

    cdef int note_request(self, const Py_ssize_t *envs, Py_ssize_t count) except -1:
        """Notes that these envs, whose last answers were taken, are about to be asked."""
        return 0

    cdef int accept(self, Py_ssize_t env) except -1:
        """Accepts what was published of an env that is not in flight."""
        return 0


cdef enum:
    SEEDED = 1
    EMPTY_OPTIONS = 2  # options={}, which masked resets have
    IN_MESSAGE = 4     # seed and options are in a message
    AUTOMATIC = 8      # the reset is an automatic one: see `mark_automatic`
    USED = 16          # the worker has reset the env with the seed


cdef class Seeds:
    """A slab with a seed for each env: for resets that are asked for, or for automatic ones.

    The caller writes the cell of an env while it is idle, the env's worker while it is in flight.
    """

    def __init__(self, values, flags):
        self.values, self.flags = values, flags

    cdef bint fits(self, tuple arguments) except -1:
        """Whether (seed, options) have room here, and come out as they are."""
        cdef int overflow = 0
        seed, options = arguments
        if type(seed) is int:
            PyLong_AsLongLongAndOverflow(seed, &overflow)
        elif seed is not None:
            return False
        return overflow == 0 and (options is None or options is EMPTY_DICT)

    cdef int put(self, Py_ssize_t env, tuple arguments) except -1:
        """Sets (seed, options) of an env's next reset, which must fit; None: a message has them."""
        if arguments is None:
            self.flags[env] = IN_MESSAGE
            return 0
        seed, options = arguments
        self.flags[env] = EMPTY_OPTIONS if options is not None else 0
        if seed is not None:
            self.flags[env] |= SEEDED
            self.values[env] = seed
        return 0

    cdef tuple get(self, Py_ssize_t env):
        """The (seed, options) of an env's reset; None: a message has them."""
        cdef uint8_t flags = self.flags[env]
        if flags & IN_MESSAGE:
            return None
        return (self.values[env] if flags & SEEDED else None,
                EMPTY_DICT if flags & EMPTY_OPTIONS else None)

    # ---- automatic resets --------------------------------------------------------------------

    cdef int mark_automatic(self, Py_ssize_t env) except -1:
        """Notes that the reset is asked for in place of an automatic one, which was lost."""
        self.flags[env] = AUTOMATIC
        return 0

    cdef bint is_automatic(self, Py_ssize_t env) noexcept:
        return self.flags[env] & AUTOMATIC

    cdef bint is_unused(self, Py_ssize_t env) noexcept:
        """Whether there is a seed that no reset has used yet."""
        return self.flags[env] & (SEEDED | IN_MESSAGE) and not self.flags[env] & USED

    cdef int mark_used(self, Py_ssize_t env) except -1:
        if self.flags[env] & (SEEDED | IN_MESSAGE):
            self.flags[env] |= USED
        return 0

    cdef int remove_used(self, Py_ssize_t env) except -1:
        """Removes a used seed, before the env is asked again."""
        if self.flags[env] & USED:
            self.flags[env] = 0
        return 0

    cdef int unmark_used(self, Py_ssize_t env) except -1:
        """Has a used seed be used once more, because the answer to the env's request is lost."""
        self.flags[env] &= ~USED
        return 0


# ==== results =====================================================================================
#
# The result of an env is a *row*: observation, reward and two flags. A *frame* has a row for each
# env: row = frame * num_envs + env. Each request names the frame for its results. The caller
# chooses it (`Frames` in caller.pyx), and the env's worker writes there.
#
# A *block* has room for the observations of all envs. Workers may write them there as well, and the
# block becomes the user's own array.
#
# A `Lender` lends rows: it marks them, and no request names a marked row. A `Lease` clears the
# marks when its last array is gone, or when its owner releases it. Arrays that a user holds when
# the process forks are copied for the fork: csrc/pages.h.


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class Lender:
    """Rows in shared memory, and which of them are lent."""

    def __cinit__(self, memory, *args, **kwargs):
        PyObject_GetBuffer(memory, &self.export, PyBUF_WRITABLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.export)

    def __init__(self, memory, num_rows):
        self.marks = np.zeros(num_rows, np.uint8)

    cpdef bint is_leased(self, Py_ssize_t first, Py_ssize_t count):
        cdef Py_ssize_t row
        for row in range(first, first + count):
            if c.sv_is_marked(&self.marks[0], row):
                return True
        return False

    cpdef Lease lease(self, Py_ssize_t first, Py_ssize_t count):
        return Lease(self, first, count)


@cython.no_gc  # it is in no cycle, and its lender must exist when it is freed
cdef class Lease:
    """Marks rows as lent while it lives. It is the base of the arrays that show these rows."""

    def __cinit__(self, Lender lender not None, Py_ssize_t first, Py_ssize_t count):
        self.lender = lender
        self.first = first
        self.count = count
        c.sv_marks_set(&lender.marks[0], first, count)

    def __dealloc__(self):
        self.end()

    def release(self):
        """Lets the rows be written, even if arrays still show them."""
        with cython.critical_section(self):  # once: the marks may be another lease's later
            self.end()

    cdef void end(self) noexcept:
        if not self.ended:
            self.ended = True
            c.sv_marks_clear(&self.lender.marks[0], self.first, self.count)

    @property
    def released(self):
        return self.ended

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef Py_buffer *export = &self.lender.export
        PyBuffer_FillInfo(view, self, export.buf, export.len, False, flags)


def release(array):
    """Ends the lease of a batch or a rollout, by one of its arrays or a view of one.

    Raises:
        TypeError: The argument is no array.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"release() takes an array of a batch, such as its rewards, got {type(array).__name__}"
        )
    owner = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    # Other arrays are the user's own; those in blocks have a lease that need not be released.
    if isinstance(owner, Lease) and not isinstance((<Lease>owner).lender, Blocks):
        owner.release()


cdef class Results(Lender):
    """Frames of results."""

    def __init__(self, memory, Codec observations, rewards, terminations, truncations,
                 Py_ssize_t num_envs):
        """Takes arrays (num_frames * num_envs, ...), and the memory in which they lie."""
        super().__init__(memory, len(rewards))
        self.observations = observations
        self.rewards, self.terminations, self.truncations = rewards, terminations, truncations
        self.reward_rows = ArrayCodec(rewards)
        self.terminated_rows = ArrayCodec(terminations)
        self.truncated_rows = ArrayCodec(truncations)
        self.reward_nbytes = rewards.nbytes // len(rewards)
        self.reward_of = rewards if rewards.ndim == 1 else None
        self.terminated_of = terminations.view("u1")
        self.truncated_of = truncations.view("u1")
        self.num_envs = num_envs
        self.num_frames = len(rewards) // num_envs

    cdef tuple gather(self, object rows):
        """Copies of rows: observations, rewards, terminations and truncations."""
        cdef const Py_ssize_t[::1] row_of = rows
        return (self.observations.gather(row_of), self.reward_rows.gather(row_of),
                self.terminated_rows.gather(row_of), self.truncated_rows.gather(row_of))

    cpdef tuple view(self, Lease lease, tuple lead):
        """Arrays (*lead, ...) over the rows of a lease. They keep the lease."""
        return (self.observations.view(lease, lease.first, lead),
                self.reward_rows.view(lease, lease.first, lead),
                self.terminated_rows.view(lease, lease.first, lead),
                self.truncated_rows.view(lease, lease.first, lead))

    cdef int copy_row(self, Results source, Py_ssize_t row, Py_ssize_t target) except -1:
        """Copies one row of other frames, or of these frames, to a row of these."""
        self.observations.copy_row(source.observations, row, target)
        self.reward_rows.copy_row(source.reward_rows, row, target)
        self.terminated_of[target] = source.terminated_of[row]
        self.truncated_of[target] = source.truncated_of[row]
        return 0

    cdef void clear_reward(self, Py_ssize_t row) noexcept:
        """Makes the reward of a row 0."""
        memset(<char *>data_of(self.rewards) + row * self.reward_nbytes, 0, self.reward_nbytes)


cdef class Blocks(Lender):
    """Blocks of observations, in memory of their own."""

    def __init__(self, memory, Codec observations, Py_ssize_t num_envs, Py_ssize_t num_blocks):
        """Takes the memory of all blocks, and observations (num_blocks * num_envs, ...)."""
        super().__init__(memory, num_blocks * num_envs)
        self.observations = observations
        self.num_envs = num_envs
        self.num_blocks = num_blocks
        if not c.sv_area_add(&self.area, self.export.buf, self.export.len, &self.marks[0],
                             num_blocks * num_envs):
            raise MemoryError
        self.is_registered = True

    def __dealloc__(self):
        if self.is_registered:
            c.sv_area_remove(&self.area)

    cdef Py_ssize_t find_unleased(self):
        """A block that is not lent; -1: there is none."""
        cdef Py_ssize_t block
        if not c.sv_area_is_common(&self.area):
            for block in range(self.num_blocks):
                if not self.is_leased(block * self.num_envs, self.num_envs):
                    return block
        return -1

    cdef object lend(self, Py_ssize_t block):
        """The observations in a block, leased."""
        cdef Lease lease = self.lease(block * self.num_envs, self.num_envs)
        return self.observations.view(lease, lease.first, (self.num_envs,))
