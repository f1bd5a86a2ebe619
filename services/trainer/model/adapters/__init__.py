"""LoRA adapters: added to a base, trained, merged into it."""

import logging

# It advises to install a package that fetches kernels from a hub; nothing here needs them.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
