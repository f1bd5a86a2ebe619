"""A broker and everybody around it in one process on a virtual clock, for property tests of the seven invariants."""
