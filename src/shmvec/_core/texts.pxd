"""The characters of a str in shared memory, in Python's own format.

Each character has 1, 2 or 4 bytes, as many as the largest one needs. So a text is copied, not
encoded, and may have any characters, also lone surrogates. Before them are their number and their
*bound*, the largest character that a str of this kind may have: 0x7f, 0xff, 0xffff or 0x10ffff.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdatomic.h>
    #if PY_VERSION_HEX < 0x030C0000 /* later ones have no other strings */
    #define sv_text_ready(text) PyUnicode_READY(text)
    #else
    #define sv_text_ready(text) 0
    #endif

    static void sv_keep_freed_memory(void)
    {
        static _Atomic int kept;
        /* relaxed (both): that another thread does so as well costs a call, and no more. */
        if (!atomic_load_explicit(&kept, memory_order_relaxed)) {
            void *volatile memory = malloc((32 << 20) - (64 << 10));
            free(memory);
            atomic_store_explicit(&kept, 1, memory_order_relaxed);
        }
    }
    """
    int sv_text_ready(object text) except -1
    # Has malloc keep memory that was freed. By default glibc returns the end of the heap to the
    # system as soon as 128 KB are free there. Then each batch of long texts would be written to new
    # pages, which takes several times as long. Freeing one large block moves that threshold to
    # twice its size; 32 MB is the largest block that does.
    void sv_keep_freed_memory() noexcept
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    uint32_t PyUnicode_MAX_CHAR_VALUE(object text)
    int PyUnicode_KIND(object text)
    void *PyUnicode_DATA(object text)
    object PyUnicode_New(Py_ssize_t size, uint32_t bound)
    object PyUnicode_FromKindAndData(int kind, const void *characters, Py_ssize_t size)

cdef enum:
    MAX_POOLED_BYTES = 512  # of an object for which Python's own pools have room


cdef inline Py_ssize_t width_of(uint32_t bound) noexcept:
    """The bytes of a character; 0: no text has this bound."""
    if bound == 0x7f or bound == 0xff:
        return 1
    return 2 if bound == 0xffff else 4 if bound == 0x10ffff else 0


cdef inline Py_ssize_t measure(object text, uint32_t *head) except -1:
    """Returns the bytes of a str's characters; writes their number and their bound to `head`."""
    sv_text_ready(text)
    cdef Py_ssize_t length = PyUnicode_GET_LENGTH(text)
    if length > MAX_POOLED_BYTES:
        sv_keep_freed_memory()
    head[0], head[1] = <uint32_t>length, PyUnicode_MAX_CHAR_VALUE(text)
    return length * PyUnicode_KIND(text)


cdef inline uint32_t _largest(const void *characters, Py_ssize_t nbytes, int kind) noexcept:
    """The largest character, or a larger number of as many bits."""
    cdef const uint8_t *bytes = <const uint8_t *>characters
    cdef const uint16_t *pairs = <const uint16_t *>characters
    cdef const uint32_t *points = <const uint32_t *>characters
    cdef uint32_t bits = 0
    cdef Py_ssize_t i
    # No branches, so that the compiler can use vector instructions.
    if kind == 1:
        for i in range(nbytes):
            bits |= bytes[i]
    elif kind == 2:
        for i in range(nbytes // 2):
            bits |= pairs[i]
    else:
        for i in range(nbytes // 4):
            bits = max(bits, points[i])
    return bits


cdef inline object text_of(const void *characters, Py_ssize_t length, uint32_t bound):
    """A str of characters that other processes may be writing; None: they are no text."""
    cdef Py_ssize_t nbytes = length * width_of(bound)
    cdef uint32_t smaller = 0x7f if bound == 0xff else 0xff if bound == 0xffff else 0xffff
    cdef uint32_t largest
    cdef object text
    if nbytes == 0:
        return "" if length == 0 else None
    if nbytes > MAX_POOLED_BYTES:
        sv_keep_freed_memory()
    text = PyUnicode_New(length, bound)
    memcpy(PyUnicode_DATA(text), characters, nbytes)
    largest = _largest(PyUnicode_DATA(text), nbytes, PyUnicode_KIND(text))
    if largest > bound:  # Python would make a str that it cannot read
        return None
    if bound > 0x7f and largest <= smaller:
        # Python relies on each str being of the smallest kind that fits.
        return PyUnicode_FromKindAndData(PyUnicode_KIND(text), PyUnicode_DATA(text), length)
    return text
