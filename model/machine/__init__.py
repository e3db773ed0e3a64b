"""What concerns this machine: building C++, files written whole, measurements kept on disk, memory."""
