"""One file per streaming call of the BrokerService: requests in, transactions, answers out.

They access runs only through `runtime`, and never Redis.
"""
