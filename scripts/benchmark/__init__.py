"""The interleaved benchmark of methods on this device."""
