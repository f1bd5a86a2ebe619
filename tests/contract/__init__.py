"""Every RPC and HTTP route over real connections on free ports, by subject.

No service runs as a whole fleet here: that is for `tests/integration` and `tests/e2e`. Tests marked `vllm` start a
real engine.
"""
