"""Control channels: messages through a socket, each with the number of the request it belongs to.

Channels carry commands, their results, errors and messages too large for the rings; steps do not
use them.

No call blocks, or runs Python code between a system call and the note of its result. So when a
signal handler raises, the channel still knows how much of each message is read or written.
A message that no call waits for any more is discarded by its number. Another thread may close the
channel at any time, so each call is one critical section, also on a Python without a GIL.
csrc/model/channel.pml is the model.
"""

cimport cython
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from posix.unistd cimport close as close_descriptor

import os

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_CMSG_CLOEXEC
        MSG_DONTWAIT
        MSG_NOSIGNAL
        SCM_RIGHTS
        SOL_SOCKET
    struct iovec:
        void *iov_base
        size_t iov_len
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
    struct cmsghdr:
        size_t cmsg_len
        int cmsg_level
        int cmsg_type
    cmsghdr *CMSG_FIRSTHDR(msghdr *message)
    unsigned char *CMSG_DATA(cmsghdr *header)
    size_t CMSG_LEN(size_t length)
    size_t CMSG_SPACE(size_t length)
    ssize_t recvmsg(int descriptor, msghdr *message, int flags)
    ssize_t sendmsg(int descriptor, const msghdr *message, int flags)

cdef uint32_t MAGIC = 0x73686D76
cdef uint64_t LONGEST = 1 << 40
cdef enum:
    MOST_DESCRIPTORS = 64


cdef packed struct Header:
    uint32_t magic
    uint32_t sequence
    uint32_t goodbye
    uint32_t num_descriptors
    uint64_t length


cdef class ChannelMessage:
    cdef readonly uint32_t sequence
    cdef readonly bint goodbye
    cdef readonly bytes content
    cdef readonly list descriptors
    cdef readonly bint whole


