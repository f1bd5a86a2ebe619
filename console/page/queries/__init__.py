"""Questions about a run folder, each a function of what `files` read of it; no server and no network."""
