"""Finds runs and inspects them from outside: status, audit, logs, stored runs, certificates, this machine.

Nothing here starts a run or its services.
"""
