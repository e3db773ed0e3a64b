"""The blocks of the check: each measures or proves one thing, and takes the bench to its findings."""
