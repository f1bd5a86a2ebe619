"""Canaries: completions with known scores, scored again and again to tell whether a grader still grades as it did.

`known` reads them; `watch` decides when they are scored, and holds samples back while they are not scored as known.
"""
