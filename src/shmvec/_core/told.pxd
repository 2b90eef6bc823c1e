cdef class Report:
    cdef readonly object fault
    cdef readonly bint cut_off    # the answer is a truncation in place of what was lost
    cdef readonly list last       # [the last observation] if a reset has overwritten it; else None


cdef Report report_of(fault, bint cut_off, list last)
