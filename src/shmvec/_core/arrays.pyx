"""Arrays: how C sees NumPy's, views of memory that are leased, and arrays made in shared memory.

A lease is for views: what they show is not written again before they are gone. A pool is for arrays
that are the user's own: their memory is shared with the workers, which write observations there.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_WRITABLE,
    Py_buffer,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.object cimport PyObject
from cpython.pycapsule cimport (
    PyCapsule_GetContext,
    PyCapsule_GetPointer,
    PyCapsule_New,
    PyCapsule_SetContext,
    PyCapsule_SetDestructor,
)
from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, strcpy

from shmvec._core.csrc cimport (
    sv_hold,
    sv_hold_drop,
    sv_hold_is_free,
    sv_hold_take,
    sv_marks_clear,
    sv_marks_set,
    sv_pages_copy,
    sv_pages_drop,
    sv_pages_give_back,
    sv_pages_replace,
)

import numpy as np

try:
    from numpy._core import _multiarray_umath as _umath
except ImportError:  # an older one
    from numpy.core import _multiarray_umath as _umath


# ---- NumPy's binary interface ----------------------------------------------------------------
#
# An attribute of an array takes Python as long as a copy of its few numbers, so on the step's path C
# looks itself. NumPy's headers are not used for so little: a build would need NumPy, and a new
# enough one. What is declared here is NumPy's binary interface, on which every extension that was
# compiled with the headers of a past version depends: the fields stay where they are, and so does a
# function in the table that NumPy hands out. (Those of a dtype are not the same in 1.x and 2.x, and
# not read here.) All of it is tried when this module is imported; a NumPy where it is otherwise is
# refused, as it is by what was compiled with its headers.

# Places in the table, as in NumPy's __multiarray_api.h.
ABI_VERSION = 0       # PyArray_GetNDArrayCVersion
API_VERSION = 211     # PyArray_GetNDArrayCFeatureVersion
NEW_LIKE_ARRAY = 277  # PyArray_NewLikeArray
SET_HANDLER = 304     # PyDataMem_SetHandler

cdef unsigned int _API_LEAST = 0xf  # of NumPy 1.22, which has allocators of arrays
cdef int _C_ORDER = 0

ctypedef unsigned int (*Version)() noexcept
ctypedef object (*NewLikeArray)(PyObject *prototype, int order, PyObject *dtype, int subok)
ctypedef object (*SetHandler)(PyObject *handler)

cdef NewLikeArray _new_like_array
cdef SetHandler _set_handler


def looked_at(array):
    """What is seen of an array here: address, shape, size, whether of its dtype, contiguous."""
    cdef int axis
    return (<size_t>data_of(array), tuple([shape_of(array)[axis] for axis in range(ndim_of(array))]),
            size_of(array), has_dtype(array, array.dtype), is_contiguous(array))


def looks(array):
    """The same as NumPy says it."""
    return (array.__array_interface__["data"][0], array.shape, array.size, True,
            array.flags.c_contiguous)


cdef int _connect() except -1:
    global _new_like_array, _set_handler
    cdef void **table
    try:
        table = <void **>PyCapsule_GetPointer(_umath._ARRAY_API, NULL)
    except (AttributeError, ValueError) as error:
        raise _unknown("it shows no table of functions") from error
    cdef unsigned int abi = (<Version>table[<int>ABI_VERSION])()
    if abi >> 24 not in (1, 2):
        raise _unknown(f"its binary interface is {abi:#x}")
    if (<Version>table[<int>API_VERSION])() < _API_LEAST:
        raise _unknown("it is too old")
    _new_like_array = <NewLikeArray>table[<int>NEW_LIKE_ARRAY]
    _set_handler = <SetHandler>table[<int>SET_HANDLER]
    whole = np.zeros((4, 2, 3), np.int16)
    for array in (whole, whole[1:, :, 2], whole[0, 1, 2:], new_like(whole)):
        if looked_at(array) != looks(array):
            raise _unknown("its arrays are not laid out as those of 1.x and 2.x")
    return 0


cdef object _unknown(str what):
    return ImportError(f"shmvec does not know NumPy {np.__version__}: {what}. "
                       "It needs NumPy 1.24 or newer, of 1.x or 2.x.")


cdef object new_like(object array):
    return _new_like_array(<PyObject *>array, _C_ORDER, NULL, False)


cdef object set_handler(object handler):
    """Sets the allocator (NEP 49) of arrays that this thread makes; returns the last one."""
    return _set_handler(<PyObject *>handler)


_connect()


# ---- leases ----------------------------------------------------------------------------------
#
# Memory that is not written again while somebody looks at it: csrc/hold.h.


@cython.no_gc  # nothing it refers to can refer to it, and it must be whole when it goes
cdef class Lease:
    """Marks rows as leased while it lives; the arrays that show them have it as their base."""

    def __cinit__(self, memory, leased, Py_ssize_t first, Py_ssize_t count):
        PyObject_GetBuffer(memory, &self.export, PyBUF_WRITABLE)
        self.memory = memory
        self.leased = leased
        self.first = first
        self.count = count
        sv_marks_set(&self.leased[0], first, count)

    def __dealloc__(self):
        self.end()
        PyBuffer_Release(&self.export)

    def release(self):
        with cython.critical_section(self):  # once, or it would end the lease of who has it next
            self.end()

    cdef void end(self) noexcept:
        if not self.ended:
            self.ended = True
            sv_marks_clear(&self.leased[0], self.first, self.count)

    @property
    def released(self):
        return self.ended

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.export.buf, self.export.len, False, flags)

    cdef object show(self, char *start, tuple shape, object dtype):
        """An array over the memory from `start` on, which keeps this lease."""
        return np.ndarray(shape, dtype, self, start - <char *>self.export.buf)


# ---- pools -----------------------------------------------------------------------------------
#
# A copy of large observations costs the parent, while all workers wait, as much as it costs them to
# write these. So there are some blocks of shared memory, each with room for all envs'. A request
# names one that nobody holds, workers write there too, and the parent hands it out as it is: not as a
# view of something else, but as an array that owns its memory. NumPy lets an array be made by an
# allocator (NEP 49) and asks that one when the array's last reference is gone; ours then notes that
# the block is free (csrc/hold.h: in any thread). So it is the user's like any other: writable, for as
# long as he likes, after `close` as well.
#
# Who holds all blocks gets ordinary arrays. Only what has come as it should is handed out from here:
# of what is not as usual (a fault, a call that was broken off) the observations are copied from the
# frames, where workers write them in any case, and the block is free again.
#
# A fork gets copies of the blocks that are held in their place: see csrc/pages.h.

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)

cdef const char *_NAME = "mem_handler"  # as NumPy wants it


# NumPy's PyDataMem_Handler and what it holds, version 1.
cdef struct Functions:
    void *ctx
    void *(*malloc)(void *ctx, size_t size) noexcept
    void *(*calloc)(void *ctx, size_t nelem, size_t elsize) noexcept
    void *(*realloc)(void *ctx, void *ptr, size_t new_size) noexcept
    void (*free)(void *ctx, void *ptr, size_t size) noexcept


cdef struct Handler:
    char[127] name
    uint8_t version
    Functions functions


cdef struct Allocator:
    Handler handler
    Py_buffer memory      # which it keeps
    char *start
    size_t block_bytes
    Py_ssize_t num_blocks
    Block *blocks
    sv_hold ended         # no array is made any more, if it is held
    bint forked           # this process is a fork of the one whose the pool is
    void *next            # where the array that is being made is to lie; NULL: anywhere
    Allocator *before     # in the list of all of this process
    Allocator *after

cdef Allocator *_all = NULL
cdef pthread_mutex_t _lock  # of the list: C code may fork without the GIL
pthread_mutex_init(&_lock, NULL)


cdef Block *_block_of(Allocator *self, void *memory) noexcept:
    """The block in which memory lies; NULL: it is ordinary memory."""
    cdef char *address = <char *>memory
    if address < self.start or address >= self.start + self.num_blocks * self.block_bytes:
        return NULL
    return &self.blocks[(address - self.start) // self.block_bytes]


cdef void _drop(Allocator *self, Block *block) noexcept:
    """An array that lived in the block is gone."""
    # Or `end` does so, or nobody if both come at once: it goes with the pool then.
    if sv_hold_drop(&block.hold) and not sv_hold_is_free(&self.ended):
        _give_back(self, block)


cdef void _give_back(Allocator *self, Block *block) noexcept:
    if not self.forked:  # else the parent goes on
        sv_pages_give_back(self.start + (block - self.blocks) * self.block_bytes,
                           self.block_bytes)


cdef void *_malloc(void *context, size_t size) noexcept:
    cdef Allocator *self = <Allocator *>context
    cdef void *memory = self.next
    if memory is NULL:
        return malloc(size)
    self.next = NULL
    sv_hold_take(&_block_of(self, memory).hold)
    return memory


cdef void *_calloc(void *context, size_t count, size_t size) noexcept:
    return calloc(count, size)


cdef void *_realloc(void *context, void *memory, size_t size) noexcept:
    """For ``ndarray.resize``: what leaves its block is ordinary memory from then on."""
    cdef Allocator *self = <Allocator *>context
    cdef Block *block = _block_of(self, memory)
    if block is NULL:
        return realloc(memory, size)
    cdef size_t most = (self.start + (block - self.blocks + 1) * self.block_bytes
                        - <char *>memory)
    cdef void *moved = malloc(size)
    if moved is not NULL:
        memcpy(moved, memory, min(size, most))
        _drop(self, block)
    return moved


cdef void _free(void *context, void *memory, size_t size) noexcept:
    cdef Allocator *self = <Allocator *>context
    cdef Block *block = _block_of(self, memory)
    if block is NULL:
        free(memory)
    else:
        _drop(self, block)


cdef void _end(object capsule) noexcept:
    """The pool is gone, and its last array."""
    global _all
    cdef Allocator *self = <Allocator *>PyCapsule_GetContext(capsule)
    pthread_mutex_lock(&_lock)
    if self.before is not NULL:
        self.before.after = self.after
    elif _all is self:
        _all = self.after
    if self.after is not NULL:
        self.after.before = self.before
    pthread_mutex_unlock(&_lock)
    free(self.blocks)
    PyBuffer_Release(&self.memory)
    free(self)


cdef void _before_fork() noexcept nogil:
    """Copies what the user holds: in the fork, the copies take its place."""
    cdef Allocator *self
    cdef Block *block
    cdef Py_ssize_t i
    pthread_mutex_lock(&_lock)
    self = _all
    while self is not NULL:
        for i in range(0 if self.forked else self.num_blocks):
            block = &self.blocks[i]
            if not sv_hold_is_free(&block.hold):
                block.copy = sv_pages_copy(self.start + i * self.block_bytes, self.block_bytes)
                if block.copy is NULL:
                    sv_hold_take(&block.hold)  # both hold it: no worker writes there any more
        self = self.after


cdef void _after_fork(bint in_child) noexcept nogil:
    cdef Allocator *self = _all
    cdef Block *block
    cdef Py_ssize_t i
    while self is not NULL:
        for i in range(self.num_blocks):
            block = &self.blocks[i]
            if block.copy is not NULL:
                if not in_child or not sv_pages_replace(
                        self.start + i * self.block_bytes, self.block_bytes, block.copy):
                    sv_pages_drop(block.copy, self.block_bytes)
                block.copy = NULL
        if in_child:
            self.forked = True
        self = self.after
    pthread_mutex_unlock(&_lock)


cdef void _in_parent() noexcept nogil:
    _after_fork(False)


cdef void _in_child() noexcept nogil:
    _after_fork(True)


# Not `os.register_at_fork`: C code forks, too, and between Python's hooks other threads may run.
if pthread_atfork(_before_fork, _in_parent, _in_child) != 0:
    raise MemoryError


cdef Allocator *_allocator_of(object capsule) noexcept:
    return <Allocator *>PyCapsule_GetContext(capsule)


@cython.final
cdef class Pool:
    """Blocks of shared memory for observations of all envs, each for an array of the user's."""

    def __init__(self, memory, Py_ssize_t block_bytes, list codecs):
        """Takes whole pages of memory, the bytes of a block, and a codec over each."""
        global _all
        cdef Allocator *made = <Allocator *>calloc(1, sizeof(Allocator))
        if made is NULL:
            raise MemoryError
        made.blocks = <Block *>calloc(len(codecs), sizeof(Block))
        if made.blocks is NULL:
            free(made)
            raise MemoryError
        try:
            PyObject_GetBuffer(memory, &made.memory, PyBUF_WRITABLE)
        except BaseException:
            free(made.blocks)
            free(made)
            raise
        made.start = <char *>made.memory.buf
        made.block_bytes = block_bytes
        made.num_blocks = len(codecs)
        strcpy(made.handler.name, b"shmvec")
        made.handler.version = 1
        made.handler.functions.ctx = made
        made.handler.functions.malloc = _malloc
        made.handler.functions.calloc = _calloc
        made.handler.functions.realloc = _realloc
        made.handler.functions.free = _free
        self.capsule = PyCapsule_New(&made.handler, _NAME, NULL)
        PyCapsule_SetContext(self.capsule, made)
        PyCapsule_SetDestructor(self.capsule, _end)
        self.codecs = codecs
        pthread_mutex_lock(&_lock)
        made.after = _all
        if _all is not NULL:
            _all.before = made
        _all = made
        pthread_mutex_unlock(&_lock)

    def end(self):
        """No array is made any more: what the user does not hold goes back to the system."""
        cdef Allocator *allocator = _allocator_of(self.capsule)
        cdef Py_ssize_t i
        sv_hold_take(&allocator.ended)
        for i in range(allocator.num_blocks):
            if sv_hold_is_free(&allocator.blocks[i].hold):
                _give_back(allocator, &allocator.blocks[i])

    cdef Py_ssize_t unheld(self):
        """A block that nobody holds; -1: there is none."""
        cdef Allocator *allocator = _allocator_of(self.capsule)
        cdef Py_ssize_t i
        for i in range(allocator.num_blocks):
            if sv_hold_is_free(&allocator.blocks[i].hold):
                return i
        return -1

    cdef object array(self, char *start, tuple shape, object dtype):
        """An array that has its memory in a block, from `start` on."""
        cdef Allocator *allocator = _allocator_of(self.capsule)
        allocator.next = start
        usual = set_handler(self.capsule)
        try:
            return np.empty(shape, dtype)
        finally:
            set_handler(usual)
            allocator.next = NULL
