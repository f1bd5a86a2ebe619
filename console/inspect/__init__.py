"""Finding runs and looking at them: status, audit, logs, stored runs, certificates, this machine.

Commands that look at a run from outside. Nothing here starts a run or its services.
"""
