"""`penstock probe`: its file, what it finds on machines of several kinds, and when it calls one busy."""
