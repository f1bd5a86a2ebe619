"""Writers of engines: each turns a described deployment into files by name."""
