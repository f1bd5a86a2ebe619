"""A broker of the next version: it writes the next format of records; `python -m` with the arguments of `penstock`."""

from console.cli import main
from services.broker.shards import shard_state
from services.broker.state import run_state

if __name__ == "__main__":
    # Before the modules that take the numbers by name are imported: the console imports a service when it serves it.
    run_state.FORMAT += 1
    shard_state.FORMAT += 1
    main()
