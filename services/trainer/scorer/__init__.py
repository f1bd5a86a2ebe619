"""The scorer: a process that leases finished samples and returns their log-probs under a frozen model.

It is the trainer's forward pass without its optimiser, and so lives beside it: it packs, loads and computes by the same
code, which is what makes its numbers those that the trainer would compute. It knows nothing of runs and steps.
"""
