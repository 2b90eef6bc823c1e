"""Arrays of the user's in shared memory: workers write observations where he gets them.

A copy of large observations costs the parent, while all workers wait, as much as it costs them to
write these. So there are some blocks of shared memory, each with room for all envs'. A request
names one that nobody holds, workers write there too, and the parent hands it out as it is: not as a
view of something else, but as an array that owns its memory. NumPy lets an array be made by an
allocator (NEP 49) and asks that one when the array's last reference is gone; ours then notes that
the block is free (csrc/hold.h: in any thread). So it is the user's like any other: writable, for as long as he likes, after
`close` as well.

Who holds all blocks gets ordinary arrays. Only what has come as it should is handed out from here:
of what is not as usual (a fault, a call that was broken off) the observations are copied from the
frames, where workers write them in any case, and the block is free again.

A fork gets copies of the blocks that are held in their place: see csrc/pages.h.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport (
    PyCapsule_GetContext,
    PyCapsule_New,
    PyCapsule_SetContext,
    PyCapsule_SetDestructor,
)
from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, strcpy

from shmvec._core.codec cimport Codec
from shmvec._core.csrc cimport (
    sv_hold,
    sv_hold_drop,
    sv_hold_is_free,
    sv_hold_take,
    sv_pages_copy,
    sv_pages_drop,
    sv_pages_give_back,
    sv_pages_replace,
)
from shmvec._core.ndarray cimport set_handler

import numpy as np

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

    cdef object take(self, Py_ssize_t block):
        """The observations in a block, which is the caller's until he drops them."""
        return (<Codec>self.codecs[block]).lend(self)

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
