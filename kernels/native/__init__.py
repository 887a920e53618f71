"""The C backend for processors: compiled at first start, called by ctypes."""
