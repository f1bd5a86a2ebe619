"""Real and scripted brokers, the clients that tests play by hand, and the data that passes through."""
