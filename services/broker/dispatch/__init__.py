"""Dispatch chooses which waiting samples a generator that asks for work gets, and which are left to others.

One file per policy; `situation` defines a policy's inputs and answers, `latency` models generators' speed,
`policies` lists policies by name. Pure: no run state and no store. Admission is not decided here. The simulator runs
this code too.
"""
