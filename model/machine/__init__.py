"""Services of this machine: C++ builds, atomic file writes, measurements kept on disk, timing, progress bars."""
