"""`penstock run` and `penstock quickstart`: check, start, follow, record, stop and report a run.

What is started is in `console.launch`, what is shown in `console.view`.
"""
