"""Requests that no honest client sends, and servers to send them to, in processes of their own."""
