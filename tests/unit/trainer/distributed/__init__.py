"""A process' part of the backend, and how processes are launched."""
