"""A writer for each engine, of a described deployment: files by name, validated nowhere but by the engine itself."""
