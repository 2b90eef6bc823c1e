cdef object float32  # the dtypes
cdef object float64

cdef bint is_plain(object array) noexcept
cdef bint same_shape(object array, object other) noexcept
cdef bint is_float64(object value) noexcept
cdef object new_float64(double value)
cdef double *value_pointer(object float64) noexcept
cdef int clear_flags() except -1
cdef bint raised_flags() noexcept
