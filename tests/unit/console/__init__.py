"""The console without services: configuration, commands, and what they write."""
