"""Programs of other projects that decode on the CPU, each in a process of its own."""
