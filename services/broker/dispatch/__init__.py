"""Dispatch: which waiting samples a generator that asks for work gets, and which it leaves to others. Pure.

One file a policy over `types` (what a policy sees and answers) and `latency` (how long a generator takes). Admission is
not a policy's business: a group that may not start is passed over, whoever asks. The broker, the simulator and `auto`'s
own look ahead all run this code.
"""