cdef class Channel:
    def __init__(self, int descriptor):
        self.descriptor = descriptor
        self.outbox = []
        self.inbox = []
        self.incoming = []

    def __dealloc__(self):
        if self.descriptor >= 0:
            close_descriptor(self.descriptor)

    def fileno(self):
        return self.descriptor

    @property
    @cython.critical_section
    def unsent(self):
        return len(self.outbox) > 0 and not self.mute

    @cython.critical_section
    def put(self, uint32_t sequence, bytes content, descriptors=(), bint goodbye=False):
        cdef Header header
        if len(descriptors) > MOST_DESCRIPTORS:
            raise ValueError(f"at most {MOST_DESCRIPTORS} descriptors a message")
        header.magic = MAGIC
        header.sequence = sequence
        header.goodbye = goodbye
        header.num_descriptors = len(descriptors)
        header.length = len(content)
        # Duplicates: the caller may close its own before these are sent.
        cdef list copies = []
        try:
            for descriptor in descriptors:
                copies.append(os.dup(descriptor))
            frame = PyBytes_FromStringAndSize(<char *>&header, sizeof(Header)) + content
        except BaseException:
            _close_all(copies)
            raise
        self.outbox.append((frame, copies))
        self.flush()

    @cython.critical_section
    def pump(self):
        cdef bint more = self.fill()
        return self.flush() or more

    @cython.critical_section
    def find(self, uint32_t sequence):
        cdef ChannelMessage message
        self.fill()
        while self.inbox:
            message = self.inbox[0]
            if message.goodbye or <int32_t>(message.sequence - sequence) > 0:
                return None
            if message.sequence == sequence:
                return message
            _close_all(message.descriptors)
            del self.inbox[0]
        return None

    @cython.critical_section
    def take(self, uint32_t sequence):
        message = self.find(sequence)
        if message is not None:
            del self.inbox[0]
        return message

    @cython.critical_section
    def fail(self, why):
        self.broken = self.broken or why

    @property
    @cython.critical_section
    def farewell(self):
        cdef ChannelMessage message
        self.fill()
        while self.inbox:
            message = self.inbox[0]
            if message.goodbye:
                return message.content
            _close_all(message.descriptors)
            del self.inbox[0]
        return None

    @cython.critical_section
    def close(self):
        cdef ChannelMessage message
        if self.descriptor >= 0:
            close_descriptor(self.descriptor)
            self.descriptor = -1
        self.broken = self.broken or "it was closed"
        for _, copies in self.outbox:
            _close_all(copies)
        for message in self.inbox:
            _close_all(message.descriptors)
        _close_all(self.incoming)
        self.outbox.clear()
        self.inbox.clear()

    # ---- the socket --------------------------------------------------------------------------

    cdef bint flush(self) except -1:
        """Writes as much as the socket takes; returns whether something is left."""
        cdef Py_ssize_t done
        while self.outbox and self.broken is None and not self.mute:
            done = self.write()
            if done == 0:
                return not self.mute
            self.written += done
            frame, copies = <tuple>self.outbox[0]
            _close_all(copies)  # the first byte has carried the descriptors
            if self.written == PyBytes_GET_SIZE(frame):
                self.written = 0
                del self.outbox[0]
        return False

    cdef Py_ssize_t write(self) except -2:
        """One write; 0: the socket is full, or broken."""
        cdef iovec vector
        cdef msghdr message
        cdef char control[512]
        cdef cmsghdr *header
        cdef ssize_t done
        cdef int[MOST_DESCRIPTORS] numbers
        frame, copies = <tuple>self.outbox[0]
        vector.iov_base = PyBytes_AS_STRING(frame) + self.written
        vector.iov_len = PyBytes_GET_SIZE(frame) - self.written
        memset(&message, 0, sizeof(message))
        message.msg_iov = &vector
        message.msg_iovlen = 1
        if copies:
            memset(control, 0, sizeof(control))
            for i, descriptor in enumerate(copies):
                numbers[i] = descriptor
            message.msg_control = control
            message.msg_controllen = CMSG_SPACE(len(copies) * sizeof(int))
            header = CMSG_FIRSTHDR(&message)
            header.cmsg_level = SOL_SOCKET
            header.cmsg_type = SCM_RIGHTS
            header.cmsg_len = CMSG_LEN(len(copies) * sizeof(int))
            memcpy(CMSG_DATA(header), numbers, len(copies) * sizeof(int))
        while True:
            done = sendmsg(self.descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
            if done >= 0:
                return done
            if errno == EAGAIN:
                return 0
            if errno != EINTR:
                self.mute = True  # messages that the other side sent before can still be read
                return 0

    cdef bint fill(self) except -1:
        """Reads what has come; returns whether that was anything."""
        cdef Header header
        cdef ChannelMessage message
        cdef Py_ssize_t got
        cdef bint some = False
        while self.broken is None:
            if self.header_read < <Py_ssize_t>sizeof(Header):
                got = self.read(self.header + self.header_read, sizeof(Header) - self.header_read)
                self.header_read += got
            elif self.body is None:
                memcpy(&header, self.header, sizeof(Header))
                if (header.magic != MAGIC or header.length > LONGEST
                        or header.num_descriptors > MOST_DESCRIPTORS):
                    self.broken = "what came through it is no message"
                    break
                self.body = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>header.length)
                self.body_read = 0
                continue
            elif self.body_read < PyBytes_GET_SIZE(self.body):
                got = self.read(PyBytes_AS_STRING(self.body) + self.body_read,
                                PyBytes_GET_SIZE(self.body) - self.body_read)
                self.body_read += got
            else:
                memcpy(&header, self.header, sizeof(Header))
                message = ChannelMessage()
                message.sequence = header.sequence
                message.goodbye = header.goodbye != 0
                message.content = self.body
                message.descriptors = self.incoming
                message.whole = len(self.incoming) == <Py_ssize_t>header.num_descriptors
                self.inbox.append(message)
                self.incoming = []
                self.body = None
                self.header_read = 0
                continue
            if got == 0:
                break
            some = True
        return some

    cdef Py_ssize_t read(self, char *target, Py_ssize_t most) except -2:
        """One read; 0: there is nothing, or it is broken."""
        cdef iovec vector
        cdef msghdr message
        cdef char control[512]
        cdef cmsghdr *header
        cdef ssize_t got
        cdef int[MOST_DESCRIPTORS] numbers
        cdef size_t count
        vector.iov_base = target
        vector.iov_len = most
        while True:
            memset(&message, 0, sizeof(message))
            message.msg_iov = &vector
            message.msg_iovlen = 1
            message.msg_control = control
            message.msg_controllen = sizeof(control)
            got = recvmsg(self.descriptor, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)
            if got > 0:
                header = CMSG_FIRSTHDR(&message)
                if header != NULL and header.cmsg_type == SCM_RIGHTS:
                    count = min((header.cmsg_len - CMSG_LEN(0)) // sizeof(int),
                                <size_t>MOST_DESCRIPTORS)
                    memcpy(numbers, CMSG_DATA(header), count * sizeof(int))
                    for i in range(count):
                        self.incoming.append(numbers[i])
                return got
            if got == 0:
                self.broken = "the other end was closed"
                return 0
            if errno == EAGAIN:
                return 0
            if errno != EINTR:
                self.broken = f"reading from it failed: {os.strerror(errno)}"
                return 0


cdef int _close_all(list descriptors) except -1:
    while descriptors:
        close_descriptor(descriptors.pop())
    return 0
