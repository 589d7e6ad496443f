// lab.h has it.
