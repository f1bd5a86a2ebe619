"""A child process in the place of the math reward's, which spins, sleeps or lacks memory where a request says so."""

import sys
import time

for line in sys.stdin:
    while "endless" in line:
        pass
    if "asleep" in line:
        time.sleep(60)
    print('{"limit": "too huge"}' if "huge" in line else '{"value": 1}', flush=True)
