"""Dispatch: which waiting samples a generator that asks for work gets, and which it leaves to others.

One file per policy; `situation` is what a policy sees and answers, `latency` how long a generator takes, `policies` the
list by name. Pure: no run state and no store. Admission is not decided here. The simulator runs this code too.
"""
