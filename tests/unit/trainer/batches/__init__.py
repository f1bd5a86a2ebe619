"""From trained groups to the rows that each process computes."""
