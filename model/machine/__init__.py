"""Services of this machine: C++ builds, files, hardware, installed packages, times, forwards of one thread."""
