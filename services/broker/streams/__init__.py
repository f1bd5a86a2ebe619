"""One file per streaming call of the BrokerService: requests in, transactions, answers out.

They know runs only through `runtime`, and no Redis.
"""
