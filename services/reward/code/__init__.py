"""The reward `code`: runs candidates' programs against a row's tests, each in a sandbox.

    code_reward -> program (of the completion), suites (of the row) -> cell, a child process -> sandboxes

Expected outputs never enter the sandbox of a candidate: what it printed or returned is compared outside.
"""
